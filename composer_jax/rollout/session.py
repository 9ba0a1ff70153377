"""The protocol between the scheduler and whatever holds a conversation (an episode, a user).

The protocol is structural: an implementation does not have to import this module. `Status` is a
`StrEnum`, so an implementation may equally return its own string enum or the plain strings.
"""

import enum
from typing import Protocol, runtime_checkable


class Status(enum.StrEnum):
  """What a session wants from the scheduler."""

  READY = 'ready'  # has tokens to append, then wants a generated turn
  WAITING = 'waiting'  # something outside runs (a tool, the grader); ask again later
  DONE = 'done'  # over; the scheduler hands it to `on_done` and frees the slot


class AbortReason(enum.StrEnum):
  """Why the scheduler stops a session; the string is passed to `Session.abort`."""

  CONTEXT_FULL = 'context_full'  # the next tokens do not fit, or the window filled up mid-turn
  BUDGET = 'budget'  # the session was READY but allows no further token
  SHUTDOWN = 'shutdown'  # the worker is closing; the half-done rollout is not a natural stop
  ERROR = 'error'  # a method of the session raised


@runtime_checkable
class Session(Protocol):
  """One conversation; all methods are called from the scheduler's thread.

  Order of calls for one turn: `poll` (READY) -> `next_tokens` -> `max_new_tokens` -> `deliver`.
  `next_tokens` is called exactly once per READY; the ids appended so far are never changed and
  never re-encoded.  After `deliver` the next `poll` may already be READY or DONE.

  When the context window fills up in the middle of a turn, `deliver(tokens, False)` is followed at
  once by `abort('context_full')`: the abort's reason is the precise one and must win over the
  session's own reading of `ended == False`.  `abort` may come at any time before DONE was
  reported, also while WAITING, and at most once; afterwards the session must report DONE.

  Attributes:
    id: unique over the run; seeds the sampling of this session.
    group_id: sessions of the same prompt that are compared with each other.
  """

  id: str
  group_id: str

  def poll(self) -> Status:
    """Returns the status without blocking."""

  def next_tokens(self) -> list[int]:
    """Returns the ids to append before generation (prompt; tool result and call opener)."""

  def max_new_tokens(self) -> int:
    """Returns how many tokens this turn may sample, `<|end|>` included; at least 1."""

  def deliver(self, tokens: list[int], ended: bool) -> None:
    """Takes the turn's sampled ids.

    Args:
      tokens: the sampled ids, including `<|end|>` when `ended`.
      ended: False when the turn was cut by `max_new_tokens` or by the context window.
    """

  def abort(self, reason: str) -> None:
    """Stops the session from outside; `reason` is one of `AbortReason`'s values."""
