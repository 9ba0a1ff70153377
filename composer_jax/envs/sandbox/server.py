"""The command server inside a sandbox: process 1 of its pid namespace.

Sent as source and run as `python -S -s -P -c SOURCE LIMITS`; it needs only the standard library,
and the host imports it for `safe_repr` alone. Requests and responses are JSON behind a 4-byte
big-endian length, on stdin and stdout; `envs.types.SandboxHandle` lists them. As process 1 it
cannot be killed or stopped from inside, as an undumpable process it cannot be traced or read, and
every other process of the sandbox is a descendant that `_kill_all` ends.
"""

import contextlib
import json
import os
import resource
import select
import signal
import stat
import sys
import time

ROOT = '/workspace'
LATE = 'timeout'  # the answer to a case for which the time did not suffice
_SCRATCH = (ROOT, '/tmp', '/dev/shm')
_MAX_ENTRIES = 10_000
_LIMITS = {}


class Refused(Exception):
  """A request that is answered with an error: (class, message)."""


# --- results -------------------------------------------------------------------------------------


def safe_repr(value, depth=0):
  """Returns `repr` of plain data, with the items of sets and dicts in a fixed order.

  Only exact built-in types count, so that no object can pass with a forged `__repr__` or `__eq__`.

  Args:
    value: int, float, complex, str, bytes, bool, None, range, Ellipsis, or a list, tuple, dict, set
      or frozenset of such values.
    depth: nesting depth so far.

  Raises:
    TypeError: another type inside.
    ValueError: nested more than 50 deep, or an int with more than 4,300 digits.
  """
  kind = type(value)
  if kind in (int, float, complex, str, bytes, bool, type(None), range, type(...)):
    return kind.__repr__(value)
  if depth > 50:
    raise ValueError('nested too deep')
  if kind is dict:
    items = sorted((safe_repr(k, depth + 1), safe_repr(v, depth + 1)) for k, v in value.items())
    return '{' + ', '.join(f'{k}: {v}' for k, v in items) + '}'
  if kind not in (list, tuple, set, frozenset):
    raise TypeError('result of type ' + kind.__name__[:80])
  parts = [safe_repr(v, depth + 1) for v in value]
  if kind is list:
    return '[' + ', '.join(parts) + ']'
  if kind is tuple:
    return '(' + ', '.join(parts) + (',)' if len(parts) == 1 else ')')
  body = '{' + ', '.join(sorted(parts)) + '}'
  if kind is set:
    return body if parts else 'set()'
  return f'frozenset({body if parts else ""})'


# --- files ---------------------------------------------------------------------------------------


def _parent(path, create=False):
  """Opens the folder of a workspace path without following a link; returns (descriptor, name)."""
  if path.startswith(ROOT + '/'):
    path = path[len(ROOT) + 1 :]
  parts = [p for p in path.split('/') if p not in ('', '.')]
  if path.startswith('/') or '..' in parts or not parts or '\0' in path:
    raise Refused('not_allowed', 'path outside the workspace')
  folder = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
  try:
    for part in parts[:-1]:
      if create:
        with contextlib.suppress(FileExistsError):
          os.mkdir(part, dir_fd=folder)
      inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
      os.close(folder)
      folder = inner
  except BaseException:
    os.close(folder)
    raise
  return folder, parts[-1]


def _read(path):
  folder, name = _parent(path)
  try:
    # O_NONBLOCK: opening a fifo must not wait for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(name, flags, dir_fd=folder)
  finally:
    os.close(folder)
  with open(file, 'rb') as stream:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
      raise Refused('not_allowed', 'not a regular file')
    if status.st_size > _LIMITS['read_bytes']:
      raise Refused('not_allowed', 'file too large')
    return stream.read(_LIMITS['read_bytes']).decode('utf-8', 'replace')


def _write(path, text):
  folder, name = _parent(path, create=True)
  try:
    temporary = f'.{os.getpid()}.{time.monotonic_ns()}.tmp'
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(temporary, flags, 0o644, dir_fd=folder)
    try:
      with open(file, 'wb') as stream:
        stream.write(text.encode('utf-8', 'surrogatepass'))
      # Replaces a link, not what it points to.
      os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
      os.unlink(temporary, dir_fd=folder)
      raise
  finally:
    os.close(folder)


