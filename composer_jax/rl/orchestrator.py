"""The rollout worker: a thread that keeps the sampler's slots busy with the tasks of the buffer.

It talks only to the buffer (tickets out, samples in) and to the weight store, and does not know the
trainer. Its errors travel through the buffer and are raised in the trainer.
"""

import threading
from typing import Any, Protocol

from composer_jax.errors import InfrastructureError
from composer_jax.rl import samples as samples_lib
from composer_jax.rl.buffer import GroupBuffer, Ticket
from composer_jax.rl.samples import Outcome, Sample
from composer_jax.rl.weight_sync import WeightSync
from composer_jax.rollout.scheduler import Scheduler
from composer_jax.rollout.session import Session, Status
from composer_jax.rollout.ticks import TickEngine
from composer_jax.rollout.types import Rollout


class Environment(Protocol):
  """Where rollouts happen; called from the rollout thread only (besides `num_tasks`)."""

  num_tasks: int

  def session(self, ordinal: int, member: int) -> Session | None:
    """Starts member `member` on the task at `ordinal`, or returns None to be asked again.

    Session ids must be unique over (ordinal, member); the group id must follow from the ordinal.

    Raises:
      InfrastructureError: it could not be started; the group goes on without this member.
    """

  def outcome(self, session: Session) -> Outcome:
    """Returns the verdict of a session that is done, and frees what it held."""


class _Member:
  """A session with its ticket; stops itself between turns once its group is gone."""

  def __init__(self, session: Session, ticket: Ticket, buffer: GroupBuffer):
    self.session = session
    self.ticket = ticket
    self.id = session.id
    self.group_id = session.group_id
    self._buffer = buffer
    self._aborted = False

  def poll(self) -> Status:
    if not self._aborted and not self._buffer.wanted(self.ticket):
      self.abort('group_gone')
    return Status.DONE if self._aborted else self.session.poll()

  def next_tokens(self) -> list[int]:
    return self.session.next_tokens()

  def max_new_tokens(self) -> int:
    return self.session.max_new_tokens()

  def deliver(self, tokens: list[int], ended: bool) -> None:
    self.session.deliver(tokens, ended)

  def abort(self, reason: str) -> None:
    if not self._aborted:
      self._aborted = reason == 'group_gone'
      self.session.abort(reason)


class RolloutWorker:
  """Runs `rollout.Scheduler` in a thread; start / stop / metrics.

  Args:
    engine: the sampler's slots.
    environment: makes sessions and gives verdicts.
    buffer: source of tickets and taker of samples.
    weights: the latest policy, already published once.
  """

  def __init__(self, engine: TickEngine, environment: Environment, buffer: GroupBuffer,
               weights: WeightSync):
    self._environment = environment
    self._buffer = buffer
    self._scheduler = Scheduler(engine, weights.current, self._next, self._done)
    self._pending: Ticket | None = None
    self._stop = threading.Event()
    self._metrics: dict[str, float] = {}
    self._thread = threading.Thread(target=self._run, name='rollout', daemon=True)

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def stop(self) -> None:
    """Stops after the current tick, aborts what is live, and waits for the thread to end."""
    self._stop.set()
    self._buffer.close()
    if self._thread.ident is not None:
      self._thread.join()

  def metrics(self) -> dict[str, float]:
    """Returns the scheduler's figures as of its last tick; see `rollout.scheduler.Meter`."""
    return self._metrics

  def _run(self) -> None:
    try:
      try:
        while not self._stop.is_set():
          self._buffer.expire()
          busy = self._scheduler.step()
          self._metrics = self._scheduler.metrics()
          if not busy:
            self._stop.wait(0.005)  # the trainer has to catch up, or all work is done
      finally:
        self._scheduler.close()
    except BaseException as error:  # noqa: BLE001 raised again in the trainer by the buffer
      self._buffer.fail(error)

  def _next(self) -> Session | None:
    ticket = self._pending or self._buffer.next_ticket()
    self._pending = None
    if ticket is None:
      return None
    try:
      session = self._environment.session(ticket.ordinal, ticket.member)
    except InfrastructureError as error:
      self._buffer.forfeit(ticket, 'infrastructure', str(error))
      return None
    if session is None:
      self._pending = ticket
      return None
    return _Member(session, ticket, self._buffer)

  def _done(self, member: Any, rollout: Rollout) -> None:
    outcome = self._environment.outcome(member.session)
    if rollout.failure is not None:
      failure = rollout.failure
      self._buffer.forfeit(member.ticket, 'session_error',
                           f'{failure.kind} in {failure.where}: {failure.message}')
      return
    if outcome.correct is None:
      self._buffer.forfeit(member.ticket, outcome.stop_reason,
                           str(outcome.trace.get('error', '')))
      return
    sample = Sample(rollout, outcome, member.group_id, member.id)
    if sample.trainable:
      samples_lib.validate([sample])
    self._buffer.deliver(member.ticket, [sample])
