import dataclasses
import json
import random
import time

import pytest

from composer_jax.data.chat import flatten, render_segments
from composer_jax.data.loader import read_traces
from composer_jax.envs import taskset
from composer_jax.envs.expert import ExpertConfig, play, play_all, repairs
from composer_jax.envs.harness import Episode, Status
from composer_jax.envs.tools.edit import apply_edit
from composer_jax.envs.tools.parse import parse
from composer_jax.envs.traces import write_traces
from composer_jax.envs.types import StopReason
from composer_jax.errors import UserError

TASKS = taskset.load(taskset.TasksetConfig(), 'train', 64, 11)


def attempt(task, texts, pool, grader, renderer):
  """Plays fixed calls in a real sandbox; returns the trace."""
  episode = Episode(task, pool.acquire(), grader, renderer, release=pool.release)
  calls = iter(texts)
  end = time.monotonic() + 60
  while (status := episode.poll()) != Status.DONE:
    assert time.monotonic() < end
    if status == Status.READY:
      episode.next_tokens()
      episode.deliver(renderer.call(next(calls)), True)
    else:
      time.sleep(0.001)
  return episode.trace()


def test_every_l0_task_fails_before_and_passes_after(grader):
  tasks = list(taskset.load(taskset.TasksetConfig(), 'heldout', 300, 21))
  tickets = [(grader.submit({**t.files, **t.solution}, [*t.visible, *t.hidden]),
              grader.submit(t.files, t.hidden), grader.submit(t.files, t.visible)) for t in tasks]
  for gold, hidden, visible in tickets:
    for ticket in (gold, hidden, visible):
      while ticket.poll() is None:
        time.sleep(0.001)
    assert gold.poll(), gold.detail
    assert not hidden.poll()
    assert not visible.poll()


def test_traces_all_succeed_and_are_what_the_harness_saw(tmp_path, pool, grader, renderer):
  path = tmp_path / 'traces.jsonl'
  stats = write_traces(path, TASKS, pool, grader, renderer, seed=0, count=48, concurrency=4,
                       config=ExpertConfig(wrong_edit_rate=0.5, learn_wrong_edits=True))
  assert (stats.rows, stats.discarded) == (48, 0)
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert [r['index'] for r in rows] == list(range(48))
  assert {r['stop_reason'] for r in rows} == {'finished'}
  assert any(r['calls'] > 4 for r in rows)
  assert stats.tokens == sum(len(ids) for _, ids, _, _ in read_traces(path))
  for (_, ids, own, context), row in zip(read_traces(path), rows, strict=True):
    calls = [renderer.call_text(s) for s, t in zip(row['segments'], row['trainable'], strict=True)
             if t]
    results = [renderer.tokenizer.decode(s).removeprefix('<|result|>').rpartition('<|end|>')[0]
               for s, t in zip(row['segments'][2:], row['trainable'][2:], strict=True) if not t]
    task = TASKS[row['index']]
    expected = flatten(render_segments(renderer, task.instruction,
                                       list(zip(calls, [*results, None], strict=True))))
    assert (ids.tolist(), own.tolist()) == (expected[0], expected[1])
    assert (context == ~own).all()


def test_traces_resume_and_do_not_depend_on_concurrency(tmp_path, pool, grader, renderer):
  one, two = tmp_path / 'one.jsonl', tmp_path / 'two.jsonl'
  write_traces(one, TASKS, pool, grader, renderer, seed=4, count=12, concurrency=1)
  lines = one.read_text().splitlines(keepends=True)
  partial = tmp_path / 'two.jsonl.partial'
  partial.write_text(lines[7] + lines[2] + lines[5][:40])  # as a kill may leave it
  seen = []
  write_traces(two, TASKS, pool, grader, renderer, seed=4, count=12, concurrency=4,
               on_progress=seen.append)
  assert two.read_text() == one.read_text()
  assert seen == list(range(3, 13))
  assert not partial.exists()
  write_traces(two, TASKS, pool, grader, renderer, seed=4, count=12)  # done: nothing is played
  two.write_text(''.join(lines[:3]))  # as nobody should: the rest is played again
  write_traces(two, TASKS, pool, grader, renderer, seed=4, count=12, concurrency=4)
  assert two.read_text() == one.read_text()
  with pytest.raises(UserError, match='other tasks, seed'):
    write_traces(two, TASKS, pool, grader, renderer, seed=5, count=12)
  for content in ('garbage\n', '[]\n', '{"a": 1}\n'):
    two.write_text(content)
    with pytest.raises(UserError, match='two.jsonl'):
      write_traces(two, TASKS, pool, grader, renderer, seed=4, count=12)


