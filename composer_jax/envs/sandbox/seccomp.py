"""The system call filter of the sandbox, as classic BPF bytes for `bwrap --seccomp`.

Namespaces leave a large kernel surface and a few holes open: `AF_VSOCK` is not part of a network
namespace, and a process may change the limits of any other process with its uid (which would let
a candidate have the command server killed). The filter closes them: everything is allowed except
the calls listed here. A call that is refused fails with an error number; nothing is killed.
"""

import errno
import struct

from composer_jax.errors import InfrastructureError

_LOAD, _JUMP_EQUAL, _JUMP_AND, _JUMP_GE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_ARCH = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
_X32_BIT = 0x40000000

# Allowed socket families: AF_UNIX, AF_INET, AF_INET6; the network namespace is empty.
_FAMILIES = (1, 2, 10)
# CLONE_NEWNS, and CLONE_NEWCGROUP, UTS, IPC, USER, PID, NET.
_CLONE_NEW = 0x00020000 | 0x7E000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# name: (x86_64, aarch64); None where the architecture lacks the call.
_DENIED = {
  'ptrace': (101, 117), 'process_vm_readv': (310, 270), 'process_vm_writev': (311, 271),
  'pidfd_getfd': (438, 438), 'kcmp': (312, 272), 'process_madvise': (440, 440),
  'add_key': (248, 217), 'request_key': (249, 218), 'keyctl': (250, 219),
  'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282),
  'io_uring_setup': (425, 425), 'io_uring_enter': (426, 426), 'io_uring_register': (427, 427),
  'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41), 'chroot': (161, 51),
  'open_tree': (428, 428), 'move_mount': (429, 429), 'fsopen': (430, 430),
  'fsconfig': (431, 431), 'fsmount': (432, 432), 'fspick': (433, 433), 'mount_setattr': (442, 442),
  'unshare': (272, 97), 'setns': (308, 268),
  'name_to_handle_at': (303, 264), 'open_by_handle_at': (304, 265), 'fanotify_init': (300, 262),
  'init_module': (175, 105), 'finit_module': (313, 273), 'delete_module': (176, 106),
  'kexec_load': (246, 104), 'kexec_file_load': (320, 294), 'reboot': (169, 142),
  'swapon': (167, 224), 'swapoff': (168, 225), 'acct': (163, 89), 'quotactl': (179, 60),
  'syslog': (103, 116), 'personality': (135, 92), 'vmsplice': (278, 75),
  # Memory that no address-space limit counts and that would outlive a process.
  'memfd_create': (319, 279), 'memfd_secret': (447, 447),
  'shmget': (29, 194), 'shmat': (30, 196), 'semget': (64, 190), 'msgget': (68, 186),
  'mq_open': (240, 180),
  # These act on other processes of the same uid, the command server among them.
  'setpriority': (141, 140), 'ioprio_set': (251, 30), 'migrate_pages': (256, 238),
  'move_pages': (279, 239), 'process_mrelease': (448, 448), 'modify_ldt': (154, None),
  'iopl': (172, None), 'ioperm': (173, None),
}  # fmt: skip
# Allowed only when the first argument (a pid) is 0, the caller itself.
_SELF_ONLY = {
  'prlimit64': (302, 261), 'sched_setparam': (142, 118), 'sched_setscheduler': (144, 119),
  'sched_setaffinity': (203, 122), 'sched_setattr': (314, 274),
}  # fmt: skip
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_IOCTL = (16, 29)


def _ins(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
  return struct.pack('=HBBI', code, jump_true, jump_false, k)


def _argument(index: int) -> bytes:
  """Loads the low 32 bits of an argument (both architectures are little-endian)."""
  return _ins(_LOAD, 16 + 8 * index)


def _fail(number: int) -> bytes:
  return _ins(_RETURN, _ERRNO | number)


def _rule(number: int, *body: bytes) -> bytes:
  """Runs `body` (which must return) when the loaded call number is `number`."""
  return _ins(_JUMP_EQUAL, number, 0, len(body)) + b''.join(body)


def build(machine: str) -> bytes:
  """Builds the filter.

  Args:
    machine: `platform.machine()`, `x86_64` or `aarch64`.

  Returns:
    `struct sock_filter` records, as `bwrap --seccomp FD` reads them.

  Raises:
    InfrastructureError: no filter exists for this architecture.
  """
  if machine not in _ARCH:
    known = ', '.join(_ARCH)
    raise InfrastructureError(f'no sandbox system call filter for {machine} (have: {known})')
  column = list(_ARCH).index(machine)
  allow, number = _ins(_RETURN, _ALLOW), _ins(_LOAD, 0)
  program = [
    _ins(_LOAD, 4), _ins(_JUMP_EQUAL, _ARCH[machine], 1, 0), _fail(errno.EPERM), number,
  ]  # fmt: skip
  if machine == 'x86_64':
    program += [_ins(_JUMP_GE, _X32_BIT, 0, 1), _fail(errno.EPERM)]
  for numbers in _DENIED.values():
    if numbers[column] is not None:
      program.append(_rule(numbers[column], _fail(errno.EPERM)))
  for numbers in _SELF_ONLY.values():
    program.append(_rule(numbers[column], _argument(0), _ins(_JUMP_EQUAL, 0, 0, 1), allow,
                         _fail(errno.EPERM)))  # fmt: skip
  families = [_ins(_JUMP_EQUAL, f, len(_FAMILIES) - i, 0) for i, f in enumerate(_FAMILIES)]
  for numbers in (_SOCKET, _SOCKETPAIR):
    body = (_argument(0), *families, _fail(errno.EAFNOSUPPORT), allow)
    program.append(_rule(numbers[column], *body))
  # The flags of clone3 lie in memory, which a filter cannot read; without it libc uses clone.
  program.append(_rule(_CLONE3[column], _fail(errno.ENOSYS)))
  program.append(_rule(_CLONE[column], _argument(0), _ins(_JUMP_AND, _CLONE_NEW, 0, 1),
                       _fail(errno.EPERM), allow))  # fmt: skip
  program.append(_rule(_IOCTL[column], _argument(1), _ins(_JUMP_EQUAL, _TIOCSTI, 1, 0),
                       _ins(_JUMP_EQUAL, _TIOCLINUX, 0, 1), _fail(errno.EPERM), allow))  # fmt: skip
  program.append(allow)
  return b''.join(program)
