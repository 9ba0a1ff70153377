"""The only meeting point of rollout worker and trainer: which group may start, wait, train or go.

One rule bounds the asynchrony. Groups are numbered by their ordinal in a fixed task order, each
task is used at most once (single epoch, Composer 2 report, section 4), and a group may start only
while

    started - dropped < min(version + 1 + max_staleness, steps) * groups_per_step

so a sampler can never run further ahead of the trainer, and nothing is started that no step will
use. A group that is dropped gives its place back. The trainer takes complete groups, oldest ordinal
first; a straggler whose tokens have become older than `max_staleness` versions is dropped instead.

Every ordinal ends as trained or as dropped with a counted reason; that set is the data cursor of a
checkpoint, saved in one piece with the groups that are ready and not yet trained.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.errors import InfrastructureError
from composer_jax.rl import samples as samples_lib
from composer_jax.rl.samples import Group, Sample


@dataclasses.dataclass(frozen=True)
class BufferLimits:
  """Sizes and bounds of the buffer; see `RLConfig` for their meaning."""

  steps: int
  groups_per_step: int
  group_size: int
  min_group_size: int
  max_staleness: int
  max_extra_groups: int
  group_deadline_s: float
  tasks: int


@dataclasses.dataclass(frozen=True)
class Ticket:
  """The right to run one member of one group."""

  ordinal: int
  member: int


@dataclasses.dataclass
class _Open:
  """A group that is not complete."""

  version: int
  started_s: float
  issued: int = 0
  results: dict[int, tuple[Sample, ...]] = dataclasses.field(default_factory=dict)
  failed: dict[int, str] = dataclasses.field(default_factory=dict)


class GroupBuffer:
  """Groups on their way from the rollout worker to the trainer; safe to use from two threads."""

  def __init__(
      self, limits: BufferLimits, zero_signal: Callable[[Sequence[Sample]], bool],
      clock: Callable[[], float] = time.monotonic):
    """Creates an empty buffer.

    Args:
      limits: sizes and bounds.
      zero_signal: decides from a group's samples whether it can give no gradient.
      clock: seconds, for the deadline of groups.
    """
    self.limits = limits
    self._zero_signal = zero_signal
    self._clock = clock
    self._changed = threading.Condition()
    self.version = 0
    self._next = 0  # lowest ordinal that was never started
    self._restart: collections.deque[int] = collections.deque()  # in flight at the last checkpoint
    self._open: dict[int, _Open] = {}
    self._ready: dict[int, Group] = {}
    self._trained: set[int] = set()
    self._dropped: dict[int, str] = {}
    self._extra_used = 0
    self._failures_in_row = 0
    self._last_failure = ''
    self._error: BaseException | None = None
    self._closed = False

  # Producer side.

  def next_ticket(self) -> Ticket | None:
    """Returns the next member to run, or None while the trainer has to catch up (or for good)."""
    with self._changed:
      if self._closed:
        return None
      for ordinal, group in self._open.items():
        if group.issued < self.limits.group_size:
          group.issued += 1
          return Ticket(ordinal, group.issued - 1)
      ordinal = self._startable()
      if ordinal is None:
        return None
      if self._restart:
        self._restart.popleft()
      else:
        self._next += 1
      self._open[ordinal] = _Open(self.version, self._clock(), issued=1)
      return Ticket(ordinal, 0)

  def deliver(self, ticket: Ticket, samples: Sequence[Sample]) -> None:
    """Takes the rows of a finished member; a result for a group that is gone is ignored."""
    with self._changed:
      group = self._open.get(ticket.ordinal)
      if group is None or ticket.member in group.failed or ticket.member in group.results:
        return
      if not all(s.trainable for s in samples) or not samples:
        stop = samples[0].outcome.stop_reason if samples else 'no_tokens'
        group.failed[ticket.member] = stop
      else:
        group.results[ticket.member] = tuple(samples)
      self._close_if_complete(ticket.ordinal)

  def forfeit(self, ticket: Ticket, reason: str, message: str = '') -> None:
    """Records that a member ended without a verdict; `reason` is one of a few counted names."""
    with self._changed:
      self._last_failure = message or self._last_failure
      group = self._open.get(ticket.ordinal)
      if group is None or ticket.member in group.results:
        return
      group.failed.setdefault(ticket.member, reason)
      self._close_if_complete(ticket.ordinal)

  def wanted(self, ticket: Ticket) -> bool:
    """Whether a running member can still be used; if not, it should be aborted."""
    with self._changed:
      group = self._open.get(ticket.ordinal)
      return group is not None and ticket.member not in group.failed

  def fail(self, error: BaseException) -> None:
    """Hands an error of the producer to the trainer, which raises it at its next call."""
    with self._changed:
      self._error = error
      self._changed.notify_all()

  def close(self) -> None:
    """Stops giving out tickets."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()

  # Either side, periodically.

  def expire(self) -> None:
    """Closes groups whose deadline has passed with the members they have."""
    with self._changed:
      now = self._clock()
      late = [o for o, g in self._open.items()
              if now - g.started_s > self.limits.group_deadline_s]
      for ordinal in late:
        group = self._open[ordinal]
        for member in range(self.limits.group_size):
          if member not in group.results:
            group.failed.setdefault(member, 'deadline')
        self._close_if_complete(ordinal)

  # Trainer side.

  def try_take(self) -> list[Group] | None:
    """Returns the groups of the next step if they are complete, without waiting.

    Fewer than `groups_per_step` groups come back only when no further group can ever come; an
    empty list says that there is nothing left to train on.

    Raises:
      InfrastructureError: group after group ended without a verdict.
      BaseException: whatever the producer failed with.
    """
    with self._changed:
      return self._try_take()

  def take(self, stop: Callable[[], bool] = lambda: False) -> list[Group]:
    """Waits for `try_take` to have an answer and returns it; raises what it raises.

    Args:
      stop: asked several times a second; once it says so, an empty list comes back and everything
        stays in the buffer.
    """
    while not stop():
      self.expire()
      with self._changed:
        groups = self._try_take()
        if groups is not None:
          return groups
        self._changed.wait(timeout=0.2)  # wakes up by itself for deadlines and for `stop`
    return []

  def advance(self, version: int) -> None:
    """Says that the policy is now `version`: opens new places and drops what became too old."""
    with self._changed:
      self.version = version
      self._extra_used = 0
      for ordinal in [o for o, g in self._open.items()
                      if version - g.version > self.limits.max_staleness]:
        del self._open[ordinal]
        self._drop(ordinal, 'stale')
      self._drop_stale_ready()

  def snapshot(self) -> dict[str, Any]:
    """Returns the cursor and the ready groups, for the same checkpoint as the parameters."""
    with self._changed:
      return {'version': self.version, 'next': self._next, 'trained': sorted(self._trained),
              'dropped': {str(k): v for k, v in sorted(self._dropped.items())},
              'ready': samples_lib.groups_to_bytes([self._ready[o] for o in sorted(self._ready)])}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues from a snapshot: what was in flight then is started again, before anything new."""
    with self._changed:
      self.version = int(state['version'])
      self._next = int(state['next'])
      self._trained = set(state['trained'])
      self._dropped = {int(k): v for k, v in state['dropped'].items()}
      self._ready = {g.ordinal: g for g in samples_lib.groups_from_bytes(state['ready'])}
      done = self._trained | self._dropped.keys() | self._ready.keys()
      self._restart = collections.deque(o for o in range(self._next) if o not in done)

  def metrics(self) -> dict[str, float]:
    """Returns counters: groups in flight, ready, trained, and dropped by reason."""
    with self._changed:
      reasons = collections.Counter(self._dropped.values())
      return {'groups_in_flight': len(self._open), 'groups_ready': len(self._ready),
              'groups_trained': len(self._trained),
              **{f'dropped/{reason}': count for reason, count in sorted(reasons.items())}}

  def trained_ordinals(self) -> list[int]:
    """Returns the ordinals whose groups were handed to the trainer."""
    with self._changed:
      return sorted(self._trained)

  # Below: called with the lock held.

  def _startable(self) -> int | None:
    """Returns the ordinal that the capacity rule lets start, or None."""
    limit = self.limits
    ahead = min(self.version + 1 + limit.max_staleness, limit.steps) * limit.groups_per_step
    used = len(self._open) + len(self._ready) + len(self._trained)
    if used >= ahead:
      return None
    if self._restart:
      return self._restart[0]
    return self._next if self._next < limit.tasks else None

  def _close_if_complete(self, ordinal: int) -> None:
    group = self._open[ordinal]
    if len(group.results) + len(group.failed) < self.limits.group_size:
      return
    del self._open[ordinal]
    if len(group.results) < self.limits.min_group_size:
      self._failures_in_row += 1
      self._drop(ordinal, collections.Counter(group.failed.values()).most_common(1)[0][0])
    else:
      self._failures_in_row = 0
      rows = tuple(s for member in sorted(group.results) for s in group.results[member])
      flat = self._zero_signal(rows)
      if flat and self._extra_used < self.limits.max_extra_groups:
        self._extra_used += 1
        self._drop(ordinal, 'zero_signal')
      else:
        self._ready[ordinal] = Group(ordinal, rows, flat)
    self._changed.notify_all()

  def _drop(self, ordinal: int, reason: str) -> None:
    self._dropped[ordinal] = reason
    self._changed.notify_all()

  def _drop_stale_ready(self) -> None:
    for ordinal, group in list(self._ready.items()):
      if self.version - group.oldest_version > self.limits.max_staleness:
        del self._ready[ordinal]
        self._drop(ordinal, 'stale')

  def _try_take(self) -> list[Group] | None:
    if self._error is not None:
      raise self._error
    if self._failures_in_row >= 2 * self.limits.groups_per_step:
      reasons = collections.Counter(self._dropped.values()).most_common(3)
      counts = ', '.join(f'{reason}: {number}' for reason, number in reasons)
      last = f'; last error: {self._last_failure}' if self._last_failure else ''
      raise InfrastructureError(
          f'{self._failures_in_row} groups in a row ended without a verdict ({counts}){last}')
    self._drop_stale_ready()
    need = self.limits.groups_per_step
    if len(self._ready) < need and (self._open or self._startable() is not None):
      return None
    taken = [self._ready.pop(o) for o in sorted(self._ready)[:need]]
    self._trained.update(g.ordinal for g in taken)
    self._changed.notify_all()
    return taken
