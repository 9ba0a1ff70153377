"""What code in a sandbox can reach: every probe first proves that it is inside one."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from composer_jax.envs.sandbox import SandboxPool

# Runs before each probe, in the probe's own process. A control case run outside a sandbox would
# hit the machine that runs the tests.
GUARD = """
import ctypes, errno, os, socket
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl(4, 1, 0, 0, 0)  # dumpable, to see our own namespaces
_spaces = {n: os.stat('/proc/self/ns/' + n).st_ino for n in ('mnt', 'pid', 'net', 'user')}
_isolated = os.getuid() == 61000 and all(_spaces[n] != i for n, i in HOST.items())
if not _isolated:
  os._exit(1)

def attempt(function, *args):
  try:
    return function(*args)
  except OSError as error:
    return errno.errorcode[error.errno]

def call(name, *args):
  ctypes.set_errno(0)
  result = getattr(_libc, name)(*args)
  return errno.errorcode[ctypes.get_errno()] if result == -1 else result
"""
DENIED = {'EACCES', 'EPERM', 'ENOENT', 'EROFS'}


@pytest.fixture(scope='module')
def pool():
  os.environ['COMPOSER_JAX_TEST_SECRET'] = 'hunter2'
  with SandboxPool(1) as pool:
    yield pool
  del os.environ['COMPOSER_JAX_TEST_SECRET']


@pytest.fixture
def probe(pool):
  sandbox = pool.acquire()

  def run(source, *exprs, timeout=10.0):
    host = {n: os.stat(f'/proc/self/ns/{n}').st_ino for n in ('mnt', 'pid', 'net', 'user')}
    text = f'HOST = {host!r}\n{GUARD}\n{textwrap.dedent(source)}'
    sandbox.call({'op': 'reset', 'files': {'probe.py': text}})
    cases = [{'module': 'probe', 'expr': e} for e in ('_isolated', *exprs)]
    response = sandbox.call({'op': 'run_cases', 'cases': cases, 'timeout': timeout})
    assert response['reprs'][0] == 'True', response
    return [eval(r, {}) if not r.startswith('raises') else r for r in response['reprs'][1:]]

  yield run
  # Whatever was tried: the same server still answers, and answers right.
  assert sandbox.call({'op': 'list'})['paths'] == ['probe.py']
  pool.release(sandbox)
  assert pool.replaced == 0


def test_host_files_are_out_of_reach(probe, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('x')
  secret.chmod(0o644)
  (shadow, passwd, own, home) = probe(
    """
    def read(path):
      return attempt(lambda: open(path).read())
    """,
    'read("/etc/shadow")', 'read("/etc/passwd")', f'read({str(secret)!r})',
    'attempt(os.listdir, "/root")',
  )  # fmt: skip
  assert shadow in DENIED and passwd in DENIED and own in DENIED and home in DENIED


@pytest.mark.parametrize('folder', ['/', '/usr', '/opt/python', '/dev', '/opt', '/proc'])
def test_system_is_read_only(probe, folder):
  (result,) = probe('', f'attempt(lambda: open({folder!r} + "/planted", "w").close())')
  assert result in DENIED


def test_host_processes_are_invisible(probe):
  canary = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
  try:
    killed, pids, all_killed = probe(
      'pids = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())',
      f'attempt(os.kill, {canary.pid}, 9)', '(pids, os.getpid())', 'attempt(os.kill, 1, 9)',
    )  # fmt: skip
    assert killed == 'ESRCH'
    assert pids[0] == [1, pids[1]]  # the server and the probe
    assert all_killed is None  # accepted and without effect, as for any namespace's process 1
    assert canary.poll() is None
  finally:
    canary.kill()
    canary.wait()


def test_network_is_closed(probe):
  with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
    server.bind(('127.0.0.1', 0))
    server.listen()
    name = f'\0composer-jax-test-{os.getpid()}'
    local.bind(name)
    local.listen()
    tcp, unix, outside, udp = probe(
      """
      def connect(family, address):
        with socket.socket(family) as s:
          s.settimeout(2)
          return attempt(s.connect, address)
      def send():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
          return attempt(s.sendto, b'x', ('192.0.2.1', 53))
      """,
      f'connect(socket.AF_INET, {server.getsockname()!r})',
      f'connect(socket.AF_UNIX, {name!r})', 'connect(socket.AF_INET, ("192.0.2.1", 80))', 'send()',
    )  # fmt: skip
  assert tcp in ('ECONNREFUSED', 'ENETUNREACH')
  assert unix == 'ECONNREFUSED'
  assert outside == udp == 'ENETUNREACH'


def test_socket_families(probe):
  families = {'VSOCK': 40, 'NETLINK': 16, 'PACKET': 17, 'ALG': 38, 'BLUETOOTH': 31, 'XDP': 44}
  results = probe('', *(f'attempt(socket.socket, {n}, 3)' for n in families.values()))
  assert results == ['EAFNOSUPPORT'] * len(families)


def test_namespaces_mounts_and_capabilities(probe):
  status, unshared, cloned, mounted, rooted, disabled = probe(
    """
    status = dict(l.split(':\\t', 1) for l in open('/proc/self/status').read().splitlines())
    """,
    '[status[k] for k in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")]',
    'call("unshare", 0x10000000)',
    'call("syscall", {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000011, 0, 0, 0, 0)',
    'call("mount", b"none", b"/tmp", b"tmpfs", 0, None)', 'attempt(os.chroot, "/tmp")',
    'attempt(lambda: open("/proc/sys/user/max_user_namespaces", "w").write("9"))',
  )  # fmt: skip
  assert [int(v, 16) for v in status] == [0, 0, 0, 0, 1, 2]
  assert unshared == cloned == mounted == rooted == 'EPERM'
  assert disabled in DENIED


def test_kernel_surface(probe):
  # add_key, io_uring_setup, perf_event_open, bpf, memfd_create, shmget, userfaultfd
  numbers = {
    'x86_64': [248, 425, 298, 321, 319, 29, 323], 'aarch64': [217, 425, 241, 280, 279, 194, 282],
  }[os.uname().machine]  # fmt: skip
  results = probe('', *(f'call("syscall", {n}, 0, 0, 0, 0, 0)' for n in numbers))
  assert results == ['EPERM'] * len(numbers)


def test_environment_is_an_allow_list(probe):
  names, server, secret = probe(
    '', 'sorted(os.environ)', 'attempt(lambda: open("/proc/1/environ").read())',
    'os.environ.get("COMPOSER_JAX_TEST_SECRET")',
  )  # fmt: skip
  assert set(names) <= {
    'HOME', 'LANG', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PATH', 'PWD', 'PYTHONDONTWRITEBYTECODE',
    'PYTHONHASHSEED',
  }  # fmt: skip
  assert server in DENIED and secret is None


def test_server_cannot_be_harmed(probe):
  signals, *results = probe(
    """
    import resource, signal
    def signals():
      for number in set(signal.Signals) - {signal.SIGCHLD}:
        attempt(os.kill, 1, number)
    class Limit(ctypes.Structure):
      _fields_ = [('soft', ctypes.c_ulong), ('hard', ctypes.c_ulong)]
    """,
    'signals()',
    'call("ptrace", 16, 1, 0, 0)',
    'attempt(lambda: os.open("/proc/1/mem", os.O_RDWR))',
    'attempt(lambda: os.listdir("/proc/1/fd"))',
    'attempt(lambda: os.open("/proc/1/fd/1", os.O_WRONLY))',
    'attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (0, 0))',
    'attempt(os.sched_setaffinity, 1, {0})',
    'attempt(os.setpriority, os.PRIO_PROCESS, 1, 19)',
    'call("syscall", 438, attempt(os.pidfd_open, 1), 0, 0)',
    'call("process_vm_readv", 1, None, 0, None, 0, 0)',
    'attempt(lambda: open("/proc/1/oom_score_adj", "w").write("1000"))',
  )
  assert signals is None
  assert set(results) <= DENIED


def test_pipes_of_the_server_are_closed(probe):
  descriptors, written = probe(
    """
    def write():
      for number in range(64):
        if number != 3:  # our own results
          attempt(os.write, number, b'\\0\\0\\0\\x0b{"ok":true}')
    """,
    # `listdir` opens one itself.
    'sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4]', 'write()',
  )  # fmt: skip
  assert descriptors == [0, 1, 2, 3]
  assert written is None


def test_forged_results_only_hurt_the_forger(pool):
  sandbox = pool.acquire()
  source = 'import os\nos.write(3, b"\\0\\0\\0\\x06forged" * 1000)\n'
  sandbox.call({'op': 'reset', 'files': {'forger.py': source}})
  request = {'op': 'run_cases', 'cases': [{'module': 'forger', 'expr': '1'}] * 2, 'timeout': 5}
  response = sandbox.call(request)
  assert response['reprs'] == ['forged', 'forged'] and len(response['messages']) == 2
  sandbox.call({'op': 'reset', 'files': {'forger.py': ''}})
  assert sandbox.call(request)['reprs'] == ['1', '1']
  pool.release(sandbox)