def _files():
  """Lists the regular files of the workspace, sorted; links are neither followed nor listed."""
  found, folders = [], [ROOT]
  while folders:
    folder = folders.pop()
    try:
      entries = list(os.scandir(folder))
    except OSError:
      continue  # the candidate closed the folder, or made its path too long
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        folders.append(entry.path)
      elif entry.is_file(follow_symlinks=False):
        found.append(entry.path[len(ROOT) + 1 :])
      if len(found) + len(folders) > _MAX_ENTRIES:
        raise Refused('not_allowed', 'too many files in the workspace')
  return sorted(found)


def _wipe(root):
  """Empties a folder whatever its tree looks like: deeper folders are moved up, so no recursion."""
  pending, counter = [root], 0
  while pending:
    folder = pending.pop()
    os.chmod(folder, 0o755)
    for entry in list(os.scandir(folder)):
      if entry.is_dir(follow_symlinks=False):
        counter += 1
        target = f'{root}/.wipe.{time.monotonic_ns()}.{counter}'
        os.chmod(entry.path, 0o755)  # its owner may not move a folder that it cannot write to
        os.rename(entry.path, target)
        pending.append(target)
      else:
        os.unlink(entry.path)
    if folder != root:
      os.rmdir(folder)


def _reset(request):
  _kill_all()
  for folder in _SCRATCH:
    _wipe(folder)
  for path, text in request['files'].items():
    _write(path, text)
  return {}


def _read_file(request):
  return {'text': _read(request['path'])}


def _write_file(request):
  _write(request['path'], request['text'])
  return {}


def _search(request):
  pattern, limit, matches = request['pattern'], request.get('limit', 20), []
  for path in _files():
    try:
      lines = _read(path).split('\n')
    except (OSError, Refused):
      continue  # too large, or not readable: nothing to find there
    for number, line in enumerate(lines, 1):
      if pattern in line:
        matches.append([path, number, line[:200]])
        if len(matches) >= limit:
          return {'matches': matches}
  return {'matches': matches}


# --- cases ---------------------------------------------------------------------------------------


def _kill_all():
  """Ends every other process of the namespace; they are all descendants of process 1."""
  while True:
    with contextlib.suppress(ProcessLookupError):
      os.kill(-1, signal.SIGKILL)
    try:
      os.waitpid(-1, 0)
    except ChildProcessError:
      return


def _evaluate(case):
  """Returns the outcome of one case as text, `repr` or `raises TypeName`, and a short message."""
  try:
    name = case['module']
    __import__(name)
    module = sys.modules[name]
    scope = {name.rpartition('.')[2]: module}
    scope.update(vars(module))
    scope['__name__'] = '__case__'
    if case.get('setup'):
      exec(compile(case['setup'], '<setup>', 'exec'), scope)
    return safe_repr(eval(compile(case['expr'], '<case>', 'eval'), scope)), ''
  except BaseException as error:  # noqa: BLE001 - whatever the candidate raises is its answer
    try:
      message = str(error)[:200]
    except BaseException:  # noqa: BLE001 - so is what its own __str__ raises
      message = ''
    return 'raises ' + type(error).__name__[:80], message


def _limit_self(seconds):
  for name in ('RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_NOFILE', 'RLIMIT_FSIZE'):
    resource.setrlimit(getattr(resource, name), (_LIMITS[name], _LIMITS[name]))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 2, int(seconds) + 2))


def _child(pipe, cases, seconds):
  """The forked process: evaluates the cases in order and writes one frame each."""
  null = os.open('/dev/null', os.O_RDWR)
  for target in (0, 1, 2):
    os.dup2(null, target)
  if pipe != 3:
    os.dup2(pipe, 3, inheritable=False)
  os.closerange(4, 4096)
  os.chdir(ROOT)
  sys.path.insert(0, ROOT)
  sys.argv[:] = ['case']
  _limit_self(seconds)
  for case in cases:
    for text in _evaluate(case):
      data = text.encode('utf-8', 'replace')
      os.write(3, len(data).to_bytes(4, 'big') + data)


def _collect(reader, process, seconds):
  """Reads the child's frames until it ends; returns (bytes, why it was cut or '')."""
  end, data = time.monotonic() + seconds, b''
  poller = select.poll()
  poller.register(reader, select.POLLIN)
  poller.register(process, select.POLLIN)
  poller.register(0, 0)  # hang-up only: the owner is gone
  while True:
    left = end - time.monotonic()
    if left <= 0:
      return data, LATE
    ready = dict(poller.poll(left * 1000 + 1))
    if 0 in ready:
      os._exit(0)
    if reader in ready:
      try:
        chunk = os.read(reader, 1 << 16)
      except BlockingIOError:
        chunk = b''
      data += chunk
      if len(data) > _LIMITS['result_bytes']:
        return data, 'output'
      if chunk:
        continue
      poller.unregister(reader)
    if process in ready:
      return data, ''