class StallingGrader:
  """Fails the first submission, as a machine does that stalls beyond the time limit."""

  def __init__(self, grader):
    self._grader, self._stalls = grader, 1

  def submit(self, files, cases, timeout_s=None):
    if self._stalls:
      self._stalls, cases = 0, [dataclasses.replace(cases[0], expected_repr='timeout')]
    return self._grader.submit(files, cases, timeout_s)


def test_an_episode_that_a_stall_spoiled_is_played_again(tmp_path, pool, grader, renderer):
  stats = write_traces(tmp_path / 'a.jsonl', TASKS, pool, StallingGrader(grader), renderer, seed=4,
                       count=4, concurrency=2)
  assert (stats.rows, stats.discarded) == (4, 1)


def test_wrong_edits_can_be_kept_out_of_the_loss(tmp_path, pool, grader, renderer):
  stats = {}
  for learn in (True, False):
    config = ExpertConfig(wrong_edit_rate=1.0, learn_wrong_edits=learn)
    stats[learn] = write_traces(tmp_path / f'{learn}.jsonl', TASKS, pool, grader, renderer, seed=1,
                                count=8, concurrency=4, config=config)
  assert stats[True].tokens == stats[False].tokens
  assert stats[True].sampled_tokens > stats[False].sampled_tokens
  for learnt, masked in zip(read_traces(tmp_path / 'True.jsonl'),
                            read_traces(tmp_path / 'False.jsonl'), strict=True):
    ids, left_out = masked[1], ~masked[2] & ~masked[3]
    assert ids.tolist() == learnt[1].tolist() and (learnt[3] == masked[3]).all()
    assert (left_out == learnt[2] & ~masked[2]).all()  # own tokens, and not weighed as context
    if left_out.any():  # a few tasks have no plausible wrong edit
      assert renderer.call_text(ids[left_out].tolist()).startswith('edit_file')


def test_idle_edits_are_shown_and_never_learnt(tmp_path, pool, grader, renderer):
  config = ExpertConfig(wrong_edit_rate=0.0, idle_edit_rate=1.0)
  path = tmp_path / 'traces.jsonl'
  stats = write_traces(path, TASKS, pool, grader, renderer, seed=1, count=16, concurrency=4,
                       config=config)
  assert stats.rows == 16
  for line in path.read_text().splitlines():
    row = json.loads(line)
    learnt = [renderer.call_text(s) for s, t in zip(row['segments'], row['trainable'], strict=True)
              if t]
    text = ''.join(renderer.tokenizer.decode(s) for s in row['segments'])
    assert [call.split()[0] for call in learnt] == ['read_file', 'edit_file', 'run_tests', 'finish']
    idle = text.count('<|result|>no change<|end|>')
    assert 1 <= idle <= 2 and row['calls'] == 4 + idle
    assert text.count('<|call|>') == row['calls']
    assert row['trainable'].count(None) == idle


def test_expert_never_makes_an_edit_that_changes_nothing():
  for task in TASKS:
    files = dict(task.files)
    player = play(task, ExpertConfig(wrong_edit_rate=1.0), random.Random(0))
    text, tests = next(player), 0
    while True:
      call = parse(text, task.tools, task.entry)
      assert call.error is None
      if call.name == 'edit_file':
        path, old = call.arguments['path'], files[call.arguments['path']]
        files[path] = apply_edit(old, call.arguments['first'], call.arguments['last'],
                                 call.arguments['text'], verbatim=call.arguments['range'])
        assert files[path] != old
      tests += call.name == 'run_tests'
      try:
        solved = files == task.solution
        text = player.send('pass' if call.name == 'run_tests' and solved else 'fail')
      except StopIteration:
        break
    assert files == task.solution


