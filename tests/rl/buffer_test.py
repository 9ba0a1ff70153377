"""The buffer: hand-made cases, and a random model check with crashes, hangs and restarts."""

import collections
import random

import pytest

from composer_jax.errors import InfrastructureError
from composer_jax.rl.buffer import BufferLimits, GroupBuffer, Ticket


def limits(**changes):
  values = {'steps': 4, 'groups_per_step': 2, 'group_size': 3, 'min_group_size': 2,
            'max_staleness': 1, 'max_extra_groups': 0, 'group_deadline_s': 50.0, 'tasks': 1000}
  return BufferLimits(**{**values, **changes})


def flat(samples):
  return len({s.outcome.correct for s in samples}) < 2


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture(scope='module')
def result(fakes):
  """Returns rows of a finished member; made once per (correct, version)."""
  made = {}

  def make(correct, version, stop='finished'):
    key = (correct, version, stop)
    if key not in made:
      made[key] = (fakes.sample(correct, sampled='.#', version=version, stop=stop),)
    return made[key]
  return make


def fill(buffer, result, groups, correct=lambda t: float(t.member == 0), version=None):
  """Finishes all members of the next `groups` groups, as far as the buffer lets them start."""
  for _ in range(groups * buffer.limits.group_size):
    ticket = buffer.next_ticket()
    if ticket is None:
      return
    buffer.deliver(ticket, result(correct(ticket), buffer.version if version is None else version))


def test_capacity_follows_the_trained_version(result):
  buffer = GroupBuffer(limits(), flat)
  tickets = []
  while (ticket := buffer.next_ticket()) is not None:
    tickets.append(ticket)
  # (version 0 + 1 + max_staleness 1) * 2 groups of 3
  assert tickets == [Ticket(o, m) for o in range(4) for m in range(3)]
  assert buffer.try_take() is None
  for ticket in tickets:
    buffer.deliver(ticket, result(float(ticket.member == 0), 0))
  assert [g.ordinal for g in buffer.try_take()] == [0, 1]
  assert buffer.next_ticket() is None  # taken is not trained
  buffer.advance(1)
  assert [buffer.next_ticket().ordinal for _ in range(6)] == [4] * 3 + [5] * 3
  assert buffer.next_ticket() is None


def test_nothing_starts_that_no_step_will_use(result):
  buffer = GroupBuffer(limits(steps=1, max_staleness=5), flat)
  fill(buffer, result, 99)
  assert buffer.metrics()['groups_ready'] == 2 and buffer.next_ticket() is None


def test_a_straggler_is_dropped_when_it_is_too_old_and_its_place_is_given_back(result):
  buffer = GroupBuffer(limits(max_staleness=0), flat)
  late = [buffer.next_ticket() for _ in range(3)]
  fill(buffer, result, 1)
  assert buffer.try_take() is None
  buffer.advance(1)  # cannot happen with a trainer that waits; an older policy is gone anyway
  assert not buffer.wanted(late[0])
  for ticket in late:
    buffer.deliver(ticket, result(1.0, 0))  # ignored
  assert buffer.metrics()['dropped/stale'] == 2
  fill(buffer, result, 2)
  assert [g.ordinal for g in buffer.try_take()] == [2, 3]


def test_age_is_that_of_the_oldest_token(result):
  buffer = GroupBuffer(limits(max_staleness=1), flat)
  fill(buffer, result, 4, version=0)
  assert len(buffer.try_take()) == 2
  buffer.advance(1)
  fill(buffer, result, 1)
  groups = buffer.try_take()
  assert [1 - g.oldest_version for g in groups] == [1, 1]
  buffer.advance(2)
  assert buffer.metrics()['groups_ready'] == 1  # sampled by version 1, may still train


