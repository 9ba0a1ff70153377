"""The scripted expert: reads, repairs, tests and finishes in the real sandbox, through the harness.

It knows the solution, so what it demonstrates is the procedure: look, change lines, run the tests,
repair after a failure, and finish only on "pass". It can be made to stumble first, so that recovery
is demonstrated as well: over a plausible wrong edit, or over edits that change nothing.
"""

import dataclasses
import difflib
import random
import select
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Protocol

from composer_jax.envs.harness import ChatRenderer, Episode, GraderLike, Status
from composer_jax.envs.tools.edit import apply_edit, split_lines
from composer_jax.envs.tools.registry import PASS
from composer_jax.envs.types import SandboxHandle, Task
from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
  """How the expert behaves (our choice).

  Attributes:
    wrong_edit_rate: probability of a wrong first edit, followed by a failing test and the repair.
    learn_wrong_edits: whether the tokens of the wrong edit are trainable in the written traces;
      False shows the recovery without teaching the mistake (see experiments/LOG.md: it makes the
      difference between 0.47 and 0.70 of held-out tasks solved).
    idle_edit_rate: probability that it first rewrites one or two lines as they already are (where
      its first edit is not a wrong one). A small model does this often, and then repeats itself:
      the demonstration is to go on to another line. These edits' tokens are never trainable.
  """

  wrong_edit_rate: float = 0.3
  learn_wrong_edits: bool = False
  idle_edit_rate: float = 0.0

  def __post_init__(self):
    if min(self.wrong_edit_rate, self.idle_edit_rate) < 0 or (
        self.wrong_edit_rate + self.idle_edit_rate > 1):
      raise ValueError('wrong_edit_rate and idle_edit_rate: must be between 0 and 1 together')


class Pool(Protocol):
  """Hands out idle sandboxes."""

  def acquire(self) -> SandboxHandle | None: ...
  def release(self, sandbox: SandboxHandle) -> None: ...


Player = Generator[str, str, None]


def play(task: Task, config: ExpertConfig, rng: random.Random) -> Player:
  """Yields the expert's call texts; the result text of each call is sent back in."""
  files = dict(task.files)
  for path in task.solution:
    yield _spell(task, 'read_file', path)
  wrong = task.meta.get('wrong_edits') or []
  chance = rng.random()
  if chance >= 1 - config.idle_edit_rate:
    yield from _idle_edits(task, rng)
  elif wrong and chance < config.wrong_edit_rate:
    path, line, text = rng.choice(wrong)
    yield f'{_spell(task, "edit_file", path, f"{line}")}|{text}'
    files[path] = apply_edit(files[path], line, line, text) or files[path]
    if (yield 'run_tests') == PASS:
      yield 'finish'
      return
  for call in repairs(task, files):  # noqa: UP028  results are sent in; a list cannot take them
    yield call
  if (yield 'run_tests') == PASS:
    yield 'finish'


def repairs(task: Task, files: Mapping[str, str]) -> list[str]:
  """Returns the edit calls that turn `files` into the solution, last lines of a file first."""
  calls = []
  for path, wanted in task.solution.items():
    old, new = split_lines(files[path]), split_lines(wanted)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, a0, a1, b0, b1 in reversed(matcher.get_opcodes()):
      if tag == 'equal':
        continue
      pairs = list(zip(old[a0:a1], new[b0:b1], strict=False))
      if a1 - a0 == b1 - b0 and all(_same_indent(o, n) and n.strip() for o, n in pairs):
        for i in reversed(range(len(pairs))):
          place = _spell(task, 'edit_file', path, str(a0 + i + 1))
          calls.append(f'{place}|{new[b0 + i].strip()}')
        continue
      first, last, text = _range_edit(old, new[b0:b1], a0, a1)
      calls.append(f'{_spell(task, "edit_file", path, f"{first}-{last}")}|{text}')
  return calls


