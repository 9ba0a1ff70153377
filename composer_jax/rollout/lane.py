"""One slot's session: its token record, its turn in progress, and its failures."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from composer_jax.rollout.session import AbortReason, Session, Status
from composer_jax.rollout.ticks import SlotOutput, SlotRequest, TickEngine
from composer_jax.rollout.types import Rollout, SessionFailure


class Lane:
  """Runs one session's side of the protocol and records every token.

  Attributes:
    slot: the engine's slot.
    session: the session.
    generating: a turn is in progress: the next tick must serve this lane.
    over: the session is done, aborted or failed; the lane waits to be collected.
  """

  def __init__(self, slot: int, session: Session, engine: TickEngine):
    self.slot = slot
    self.session = session
    self.generating = False
    self.over = False
    self._max_len = engine.max_len
    self._temperature = engine.temperature
    self._routing_shape = engine.routing_shape
    self._tokens: list[int] = []
    self._sampled: list[bool] = []
    self._logprobs: list[float] = []
    self._versions: list[int] = []
    self._routing: list[np.ndarray] = []
    self._feed: list[int] = []
    self._turn: list[int] = []
    self._turn_limit = 0
    self._context_limited = False
    self._turns = 0
    self._seen_by_engine = False
    self._aborted: str | None = None
    self._failure: SessionFailure | None = None
    self._started = time.monotonic()
    self._waiting_since: float | None = None
    self._waiting_s = 0.0

  def poll(self) -> Status:
    """Asks the session for its status; sets `over` when it is done or raised."""
    status, ok = self._call('poll', self.session.poll)
    if not ok or status == Status.DONE:
      self.over = True
      self._stop_waiting()
      return Status.DONE
    if status == Status.WAITING:
      if self._waiting_since is None:
        self._waiting_since = time.monotonic()
      return Status.WAITING
    self._stop_waiting()
    return Status.READY

  def begin_turn(self) -> None:
    """Takes the session's next tokens and starts a turn, or ends the session if it cannot."""
    feed, ok = self._call('next_tokens', self.session.next_tokens)
    if not ok:
      return
    budget, ok = self._call('max_new_tokens', self.session.max_new_tokens)
    if not ok:
      return
    if not feed:
      self._fail('next_tokens', ValueError('a READY session gave no tokens to append'))
      return
    if budget < 1:
      self.abort(AbortReason.BUDGET)
      return
    room = self._max_len - len(self._tokens) - len(feed)
    if room < 1:
      self.abort(AbortReason.CONTEXT_FULL)
      return
    self._append(feed, sampled=False)
    self._feed = list(feed)
    self._turn = []
    self._turn_limit = min(budget, room)
    self._context_limited = room < budget
    self.generating = True

  def request(self) -> SlotRequest:
    """Returns what this lane asks of the next tick."""
    first = None if self._seen_by_engine else self.session.id
    return SlotRequest(self.slot, self._feed, self._turn_limit - len(self._turn), first)

  def take(self, output: SlotOutput, version: int) -> None:
    """Records a tick's output and delivers the turn when it is over."""
    self._seen_by_engine = True
    self._feed = []
    tokens = output.tokens.tolist()
    self._append(tokens, sampled=True, logprobs=output.logprobs.tolist(), version=version)
    self._routing.append(output.routing)
    self._turn += tokens
    cut = not output.ended and len(self._turn) >= self._turn_limit
    if not output.ended and not cut:
      return
    self.generating = False
    self._turns += 1
    self._call('deliver', lambda: self.session.deliver(self._turn, output.ended))
    if cut and self._context_limited and not self.over:
      self.abort(AbortReason.CONTEXT_FULL)

  def abort(self, reason: str) -> None:
    """Stops the session; it counts as over whatever it answers."""
    self.generating = False
    self.over = True
    self._aborted = str(reason)
    self._stop_waiting()
    try:
      self.session.abort(self._aborted)
    except Exception as error:  # noqa: BLE001 recorded on the rollout, the others must go on
      self._record('abort', error)

  def rollout(self) -> Rollout:
    """Returns the record of everything that was appended so far."""
    total = len(self._tokens)
    routing = np.zeros((total, *self._routing_shape), np.uint16)
    mask = np.zeros(total, bool)
    recorded = np.concatenate(self._routing) if self._routing else routing[:0]
    routing[:len(recorded)] = recorded
    mask[:len(recorded)] = True
    return Rollout(
        session_id=self.session.id,
        group_id=self.session.group_id,
        tokens=np.asarray(self._tokens, np.int32),
        sampled=np.asarray(self._sampled, bool),
        logprobs=np.asarray(self._logprobs, np.float32),
        versions=np.asarray(self._versions, np.int32),
        routing=routing,
        routing_mask=mask,
        temperature=self._temperature,
        aborted=self._aborted,
        failure=self._failure,
        turns=self._turns,
        started_s=self._started,
        finished_s=time.monotonic(),
        waiting_s=self._waiting_s,
    )

  def _append(self, tokens: list[int], *, sampled: bool, logprobs: list[float] | None = None,
              version: int = -1) -> None:
    self._tokens += tokens
    self._sampled += [sampled] * len(tokens)
    self._logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)
    self._versions += [version] * len(tokens)

  def _stop_waiting(self) -> None:
    if self._waiting_since is not None:
      self._waiting_s += time.monotonic() - self._waiting_since
      self._waiting_since = None

  def _call(self, where: str, function: Callable[[], Any]) -> tuple[Any, bool]:
    """Calls into the session; on an exception the session fails and (None, False) comes back."""
    try:
      return function(), True
    except Exception as error:  # noqa: BLE001 any session error ends this session only, typed
      self._fail(where, error)
      return None, False

  def _fail(self, where: str, error: Exception) -> None:
    self._record(where, error)
    self.abort(AbortReason.ERROR)

  def _record(self, where: str, error: Exception) -> None:
    if self._failure is None:  # the first error is the cause, later ones its consequences
      self._failure = SessionFailure(where, type(error).__name__, str(error))
