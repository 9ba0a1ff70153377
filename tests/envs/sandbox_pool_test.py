"""Life and death of sandboxes: nothing is left behind, whoever dies first."""

import os
import pathlib
import select
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from composer_jax.envs.sandbox import SandboxConfig, SandboxError, SandboxPool, cgroup
from composer_jax.envs.sandbox.process import Sandbox

HANG = {
  'op': 'run_cases', 'cases': [{'module': 'os', 'expr': '[0 for i in iter(int, 1)]'}],
  'timeout': 60,
}  # fmt: skip


def descendants(pid):
  """Returns {pid: start time} of all processes below `pid`."""
  parents = {}
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit():
      try:
        fields = (entry / 'stat').read_text().rpartition(')')[2].split()
      except (FileNotFoundError, ProcessLookupError):
        continue
      parents[int(entry.name)] = int(fields[1]), fields[19]
  found, grown = {pid}, True
  while grown:
    more = {p for p, (parent, _) in parents.items() if parent in found} - found
    found, grown = found | more, bool(more)
  return {p: parents[p][1] for p in found - {pid} if p in parents}


def wait_until_gone(processes, seconds=60.0):
  end = time.monotonic() + seconds
  while left := {p for p, start in processes.items() if cgroup._start_time(p) == start}:
    assert time.monotonic() < end, f'still there: {left}'
    time.sleep(0.02)


def test_close_leaves_nothing():
  with SandboxPool(3) as pool:
    sandboxes = [pool.acquire() for _ in range(3)]
    sandboxes[0].call({'op': 'reset', 'files': {}})
    sandboxes[1].wait_ready()
    sandboxes[1].send(HANG)  # the third may still be starting
    processes = descendants(os.getpid())
    assert len(processes) >= 5
    controllers = pool._launch.controllers
  wait_until_gone(processes)
  own = f'composer-jax.{os.getpid()}.'
  assert not [n for c in controllers for n in os.listdir(c.parent) if n.startswith(own)]
  with pytest.raises(SandboxError, match='closed'):
    sandboxes[0].send({'op': 'list'})


OWNER = """
import sys, threading, time
from composer_jax.envs.sandbox import SandboxPool
pool = SandboxPool(3)
sandboxes = [pool.acquire() for _ in range(3)]
for sandbox in sandboxes:
  sandbox.wait_ready()
sandboxes[1].send({HANG})
sandboxes[2].send({FORKS})
time.sleep(0.3)
print('ready', flush=True)
{END}
"""
DAEMONS = {
  'module': 'os', 'setup': '[fork() for i in "abc"]; setsid()',
  'expr': '__import__("time").sleep(60)',
}  # fmt: skip
FORKS = HANG | {'cases': [DAEMONS]}


