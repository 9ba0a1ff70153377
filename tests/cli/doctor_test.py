import types

import numpy as np
import pytest

from composer_jax import api
from composer_jax.cli import doctor, golden


def test_parameter_table_of_kimi():
  """Counted by hand from the published shape: 61 layers, 384 experts of width 2048, D 7168."""
  d, heads = 7168, 64
  attention = (d * 1536 + 1536 + 1536 * heads * (128 + 64)  # queries through a latent of 1536
               + d * (512 + 64) + 512 + 512 * heads * (128 + 128)  # keys and values, 512 + rope 64
               + heads * 128 * d)
  expert = 3 * d * 2048
  router = d * 384 + 384
  dense_layer = attention + 3 * d * 18432 + 2 * d
  moe_layer = attention + 385 * expert + router + 2 * d
  ends = 2 * 163840 * d + d
  table = doctor.parameters('kimi_k2_5')
  assert table['total'] == dense_layer + 60 * moe_layer + ends
  active_layer = attention + 9 * expert + router + 2 * d  # 8 routed and 1 shared
  assert table['active'] == dense_layer + 60 * active_layer + ends


def test_facts():
  assert doctor.versions()['numpy'] == np.__version__
  assert doctor.machine()['cpu_cores'] >= 1 and doctor.machine()['memory_gb'] > 0
  assert any('cpu' in device or ':' in device for device in doctor.devices())


@pytest.fixture
def model(monkeypatch):
  """A bigram table instead of a model; the sampling path is off by a settable amount."""
  table = np.random.default_rng(0).normal(size=(256, 256))
  settings = types.SimpleNamespace(off=0.0)

  def forward(params, tokens):
    return types.SimpleNamespace(logits=params[np.asarray(tokens)])
  loaded = types.SimpleNamespace(
      params=table, forward=forward,
      tokenizer=types.SimpleNamespace(encode=lambda text: list(text.encode())))
  monkeypatch.setattr(api, 'load', lambda folder, dtype: loaded)
  monkeypatch.setattr(golden, '_cached',
                      lambda model, tokens: golden._full(model, tokens) + settings.off)
  settings.table = table
  return settings


def test_golden_is_kept_and_compared(model, tmp_path):
  first = golden.check(tmp_path)
  assert first.ok and first.golden_gap is None and first.tokens == len(golden.TEXT)
  assert golden.check(tmp_path).golden_gap == 0.0
  model.table[:, ord('v')] += 0.5
  changed = golden.check(tmp_path)
  assert changed.golden_gap > 0.1 and not changed.ok


def test_paths_that_differ_are_not_ok(model, tmp_path):
  model.off = 3e-4
  check = golden.check(tmp_path)
  assert check.paths_gap == pytest.approx(3e-4) and not check.ok


def test_log_probs_are_normalised(model):
  logits = np.array([[1.0, 2.0, 3.0], [1000.0, 0.0, -1000.0]])
  expected = [2.0 - np.log(np.exp([1.0, 2.0, 3.0]).sum()), -1000.0]
  np.testing.assert_allclose(golden._pick(logits, np.array([1, 1])), expected)
