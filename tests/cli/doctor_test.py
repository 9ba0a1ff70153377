import jax
import numpy as np
import pytest

from composer_jax.cli import doctor, main
from composer_jax.errors import UserError
from composer_jax.recipe import golden, stages


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
  assert [d.split()[0] for d in doctor.devices()] == [f'{d.platform}:{d.id}' for d in jax.devices()]


@pytest.mark.parametrize(('kept', 'paths', 'code'), [(0.0, 0.0, 0), (0.1, 0.0, 4), (0.0, 3e-4, 4)])
def test_either_gap_is_a_numerics_error(monkeypatch, capsys, tmp_path, kept, paths, code):
  comparison = golden.Comparison('cpt', kept, {}, {})
  monkeypatch.setattr(stages, 'open_run', lambda folder: None)
  monkeypatch.setattr(golden, 'keep', lambda context: None)
  monkeypatch.setattr(golden, 'compare', lambda context: comparison)
  monkeypatch.setattr(golden, 'paths_gap', lambda context, stage: paths)
  monkeypatch.setattr(doctor, 'sandbox', lambda: {'ok': True})
  assert main.main(['doctor', f'--workdir={tmp_path}']) == code
  assert ('log-probs differ' in capsys.readouterr().err) == bool(code)


def test_a_run_without_parameters_has_no_log_probs(monkeypatch, tmp_path):
  with pytest.raises(UserError, match='holds no run'):
    doctor.logprobs(tmp_path)
  monkeypatch.setattr(stages, 'open_run', lambda folder: stages.Context(None, folder))
  with pytest.raises(UserError, match='no stage has finished'):
    doctor.logprobs(tmp_path)
