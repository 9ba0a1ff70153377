"""The whole stage with a tiny random model and an environment without sandboxes."""

import dataclasses
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from composer_jax import metrics
from composer_jax.checkpoint.manager import CheckpointManager
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.rl import trainer
from composer_jax.rl.config import RLConfig
from composer_jax.rollout.engine import Engine, EngineConfig
from composer_jax.rollout.session import Status
from composer_jax.train import state as state_lib
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer

CONFIG = RLConfig(
    steps=6, groups_per_step=2, group_size=4, min_group_size=2, row_len=32,
    rows_per_micro_batch=2, checkpoint_every=2, trace_every=2, trace_groups=1,
    optimizer=OptimizerConfig(lr=2e-2, schedule='constant', warmup_steps=0))


@pytest.fixture(scope='module')
def engine(model_config):
  return Engine(model_config, EngineConfig(
      slots=6, max_len=24, prefill_buckets=(4, 8), prefill_tokens=24, decode_chunk=4,
      cache_views=()), end_id=1)


@pytest.fixture
def run(model_config, params, engine, tmp_path, compilation_cache):
  def call(config, environment, folder='rl', **changes):
    return trainer.run_stage(
        config, model_config=model_config, params=params, engine=engine, environment=environment,
        folder=tmp_path / folder, **changes)
  return call


