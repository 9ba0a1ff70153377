"""Writes expert episodes as training traces: resumable, atomic, the same rows for the same seed."""

import dataclasses
import itertools
import json
import os
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.config import fingerprint
from composer_jax.envs.expert import ExpertConfig, Pool, play, play_all
from composer_jax.envs.harness import ChatRenderer, Episode, GraderLike
from composer_jax.envs.tools.registry import NO_CHANGE
from composer_jax.envs.types import Task
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.files import json_lines, replacing

_TRIES = 3


@dataclasses.dataclass(frozen=True)
class TraceStats:
  """Summary of `write_traces`.

  Attributes:
    rows: traces in the file, all of them solved.
    tokens: total token count.
    sampled_tokens: of those, trainable ones.
    calls: mean tool calls per trace.
    discarded: episodes repeated because the sandbox or the grader broke, or because the expert, who
      cannot fail on a sound machine, did not solve its task (a test that a stall timed out).
  """

  rows: int
  tokens: int
  sampled_tokens: int
  calls: float
  discarded: int


def write_traces(path: str | os.PathLike, tasks: Sequence[Task], pool: Pool, grader: GraderLike,
                 renderer: ChatRenderer, *, seed: int, count: int, concurrency: int = 8,
                 config: ExpertConfig | None = None,
                 on_progress: Callable[[int], None] = lambda rows: None) -> TraceStats:
  """Writes `count` expert traces as JSON lines, in order; continues what an earlier call began.

  Each row has `index, source` (fingerprint of the arguments), `task_id, level, mutation, reward,
  stop_reason, calls` and what `data.loader.read_traces` reads: `id`, `segments` (runs of
  token ids) and `trainable` (one flag a run), the role mask exactly as live: true, false, or null
  for the edits that are not to be learnt (see `ExpertConfig`). The file appears complete or not at
  all; rows that are done wait in `PATH.partial`. Row i depends on the arguments and i only.

  Args:
    path: the file to write.
    tasks: task i % len(tasks) is played for row i.
    pool: must hold at least `concurrency` sandboxes.
    grader: decides on the hidden cases.
    renderer: encodes the conversation.
    seed: of the expert's own choices.
    count: rows.
    concurrency: episodes in flight.
    config: the expert's behaviour.
    on_progress: called with the number of rows done.

  Raises:
    UserError: the file belongs to other arguments.
    InfrastructureError: the expert, who cannot fail on a sound machine, did not solve some tasks in
      three tries. What it solved is kept: the next call plays only the rest.
  """
  path = pathlib.Path(path)
  config = config or ExpertConfig()
  source = fingerprint([seed, count, config, _sample_of(tasks), len(tasks),
                        renderer.user('x'), renderer.call('read_file')])
  partial = _partial(path)
  if path.exists():
    rows = _read(path, source)
    if [row['index'] for row in rows] == list(range(count)):
      return _stats(rows, 0)
    os.replace(path, partial)  # somebody shortened it
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = {row['index']: row for row in _read(partial, source)} if partial.exists() else {}
  with replacing(partial) as stream:  # without the half line that a kill may have left
    stream.writelines(_line(row) for row in rows.values())
  discarded = 0
  with open(partial, 'a', encoding='utf-8') as stream:
    todo = [i for i in range(count) if i not in rows]
    for _ in range(_TRIES):
      failed = []
      jobs = ((i, task, play(task, config, random.Random(f'expert/{seed}/{i}')))
              for i in todo for task in (tasks[i % len(tasks)],))
      for index, episode in play_all(jobs, pool, grader, renderer, concurrency):
        if episode.reward != 1:  # or None, when the sandbox or the grader broke
          failed.append((index, episode.trace()))
          continue
        rows[index] = _row(index, episode, config, source)
        stream.write(_line(rows[index]))
        on_progress(len(rows))
      discarded += len(failed)
      todo = [index for index, _ in failed]
  if todo:
    trace = failed[0][1]
    raise InfrastructureError(
      f'the expert did not solve {len(todo)} of {count} tasks in {_TRIES} tries (the first: '
      f'{trace.task_id}, {trace.error or trace.stop_reason}): the sandbox or the tasks are broken; '
      f'{len(rows)} solved ones are kept in {partial}, and the next start plays the rest')
  ordered = [rows[i] for i in range(count)]
  with replacing(partial) as stream:
    stream.writelines(_line(row) for row in ordered)
  os.replace(partial, path)
  return _stats(ordered, discarded)


def rows_kept(path: str | os.PathLike) -> int:
  """Returns how many rows earlier calls of `write_traces` have left, finished or not."""
  path = pathlib.Path(path)
  files = [f for f in (path, _partial(path)) if f.exists()]
  return files[0].read_bytes().count(b'\n') if files else 0


def _partial(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(path.name + '.partial')


def _sample_of(tasks: Sequence[Task]) -> list[Any]:
  """Returns what tells one task list from another, without generating all of it."""
  return [[t.id, t.instruction, t.files] for t in (tasks[0], tasks[len(tasks) - 1])]


def _row(index: int, episode: Episode, config: ExpertConfig, source: str) -> dict[str, Any]:
  trace = episode.trace()
  flags: list[bool | None] = [bool(t) for t in trace.trainable]
  failing = [i for i, t in enumerate(trace.turns) if t.result and t.result.passed is False]
  for i, turn in enumerate(trace.turns):
    if turn.call is None or turn.call.name != 'edit_file' or turn.result is None:
      continue
    wrong = not config.learn_wrong_edits and any(i < later for later in failing)
    if wrong or turn.result.text == NO_CHANGE:
      first, last = turn.call_span
      flags[first:last] = [None] * (last - first)
  return {'id': f'{trace.task_id}/{index}', 'index': index, 'source': source,
          'task_id': trace.task_id, 'level': trace.level,
          'mutation': trace.meta.get('mutation', ''), 'reward': trace.reward,
          'stop_reason': trace.stop_reason, 'calls': len(trace.turns),
          **_segments(trace.tokens, flags)}


def _segments(tokens: list[int], flags: list[bool | None]) -> dict[str, Any]:
  segments: list[list[int]] = []
  trainable: list[bool | None] = []
  for flag, run in itertools.groupby(zip(flags, tokens, strict=True), key=lambda pair: pair[0]):
    segments.append([token for _, token in run])
    trainable.append(flag)
  return {'segments': segments, 'trainable': trainable}


def _stats(rows: Sequence[dict[str, Any]], discarded: int) -> TraceStats:
  count = max(len(rows), 1)
  return TraceStats(
    rows=len(rows),
    tokens=sum(len(s) for r in rows for s in r['segments']),
    sampled_tokens=sum(len(s) for r in rows for s, t in zip(r['segments'], r['trainable'],
                                                           strict=True) if t),
    calls=sum(r['calls'] for r in rows) / count, discarded=discarded)


def _line(value: dict[str, Any]) -> str:
  return json.dumps(value, separators=(',', ':')) + '\n'


def _read(path: pathlib.Path, source: str) -> list[dict[str, Any]]:
  """Reads a trace file.

  Raises:
    UserError: it is damaged, or was written with other arguments.
  """
  rows = json_lines(path)
  if any(row.get('source') != source for row in rows):
    raise UserError(f'{path}: written with other tasks, seed, tokenizer or settings; remove it')
  return rows
