import errno
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import metrics as metrics_lib
from composer_jax.batch import Batch
from composer_jax.checkpoint.manager import CheckpointManager
from composer_jax.errors import InfrastructureError, NumericsError, UserError
from composer_jax.train import loop, optimizer, state, step
from composer_jax.train.config import StageConfig

OPTIMIZER = optimizer.OptimizerConfig(lr=0.1, warmup_steps=2)
BIAS = {'moe': {'router': {'selection_bias': jnp.zeros((1, 4))}}}


def linear_loss(params, batch):
  value = (params['a'][batch.tokens] - batch.advantages) ** 2
  counts = jnp.sum(jax.nn.one_hot(batch.tokens, 4, dtype=jnp.int32), (0, 1))[None]
  return jnp.sum(batch.weights * value) / batch.denominator, {'counts': counts}


class RandomLoader:
  """Batches from a generator whose place is its bit generator's state."""

  def __init__(self, end=None, poison=(), on_batch=None):
    self.rng = np.random.default_rng(0)
    self.count, self.end, self.poison, self.on_batch = 0, end, poison, on_batch

  def __next__(self):
    if self.count == self.end:
      raise StopIteration
    self.count += 1
    if self.on_batch:
      self.on_batch(self.count)
    tokens = self.rng.integers(0, 4, (2, 3)).astype(np.int32)
    targets = self.rng.normal(size=(2, 3)).astype(np.float32)
    if self.count in self.poison:
      targets[:] = np.nan
    weights = np.ones((2, 3), np.float32)
    return Batch(tokens, tokens, weights, tokens, np.ones_like(tokens), np.float32(6),
                 advantages=targets)

  def get_state(self):
    return {'count': self.count, 'rng': self.rng.bit_generator.state}

  def set_state(self, value):
    self.count, self.rng.bit_generator.state = value['count'], value['rng']


@pytest.fixture(scope='module')
def step_fn():
  return step.make_train_step(linear_loss, optimizer.make_optimizer(OPTIMIZER, 10), bias_rate=0.01)


@pytest.fixture
def run(step_fn):
  def call(folder, steps=10, loader=None, evaluate=None, **fields):
    stage = StageConfig(**({'steps': steps, 'optimizer': OPTIMIZER, 'log_every': 2,
                            'eval_every': 5, 'checkpoint_every': 5} | fields))
    start = state.create({'a': jnp.arange(4.), 'moe_layers': BIAS},
                         optimizer.make_optimizer(OPTIMIZER, 10))
    return loop.run_loop(stage, folder, state=start, step_fn=step_fn,
                         loader=loader or RandomLoader(), evaluate=evaluate)
  return call


