"""Episodes as the rollout worker sees them, with a sandbox and a grader that are stubs."""

import dataclasses

from composer_jax.envs.types import Case, Task
from composer_jax.rl.environment import EpisodeEnvironment
from composer_jax.rl.shaping import EFFORT_PARTS


class Sandbox:
  def __init__(self, files):
    self.files, self.request = files, None

  def send(self, request):
    self.request = request

  def poll(self):
    request, self.request = self.request, None
    answers = {'reset': {'ok': True}, 'write_file': {'ok': True}}
    if request['op'] == 'read_file':
      return {'ok': True, 'text': self.files[request['path']]}
    return answers[request['op']]


class Pool:
  def __init__(self, sandbox):
    self.free = [sandbox]

  def acquire(self):
    return self.free.pop() if self.free else None

  def release(self, sandbox):
    self.free.append(sandbox)


class Grader:
  def submit(self, files, cases, timeout_s=None):
    return self

  def poll(self):
    return True


class Renderer:
  end_id = 1

  def user(self, text):
    return [2, *map(ord, text), 1]

  def call_open(self):
    return [3]

  def call(self, text):
    return [*map(ord, text), 1]

  def result(self, text):
    return [4, *map(ord, text), 1]

  def call_text(self, ids):
    return ''.join(chr(i) for i in ids if i != 1)


TASK = Task('t', 'l0', 'fix f', {'main.py': 'def f():\n    return 1\n'}, [],
            [Case('main', 'f()', '2')], 'main.py', meta={'mutation': 'cond'})


def turn(session, text):
  status = session.poll()
  assert status == 'ready'
  session.next_tokens()
  session.deliver(Renderer().call(text), True)


def test_an_episode_becomes_an_outcome_and_frees_its_sandbox():
  task = dataclasses.replace(TASK, limits=dataclasses.replace(TASK.limits, max_tokens=500))
  pool = Pool(Sandbox(task.files))
  environment = EpisodeEnvironment([task] * 3, pool, Grader(), Renderer())
  session = environment.session(2, 5)
  assert environment.session(2, 6) is None  # no sandbox free: asked again later
  assert (session.group_id, session.id) == ('2:t', '2:t/5')
  turn(session, 'read_file')
  turn(session, 'nonsense')
  turn(session, 'finish')
  while session.poll() != 'done':
    pass
  outcome = environment.outcome(session)
  assert outcome.correct == 1.0 and outcome.stop_reason == 'finished' and outcome.label == 'cond'
  assert outcome.counts['calls'] == 3 and outcome.counts['call_errors'] == 1
  assert outcome.counts['edits'] == 0 and set(EFFORT_PARTS) <= outcome.counts.keys()
  assert [t['call'] for t in outcome.trace['turns']] == ['read_file', 'nonsense', 'finish']
  assert 'return 1' in outcome.trace['turns'][0]['result']
  assert outcome.trace['turns'][1]['error'] is not None
  assert len(pool.free) == 1


def test_an_abort_is_no_verdict():
  pool = Pool(Sandbox(TASK.files))
  environment = EpisodeEnvironment([TASK], pool, Grader(), Renderer())
  session = environment.session(0, 0)
  session.abort('group_gone')
  outcome = environment.outcome(session)
  assert outcome.correct is None and outcome.stop_reason == 'aborted'
  assert len(pool.free) == 1
