"""Admission: a task is used only when its gold repair passes and doing nothing does not.

The gold passes three times out of three (a flaky task is refused), and the untouched workspace
fails both a visible and a hidden case, within the task's time limit (SWE-smith's admission rule).
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from composer_jax.envs.harness import GraderLike, Ticket
from composer_jax.envs.rewards import contraband
from composer_jax.envs.types import Task

GOLD_RUNS = 3


@dataclasses.dataclass
class Verdict:
  """Whether a task is admitted, and why not.

  Attributes:
    task: the task.
    reason: empty when admitted, else one line.
  """

  task: Task
  reason: str = ''

  @property
  def admitted(self) -> bool:
    """Whether the task may be used."""
    return not self.reason


def validate(tasks: Iterable[Task], grader: GraderLike, *, in_flight: int = 8,
             wait: Callable[[], None] = lambda: None) -> Iterator[Verdict]:
  """Yields a verdict for each task, in order.

  Args:
    tasks: candidates.
    grader: runs the cases; it takes as many submissions as it is given.
    in_flight: tasks whose checks run at the same time.
    wait: called when nothing has moved, to pass the time.

  Raises:
    InfrastructureError: the grader broke; nothing can be said about the task.
  """
  pending: collections.deque[_Check] = collections.deque()
  source = iter(tasks)
  exhausted = False
  while pending or not exhausted:
    while not exhausted and len(pending) < in_flight:
      task = next(source, None)
      if task is None:
        exhausted = True
      else:
        pending.append(_Check(task, grader))
    moved = False
    for check in pending:
      moved |= check.poll()
    while pending and pending[0].done:
      yield pending.popleft().verdict()
      moved = True
    if pending and not moved:
      wait()


class _Check:
  """All gradings of one task."""

  def __init__(self, task: Task, grader: GraderLike):
    self.task = task
    gold = {**task.files, **task.solution}
    both = [*task.visible, *task.hidden]
    self._wanted: list[tuple[str, bool]] = []
    self._tickets: list[Ticket] = []
    self._answers: dict[int, bool] = {}
    self._static = _static_reason(task, gold)
    if self._static:
      return
    plans = [('gold fails', gold, both, True)] * GOLD_RUNS
    plans += [('no-op passes the visible cases', task.files, task.visible, False),
              ('no-op passes the hidden cases', task.files, task.hidden, False)]
    for reason, files, cases, wanted in plans:
      self._wanted.append((reason, wanted))
      self._tickets.append(grader.submit(files, cases, task.limits.test_timeout_s))

  @property
  def done(self) -> bool:
    return len(self._answers) == len(self._tickets)

  def poll(self) -> bool:
    moved = False
    for i, ticket in enumerate(self._tickets):
      if i not in self._answers:
        answer = ticket.poll()
        if answer is not None:
          self._answers[i] = bool(answer)
          moved = True
    return moved

  def verdict(self) -> Verdict:
    wrong = [reason for i, (reason, wanted) in enumerate(self._wanted)
             if self._answers[i] != wanted]
    if 0 < wrong.count('gold fails') < GOLD_RUNS:
      wrong = ['flaky: gold passes only sometimes']
    return Verdict(self.task, self._static or (wrong[0] if wrong else ''))


def _static_reason(task: Task, gold: dict[str, str]) -> str:
  if not task.visible or not task.hidden:
    return 'no visible or no hidden case'
  if set(task.solution) - set(task.files):
    return 'the solution has files that the workspace lacks'
  if set(task.solution) & set(task.protected):
    return 'the solution changes a protected file'
  if all(task.files[p] == t for p, t in task.solution.items()):
    return 'the solution changes nothing'
  if task.entry not in task.files:
    return 'the entry is not among the files'
  if contraband(task, gold):
    return 'the solution itself looks like borrowing'
  return ''
