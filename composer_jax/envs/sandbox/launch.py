"""Program that turns itself into a sandbox: cgroup, private binds, uid drop, then bubblewrap.

Run as `python -I -S launch.py SPEC`, never imported by the library; a program of its own because
code between fork and exec of a process with threads (JAX has many) may deadlock. SPEC is a dict,
by marshal (nothing to import: this is half of a sandbox's start) and in hexadecimal:
  argv: bubblewrap's command line; `{seccomp}` in it stands for the descriptor of the filter
  seccomp: the filter, bytes
  env: environment of bubblewrap itself (the sandbox gets its own, see `bwrap.py`)
  cgroups: `cgroup.procs` files to join. Joined here, before exec, so that no process escapes.
  uid: user and group to become, or None to stay
  binds: [[source, target]], directories to show below /tmp in a private mount namespace. The
    interpreter may lie in a home that only its owner may enter (pyenv), and bubblewrap, which
    runs as `uid`, has to reach it by path.
"""

import marshal
import os
import sys

_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000


def _mount(source: str, target: str, kind: str, flags: int) -> None:
  import ctypes

  libc = ctypes.CDLL(None, use_errno=True)
  if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None):
    number = ctypes.get_errno()
    raise OSError(number, f'mount on {target}: {os.strerror(number)}')


def _show(binds: list[list[str]]) -> None:
  """Binds directories below a private /tmp; they are opened first, one may lie in /tmp itself."""
  os.unshare(os.CLONE_NEWNS)
  _mount('none', '/', '', _MS_REC | _MS_SLAVE)
  opened = [(os.open(source, os.O_PATH | os.O_DIRECTORY), target) for source, target in binds]
  _mount('tmpfs', '/tmp', 'tmpfs', 0)
  os.chmod('/tmp', 0o755)
  for descriptor, target in opened:
    os.mkdir(target, 0o755)
    _mount(f'/proc/self/fd/{descriptor}', target, '', _MS_BIND | _MS_REC)
    os.close(descriptor)


def main() -> None:
  """Prepares the process as SPEC says and becomes bubblewrap."""
  spec = marshal.loads(bytes.fromhex(sys.argv[1]))
  for path in spec['cgroups']:
    with open(path, 'w') as file:
      file.write('0')
  os.chdir('/')
  os.umask(0o022)
  if spec['binds']:
    _show(spec['binds'])
  if spec['uid'] is not None:
    os.setgroups([])
    os.setresgid(spec['uid'], spec['uid'], spec['uid'])
    os.setresuid(spec['uid'], spec['uid'], spec['uid'])
  reader, writer = os.pipe()
  os.write(writer, spec['seccomp'])  # 1-2 KB: fits into the pipe
  os.close(writer)
  os.set_inheritable(reader, True)
  argv = [str(reader) if a == '{seccomp}' else a for a in spec['argv']]
  os.execve(argv[0], argv, spec['env'])


if __name__ == '__main__':
  main()
