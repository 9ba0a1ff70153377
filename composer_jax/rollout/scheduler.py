"""Continuous batching: sessions come and go in the engine's slots, tools run meanwhile.

A slot whose turn has ended waits for its tool while the other slots go on decoding; a slot in the
middle of a turn just continues in the next tick.  Weights are looked up once a tick, so a new
version takes effect at a tick boundary, in the middle of rollouts and even of turns (Composer 2
report, section 4.1: in-flight weight updates).  Cache policy across a swap: the cache of a running
session is *kept*, each sampled token is tagged with the version that sampled it, and nothing is
ever shared between sessions, so a session that starts after the swap has seen no old cache entry.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.errors import NumericsError, UserError
from composer_jax.rollout.lane import Lane
from composer_jax.rollout.session import AbortReason, Session, Status
from composer_jax.rollout.ticks import SlotOutput, SlotRequest, TickEngine
from composer_jax.rollout.types import Rollout

Weights = Callable[[], tuple[int, Any]]
Source = Callable[[], Session | None]
OnDone = Callable[[Session, Rollout], None]


class Scheduler:
  """Drives sessions over an engine; single-threaded, one `step` is one engine tick.

  Every session taken from `source` is handed to `on_done` exactly once, however it ends: done by
  itself, aborted (context full, no budget, shutdown), or failed.  An exception raised by a session
  ends that session only (`Rollout.failure`); one raised by `weights`, `source`, `on_done` or the
  engine is the caller's and propagates, after which `close` still works.

  Args:
    engine: the slots.
    weights: returns the newest (version, params); versions must not decrease.
    source: returns the next session, or None when there is none at the moment.
    on_done: takes a finished session and its rollout.
    training: the rollouts will be trained on; refuses greedy sampling, whose tokens are not
      samples of the policy.
    idle_s: seconds to sleep when all sessions wait for tools.

  Raises:
    UserError: `training` with temperature 0.
  """

  def __init__(self, engine: TickEngine, weights: Weights, source: Source, on_done: OnDone, *,
               training: bool = True, idle_s: float = 5e-4):
    if training and engine.temperature == 0:
      raise UserError('temperature 0 (greedy) is for evaluation only, not for training rollouts')
    self._engine = engine
    self._weights = weights
    self._source = source
    self._on_done = on_done
    self._idle_s = idle_s
    self._lanes: list[Lane | None] = [None] * engine.slots
    self._version = None
    self._closed = False
    self._meter = Meter(engine.slots)

  @property
  def live(self) -> int:
    """Number of sessions that hold a slot."""
    return sum(lane is not None for lane in self._lanes)

  def step(self) -> bool:
    """Takes in sessions, polls them, and runs one tick for those that can generate.

    Returns:
      False when no session is live and the source has none; True otherwise.
    """
    if self._closed:
      raise RuntimeError('the scheduler is closed')
    self._poll()
    source_empty = self._fill()
    requests = [lane.request() for lane in self._lanes if lane is not None and lane.generating]
    if not self.live:
      return not source_empty
    if requests:
      self._tick(requests)
    else:
      time.sleep(self._idle_s)
    self._meter.account(self.live, len(requests))
    return True

  def run(self) -> None:
    """Steps until no session is live and the source is empty."""
    while self.step():
      pass

  def close(self, reason: str = AbortReason.SHUTDOWN) -> None:
    """Aborts what is live and hands it to `on_done`; the scheduler cannot be used afterwards."""
    self._closed = True
    for lane in self._lanes:
      if lane is not None:
        lane.abort(reason)
        self._finish(lane)

  def metrics(self) -> dict[str, float]:
    """Returns the meter's figures since the start; see `Meter.read`."""
    return self._meter.read()

  def _fill(self) -> bool:
    """Gives free slots to new sessions; True when the source ran out."""
    # A session may be over as soon as it is polled; the bound keeps a stream of such sessions
    # from holding this step for ever.
    for _ in range(2 * len(self._lanes)):
      if None not in self._lanes:
        return False
      session = self._source()
      if session is None:
        return True
      if any(lane is not None and lane.session.id == session.id for lane in self._lanes):
        raise ValueError(f'session id {session.id!r} is already live: ids must be unique')
      slot = self._lanes.index(None)
      self._lanes[slot] = Lane(slot, session, self._engine)
      self._advance(self._lanes[slot])
    return False

  def _poll(self) -> None:
    for lane in self._lanes:
      if lane is not None and not lane.generating:
        self._advance(lane)

  def _advance(self, lane: Lane) -> None:
    status = lane.poll()
    if status == Status.READY:
      lane.begin_turn()
    if lane.over:
      self._finish(lane)

  def _tick(self, requests: Sequence[SlotRequest]) -> None:
    version, params = self._weights()
    if self._version is not None and version < self._version:
      raise ValueError(f'weights went back from version {self._version} to {version}')
    self._version = version
    outputs = self._engine.tick(params, requests)
    for request, output in zip(requests, outputs, strict=True):
      lane = self._lanes[request.slot]
      self._check(lane, output)
      lane.take(output, version)
      self._meter.count(fed=len(output.routing), sampled=len(output.tokens))
      if lane.over:
        self._finish(lane)

  @staticmethod
  def _check(lane: Lane, output: SlotOutput) -> None:
    total = float(output.logprobs.sum())
    if not -float('inf') < total <= 0:  # false for NaN too
      raise NumericsError(f'session {lane.session.id}: sampled log-probabilities are not finite')

  def _finish(self, lane: Lane) -> None:
    self._lanes[lane.slot] = None  # first: the slot is free even if on_done raises
    self._meter.sessions += 1
    self._on_done(lane.session, lane.rollout())


class Meter:
  """Counts tokens and slot-seconds; the clock is read once a step."""

  def __init__(self, slots: int):
    self._slots = slots
    self._start = self._last = time.monotonic()
    self._generating_s = self._waiting_s = 0.0
    self._ticks = self._fed = self._sampled = 0
    self.sessions = 0

  def count(self, *, fed: int, sampled: int) -> None:
    """Adds tokens fed to the model and tokens sampled."""
    self._fed += fed
    self._sampled += sampled

  def account(self, live: int, generating: int) -> None:
    """Charges the time since the last call to the slots that generated and those that waited."""
    now = time.monotonic()
    elapsed, self._last = now - self._last, now
    self._generating_s += elapsed * generating
    self._waiting_s += elapsed * max(0, live - generating)
    self._ticks += generating > 0

  def read(self) -> dict[str, float]:
    """Returns the figures.

    `occupancy` is the share of slot-seconds spent generating, `wait_share` the share spent on
    waiting for tools; the rest of the slot-seconds had no session.
    """
    wall = max(time.monotonic() - self._start, 1e-9)
    return {
        'wall_s': wall,
        'ticks': self._ticks,
        'sessions': self.sessions,
        'sampled_tokens': self._sampled,
        'fed_tokens': self._fed,
        'sampled_tokens_per_s': self._sampled / wall,
        'occupancy': self._generating_s / (wall * self._slots),
        'wait_share': self._waiting_s / (wall * self._slots),
    }
