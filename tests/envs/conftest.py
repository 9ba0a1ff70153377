"""Fixtures of the environment tests: a renderer, real sandboxes, and a scripted fake sandbox."""

import collections

import pytest

from composer_jax.data import chat, tokenizer
from composer_jax.envs import taskset
from composer_jax.envs.grading import Grader
from composer_jax.envs.sandbox import SandboxPool
from composer_jax.envs.tasks import functions
from composer_jax.errors import InfrastructureError


@pytest.fixture(scope='session')
def renderer():
  tasks = taskset.load(taskset.TasksetConfig(), 'train', 100, 77)
  texts = list(functions.documents('train', 300, 0)) + [t.instruction for t in tasks]
  texts.append('read_file edit_file 4|x run_tests finish search ok pass fail got want error: ')
  return chat.Renderer(tokenizer.train(texts, 400))


@pytest.fixture(scope='module')
def pool():
  with SandboxPool(4) as sandboxes:
    yield sandboxes


@pytest.fixture(scope='module')
def grader():
  with SandboxPool(2) as sandboxes:
    yield Grader(sandboxes)


class FakeSandbox:
  """Answers like a sandbox whose tests give scripted texts; `breaks` names an op that kills it."""

  def __init__(self, reprs=('1',), breaks='', malformed=''):
    self.files, self.sent, self.released = {}, [], 0
    self._reprs, self._breaks, self._malformed = list(reprs), breaks, malformed
    self._answers = collections.deque()

  def send(self, request):
    operation = request['op']
    self.sent.append(operation)
    if operation == self._breaks:
      raise InfrastructureError('sandbox gone')
    if operation == self._malformed:
      self._answers.append({'ok': True})
    elif operation == 'reset':
      self.files = dict(request['files'])
      self._answers.append({'ok': True})
    elif operation == 'read_file':
      self._answers.append({'ok': True, 'text': self.files[request['path']]})
    elif operation == 'write_file':
      self.files[request['path']] = request['text']
      self._answers.append({'ok': True})
    elif operation == 'run_cases':
      assert all('expected_repr' not in case for case in request['cases'])
      self._answers.append({'ok': True, 'reprs': self._reprs[:len(request['cases'])]})
    else:
      self._answers.append({'ok': False, 'error': 'not_allowed', 'message': 'no'})

  def poll(self):
    return self._answers.popleft() if self._answers else None

  def fileno(self):
    raise NotImplementedError


class FakeGrader:
  """Gives one verdict, or raises."""

  def __init__(self, verdict=True):
    self.verdict, self.graded = verdict, []

  def submit(self, files, cases, timeout_s=None):
    self.graded.append((dict(files), list(cases)))
    return self

  def poll(self):
    if isinstance(self.verdict, Exception):
      raise self.verdict
    return self.verdict


@pytest.fixture
def fake_sandbox():
  return FakeSandbox


@pytest.fixture
def fake_grader():
  return FakeGrader
