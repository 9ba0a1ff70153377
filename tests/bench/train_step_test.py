"""The training-step bench with a small model of ours and a peer made of answers."""

import dataclasses
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest

from composer_jax import models
from composer_jax.bench import train_step
from composer_jax.bench.worker import Worker
from composer_jax.cli import main as cli
from composer_jax.errors import InfrastructureError
from composer_jax.models.config import ModelConfig

STUB = pathlib.Path(__file__).parent / 'stub_peer.py'
SMALL = ModelConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, intermediate_size=24,
                    first_k_dense_replace=0,
                    moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
                    num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4,
                    v_head_dim=4)


@pytest.fixture(scope='module')
def ours():
  return train_step.Ours(SMALL, rows=2, length=8)


@pytest.fixture
def losses(ours):
  """Losses of the first steps from the first weights."""
  ours.reset()
  for _ in range(7):
    ours.step()
  return list(ours.losses)


def _answers(folder, losses, **more):
  answers = {'load': [{'parameters': 1}], 'gemm': [{'seconds': 1e9}],
             'loss': [{'loss': losses[0]}],
             'step': [{'loss': x, 'seconds': 1e6} for x in losses], **more}
  (folder / 'answers.json').write_text(json.dumps(answers))
  return shutil.copy(STUB, folder)


def test_our_side_trains_and_goes_back(ours, losses):
  """The first loss is that of a float64 forward pass; a reset repeats it to the bit."""
  assert losses[-1] < losses[0]
  assert ours.loss() == losses[0] and not ours.losses
  logits = np.asarray(models.forward(SMALL, ours.params, ours.tokens).logits, np.float64)[:, :-1]
  nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
      logits, ours.tokens[:, 1:, None], axis=-1)[..., 0]
  np.testing.assert_allclose(losses[0], nll.mean(), rtol=1e-6)


def test_compare(ours, losses, tmp_path):
  """Seven steps are segments of three, three and one, each after two warm-ups."""
  script = _answers(tmp_path, losses[:5] * 2 + losses[:3])
  with Worker(sys.executable, script, threads=1) as worker:
    peer = train_step.Peer(worker, ours, tmp_path)
    peer.choose('eager')
    facts = train_step.compare(ours, peer, 7)
  assert facts['loss_gap_max'] == 0 and len(facts['seconds']['peer']) == 7
  assert facts['ratio']['ratio_median'] == pytest.approx(
      np.median(facts['seconds']['ours']) / 1e6)
  with np.load(tmp_path / 'weights.npz') as handed_over:
    np.testing.assert_array_equal(handed_over['tokens'], ours.tokens)
    np.testing.assert_array_equal(handed_over['model.embed_tokens.weight'], ours.params['embed'])


@pytest.mark.parametrize('answer, message', [
    ({'loss': [{'loss': 1.0}]}, 'before the first step the loss is'),
    ({'loss': [{'loss': float('nan')}]}, 'before the first step the loss is'),
    ({'step': [{'loss': 1.0, 'seconds': 1.0}]}, 'in step 1 from the first weights the loss is')])
def test_other_losses_give_no_ratio(ours, losses, tmp_path, answer, message):
  with Worker(sys.executable, _answers(tmp_path, losses, **answer), threads=1) as worker:
    peer = train_step.Peer(worker, ours, tmp_path)
    with pytest.raises(InfrastructureError, match=f'{message}.*no ratio is given'):
      train_step.compare(ours, peer, 2)


@pytest.mark.parametrize(('load', 'took'), [
    ([{}, {'error': 'no such\n  experts'}, {}], [9, 9, 3, 4, 5, 9, 9, 2, 6, 6]),
    ([{}, {}, {'error': 'no such\n  experts'}, {}], [9, 9, 3, 4, 5] + 5 * [1] + [9, 9, 2, 6, 6])])
def test_the_fastest_path_that_runs(ours, tmp_path, load, took):
  """One that fails, in its first turn or its second, is named with one line."""
  script = _answers(tmp_path, [1.0], step=[{'loss': 1.0, 'seconds': s} for s in took], load=load)
  with Worker(sys.executable, script, threads=1) as worker:
    found, failed = train_step.try_paths(train_step.Peer(worker, ours, tmp_path))
  assert found == {'grouped_mm': 2000}
  assert failed == {'eager': "the peer failed in 'load': no such experts"}


def test_no_path_that_runs(ours, tmp_path):
  script = _answers(tmp_path, [1.0], load=[{'error': 'one'}, {'error': 'two ' + 999 * 'long '}])
  with Worker(sys.executable, script, threads=1) as worker:
    with pytest.raises(InfrastructureError, match='none .* runs: grouped_mm: .*: one; eager: .*two '
                                                  '(long ){20,60}...$'):
      train_step.try_paths(train_step.Peer(worker, ours, tmp_path))


def test_the_verb_from_end_to_end(ours, losses, tmp_path, monkeypatch, capsys):
  # two tries of one path, none of the other, one segment
  script = _answers(tmp_path, losses[:5] * 3 + losses[:3],
                    load=[{}, {'error': 'no such experts'}, {}])
  monkeypatch.setattr(train_step, 'Ours', lambda *unused: ours)
  monkeypatch.setattr(train_step, 'peer_script', lambda name: script)
  path = tmp_path / 'out.json'
  assert cli.main(['bench', 'train_step', f'--peer_python={sys.executable}', '--steps=3',
                   f'--json={path}']) == 0, capsys.readouterr().err
  facts, out = json.loads(path.read_text()), capsys.readouterr().out
  assert facts['ratio']['ratio_median'] < 1e-3 and facts['peer']['experts'] == 'grouped_mm'
  assert facts['peer']['median_ms'] == 1e9 and facts['ours']['compile_s'] > 0
  assert 'ours / peer, 3 interleaved steps: median 0.000' in out
  error = "the peer failed in 'load': no such experts"
  assert facts['peer_paths_failed'] == {'eager': error}
  assert f'experts eager failed and were left out: {error}\n' in out


def test_useful_flops_by_hand():
  """All of one layer of each kind, counted from the shapes."""
  c = dataclasses.replace(SMALL, q_lora_rank=6, num_hidden_layers=2, first_k_dense_replace=1)
  heads, d = 2, 16
  attention = d * 6 + 6 * heads * 8 + d * (8 + 4) + 8 * heads * (4 + 4) + heads * 4 * d
  dense = 3 * d * 24
  moe = d * 4 + 3 * d * 8 * (2 + 1)  # router, two routed experts and a shared one
  weights = 2 * attention + dense + moe + d * 64
  pairs = 8 * 9 / 2
  scores = 2 * heads * pairs * ((4 + 4) + 4)
  assert train_step.useful_flops(c, 2, 8) == 6 * 2 * (8 * weights + scores)