def _frames(data):
  texts, at = [], 0
  while at + 4 <= len(data):
    size = int.from_bytes(data[at : at + 4], 'big')
    if at + 4 + size > len(data):
      break
    texts.append(data[at + 4 : at + 4 + size].decode('utf-8', 'replace'))
    at += 4 + size
  return texts


def _run_cases(request):
  if 'files' in request:
    _reset(request)
  cases, seconds = request['cases'], request['timeout']
  try:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
  except OSError as error:  # nothing of the candidate runs now: the machine is short, not its code
    raise SystemExit(f'cannot fork: {os.strerror(error.errno)}') from error
  if pid == 0:
    try:
      _child(writer, cases, seconds)
    finally:
      os._exit(0)
  os.close(writer)
  os.set_blocking(reader, False)
  process = os.pidfd_open(pid)
  try:
    data, why = _collect(reader, process, seconds)
  finally:
    _kill_all()
    os.close(process)
    os.close(reader)
  texts = _frames(data)[: 2 * len(cases)]
  reprs, messages = texts[0::2], texts[1::2]
  lost = LATE if why == LATE else 'died'
  reason = {LATE: f'no answer within {seconds:g} s', 'output': 'results too large'}
  while len(reprs) < len(cases):
    reprs.append(lost)
  while len(messages) < len(cases):
    messages.append(reason.get(why, 'the process ended early'))
  return {'reprs': reprs, 'messages': messages}


# --- serving -------------------------------------------------------------------------------------

_OPERATIONS = {
  'reset': _reset,
  'read_file': _read_file,
  'write_file': _write_file,
  'list': lambda request: {'paths': _files()},
  'search': _search,
  'run_cases': _run_cases,
  'ping': lambda request: {},
}


def _answer(request):
  try:
    return {'ok': True, **_OPERATIONS[request['op']](request)}
  except Refused as error:
    return {'ok': False, 'error': error.args[0], 'message': error.args[1]}
  except FileNotFoundError:
    return {'ok': False, 'error': 'not_found', 'message': 'no such file'}
  except OSError as error:
    return {'ok': False, 'error': 'not_allowed', 'message': os.strerror(error.errno)}
  except ValueError as error:  # a path that the file system cannot express
    return {'ok': False, 'error': 'bad_arguments', 'message': str(error)[:200]}


def _receive(size):
  parts = []
  while size:
    part = os.read(0, min(size, 1 << 20))
    if not part:
      os._exit(0)  # the owner closed the pipe or is gone; process 1 takes the namespace with it
    parts.append(part)
    size -= len(part)
  return b''.join(parts)


def _send(message):
  data = json.dumps(message).encode()
  data = memoryview(len(data).to_bytes(4, 'big') + data)
  while data:
    data = data[os.write(1, data) :]


def _warm_up():
  """Evaluates a dummy candidate here, so that the children share pages that they would copy.

  The interpreter's lazily filled caches and specialised bytecode are memory writes; done once in
  process 1 they are not repeated, page by page, in each child (0.8 instead of 3.4 ms a child).
  """
  folder, name = '/tmp/warm', 'warm_up_candidate'
  os.mkdir(folder)
  with open(f'{folder}/{name}.py', 'w') as file:
    file.write('def f(x):\n  return [x, str(x), {x: (x,)}]\n')
  sys.path.insert(0, folder)
  for i in range(16):
    for expr in (f'f({i})', 'f.x'):
      _evaluate({'module': name, 'setup': 'y = 1', 'expr': expr})
    del sys.modules[name]
    sys.path_importer_cache.pop(folder)
  sys.path.remove(folder)
  _wipe('/tmp')


def main():
  """Checks that this is a sandbox, hides the process, serves until stdin closes."""
  import ctypes
  import gc

  _LIMITS.update(json.loads(sys.argv[1]))
  if os.getpid() != 1 or os.geteuid() != _LIMITS['uid']:
    raise SystemExit(f'not a sandbox: pid {os.getpid()}, uid {os.geteuid()}')
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:  # PR_SET_DUMPABLE
    raise SystemExit('prctl(PR_SET_DUMPABLE) failed')
  _warm_up()
  gc.collect()
  gc.freeze()  # keeps the pages shared with the children
  _send({'ok': True, 'hello': 1})
  while True:
    _send(_answer(json.loads(_receive(int.from_bytes(_receive(4), 'big')))))


if __name__ == '__main__':
  main()