def test_infrastructure_failures_are_left_out_and_counted(result):
  buffer = GroupBuffer(limits(), flat)
  tickets = [buffer.next_ticket() for _ in range(6)]
  buffer.deliver(tickets[0], result(1.0, 0))
  buffer.deliver(tickets[1], result(0.0, 0))
  buffer.deliver(tickets[2], result(None, 0, 'infrastructure'))
  buffer.deliver(tickets[3], result(1.0, 0))
  buffer.forfeit(tickets[4], 'session_error')
  buffer.forfeit(tickets[5], 'session_error')
  assert buffer.metrics() == {'groups_in_flight': 0, 'groups_ready': 1, 'groups_trained': 0,
                              'dropped/session_error': 1}
  fill(buffer, result, 1)
  assert [len(g.samples) for g in buffer.try_take()] == [2, 3]  # never as reward 0


def test_a_hanging_member_does_not_hold_its_group(result):
  clock = Clock()
  buffer = GroupBuffer(limits(), flat, clock)
  tickets = [buffer.next_ticket() for _ in range(6)]
  for ticket in (*tickets[:2], tickets[3]):
    buffer.deliver(ticket, result(float(ticket.member), 0))
  clock.now = 49.0
  buffer.expire()
  assert buffer.metrics()['groups_in_flight'] == 2
  clock.now = 51.0
  buffer.expire()
  assert buffer.metrics() == {'groups_in_flight': 0, 'groups_ready': 1, 'groups_trained': 0,
                              'dropped/deadline': 1}
  assert not buffer.wanted(tickets[2])
  fresh = GroupBuffer(limits(), flat, clock)  # the second run does not draw the same group again
  fresh.restore(buffer.snapshot())
  assert fresh.next_ticket() == Ticket(2, 0)


def test_zero_signal_groups_are_replaced_a_bounded_number_of_times(result):
  buffer = GroupBuffer(limits(max_extra_groups=3, steps=2), flat)
  for version in (0, 1):
    fill(buffer, result, 99, correct=lambda ticket: 1.0)
    groups = buffer.try_take()
    assert len(groups) == 2 and all(g.zero_signal for g in groups)
    buffer.advance(version + 1)
  assert buffer.metrics()['dropped/zero_signal'] <= 6
  fill(buffer, result, 99)
  assert buffer.next_ticket() is None


def test_the_last_tasks_make_a_smaller_step_and_then_none(result):
  buffer = GroupBuffer(limits(tasks=3), flat)
  fill(buffer, result, 99)
  assert len(buffer.try_take()) == 2
  buffer.advance(1)
  assert len(buffer.try_take()) == 1
  buffer.advance(2)
  assert buffer.try_take() == []


def test_endless_failure_is_an_error(result):
  buffer = GroupBuffer(limits(), flat)
  with pytest.raises(InfrastructureError, match='without a verdict.*session_error: 4.*no bwrap'):
    for _ in range(100):
      while (ticket := buffer.next_ticket()) is not None:
        buffer.forfeit(ticket, 'session_error', 'no bwrap')
        buffer.try_take()


def test_an_error_of_the_producer_wakes_the_trainer():
  buffer = GroupBuffer(limits(), flat)
  buffer.fail(OSError('gone'))
  with pytest.raises(OSError, match='gone'):
    buffer.take()


def test_a_trainer_that_is_asked_to_stop_takes_nothing(result):
  buffer = GroupBuffer(limits(), flat)
  fill(buffer, result, 1)
  answers = iter([False, True])
  assert buffer.take(lambda: next(answers)) == []  # one of two groups is there: it had to wait
  fill(buffer, result, 1)
  assert buffer.take(lambda: True) == []
  assert buffer.metrics()['groups_ready'] == 2 and buffer.trained_ordinals() == []


