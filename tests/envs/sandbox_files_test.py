"""File requests: what they do, and what a hostile workspace cannot make them do."""

import pytest

from composer_jax.envs.sandbox import SandboxPool, safe_repr


@pytest.fixture(scope='module')
def pool():
  with SandboxPool(1) as pool:
    yield pool


@pytest.fixture
def sandbox(pool):
  sandbox = pool.acquire()
  yield sandbox
  pool.release(sandbox)


def read(sandbox, path):
  return sandbox.call({'op': 'read_file', 'path': path})


def plant(sandbox, source):
  """Runs code in the workspace as a candidate would."""
  sandbox.call({'op': 'reset', 'files': {'plant.py': source, 'real.txt': 'real\n'}})
  case = {'module': 'plant', 'expr': '1'}
  assert sandbox.call({'op': 'run_cases', 'cases': [case], 'timeout': 10})['reprs'] == ['1']


def test_round_trip(sandbox):
  files = {'a.py': 'x = 1\n', 'deep/er/b.txt': 'é\r\n\x0c\x00 tail', 'empty': ''}
  assert sandbox.call({'op': 'reset', 'files': files}) == {'ok': True}
  assert {p: read(sandbox, p)['text'] for p in files} == files
  assert sandbox.call({'op': 'list'})['paths'] == sorted(files)
  sandbox.call({'op': 'write_file', 'path': 'a.py', 'text': 'x = 2\n'})
  assert read(sandbox, '/workspace/a.py')['text'] == 'x = 2\n'
  assert sandbox.call({'op': 'list'})['paths'] == sorted(files)  # no temporary file left
  sandbox.call({'op': 'reset', 'files': {'c': ''}})
  assert sandbox.call({'op': 'list'})['paths'] == ['c']


def test_large_messages(sandbox):
  text = 'abcdefg\n' * 100_000  # many pipe buffers each way
  assert sandbox.call({'op': 'reset', 'files': {'big': text}})['ok']
  assert read(sandbox, 'big')['text'] == text


def test_search(sandbox):
  files = {'b.py': 'one\ntwo one\n', 'a/x.py': 'none\n', 'z': 'x.y\n'}
  sandbox.call({'op': 'reset', 'files': files})
  found = sandbox.call({'op': 'search', 'pattern': 'one', 'limit': 10})['matches']
  assert found == [['a/x.py', 1, 'none'], ['b.py', 1, 'one'], ['b.py', 2, 'two one']]
  assert len(sandbox.call({'op': 'search', 'pattern': 'one', 'limit': 2})['matches']) == 2
  found = sandbox.call({'op': 'search', 'pattern': '.', 'limit': 10})['matches']
  assert found == [['z', 1, 'x.y']]  # plain text, not a pattern


@pytest.mark.parametrize(
  'path', ['../etc/passwd', '/etc/passwd', 'a/../../x', '', '.', '/workspace', '..', 'a\0b', '/']
)
def test_paths_outside_are_refused(sandbox, path):
  sandbox.call({'op': 'reset', 'files': {'a/b': ''}})
  for request in ({'op': 'read_file'}, {'op': 'write_file', 'text': 'x'}):
    answer = sandbox.call(request | {'path': path})
    assert not answer['ok'] and answer['error'] == 'not_allowed', answer


def test_ordinary_errors(sandbox):
  sandbox.call({'op': 'reset', 'files': {'a/b': ''}})
  assert read(sandbox, 'nothing')['error'] == 'not_found'
  assert read(sandbox, 'a')['error'] == 'not_allowed'
  assert read(sandbox, 'a/b/c')['error'] == 'not_allowed'
  assert not read(sandbox, 'x' * 5000)['ok']
  assert not read(sandbox, '\ud800')['ok']


def test_links_and_special_files(sandbox):
  plant(sandbox, """
import os
os.symlink('/proc/self/environ', 'environ')
os.symlink('/proc/self/mem', 'memory')
os.symlink('/proc/self/fd/1', 'pipe')
os.symlink('/etc', 'folder')
os.symlink('real.txt', 'inside')
os.symlink('loop', 'loop')
os.mkfifo('fifo')
os.truncate(os.open('sparse', os.O_CREAT | os.O_RDWR), 4 << 20)
open('binary', 'wb').write(b'\\xff\\xfe\\n')
""")  # fmt: skip
  for path in ('environ', 'memory', 'pipe', 'folder/passwd', 'inside', 'loop', 'fifo', 'sparse'):
    answer = read(sandbox, path)
    assert not answer['ok'] and answer['error'] == 'not_allowed', (path, answer)
  assert read(sandbox, 'binary')['text'] == '\ufffd\ufffd\n'
  # Writing replaces a link and leaves what it points to alone; a linked folder is not entered.
  for path in ('memory', 'pipe', 'inside'):
    assert sandbox.call({'op': 'write_file', 'path': path, 'text': 'new'})['ok']
    assert read(sandbox, path)['text'] == 'new'
  assert read(sandbox, 'real.txt')['text'] == 'real\n'
  assert not sandbox.call({'op': 'write_file', 'path': 'folder/x', 'text': 'new'})['ok']
  found = sandbox.call({'op': 'search', 'pattern': 'e', 'limit': 50})
  assert {m[0] for m in found['matches']} <= {'plant.py', 'real.txt', 'memory', 'pipe', 'inside'}


