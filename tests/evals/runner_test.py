"""Every attempt exactly once, failures of the machine apart, restarts, the summary by hand."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from composer_jax.errors import InfrastructureError, UserError
from composer_jax.evals import runner
from composer_jax.evals.rows import RowFile
from composer_jax.evals.summary import summarize
from composer_jax.rollout.ticks import SlotOutput


@dataclasses.dataclass
class FakeTrace:
  reward: float | None
  stop_reason: str = 'finished'
  failure: str | None = None
  error: str = ''
  wall_s: float = 0.0

  def __post_init__(self):
    self.valid = self.reward is not None
    self.turns = [collections.namedtuple('Turn', 'call')('finish')] * 2


@dataclasses.dataclass
class FakeTask:
  id: str
  meta: dict
  level: str = 'l0'


class FakeEngine:
  slots, max_len, temperature, routing_shape = 4, 100, 1.0, (1, 1)

  def tick(self, params, requests):
    return [SlotOutput(r.slot, np.array([1, 0]), np.array([-1.0, -1.0], np.float32),
                       np.zeros((len(r.feed) + 1, 1, 1), np.uint16), True) for r in requests]


def is_right(task_id, sample):
  return (int(task_id[1:]) * 7 + sample * 5) % 3 == 0


class World:
  """Opens episodes for `FakeTask`s; the given attempts lose their sandbox."""

  def __init__(self, session_class, broken=(), sandboxes=3, stop_after=None):
    self.session_class, self.broken = session_class, collections.Counter(dict(broken))
    self.free, self.opened, self.stop_after = sandboxes, collections.Counter(), stop_after

  def open(self, task, sample):
    if not self.free:
      return None
    if self.stop_after is not None and sum(self.opened.values()) >= self.stop_after:
      raise KeyboardInterrupt
    self.opened[task.id, sample] += 1
    attempt = self.opened[task.id, sample]
    if self.broken[task.id, sample, 'open'] >= attempt:
      raise InfrastructureError('no sandbox')
    self.free -= 1
    episode = self.session_class(f'{task.id}/{sample}', [[2], [3]], wait=sample % 2)
    episode.task, episode.sample_index = task, sample
    broken = self.broken[task.id, sample, 'run'] >= attempt

    def trace():
      self.free += 1
      return FakeTrace(None, 'infrastructure', 'infra', 'sandbox died') if broken else (
          FakeTrace(float(is_right(task.id, sample))))

    episode.trace = trace
    return episode


def tasks_of(count):
  return [FakeTask(f't{i}', {'mutation': 'ab'[i % 2]}) for i in range(count)]


def run(world, tasks, samples, file=None):
  file = file or RowFile(None, 0)
  runner.run_rows(FakeEngine(), None, tasks, samples, world.open, file)
  return file.rows


def test_101_tasks_times_3_samples_give_303_rows_each_once(scripted_session):
  rows = run(World(scripted_session), tasks_of(101), 3)
  assert len(rows) == 303
  assert {(r['task_id'], r['sample']) for r in rows} == {
      (f't{i}', s) for i in range(101) for s in range(3)}
  assert all(r['reward'] == is_right(r['task_id'], r['sample']) for r in rows)
  assert all((r['tokens'], r['total_tokens'], r['calls']) == (4, 6, 2) for r in rows)


def test_machine_failures_are_retried_then_reported_and_never_counted_as_zero(scripted_session):
  broken = {('t0', 0, 'run'): 1, ('t1', 0, 'open'): 2, ('t2', 0, 'run'): 99, ('t3', 1, 'open'): 99}
  world = World(scripted_session, broken)
  rows = {(r['task_id'], r['sample']): r for r in run(world, tasks_of(5), 2)}
  assert len(rows) == 10
  assert rows['t0', 0]['attempts'] == 2 and rows['t0', 0]['valid']
  assert rows['t1', 0]['attempts'] == 3 and rows['t1', 0]['valid']
  for lost in (('t2', 0), ('t3', 1)):
    assert world.opened[lost] == runner.ATTEMPTS == rows[lost]['attempts']
    assert rows[lost]['reward'] is None and not rows[lost]['valid'] and rows[lost]['error']
  summary = summarize(list(rows.values()), 2)
  rates = [np.mean([is_right(t, s) for s in range(2) if (t, s) not in (('t2', 0), ('t3', 1))])
           for t in ('t0', 't1', 't2', 't3', 't4')]
  assert summary['pass_at_1'] == pytest.approx(np.mean(rates))
  assert summary['invalid'] == 2 and summary['best_of_tasks'] == 3


def test_restart_keeps_finished_rows(scripted_session, tmp_path):
  tasks = tasks_of(10)
  first = World(scripted_session, stop_after=12)
  with pytest.raises(KeyboardInterrupt):
    run(first, tasks, 2, RowFile(tmp_path, 'model a'))
  with (tmp_path / 'rows.jsonl').open('a') as file:
    file.write('{"task_id": "t9", "sam')  # killed while writing
  kept = RowFile(tmp_path, 'model a')
  already = {(r['task_id'], r['sample']) for r in kept.rows}
  assert 0 < len(already) < 20
  second = World(scripted_session)
  rows = run(second, tasks, 2, kept)
  assert len(rows) == 20 and len({(r['task_id'], r['sample']) for r in rows}) == 20
  assert not already & set(second.opened)
  assert [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()] == rows
  third = World(scripted_session)
  assert run(third, tasks, 2, RowFile(tmp_path, 'model a')) == rows and not third.opened
  with pytest.raises(UserError, match='another evaluation'):
    RowFile(tmp_path, 'model b')


def test_attempts_that_find_no_sandbox_are_an_error_not_a_loss(scripted_session):
  with pytest.raises(InfrastructureError, match='6 attempts'):
    run(World(scripted_session, sandboxes=0), tasks_of(3), 2)


def test_repeated_task_ids_are_refused(scripted_session):
  with pytest.raises(UserError, match='same id'):
    run(World(scripted_session), tasks_of(3) * 2, 1)


def test_summary_by_hand():
  def row(task, sample, reward, mutation, stop='finished'):
    return {'task_id': task, 'sample': sample, 'reward': reward, 'valid': reward is not None,
            'mutation': mutation, 'stop_reason': stop, 'tokens': 10, 'total_tokens': 30, 'calls': 3}

  rows = [row('x', 0, 1.0, 'cond'), row('x', 1, 0.0, 'cond'), row('y', 0, 0.0, 'expr'),
          row('y', 1, 0.0, 'expr', 'max_calls'), row('z', 0, None, 'expr', 'infrastructure'),
          row('z', 1, None, 'expr', 'infrastructure')]
  summary = summarize(rows, 2)
  assert summary['pass_at_1'] == 0.25
  assert summary['best_of_2'] == 0.5 and summary['pass_at'] == {'1': 0.25, '2': 0.5}
  assert summary['ci95'] == [0.0, 0.5] and summary['best_of_ci95'] == [0.0, 1.0]
  assert (summary['tasks'], summary['samples'], summary['invalid']) == (3, 6, 2)
  assert summary['tasks_without_verdict'] == 1 and summary['scored_tasks'] == 2
  assert summary['stop_reasons'] == {'finished': 3, 'max_calls': 1, 'infrastructure': 2}
  assert summary['by_mutation']['cond']['pass_at_1'] == 0.5
  assert summary['by_mutation']['expr']['best_of_2'] == 0.0
  assert (summary['tokens_per_task'], summary['calls_per_task']) == (10, 3)
  nothing = summarize([row('z', 0, None, 'expr', 'infrastructure')], 1)
  assert nothing['pass_at_1'] is None and nothing['ci95'] is nothing['best_of_ci95'] is None
