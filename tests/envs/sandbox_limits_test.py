"""Resource abuse: the sandbox survives or is replaced, the host does not notice."""

import pathlib
import resource
import time

import pytest

from composer_jax.envs.sandbox import SandboxConfig, SandboxError, SandboxPool

CONFIG = SandboxConfig(
  memory_mb=96, address_space_mb=128, processes=16, workspace_mb=4, tmp_mb=4, file_mb=3
)
ISOLATED = {'module': 'os', 'expr': '(os.getuid(), os.getpid() > 1, os.path.exists("/root"))'}


@pytest.fixture(scope='module')
def pool():
  with SandboxPool(1, CONFIG) as pool:
    yield pool


@pytest.fixture
def sandbox(pool):
  sandbox = pool.acquire()
  sandbox.call({'op': 'reset', 'files': {}})
  yield sandbox
  pool.release(sandbox)


def run(sandbox, source, expr='f()', timeout=5.0):
  """Runs one expression over `source`, after a case that shows where we are."""
  sandbox.call({'op': 'reset', 'files': {'abuse.py': source}})
  request = {'op': 'run_cases', 'timeout': timeout}
  assert sandbox.call(request | {'cases': [ISOLATED]})['reprs'] == ['(61000, True, False)']
  return sandbox.call(request | {'cases': [{'module': 'abuse', 'expr': expr}]})


def pids(sandbox):
  cases = [{'module': 'os', 'expr': '[int(p) for p in os.listdir("/proc") if p.isdigit()]'}]
  answer = sandbox.call({'op': 'run_cases', 'cases': cases, 'timeout': 5})
  return eval(answer['reprs'][0])


def test_fork_bomb(sandbox):
  source = """
import os
def f():
  while True:
    try:
      os.fork()
    except OSError:
      pass
"""
  start = time.monotonic()
  assert run(sandbox, source, timeout=1.0)['reprs'] == ['timeout']
  assert time.monotonic() - start < 10
  assert len(pids(sandbox)) == 2


def test_processes_are_counted(sandbox):
  source = """
import os, time
def f():
  made = 0
  while made < 100:
    try:
      if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    except BlockingIOError:
      break
    made += 1
  return made
"""
  made = int(run(sandbox, source)['reprs'][0])
  assert 8 <= made <= CONFIG.processes
  assert len(pids(sandbox)) == 2


def test_memory_of_one_process(sandbox):
  answer = run(sandbox, 'def f():\n  return len(bytearray(1 << 30))\n')
  assert answer['reprs'] == ['raises MemoryError']


def test_memory_of_many_processes(pool, sandbox):
  if 'cgroup' not in pool.tier:
    pytest.skip(f'no cgroup here: {pool.tier}')
  source = """
import os, time
def f():
  for _ in range(8):
    if os.fork() == 0:
      keep = bytearray(40 << 20)
      for i in range(0, len(keep), 4096):
        keep[i] = 1
      time.sleep(60)
  keep = bytearray(40 << 20)
  for i in range(0, len(keep), 4096):
    keep[i] = 1
  time.sleep(0.5)
  return 'alive'
"""
  # 360 MB wanted, 96 allowed: the kernel kills children, or the whole sandbox, and we can tell.
  try:
    answer = run(sandbox, source, timeout=3.0)
    assert answer['reprs'][0] in ('died', "'alive'", 'timeout')
    assert len(pids(sandbox)) == 2
  except SandboxError as error:
    assert error.out_of_memory


@pytest.mark.parametrize('folder, size', [('/workspace', 4), ('/tmp', 4), ('/dev/shm', 1)])
def test_full_file_systems(sandbox, folder, size):
  source = f"""
def f():
  total = 0
  try:
    for i in range(64):
      with open(f'{folder}/{{i}}', 'wb', buffering=0) as file:
        total += file.write(b'x' * (1 << 18))
  except OSError as error:
    return error.errno, total
"""
  number, total = eval(run(sandbox, source)['reprs'][0])
  assert number == 28 and (size - 1) << 20 <= total <= size << 20
  refused = sandbox.call({'op': 'write_file', 'path': 'big', 'text': 'y' * (1 << 20)})
  assert refused['ok'] == (folder != '/workspace')
  assert sandbox.call({'op': 'reset', 'files': {'a.py': ''}})['ok']
  assert sandbox.call({'op': 'list'})['paths'] == ['a.py']


def test_file_size_and_open_files(sandbox):
  source = """
def write():
  with open('/tmp/big', 'wb', buffering=0) as file:
    return file.write(bytes(5 << 20))
def files():
  keep = []
  try:
    while True:
      keep.append(open('/dev/null'))
  except OSError as error:
    return error.errno
"""
  assert int(run(sandbox, source, 'write()')['reprs'][0]) == CONFIG.file_mb << 20
  assert run(sandbox, source, 'files()')['reprs'] == ['24']


def test_output_floods(sandbox):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  flood = 'def f():\n  while True:\n    print("x" * 10000, flush=True)\n'
  assert run(sandbox, flood, timeout=1.0)['reprs'] == ['timeout']
  answer = run(sandbox, '', '"x" * 2_000_000')
  assert answer['reprs'] == ['died'] and answer['messages'] == ['results too large']
  direct = 'import os\ndef f():\n  while True:\n    os.write(3, b"x" * 65536)\n'
  assert run(sandbox, direct)['reprs'] == ['died']
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def test_daemon_does_not_survive(sandbox):
  source = """
import os, signal, time
def f():
  for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
  if os.fork() == 0:
    os.setsid()
    if os.fork():
      os._exit(0)
    while True:
      with open('/workspace/alive', 'a') as file:
        file.write('x')
      time.sleep(0.01)
  time.sleep(0.3)
  return os.path.getsize('/workspace/alive') > 0
"""
  assert run(sandbox, source)['reprs'] == ['True']
  assert len(pids(sandbox)) == 2
  size = len(sandbox.call({'op': 'read_file', 'path': 'alive'})['text'])
  time.sleep(0.1)
  assert len(sandbox.call({'op': 'read_file', 'path': 'alive'})['text']) == size


def test_time_limit_keeps_earlier_answers(sandbox):
  source = 'import time\ndef f(s):\n  time.sleep(s)\n  return s\n'
  sandbox.call({'op': 'reset', 'files': {'abuse.py': source}})
  cases = [{'module': 'abuse', 'expr': f'f({s})'} for s in (0, 60, 0)]
  start = time.monotonic()
  answer = sandbox.call({'op': 'run_cases', 'cases': cases, 'timeout': 0.5})
  assert answer['reprs'] == ['0', 'timeout', 'timeout']
  assert time.monotonic() - start < 5


def test_thousands_of_resets_without_growth(sandbox):
  def size():
    status = pathlib.Path(f'/proc/{server}/status').read_text()
    files = len(list(pathlib.Path(f'/proc/{server}/fd').iterdir()))
    return int(status.split('VmRSS:')[1].split()[0]), files

  children = pathlib.Path(f'/proc/{sandbox.pid}/task/{sandbox.pid}/children').read_text()
  server = int(children.split()[0])
  cases = [{'module': 'm', 'expr': 'm.x'}]
  for number in range(2000):
    sandbox.call({'op': 'reset', 'files': {'m.py': f'x = {number}', 'd/n.py': 'y = 1\n' * 50}})
    if number % 40 == 0:
      answer = sandbox.call({'op': 'run_cases', 'cases': cases, 'timeout': 5})
      assert answer['reprs'] == [str(number)]
    if number == 200:
      before = size()
  after = size()
  assert after[0] - before[0] < 512 and after[1] == before[1]
