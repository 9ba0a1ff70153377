"""The scheduler against a fake engine: the protocol, random event traces, and every way to end."""

import collections
import hashlib
import random

import numpy as np
import pytest

from composer_jax.errors import NumericsError, UserError
from composer_jax.rollout.scheduler import Scheduler
from composer_jax.rollout.session import AbortReason, Session, Status
from composer_jax.rollout.ticks import SlotOutput

END = 0
VERSION = 7


def next_token(session_id, position):
  """The fake model: a token is a hash of the session and the position, the end id one in five."""
  return hashlib.md5(f'{session_id}/{position}'.encode()).digest()[0] % 5


class FakeEngine:
  """Samples from `next_token` and asserts that the scheduler keeps to the engine's contract."""

  routing_shape = (1, 1)

  def __init__(self, slots, max_len, chunk=3, temperature=1.0):
    self.slots, self.max_len, self.chunk, self.temperature = slots, max_len, chunk, temperature
    self.sequences = {}  # slot -> (session id, tokens)
    self.ended_turn = {}
    self.history = {}  # session id -> tokens
    self.ticks = 0

  def tick(self, params, requests):
    self.ticks += 1
    assert requests
    assert len({r.slot for r in requests}) == len(requests), 'a slot asked twice'
    return [self._serve(r) for r in requests]

  def _serve(self, request):
    assert 0 <= request.slot < self.slots
    if request.session_id is not None:
      assert request.feed
      self.sequences[request.slot] = (request.session_id, [])
      assert request.session_id not in self.history, 'a session started twice'
      self.history[request.session_id] = self.sequences[request.slot][1]
      unfed = 0
    else:
      unfed = 1
      assert bool(request.feed) == self.ended_turn[request.slot], 'feed only between turns'
    session_id, tokens = self.sequences[request.slot]
    tokens += request.feed
    fed = unfed + len(request.feed) - 1
    assert request.limit >= 1
    assert len(tokens) + request.limit <= self.max_len
    sampled = []
    while len(sampled) < min(request.limit, self.chunk) and END not in sampled:
      sampled.append(next_token(session_id, len(tokens)))
      tokens.append(sampled[-1])
    fed += len(sampled)
    ended = sampled[-1] == END
    self.ended_turn[request.slot] = ended or len(sampled) == request.limit
    # The record of position p is p: a shifted or lost record shows.
    first = len(tokens) - 1 - fed
    routing = np.arange(first, first + fed, dtype=np.uint16).reshape(-1, 1, 1)
    logprobs = -np.asarray(sampled, np.float32)
    return SlotOutput(request.slot, np.asarray(sampled, np.int32), logprobs, routing, ended)


def scheduler_of(engine, sessions, **kwargs):
  queue, done = collections.deque(sessions), []
  scheduler = Scheduler(
      engine, lambda: (VERSION, None), lambda: queue.popleft() if queue else None,
      lambda session, rollout: done.append((session, rollout)), idle_s=0, **kwargs)
  return scheduler, done


class RandomSession:
  """Behaves at random within the protocol, raises now and then, and checks the order of calls."""

  def __init__(self, id, rng):
    self.id, self.group_id, self.rng = id, 'g', rng
    self.state = 'idle'
    self.turns_left = rng.randrange(5)
    self.crash_rate = rng.choice([0, 0, 0.05])
    self.aborted = None
    self.record = []  # what the session believes its token sequence to be
    self.raised = False

  def _maybe_raise(self):
    if self.rng.random() < self.crash_rate:
      self.raised = True
      raise OSError('tool server gone')

  def poll(self):
    assert self.aborted is None and not self.raised, 'polled after its end'
    assert self.state == 'idle'
    self._maybe_raise()
    if self.rng.random() < 0.4:
      return Status.WAITING
    if not self.turns_left:
      self.state = 'done'
      return Status.DONE
    self.state = 'ready'
    return Status.READY

  def next_tokens(self):
    assert self.state == 'ready'
    self._maybe_raise()
    self.state = 'fed'
    self.feed = [self.rng.randrange(5) for _ in range(self.rng.choice([1, 2, 5, 20]))]
    return self.feed

  def max_new_tokens(self):
    assert self.state == 'fed'
    self._maybe_raise()
    self.budget = self.rng.choice([0, 1, 4, 8, 30])
    return self.budget

  def deliver(self, tokens, ended):
    assert self.state == 'fed' and self.aborted is None
    assert 1 <= len(tokens) <= self.budget
    assert ended == (tokens[-1] == END) and END not in tokens[:-1]
    self.record += self.feed + tokens
    self.state = 'idle'
    self.turns_left -= 1
    self._maybe_raise()

  def abort(self, reason):
    assert self.aborted is None, 'aborted twice'
    assert self.state != 'done', 'aborted after it had reported done'
    self.aborted = reason
    self._maybe_raise()