def test_reset_of_a_hostile_tree(sandbox):
  plant(sandbox, """
import os
os.mkdir('closed'); open('closed/x', 'w').close(); os.chmod('closed', 0)
os.mkdir('readonly'); os.mkdir('readonly/inner'); os.chmod('readonly', 0o500)
os.symlink('/usr', 'usr')
for _ in range(1500):  # far beyond PATH_MAX
  os.mkdir('d' * 20)
  os.chdir('d' * 20)
open('bottom', 'w').close()
os.makedirs('/tmp/left/over'); open('/dev/shm/over', 'w').close()
os.chmod('/workspace', 0o500)
""")  # fmt: skip
  assert sandbox.call({'op': 'reset', 'files': {'a': 'x'}})['ok']
  assert sandbox.call({'op': 'list'})['paths'] == ['a']
  sandbox.call({'op': 'reset', 'files': {'left.py': 'import os\n'}})
  case = {'module': 'left', 'expr': '(os.listdir("/tmp"), os.listdir("/dev/shm"), os.listdir("."))'}
  answer = sandbox.call({'op': 'run_cases', 'cases': [case], 'timeout': 10})
  assert answer['reprs'] == ["([], [], ['left.py'])"]


def test_cases(sandbox):
  files = {
    'pkg/__init__.py': 'from pkg.core import f\n',
    'pkg/core.py': '_hidden = 3\ndef f(x):\n  return {"b": x, "a": {2, 1, 10}}\n',
    'broken.py': 'def f(:\n',
  }
  sandbox.call({'op': 'reset', 'files': files})
  cases = [
    {'module': 'pkg.core', 'expr': 'f(1)'},
    {'module': 'pkg.core', 'setup': 'import math\nz = math.floor(2.5)', 'expr': 'f(z)["b"]'},
    {'module': 'pkg.core', 'expr': 'z'},  # a setup's names are its own case's
    {'module': 'pkg', 'expr': 'pkg.core._hidden'},
    {'module': 'broken', 'expr': 'f(1)'},
    {'module': 'absent', 'expr': 'f(1)'},
    {'module': 'pkg', 'expr': 'f'},
    {'module': 'pkg', 'expr': 'hash("x")'},
  ]
  request = {'op': 'run_cases', 'cases': cases, 'timeout': 10}
  answers = [sandbox.call(request)['reprs'] for _ in range(2)]
  assert answers[0] == answers[1]
  assert answers[0][:7] == [
    safe_repr({'a': {1, 2, 10}, 'b': 1}), '2', 'raises NameError', '3', 'raises SyntaxError',
    'raises ModuleNotFoundError', 'raises TypeError',
  ]  # fmt: skip
  with SandboxPool(1) as other:  # hashes, and so the order of sets, do not depend on the sandbox
    again = other.acquire().call(request | {'files': files})['reprs']
  assert again == answers[0]


def test_safe_repr():
  for value in (1, -2.5, 'a"\'', b'x', None, True, [1, (2,), ()], {1: [2]}, set(), frozenset(), 3j,
                range(3), {3}, float('inf')):  # fmt: skip
    assert safe_repr(value) == repr(value)
  assert safe_repr({'b': 1, 'a': 2}) == safe_repr({'a': 2, 'b': 1}) == "{'a': 2, 'b': 1}"
  assert safe_repr(frozenset({10, 9})) == 'frozenset({10, 9})'
  assert safe_repr(1) != safe_repr(True) != safe_repr(1.0)

  class Forged(int):
    def __repr__(self):
      return '1'

  for value in (Forged(1), [Forged(1)], {1: Forged(1)}, object(), len, type):
    with pytest.raises(TypeError):
      safe_repr(value)
  deep = []
  for _ in range(100):
    deep = [deep]
  with pytest.raises(ValueError, match='deep'):
    safe_repr(deep)