class Simulation:
  """One random trace: a worker with slots, a trainer, and a world in which everything fails."""

  def __init__(self, seed, result):
    self.rng = random.Random(seed)
    pick = self.rng.randint
    size = pick(2, 3)
    self.limits = limits(
        steps=pick(1, 4), groups_per_step=pick(1, 3), group_size=size, min_group_size=2,
        max_staleness=pick(0, 2), max_extra_groups=pick(0, 1), tasks=pick(12, 40))
    self.clock, self.result = Clock(), result
    self.buffer = GroupBuffer(self.limits, flat, self.clock)
    self.running: dict[Ticket, int] = {}
    self.slots = pick(2, 8)
    self.trained: list[int] = []
    self.saved = None
    self.ended = False

  def check(self):
    m = self.buffer.metrics()
    bound = (1 + self.limits.max_staleness) * self.limits.groups_per_step
    assert m['groups_in_flight'] + m['groups_ready'] <= bound
    assert len(self.running) <= self.slots

  def produce(self):
    self.running = {t: v for t, v in self.running.items() if self.buffer.wanted(t)}
    while len(self.running) < self.slots and (ticket := self.buffer.next_ticket()) is not None:
      assert ticket not in self.running
      self.running[ticket] = self.buffer.version
    for ticket in list(self.running):
      draw = self.rng.random()
      if draw < 0.5:
        version = self.running.pop(ticket)
        self.buffer.deliver(ticket, self.result(float(self.rng.random() < 0.5), version))
      elif draw < 0.53:
        del self.running[ticket]
        self.buffer.forfeit(ticket, 'crash')
      elif draw < 0.55:
        del self.running[ticket]
        self.buffer.deliver(ticket, self.result(None, 0, 'infrastructure'))
      # else it goes on, perhaps for ever: then the deadline decides

  def train(self):
    groups = self.buffer.try_take()
    if groups is None:
      return
    if not groups:
      self.ended = True
      return
    version = self.buffer.version
    assert all(version - g.oldest_version <= self.limits.max_staleness for g in groups)
    assert all(len(g.samples) >= self.limits.min_group_size for g in groups)
    self.trained += [g.ordinal for g in groups]
    self.buffer.advance(version + 1)
    self.ended = version + 1 == self.limits.steps
    if self.rng.random() < 0.5:
      self.saved = (self.buffer.snapshot(), list(self.trained))

  def crash(self):
    self.buffer = GroupBuffer(self.limits, flat, self.clock)
    self.running, self.trained = {}, []
    if self.saved is not None:
      self.buffer.restore(self.saved[0])
      self.trained = list(self.saved[1])

  def run(self):
    for _ in range(400):
      self.clock.now += self.rng.choice([0.1, 1.0, 20.0])
      if self.rng.random() < 0.01:
        self.crash()
      try:
        self.produce()
        self.buffer.expire()
        self.check()
        self.train()
      except InfrastructureError:
        return  # so many crashes in a row are reported, not trained around
      if self.ended:
        break
    assert self.ended, 'no progress'
    assert max(collections.Counter(self.trained).values(), default=1) == 1  # single epoch
    state = self.buffer.snapshot()
    assert sorted(self.trained) == state['trained']
    assert not set(state['trained']) & {int(o) for o in state['dropped']}
    if self.buffer.version == self.limits.steps:
      assert not self.buffer.metrics()['groups_in_flight']


def test_random_traces_keep_the_bounds_and_always_end(result):
  for seed in range(10_000):
    Simulation(seed, result).run()


def test_crashes_do_not_change_what_is_trained_on(result):
  """Without drops, the multiset of trained tasks after random crashes is that of a clean run."""
  for seed in range(200):
    rng = random.Random(seed)
    bounds = limits(steps=5, tasks=10)
    buffer, saved, trained = GroupBuffer(bounds, flat), None, []
    running: list[Ticket] = []
    while buffer.version < bounds.steps:
      if rng.random() < 0.1:
        buffer, running, trained = GroupBuffer(bounds, flat), [], []
        if saved:
          buffer.restore(saved[0])
          trained = list(saved[1])
      if len(running) < 5 and (ticket := buffer.next_ticket()):
        running.append(ticket)
      elif running:
        ticket = running.pop(0)
        buffer.deliver(ticket, result(float(rng.random() < 0.5), buffer.version))
      groups = buffer.try_take()
      if groups:
        trained += [g.ordinal for g in groups]
        buffer.advance(buffer.version + 1)
        if rng.random() < 0.5:
          saved = (buffer.snapshot(), list(trained))
    assert sorted(trained) == list(range(10))