def _idle_edits(task: Task, rng: random.Random) -> Generator[str, str, None]:
  """Yields one or two edits that write a line which needs no repair as it is."""
  path = rng.choice(list(task.solution))
  old = split_lines(task.files[path])
  kept = {i for block in difflib.SequenceMatcher(
            None, old, split_lines(task.solution[path]), autojunk=False).get_matching_blocks()
          for i in range(block.a, block.a + block.size) if old[i].strip()}
  same = sorted(i for i in kept if apply_edit(task.files[path], i + 1, i + 1, old[i].strip())
                == task.files[path])
  for i in rng.sample(same, min(len(same), rng.randint(1, 2))):
    yield f'{_spell(task, "edit_file", path, str(i + 1))}|{old[i].strip()}'


def _range_edit(old: Sequence[str], block: list[str], a0: int, a1: int) -> tuple[int, int, str]:
  """Returns (first, last, text) replacing old[a0:a1] by `block`, in the tool's terms."""
  if a0 == a1 and a0 > 0:  # an insertion carries the line before it along
    a0, block = a0 - 1, [old[a0 - 1], *block]
  elif a0 == a1 and old:
    a1, block = 1, [*block, old[0]]
  return a0 + 1, max(a1, a0 + 1), ''.join(line + '\n' for line in block)


def _same_indent(old: str, new: str) -> bool:
  return len(old) - len(old.lstrip()) == len(new) - len(new.lstrip())


def _spell(task: Task, tool: str, path: str, lines: str = '') -> str:
  """Spells a call, leaving out the path where the task's entry is meant."""
  where = ':'.join(part for part in ('' if path == task.entry else path, lines) if part)
  return f'{tool} {where}'.rstrip()


class _Attempt:
  """One expert episode in progress."""

  def __init__(self, index: int, episode: Episode, player: Player, renderer: ChatRenderer):
    self.index, self.episode = index, episode
    self._player, self._renderer = player, renderer
    self._started = False

  def step(self) -> bool:
    """Advances as far as it goes; returns whether the episode is over."""
    while (status := self.episode.poll()) == Status.READY:
      try:
        if self._started:
          text = self._player.send(self.episode.turns[-1].result.text)
        else:
          text, self._started = next(self._player), True
      except StopIteration:
        self.episode.abort('gave up')  # the tests do not pass: this task is not solved
        return True
      self.episode.next_tokens()
      self.episode.deliver(self._renderer.call(text), True)
    return status == Status.DONE


def play_all(jobs: Iterator[tuple[int, Task, Player]], pool: Pool, grader: GraderLike,
             renderer: ChatRenderer, concurrency: int) -> Iterator[tuple[int, Episode]]:
  """Plays episodes side by side in one thread and yields them as they finish.

  Args:
    jobs: (index, task, player) triples.
    pool: must hold at least `concurrency` sandboxes.
    grader: decides on the hidden cases.
    renderer: encodes the conversation.
    concurrency: episodes in flight; each is a separate process, so a few more than cores is right.
  """
  active: list[_Attempt] = []
  exhausted = False
  try:
    while active or not exhausted:
      while not exhausted and len(active) < concurrency:
        job = next(jobs, None)
        if job is None:
          exhausted = True
          break
        sandbox = pool.acquire()
        if sandbox is None:
          raise UserError(f'the pool has fewer than {concurrency} free sandboxes')
        index, task, player = job
        episode = Episode(task, sandbox, grader, renderer, sample_index=index, release=pool.release)
        active.append(_Attempt(index, episode, player, renderer))
      over = [attempt for attempt in active if attempt.step()]
      active = [attempt for attempt in active if attempt not in over]
      for attempt in over:
        yield attempt.index, attempt.episode
      if active and not over:
        _wait(active)
  finally:  # also when the caller stops, or something fails: the pool gets its sandboxes back
    for attempt in active:
      attempt.episode.abort('stopped')


def _wait(active: list[_Attempt]) -> None:
  """Sleeps until a sandbox answers; gradings are looked at every 2 ms at the latest."""
  busy = [a.episode.waiting_on for a in active]
  readable = [s.fileno() for s in busy if s is not None]
  select.select(readable, [], [], 0.002 if len(readable) < len(active) else 0.05)