def test_repairs_restore_any_file(renderer):
  rng = random.Random(3)
  task = TASKS[0]
  words = ['', 'a', '  b', '    c', 'd |', '']
  for _ in range(200):
    new = [rng.choice(words) for _ in range(rng.randint(1, 9))] + ['end']
    old = list(new)
    for _ in range(rng.randint(1, 3)):
      at = rng.randrange(len(old))
      old[at:at + rng.randint(0, 2)] = [rng.choice(words) for _ in range(rng.randint(0, 2))]
      old = old or ['x']
    changed = type(task)(**{**task.__dict__, 'files': {'main.py': '\n'.join(old) + '\n'},
                            'solution': {'main.py': '\n'.join(new) + '\n'}})
    text = changed.files['main.py']
    for spelled in repairs(changed, changed.files):
      call = parse(spelled, task.tools, task.entry)
      assert call.error is None, spelled
      text = apply_edit(text, call.arguments['first'], call.arguments['last'],
                        call.arguments['text'], verbatim=call.arguments['range'])
    assert text == changed.solution['main.py']


HOSTILE = (
  'import os; os._exit(0)',
  'import sys; sys.stdout.write("pass"); sys.exit(0)',
  'import builtins; builtins.repr = lambda v: "0"',
  'open("main.py", "w").write("x = 1")',
  'open("sitecustomize.py", "w").write("import os")',
  '__eq__ = lambda *a: True; calc = run = solve = apply = work = get = lambda *a: __eq__',
)


@pytest.mark.parametrize('line', HOSTILE)
def test_hostile_edits_score_zero(line, pool, grader, renderer):
  task = type(TASKS[0])(**{**TASKS[0].__dict__, 'limits': taskset.TasksetConfig().l1.limits})
  trace = attempt(task, ['run_tests', f'edit_file 1-1|{line}\n' + task.files['main.py'],
                         'run_tests', 'finish'], pool, grader, renderer)
  assert (trace.stop_reason, trace.reward) == (StopReason.FINISHED, 0.0)


def test_new_files_and_paths_outside_are_refused(pool, grader, renderer):
  trace = attempt(TASKS[0], ['edit_file sitecustomize.py:1|x = 1', 'edit_file ../x.py:1|x',
                             'read_file nothing.py', 'search zzzz', 'finish'],
                  pool, grader, renderer)
  texts = [t.result.text for t in trace.turns[:-1]]
  assert texts == ['error: no such file', 'error: path not allowed', 'error: no such file',
                   'no match']
  assert trace.reward == 0.0


def test_endless_loop_is_a_failing_test_not_a_broken_machine(pool, grader, renderer):
  base = TASKS[0]
  limits = type(base.limits)(max_turn_tokens=256, max_tokens=2048, test_timeout_s=0.5)
  task = type(base)(**{**base.__dict__, 'limits': limits})
  trace = attempt(task, ['edit_file 2-2|    while True: pass', 'run_tests', 'read_file'] * 2
                  + ['fly'] * 2, pool, grader, renderer)
  assert trace.turns[1].result.text.startswith('fail')
  assert 'timeout' in trace.turns[1].result.text
  assert trace.stop_reason == StopReason.MAX_CALLS
  assert trace.reward == 0.0


@pytest.mark.parametrize('level', ['l1', 'l2'])
def test_expert_solves_the_harder_levels_through_the_same_harness(level, pool, grader, renderer):
  tasks = taskset.load(taskset.TasksetConfig(level=level), 'train', 6, 0)
  jobs = ((i, t, play(t, ExpertConfig(), random.Random(i))) for i, t in enumerate(tasks))
  done = dict(play_all(jobs, pool, grader, renderer, 2))
  for index, task in enumerate(tasks):
    solved = done[index].reward
    # Not admitted yet: a mutant that behaves like the original still ends with a pass.
    assert solved == 1.0, (task.instruction, done[index].turns[-1])