def same(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def rows(folder):
  """The metric rows without what depends on the clock."""
  return [{k: v for k, v in row.items() if k != 'tokens_per_s'}
          for row in metrics_lib.read(folder / 'metrics.jsonl')]


def duplicates(folder):
  pairs = [(row['step'], name) for row in rows(folder) for name in row if name != 'step']
  return len(pairs) - len(set(pairs))


def test_five_and_five_steps_are_ten(run, tmp_path):
  calls = []

  def evaluate(params):
    calls.append(np.asarray(params['a']).copy())
    return {'score': float(params['a'].sum())}

  whole, summary = run(tmp_path / 'whole', evaluate=evaluate)
  assert len(calls) == 3  # before the first step, at 5, at 10
  stage_of_10 = {'optimizer': OPTIMIZER}
  run(tmp_path / 'parts', steps=5, evaluate=evaluate, **stage_of_10)
  assert len(calls) == 5
  parts, again = run(tmp_path / 'parts', evaluate=evaluate)
  assert len(calls) == 6  # those at 0 and 5 are not repeated
  same(whole, parts)
  assert duplicates(tmp_path / 'parts') == 0
  assert [r['step'] for r in rows(tmp_path / 'whole')] == [0, 2, 4, 5, 5, 6, 8, 10, 10]
  strip = lambda folder: [{k: v for k, v in r.items() if k != 'lr'} for r in rows(folder)]  # noqa: E731
  assert strip(tmp_path / 'whole') == strip(tmp_path / 'parts')
  assert summary['tokens'] == again['tokens'] == 60 and summary['eval'] == again['eval']


def test_finished_stage_does_nothing(run, tmp_path):
  done, _ = run(tmp_path)
  loader = RandomLoader(end=0)
  again, summary = run(tmp_path, loader=loader)
  same(done, again)
  assert summary['steps'] == 10 and duplicates(tmp_path) == 0


def test_sigterm_saves_and_exits(run, tmp_path):
  whole, _ = run(tmp_path / 'whole')
  stopper = RandomLoader(on_batch=lambda n: n == 7 and os.kill(os.getpid(), signal.SIGTERM))
  handler = signal.getsignal(signal.SIGTERM)
  with pytest.raises(SystemExit) as exit_:
    run(tmp_path / 'parts', loader=stopper)
  assert exit_.value.code == 128 + signal.SIGTERM
  assert signal.getsignal(signal.SIGTERM) == handler
  with CheckpointManager(tmp_path / 'parts' / 'checkpoints') as manager:
    assert manager.steps() == [5, 7]
  parts, _ = run(tmp_path / 'parts')
  same(whole, parts)
  assert duplicates(tmp_path / 'parts') == 0


def test_sigterm_in_the_last_step_is_not_lost(run, tmp_path):
  stopper = RandomLoader(on_batch=lambda n: n == 10 and os.kill(os.getpid(), signal.SIGTERM))
  with pytest.raises(SystemExit):
    run(tmp_path, loader=stopper)
  _, summary = run(tmp_path, loader=RandomLoader(end=0))
  assert summary['steps'] == 10


def test_crash_between_checkpoints_repeats_the_lost_steps(run, tmp_path):
  whole, _ = run(tmp_path / 'whole')

  def crash(count):
    if count == 9:
      raise RuntimeError('power cut')

  with pytest.raises(RuntimeError, match='power cut'):
    run(tmp_path / 'parts', loader=RandomLoader(on_batch=crash))
  parts, _ = run(tmp_path / 'parts')
  same(whole, parts)
  assert rows(tmp_path / 'parts') == rows(tmp_path / 'whole')


def test_lost_updates_are_counted_and_end_the_stage(run, tmp_path):
  _, summary = run(tmp_path / 'few', loader=RandomLoader(poison=(3, 6, 7)), max_bad_steps=3)
  assert sum(row.get('lost', 0) for row in rows(tmp_path / 'few')) == 3
  assert np.isfinite(summary['loss'])
  with pytest.raises(NumericsError, match='3 steps in a row'):
    run(tmp_path / 'many', loader=RandomLoader(poison=(6, 7, 8)), max_bad_steps=3)
  with CheckpointManager(tmp_path / 'many' / 'checkpoints') as manager:
    assert manager.steps() == [5]  # nothing was saved after the trouble began
  with pytest.raises(NumericsError, match='2 steps in a row'):  # a stage that learnt nothing
    run(tmp_path / 'short', loader=RandomLoader(poison=(1, 2)), steps=2)


def test_data_that_ends_early_is_a_user_error(run, tmp_path):
  with pytest.raises(UserError, match='ended after 4 of 10'):
    run(tmp_path, loader=RandomLoader(end=4))


def test_full_disk_under_the_metrics(run, tmp_path, monkeypatch):
  def full(self, step, **values):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  monkeypatch.setattr(metrics_lib.MetricsLog, 'append', full)
  with pytest.raises(InfrastructureError, match='the disk is full'):
    run(tmp_path)


def test_other_file_errors_are_not_renamed(run, tmp_path):
  def evaluate(params):
    raise FileNotFoundError('corpus')
  with pytest.raises(FileNotFoundError, match='corpus'):
    run(tmp_path, evaluate=evaluate)