def equal(a, b):
  return all(np.array_equal(x, y) for x, y in
             zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_rate_zero_keeps_parameters_and_the_gap_at_rounding(run, make_environment, params,
                                                            tmp_path):
  config = dataclasses.replace(
      CONFIG, steps=10, optimizer=OptimizerConfig(lr=0.0, warmup_steps=0))
  result = run(config, make_environment())
  rows = metrics.read(tmp_path / 'rl' / 'metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(1, 11))
  assert sum(row['tokens_trained'] for row in rows) > 300
  assert max(row['gap_max'] for row in rows) < 1e-4
  assert max(abs(row['kl']) for row in rows) < 1e-3
  assert all(row['replay_override_fraction'] == 0 for row in rows)  # every record is plausible
  assert equal(result.params, params)


def test_training_learns_and_reports(run, make_environment, params, tmp_path):
  # On-policy, so that the result does not depend on which thread is faster.
  config = dataclasses.replace(
      CONFIG, steps=20, groups_per_step=4, group_size=8, max_staleness=0,
      optimizer=OptimizerConfig(lr=5e-3, schedule='constant', warmup_steps=0))
  # Every token counts, so that learning is far above the noise of so few rollouts.
  environment = make_environment(reward=lambda session: float(
      np.mean([token % 2 == 0 for token in session.sampled]) > 0.5))
  result = run(config, environment)
  rows = metrics.read(tmp_path / 'rl' / 'metrics.jsonl')
  early = np.mean([r['solved_fraction'] for r in rows[:5]])
  late = np.mean([r['solved_fraction'] for r in rows[-5:]])
  assert late > early + 0.15, [r['solved_fraction'] for r in rows]
  assert all(row['staleness_max'] == 0 and row['gap_max'] < 1e-4 for row in rows)
  assert not equal(result.params, params)
  assert result.trained_ordinals == list(range(80))
  assert len(set(environment.started)) == len(environment.started) == 640
  for name in ('reward_mean', 'entropy', 'gap_p99', 'kl', 'calls_per_episode', 'finish_rate',
               'success/c0', 'wait_share', 'rollout_tokens_per_s', 'pass_at_k', 'packing'):
    assert any(name in row for row in rows), name
  traces = [json.loads(line) for line in (tmp_path / 'rl/traces.jsonl').read_text().splitlines()]
  assert {t['step'] for t in traces} <= set(range(1, 21, 2)) and len(traces) >= 4
  for trace in traces:
    assert len(trace['turns']) == 2
    assert trace['reward'] == pytest.approx(sum(trace['reward_parts'].values()))
    for token in (t for turn in trace['turns'] for t in turn['tokens']):
      assert (token['lp'] is not None) == (token['tlp'] is not None) == (token['m'] == 1)
      if token['m']:
        assert token['v'] == trace['step'] - 1
        assert token['tlp'] == pytest.approx(token['lp'], abs=1e-4)
    assert all(turn['tokens'][0]['m'] == 1 for turn in trace['turns'])


class Killed(Exception):
  pass


@pytest.mark.parametrize('dies_after', [1, 3])
def test_a_killed_stage_trains_on_every_task_once(run, make_environment, tmp_path, dies_after):
  def die(step, row):
    if step == dies_after:
      raise Killed

  with pytest.raises(Killed):
    run(CONFIG, make_environment(), on_step=die)
  seen = []
  result = run(CONFIG, make_environment(), on_step=lambda step, row: seen.append(step))
  assert seen == list(range(dies_after - dies_after % 2 + 1, 7))
  assert result.trained_ordinals == list(range(12)) and result.steps == 6
  rows = metrics.read(tmp_path / 'rl/metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(1, 7))
  assert all(row['staleness_max'] <= CONFIG.max_staleness for row in rows)
  again = run(CONFIG, make_environment(), on_step=lambda step, row: seen.append('late'))
  assert 'late' not in seen and equal(again.params, result.params)


def test_sigterm_finishes_the_step_and_nothing_is_done_twice(run, make_environment, tmp_path):
  def stop(step, row):
    if step == 3:  # between two checkpoints
      os.kill(os.getpid(), signal.SIGTERM)

  handler = signal.getsignal(signal.SIGTERM)
  with pytest.raises(SystemExit) as exit_:
    run(CONFIG, make_environment(), on_step=stop)
  assert exit_.value.code == 128 + signal.SIGTERM
  assert signal.getsignal(signal.SIGTERM) == handler
  assert not [t for t in threading.enumerate() if t.name == 'rollout']
  seen = []
  result = run(CONFIG, make_environment(), on_step=lambda step, row: seen.append(step))
  assert seen == [4, 5, 6] and result.trained_ordinals == list(range(12))
  rows = metrics.read(tmp_path / 'rl/metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(1, 7))


def test_a_stop_while_the_trainer_waits_keeps_the_groups_that_are_ready(run, make_environment):
  """Group 2 is complete, group 3 never will be, and step 1 has been saved before."""
  class Stuck(make_environment):
    finished = 0

    def session(self, ordinal, member):
      session = super().session(ordinal, member)
      if ordinal >= 3:
        session.poll = lambda: Status.DONE if session.aborted else Status.WAITING
      return session

    def outcome(self, session):
      self.finished += session.ordinal == 2
      return super().outcome(session)

  config = dataclasses.replace(CONFIG, checkpoint_every=1)
  stuck, first_step, sent = Stuck(), threading.Event(), []

  def watch():
    first_step.wait()
    while stuck.finished < config.group_size:
      time.sleep(0.01)
    time.sleep(0.5)  # the trainer waits for group 3
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

  threading.Thread(target=watch, daemon=True).start()
  with pytest.raises(SystemExit) as exit_:
    run(config, stuck, on_step=lambda step, row: first_step.set())
  assert time.monotonic() - sent[0] < 60  # for the save; the group itself has ten minutes
  assert exit_.value.code == 128 + signal.SIGINT
  environment = make_environment()
  result = run(config, environment)
  assert result.trained_ordinals == list(range(12)) and not result.dropped
  assert {ordinal for ordinal, _ in environment.started} == set(range(3, 12))


def test_all_solved_leaves_the_policy_alone_and_ends(run, make_environment, params, tmp_path):
  config = dataclasses.replace(CONFIG, steps=2, max_extra_groups=1)
  result = run(config, make_environment(reward=lambda session: 1.0))
  assert equal(result.params, params)
  tx = make_optimizer(config.optimizer, config.steps)
  with CheckpointManager(tmp_path / 'rl/checkpoints') as manager:
    kept = manager.restore_latest(state_lib.create(params, tx)).state
  assert equal(kept, state_lib.create(params, tx))  # moments and counters too
  rows = metrics.read(tmp_path / 'rl/metrics.jsonl')
  assert [row['skipped'] for row in rows] == [1, 1]
  assert 1 <= rows[-1]['dropped/zero_signal'] <= 2 and rows[-1]['groups_trained'] == 4


def test_errors_of_the_worker_surface_and_leave_no_thread(run, make_environment):
  class Broken(make_environment):
    def session(self, ordinal, member):
      if ordinal == 3:
        raise OSError('the sandbox host is gone')
      return super().session(ordinal, member)

  with pytest.raises(OSError, match='host is gone'):
    run(CONFIG, Broken())
  assert not [t for t in threading.enumerate() if t.name == 'rollout']


def test_a_member_that_cannot_start_is_left_out(run, make_environment, tmp_path):
  class Flaky(make_environment):
    def session(self, ordinal, member):
      if member == 0:
        raise InfrastructureError('cannot start a sandbox')
      return super().session(ordinal, member)

  assert run(CONFIG, Flaky()).steps == CONFIG.steps
  rows = metrics.read(tmp_path / 'rl' / 'metrics.jsonl')
  assert {row['rollouts'] for row in rows} == {CONFIG.groups_per_step * (CONFIG.group_size - 1)}


def test_a_machine_that_starts_nothing_ends_the_stage_with_its_reason(run, make_environment):
  class Dead(make_environment):
    def session(self, ordinal, member):
      raise InfrastructureError('cannot start a sandbox')

  with pytest.raises(InfrastructureError, match='infrastructure: 4.*cannot start a sandbox'):
    run(CONFIG, Dead())


def test_a_behaviour_that_nobody_counts_is_refused():
  with pytest.raises(ValueError, match='behaviour.call_error: unknown key .did you mean call_erro'):
    RLConfig(behaviour={'call_error': -0.1})


def test_tasks_that_run_out_are_a_user_error(run, make_environment):
  with pytest.raises(UserError, match='12 tasks'):
    run(CONFIG, make_environment(num_tasks=11))