def check_rollout(session, rollout, engine):
  tokens = rollout.tokens.tolist()
  assert rollout.session_id == session.id
  assert tokens == engine.history.get(session.id, [])[:len(tokens)] or rollout.aborted
  assert tokens[:len(session.record)] == session.record
  for t, token in enumerate(tokens):
    if rollout.sampled[t]:
      assert token == next_token(session.id, t)
      assert rollout.versions[t] == VERSION and rollout.logprobs[t] == -token
    else:
      assert rollout.versions[t] == -1 and rollout.logprobs[t] == 0
    if rollout.routing_mask[t]:
      assert rollout.routing[t] == t
  seen = len(engine.history.get(session.id, []))
  assert rollout.routing_mask.sum() == max(0, seen - 1), 'all but the last token are recorded'
  assert not rollout.routing_mask[seen:].any()
  assert (rollout.failure is not None) == session.raised
  if not session.raised:
    assert rollout.aborted == session.aborted
    assert rollout.aborted in (None, 'context_full', 'budget', 'shutdown')
    if rollout.aborted is None:
      assert session.state == 'done' and tokens == session.record


@pytest.mark.parametrize('block', range(8))
def test_random_traces_deliver_every_session_once_and_leak_no_slot(block):
  for trace in range(250):
    rng = random.Random(block * 1000 + trace)
    engine = FakeEngine(rng.randint(1, 4), rng.choice([10, 24, 60]), rng.randint(1, 4))
    sessions = [RandomSession(f's{i}', rng) for i in range(rng.randint(0, 9))]
    assert all(isinstance(s, Session) for s in sessions)
    hidden = collections.deque(sessions)
    done = []

    def source():
      # None now does not mean that there is none later
      return hidden.popleft() if hidden and rng.random() < 0.7 else None  # noqa: B023

    scheduler = Scheduler(engine, lambda: (VERSION, None), source,
                          lambda s, r: done.append((s, r)), idle_s=0)  # noqa: B023
    stop_after = rng.choice([None, None, rng.randint(0, 10)])
    steps = 0
    while (stop_after is None or steps < stop_after) and (scheduler.step() or hidden):
      steps += 1
      assert scheduler.live <= engine.slots
      assert steps < 5000, 'no progress'
    scheduler.close()
    taken = sessions[:len(sessions) - len(hidden)]
    assert scheduler.live == 0
    assert collections.Counter(s.id for s, _ in done) == collections.Counter(s.id for s in taken)
    if stop_after is None:
      assert not hidden
      assert not any(r.aborted == 'shutdown' for _, r in done)
    for session, rollout in done:
      check_rollout(session, rollout, engine)


def test_101_items_over_4_slots_give_101_results_each_once(scripted_session):
  sessions = [scripted_session(f's{i}', [[1]] * (i % 3), wait=i % 2) for i in range(101)]
  scheduler, done = scheduler_of(FakeEngine(4, 40), sessions)
  scheduler.run()
  assert len(done) == 101
  assert {s.id for s, _ in done} == {f's{i}' for i in range(101)}
  assert scheduler.metrics()['sessions'] == 101


def test_slots_in_mid_turn_continue_while_others_wait(scripted_session):
  engine = FakeEngine(2, 400, chunk=1)
  patient = scripted_session('patient', [[1], [1]], wait=10**9)
  long = scripted_session('long', [[1]] * 20, budget=5)
  scheduler, done = scheduler_of(engine, [patient, long])
  for _ in range(200):
    scheduler.step()
  assert [s.id for s, _ in done] == ['long']
  assert len(patient.turns) == 1 and patient.aborted is None
  scheduler.close()
  rollout = {s.id: r for s, r in done}['patient']
  assert rollout.aborted == 'shutdown' == patient.aborted
  assert rollout.waiting_s > 0
  values = scheduler.metrics()
  assert 0 < values['wait_share'] < 1 and 0 < values['occupancy'] < 1


def endless(position_from):
  """A session id whose fake text has no end id for 12 tokens after `position_from`."""
  for i in range(100_000):
    if all(next_token(f'e{i}', position_from + t) != END for t in range(12)):
      return f'e{i}'
  raise AssertionError


def run_one(session, engine):
  scheduler, done = scheduler_of(engine, [session])
  scheduler.run()
  (_, rollout), = done
  return rollout


