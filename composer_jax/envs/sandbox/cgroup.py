"""Memory and process limits of a whole sandbox by cgroups, where the machine lets us make one.

Machines differ: pure v2, v1, both at once ("hybrid": each controller is bound to one of them), or
nothing that we may write to. Each controller is looked up on its own, groups are made below (v1) or
beside (v2, where a group with processes cannot limit its children) the group that we are in.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import re
import time
from collections.abc import Callable

_PREFIX = 'composer-jax'
_COUNTER = itertools.count()


@dataclasses.dataclass(frozen=True)
class Controller:
  """One usable controller.

  Attributes:
    name: `memory` or `pids`.
    version: cgroup version it is bound to, 1 or 2.
    parent: directory in which groups can be made.
  """

  name: str
  version: int
  parent: str


class Group:
  """The cgroup directories of one sandbox.

  Attributes:
    procs: the `cgroup.procs` files that a process joins.
  """

  def __init__(self, directories: list[str], memory: Controller):
    self._directories = directories
    self._events = os.path.join(
      directories[0], 'memory.oom_control' if memory.version == 1 else 'memory.events'
    )
    self.procs = [os.path.join(d, 'cgroup.procs') for d in directories]

  def oom_kills(self) -> int:
    """Returns how many processes the kernel killed here for lack of memory."""
    try:
      found = re.search(r'^oom_kill (\d+)$', _read(self._events), re.MULTILINE)
    except FileNotFoundError:
      return 0
    return int(found[1]) if found else 0

  def remove(self) -> bool:
    """Removes the directories; False while a dying process still holds one."""
    left = []
    for directory in self._directories:
      try:
        os.rmdir(directory)
      except FileNotFoundError:
        continue
      except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
          raise
        left.append(directory)
    return not left


def own_directories(cgroup: str, mountinfo: str) -> dict[str, str]:
  """Finds the directories of our own cgroups.

  Args:
    cgroup: content of /proc/self/cgroup.
    mountinfo: content of /proc/self/mountinfo.

  Returns:
    Controller name -> directory, for v1 controllers; key '' is our group in the v2 hierarchy.
  """
  mounts = []
  for line in mountinfo.splitlines():
    left, right = line.split(' - ', 1)
    (kind, _, options), fields = right.split()[:3], left.split()
    if kind in ('cgroup', 'cgroup2'):
      mounts.append((fields[3], fields[4], kind, set(options.split(','))))
  own = {}
  for line in cgroup.splitlines():
    _, controllers, path = line.split(':', 2)
    names = controllers.split(',') if controllers else []
    for root, point, kind, options in mounts:
      if (kind == 'cgroup' and names[0] in options) if names else kind == 'cgroup2':
        inside = os.path.relpath(path, root) if path.startswith(root) else '.'
        directory = os.path.normpath(os.path.join(point, inside))
        own.update(dict.fromkeys(names or [''], directory))
        break
  return own


def _read(path: str) -> str:
  with open(path) as file:
    return file.read()


def _v2_parent(directory: str) -> str | None:
  """Returns the nearest group, ours or the one above it, whose children get both controllers."""
  for candidate in (directory, os.path.dirname(directory)):
    try:
      enabled = _read(os.path.join(candidate, 'cgroup.subtree_control')).split()
      if {'memory', 'pids'} <= set(enabled) and os.access(candidate, os.W_OK):
        return candidate
    except FileNotFoundError:
      return None  # above the mount point
  return None


def _start_time(pid: int | str) -> str | None:
  """Returns a process's start time, which tells it from a later one with its number."""
  try:
    return _read(f'/proc/{pid}/stat').rpartition(')')[2].split()[19]
  except (FileNotFoundError, ProcessLookupError):
    return None


def _sweep(parent: str) -> None:
  """Removes groups that a killed owner left; only our own kind, only dead owners, only empty."""
  for name in os.listdir(parent):
    match = re.fullmatch(rf'{_PREFIX}\.(\d+)\.(\d+)\.\d+', name)
    if match and _start_time(match[1]) != match[2]:
      with contextlib.suppress(OSError):  # not empty yet, or another process was faster
        os.rmdir(os.path.join(parent, name))


def _write(path: str, value: int) -> None:
  with open(path, 'w') as file:
    file.write(str(value))


def make_group(controllers: list[Controller], memory_bytes: int, processes: int) -> Group:
  """Makes the cgroup of one sandbox.

  Args:
    controllers: what `detect` returned, not empty.
    memory_bytes: limit of the whole group, its tmpfs files included.
    processes: limit of processes and threads.

  Raises:
    OSError: the kernel refused.
  """
  name = f'{_PREFIX}.{os.getpid()}.{_start_time("self")}.{next(_COUNTER)}'
  directories = []
  for controller in controllers:
    directory = os.path.join(controller.parent, name)
    if directory not in directories:
      os.mkdir(directory)
      directories.append(directory)
    if controller.name == 'memory':
      file = 'memory.limit_in_bytes' if controller.version == 1 else 'memory.max'
      _write(os.path.join(directory, file), memory_bytes)
      if controller.version == 2 and os.path.exists(os.path.join(directory, 'memory.swap.max')):
        _write(os.path.join(directory, 'memory.swap.max'), 0)
    else:
      _write(os.path.join(directory, 'pids.max'), processes)
  return Group(directories, controllers[0])


def detect() -> list[Controller]:
  """Finds controllers for memory and pids that we may use, trying each by making a group.

  Returns:
    `[memory, pids]`, or an empty list when the machine does not let us limit both.
  """
  try:
    own = own_directories(_read('/proc/self/cgroup'), _read('/proc/self/mountinfo'))
  except FileNotFoundError:
    return []
  controllers: list[Controller] = []
  for name in ('memory', 'pids'):
    if name in own:
      controllers.append(Controller(name, 1, own[name]))
    elif '' in own and (parent := _v2_parent(own[''])):
      controllers.append(Controller(name, 2, parent))
    else:
      return []
  try:
    for controller in controllers:
      _sweep(controller.parent)
    make_group(controllers, 1 << 26, 8).remove()
  except OSError:
    return []
  return controllers


def remove_all(groups: list[Group], timeout_s: float, wait: Callable[[float], None]) -> list[Group]:
  """Removes groups, waiting for dying processes; returns those that are still held."""
  end = time.monotonic() + timeout_s
  while groups := [g for g in groups if not g.remove()]:
    if time.monotonic() > end:
      break
    wait(0.005)
  return groups
