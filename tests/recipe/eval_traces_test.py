"""Which attempts of an evaluation are left for the viewer."""

import json
import random

import numpy as np
import pytest

from composer_jax.envs.types import Call, CallResult, StopReason, Task, Trace, Turn
from composer_jax.recipe import eval_traces
from composer_jax.report import rollout_viewer
from composer_jax.rl.traces import TraceLog
from composer_jax.rollout.types import Rollout

TASKS = [Task(f't{i:02}', 'l0', 'fix f', {'main.py': f'x = {i}\n'}, [], [], 'main.py',
              meta={'mutation': 'cond'}) for i in range(eval_traces.SHOWN_TASKS + 2)]
SAMPLES = 4


def attempt(task, sample):
  """A prompt of two tokens and one turn of two; solved when the sample has the task's parity."""
  number = int(task.id[1:])
  reward = float(sample % 2 == number % 2)
  turn = Turn('finish', Call('finish'), CallResult('bye'), (2, 4), (4, 4), True)
  trace = Trace(
    task_id=task.id, level='l0', group_id=task.id, sample_index=sample, instruction='fix f',
    stop_reason=StopReason.FINISHED, reward=reward, valid=True, failure=None, parts={},
    turns=[turn], prompt_span=(0, 2), tokens=[1, 2, 3, 4], trainable=[False, False, True, True],
    context_hashes=[], diff={}, wall_s=0.0)
  sampled = np.array(trace.trainable)
  rollout = Rollout(
    session_id=f'{task.id}/{sample}', group_id=task.id, tokens=np.array(trace.tokens, np.int32),
    sampled=sampled, logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
    versions=np.where(sampled, 0, -1).astype(np.int32),
    routing=np.zeros((4, 1, 1), np.uint16), routing_mask=np.ones(4, bool))
  return trace, rollout


@pytest.fixture
def write(tmp_path):
  """Writes attempts; returns the file."""
  def call(attempts, name='eval_sft'):
    path = tmp_path / name / 'traces.jsonl'
    with TraceLog(path, resume_step=0, decode=lambda ids: f'<{ids[0]}>') as log:
      on_trace = eval_traces.writer(log, name, TASKS)
      for task, sample in attempts:
        on_trace(*attempt(task, sample))
    return path
  return call


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def everything(seed=0):
  attempts = [(task, sample) for task in TASKS for sample in range(SAMPLES)]
  random.Random(seed).shuffle(attempts)
  return attempts


def test_first_solved_and_first_failed_attempt_of_the_first_tasks(write):
  path = write(everything())
  assert len(rows(path)) == eval_traces.SHOWN_TASKS * SAMPLES
  eval_traces.thin(path)
  assert {row['id']: row['correct'] for row in rows(path)} == {
    f'eval_sft/{task.id}/{sample}': float(sample == i % 2)
    for i, task in enumerate(TASKS[:eval_traces.SHOWN_TASKS]) for sample in (0, 1)}


def test_the_order_in_which_attempts_end_and_restarts_change_nothing(write):
  path = write(everything(1))
  eval_traces.thin(path)
  first = path.read_bytes()
  eval_traces.thin(path)
  assert path.read_bytes() == first
  path.unlink()
  attempts = everything(2)
  write(attempts[:20])
  with path.open('a') as file:
    file.write('{"id": "eval_sft/t0')  # killed while writing
  write(attempts[20:])
  eval_traces.thin(path)
  assert path.read_bytes() == first


def test_an_evaluation_without_verdicts_shows_nothing(write):
  path = write([])
  eval_traces.thin(path)
  assert rows(path) == []


def test_the_viewer_shows_them_by_stage(write, tmp_path):
  files = [('eval_sft', write([(TASKS[0], 0)]).parent),
           ('eval_rl', write([(TASKS[0], 1)], 'eval_rl').parent)]
  traces, totals, bad = rollout_viewer.collect(rollout_viewer.sources(files, tmp_path / 'none'))
  assert totals == {'eval_sft': 1, 'eval_rl': 1} and not bad
  assert [(t['stage'], t['verdict']) for t in traces] == [('eval_sft', 'solved'),
                                                          ('eval_rl', 'failed')]
  assert len({t['id'] for t in traces}) == 2
  trace = traces[0]
  assert trace['task'] == 't00' and trace['label'] == 'cond' and trace['parts'] == {'correct': 1.0}
  assert trace['advantage'] is None and trace['files'] == {'main.py': 'x = 0\n'}
  assert [(t['call'], t['result']) for t in trace['turns']] == [('finish', 'bye')]
  assert trace['turns'][0]['tokens'] == [['<3>', 1, -0.5, None, 0], ['<4>', 1, -0.5, None, 0]]