def test_each_kind_of_cut_has_its_own_reason(scripted_session):
  # a turn at its budget: delivered as not ended, and the session decides what that means
  session = scripted_session(endless(2), [[1, 1]], budget=5)
  rollout = run_one(session, FakeEngine(1, 100))
  assert [len(t) for t in session.turns] == [5] and session.ended == [False]
  assert rollout.aborted is None and session.aborted is None
  # the window fills up in the middle of a turn: the partial turn first, then the reason
  session = scripted_session(endless(2), [[1, 1]], budget=50)
  rollout = run_one(session, FakeEngine(1, 8))
  assert [len(t) for t in session.turns] == [6] and session.ended == [False]
  assert rollout.aborted == session.aborted == AbortReason.CONTEXT_FULL
  assert len(rollout) == 8 and rollout.num_sampled == 6
  # budget and window end at the same token: the session's own budget is the reason
  session = scripted_session(endless(2), [[1, 1]], budget=6)
  assert run_one(session, FakeEngine(1, 8)).aborted is None
  # the environment's feedback does not fit
  session = scripted_session('s', [[1], [1] * 30])
  rollout = run_one(session, FakeEngine(1, 20))
  assert rollout.aborted == session.aborted == AbortReason.CONTEXT_FULL
  assert len(rollout) == 1 + len(session.turns[0])
  # READY without budget
  session = scripted_session('s', [[1]], budget=0)
  rollout = run_one(session, FakeEngine(1, 20))
  assert rollout.aborted == session.aborted == AbortReason.BUDGET and len(rollout) == 0


@pytest.mark.parametrize('method', ['poll', 'next_tokens', 'max_new_tokens', 'deliver'])
def test_an_exception_ends_its_own_session_only(scripted_session, method):
  broken = scripted_session('broken', [[1], [1]])

  def fail(*_):
    raise ConnectionError('sandbox died')

  setattr(broken, method, fail)
  others = [scripted_session(f's{i}', [[1], [2]]) for i in range(5)]
  scheduler, done = scheduler_of(FakeEngine(2, 100), [others[0], broken, *others[1:]])
  scheduler.run()
  rollouts = {s.id: r for s, r in done}
  assert len(rollouts) == 6
  failure = rollouts['broken'].failure
  assert (failure.where, failure.kind, failure.message) == (
      method, 'ConnectionError', 'sandbox died')
  assert rollouts['broken'].aborted == broken.aborted == 'error'
  assert all(rollouts[s.id].failure is None and len(s.turns) == 2 for s in others)


def test_empty_feed_is_the_sessions_fault(scripted_session):
  rollout = run_one(scripted_session('s', [[]]), FakeEngine(1, 20))
  assert rollout.failure.where == 'next_tokens'


def test_versions_must_not_go_back_and_ids_must_be_unique(scripted_session):
  versions = iter([3, 2])
  queue = [scripted_session('s', [[1]] * 50)]
  scheduler = Scheduler(FakeEngine(1, 500, chunk=1), lambda: (next(versions), None),
                        lambda: queue.pop() if queue else None, lambda *_: None, idle_s=0)
  scheduler.step()
  with pytest.raises(ValueError, match='from version 3 to 2'):
    scheduler.step()
  twins = [scripted_session('s', [[1]] * 9), scripted_session('s', [[1]] * 9)]
  with pytest.raises(ValueError, match='unique'):
    scheduler_of(FakeEngine(2, 500), twins)[0].run()


def test_greedy_is_refused_for_training_rollouts(scripted_session):
  with pytest.raises(UserError, match='temperature 0'):
    scheduler_of(FakeEngine(1, 20, temperature=0), [])
  scheduler, done = scheduler_of(
      FakeEngine(1, 20, temperature=0), [scripted_session('s', [[1]])], training=False)
  scheduler.run()
  assert done[0][1].temperature == 0


def test_non_finite_log_probability_stops_the_run(scripted_session):
  class Broken(FakeEngine):
    def _serve(self, request):
      out = super()._serve(request)
      return SlotOutput(out.slot, out.tokens, out.logprobs * np.nan, out.routing, out.ended)

  scheduler, done = scheduler_of(Broken(1, 20), [scripted_session('s', [[1]])])
  with pytest.raises(NumericsError, match='session s'):
    scheduler.run()
  scheduler.close()
  assert [s.id for s, _ in done] == ['s']


def test_closed_scheduler_refuses_to_step():
  scheduler, _ = scheduler_of(FakeEngine(1, 20), [])
  assert scheduler.step() is False
  scheduler.close()
  with pytest.raises(RuntimeError, match='closed'):
    scheduler.step()


def test_a_source_of_sessions_that_are_over_at_once_is_not_mistaken_for_an_empty_one(
    scripted_session):
  sessions = [scripted_session(f's{i}', []) for i in range(50)]
  scheduler, done = scheduler_of(FakeEngine(2, 20), sessions)
  scheduler.run()
  assert len(done) == 50