@pytest.mark.parametrize(
  'end', ['time.sleep(60)', 'sys.exit(0)', 'raise ValueError', 'import os; os._exit(1)']
)
def test_nothing_outlives_its_owner(end):
  code = OWNER.format(HANG=HANG, FORKS=FORKS, END=end)
  owner = subprocess.Popen(
    [sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
  )
  try:
    assert owner.stdout.readline() == 'ready\n'
    processes = descendants(owner.pid)
    if end == 'time.sleep(60)':
      assert len(processes) >= 12
      os.kill(owner.pid, signal.SIGKILL)
  finally:
    if end == 'time.sleep(60)':
      owner.kill()
    owner.wait(30)
    owner.stdout.close()
  wait_until_gone(processes)
  prefix, deadline = f'composer-jax.{owner.pid}.', time.monotonic() + 10
  while True:
    controllers = cgroup.detect()  # sweeps what a killed owner could not remove
    left = [n for c in controllers for n in os.listdir(c.parent) if n.startswith(prefix)]
    if not left:
      break
    assert time.monotonic() < deadline, left  # the kernel frees a dead process a little later
    time.sleep(0.05)


def test_sandboxes_outlive_the_thread_that_made_them():
  with SandboxPool(1) as pool:
    made = []
    thread = threading.Thread(target=lambda: made.append(pool.acquire()))
    thread.start()
    thread.join()
    made[0].wait_ready()
    time.sleep(0.2)
    assert made[0].call({'op': 'list'})['ok']


def test_ctrl_c_in_the_terminal_does_not_reach_them():
  """The terminal signals the foreground process group."""
  with SandboxPool(1) as pool:
    assert os.getpgid(pool.acquire().pid) != os.getpgid(0)


def test_pool_reuses_replaces_and_is_bounded():
  with SandboxPool(2) as pool:
    first, second = pool.acquire(), pool.acquire()
    assert pool.available == 0 and pool.acquire() is None
    first.call({'op': 'reset', 'files': {'secret': 'x'}})
    pool.release(first)
    again = pool.acquire()
    assert again is first
    assert again.call({'op': 'list'})['paths'] == []  # emptied before it was handed out
    second.wait_ready()
    second._process.kill()
    second._process.wait()
    assert select.select([second], [], [], 30)[0]  # what is inside dies a moment after bubblewrap
    with pytest.raises(SandboxError, match='ended'):
      second.call({'op': 'list'})
    with pytest.raises(SandboxError):
      second.send({'op': 'list'})
    pool.release(second)
    again.send(HANG)
    with pytest.raises(RuntimeError, match='one request'):
      again.send(HANG)
    pool.release(again)  # busy: cannot be used again
    assert pool.replaced == 2
    third, fourth = pool.acquire(), pool.acquire()
    assert {third, fourth}.isdisjoint({first, second})
    assert third.call({'op': 'list'})['ok'] and fourth.call({'op': 'list'})['ok']
    assert pool.started == 4


def test_one_that_dies_while_idle_is_not_handed_out():
  with SandboxPool(1) as pool:
    first = pool.acquire()
    first.wait_ready()
    pool.release(first)
    first._process.kill()
    first._process.wait()
    assert pool.acquire().call({'op': 'list'})['ok']


def test_one_that_cannot_be_emptied_is_not_handed_out(monkeypatch):
  with SandboxPool(1) as pool:
    first = pool.acquire()
    first.wait_ready()
    pool.release(first)
    monkeypatch.setattr(first, 'poll', lambda: {'ok': False, 'error': 'not_allowed'})
    assert pool.acquire() is not first and pool.replaced == 1


def test_one_thread_drives_many():
  count, rounds = 8, 5
  with SandboxPool(count) as pool, selectors.DefaultSelector() as selector:
    answered = dict.fromkeys(range(count), 0)
    for i in range(count):
      sandbox = pool.acquire()
      sandbox.send({'op': 'reset', 'files': {'m.py': f'x = {i}'}})
      selector.register(sandbox, selectors.EVENT_READ, i)
    end = time.monotonic() + 60
    while min(answered.values()) < rounds and time.monotonic() < end:
      for key, _ in selector.select(1.0):
        response = key.fileobj.poll()
        if response is None:
          continue
        if 'reprs' in response:
          assert response['reprs'] == [str(key.data)]
          answered[key.data] += 1
        cases = [{'module': 'm', 'expr': 'x'}]
        key.fileobj.send({'op': 'run_cases', 'cases': cases, 'timeout': 5})
    assert min(answered.values()) >= rounds


def start_fake(code, **limits):
  """Starts a 'sandbox' whose bubblewrap is a Python program of ours."""
  spec = {
    'argv': [sys.executable, '-I', '-S', '-c', textwrap.dedent(code)], 'seccomp': b'', 'env': {},
    'cgroups': [], 'uid': None, 'binds': [],
  }  # fmt: skip
  return Sandbox(0, spec, SandboxConfig(**limits), [])


def test_one_that_never_starts_is_given_up_in_time():
  sandbox = start_fake('import time; time.sleep(60)', start_timeout_s=0.5)
  start = time.monotonic()
  with pytest.raises(SandboxError, match='no answer in time'):
    sandbox.call({'op': 'list'})
  assert time.monotonic() - start < 2
  sandbox.close()
  wait_until_gone({sandbox.pid: '?'})


@pytest.mark.parametrize('code, message', [
  ('raise SystemExit("bwrap: no way")', 'no way'),
  ('import os; os.write(1, b"\\xff" * 100); input()', 'nonsense'),
  ('import os; os.write(1, b"\\0\\0\\0\\x02[}"); input()', 'nonsense'),
  ('import os; os.write(1, b"\\0\\0\\0\\x02{}"); input()', 'first word'),
])  # fmt: skip
def test_nonsense_breaks_the_sandbox_not_us(code, message):
  sandbox = start_fake(code)
  with pytest.raises(SandboxError, match=message):
    sandbox.call({'op': 'list'})
  sandbox.close()


def test_a_server_that_hangs_is_given_up():
  code = """
    import os, time
    os.write(1, b'\\0\\0\\0\\x0c{"hello": 1}')
    time.sleep(60)
  """
  sandbox = start_fake(code, reply_timeout_s=0.3)
  with pytest.raises(SandboxError, match='no answer in time'):
    sandbox.call({'op': 'list'})
  sandbox.close()
