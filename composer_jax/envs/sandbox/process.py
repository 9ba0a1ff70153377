"""One sandbox: start, talk, stop. Nothing here blocks but `call` and `close`."""

import concurrent.futures
import contextlib
import json
import marshal
import math
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
from typing import NoReturn

from composer_jax.envs.sandbox import cgroup
from composer_jax.envs.sandbox.config import SandboxConfig
from composer_jax.envs.types import Request, Response
from composer_jax.errors import InfrastructureError

_LAUNCHER = str(pathlib.Path(__file__).with_name('launch.py'))
_MAX_RESPONSE = 1 << 26
_spawner_lock = threading.Lock()
_spawner: concurrent.futures.ThreadPoolExecutor | None = None


class SandboxError(InfrastructureError):
  """A sandbox broke: it died, hung, or answered nonsense.

  Attributes:
    out_of_memory: the kernel killed a process of the sandbox because its cgroup was full, and the
      sandbox died: whoever ran in it is to blame, not the machine.
  """

  def __init__(self, message: str, out_of_memory: bool = False):
    super().__init__(message)
    self.out_of_memory = out_of_memory


def _spawn(*args, **kwargs) -> subprocess.Popen:
  """Starts a process from one thread that lives as long as we do.

  The kernel ends a `--die-with-parent` process with the *thread* that made it, so a caller's
  short-lived thread must not be its parent.
  """
  global _spawner
  with _spawner_lock:
    if _spawner is None:
      _spawner = concurrent.futures.ThreadPoolExecutor(1, 'sandbox-spawner')
  return _spawner.submit(subprocess.Popen, *args, **kwargs).result()


class Sandbox:
  """A running sandbox with its command server; one request in flight.

  Attributes:
    id: number unique in this process.
    broken: why it cannot be used any more, or None.
    calls: requests answered so far.
    start_s: seconds from start to the server's first word, once it is there.
  """

  def __init__(
    self,
    identifier: int,
    spec: dict,
    config: SandboxConfig,
    controllers: list[cgroup.Controller],
  ):
    """Starts the sandbox; `send` may be called at once.

    Args:
      identifier: becomes `id`.
      spec: from `bwrap.launch_spec`.
      config: limits.
      controllers: from `cgroup.detect`.

    Raises:
      SandboxError: the launcher could not be started.
    """
    self.id, self._config = identifier, config
    self.broken: str | None = None
    self.calls, self.start_s = 0, None
    self._out, self._in = memoryview(b''), bytearray()
    self._awaited = 1  # the server's first word
    self._ready = False
    self._started = time.monotonic()
    self._deadline: float | None = self._started + config.start_timeout_s
    self._group, self._oom_kills = None, 0
    try:
      if controllers:
        # Two more than the sandbox may have: bubblewrap's two processes, one of which becomes 1.
        self._group = cgroup.make_group(
          controllers, config.memory_mb << 20, config.processes + 2
        )
      self._process = _spawn(
        [sys.executable, '-I', '-S', _LAUNCHER, marshal.dumps(self._complete(spec)).hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        start_new_session=True,  # Ctrl-C in the terminal is ours to answer, not the sandboxes'
      )  # fmt: skip
    except OSError as error:
      if self._group:
        self._group.remove()
      raise SandboxError(f'cannot start a sandbox: {error}') from error
    for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
      os.set_blocking(stream.fileno(), False)

  def _complete(self, spec: dict) -> dict:
    config = self._config
    limits = {
      'RLIMIT_AS': config.address_space_mb << 20,
      'RLIMIT_NPROC': config.processes,
      'RLIMIT_NOFILE': config.open_files,
      'RLIMIT_FSIZE': config.file_mb << 20,
      'result_bytes': config.result_kb << 10,
      'read_bytes': config.read_kb << 10,
      'uid': config.uid,
    }
    procs = self._group.procs if self._group else []
    return spec | {'argv': [*spec['argv'], json.dumps(limits)], 'cgroups': procs}

  def fileno(self) -> int:
    """Returns the descriptor that becomes readable with the response, or when the sandbox dies."""
    return self._process.stdout.fileno()

  @property
  def pid(self) -> int:
    """Process id of bubblewrap on the host."""
    return self._process.pid

  @property
  def busy(self) -> bool:
    """True while a request is unanswered."""
    return self._awaited > (0 if self._ready else 1)

  @property
  def alive(self) -> bool:
    """True while bubblewrap runs."""
    return self._process.poll() is None

  def send(self, request: Request) -> None:
    """Sends one request.

    Raises:
      SandboxError: the sandbox is broken.
      RuntimeError: the previous request has not been answered.
    """
    self._check()
    if self.busy:
      raise RuntimeError('one request at a time')
    data = json.dumps(request).encode()
    self._out = memoryview(len(data).to_bytes(4, 'big') + data)
    self._awaited += 1
    if self._group and request['op'] == 'run_cases':
      self._oom_kills = self._group.oom_kills()
    if self._ready:
      self._expect(request)
    else:
      self._first_request = request
    self._flush()

  def _expect(self, request: Request) -> None:
    allowed = self._config.reply_timeout_s + request.get('timeout', 0)
    self._deadline = time.monotonic() + allowed

  def poll(self) -> Response | None:
    """Returns the response when it is there, else None.

    Raises:
      SandboxError: the sandbox died, hung, or answered nonsense.
    """
    self._check()
    self._flush()
    while True:
      try:
        chunk = os.read(self.fileno(), 1 << 16)
      except BlockingIOError:
        break
      if not chunk:
        self._fail(self._why_dead())
      self._in += chunk
      while (message := self._next_message()) is not None:
        self._awaited -= 1
        if self._ready:
          self._deadline = None
          self.calls += 1
          return message
        self._greeted(message)
    if self._deadline is not None and time.monotonic() > self._deadline:
      self._fail('no answer in time')
    return None

  def _greeted(self, message: Response) -> None:
    if message.get('hello') != 1:
      self._fail(f'unexpected first word {message}')
    self._ready = True
    self.start_s = time.monotonic() - self._started
    self._deadline = None
    if self._awaited:
      self._expect(self._first_request)

  def _next_message(self) -> Response | None:
    if len(self._in) < 4:
      return None
    size = int.from_bytes(self._in[:4], 'big')
    if size > _MAX_RESPONSE or not self._awaited:
      self._fail('answered nonsense')
    if len(self._in) < 4 + size:
      return None
    data = bytes(self._in[4 : 4 + size])
    del self._in[: 4 + size]
    try:
      return json.loads(data)
    except (ValueError, RecursionError):
      self._fail('answered nonsense')

  def _flush(self) -> None:
    while self._out:
      try:
        sent = os.write(self._process.stdin.fileno(), self._out)
      except BlockingIOError:
        return
      except BrokenPipeError:
        self._fail(self._why_dead())
      self._out = self._out[sent:]

  def wait(self, timeout_s: float) -> Response | None:
    """Waits for the response; None when it did not come in time (the sandbox goes on).

    Raises:
      SandboxError: as `poll`.
    """
    end = time.monotonic() + timeout_s
    while (response := self.poll()) is None:
      left = end - time.monotonic()
      if left <= 0:
        return None
      writers = [self._process.stdin.fileno()] if self._out else []
      select.select([self.fileno()], writers, [], min(left, 0.1))
    return response

  def call(self, request: Request) -> Response:
    """Sends a request and waits for its response.

    Raises:
      SandboxError: as `poll`; also when no response came in time.
    """
    self.send(request)
    return self.wait(math.inf)

  def wait_ready(self) -> None:
    """Waits until the server runs.

    Raises:
      SandboxError: it did not start, with what it wrote to its error stream.
    """
    if not self._ready:
      self.call({'op': 'ping'})

  def _check(self) -> None:
    if self.broken:
      raise SandboxError(f'sandbox {self.id}: {self.broken}')

  def _fail(self, why: str) -> NoReturn:
    full = self._group is not None and self._group.oom_kills() > self._oom_kills
    self.broken = why + (' (out of memory)' if full else '')
    self.kill()
    raise SandboxError(f'sandbox {self.id}: {self.broken}', full)

  def _why_dead(self) -> str:
    """Says what the launcher, bubblewrap or the server wrote last."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(1)
    why = f'ended with status {self._process.poll()}'
    with contextlib.suppress(BlockingIOError):
      lines = os.read(self._process.stderr.fileno(), 1 << 16).decode('utf-8', 'replace').strip()
      if lines:
        why += ': ' + lines.splitlines()[-1][:300]
    return why

  def kill(self) -> None:
    """Ends everything inside at once; does not wait for it."""
    if self._process.returncode is None:
      self._process.kill()

  def close(self, timeout_s: float = 5.0) -> list[cgroup.Group]:
    """Ends the sandbox and waits until nothing of it is left.

    Returns:
      cgroups that could not be removed yet (a dying process still holds them).
    """
    self.broken = self.broken or 'closed'
    self._process.stdin.close()  # the server leaves, and its namespace with it
    try:
      self._process.wait(0.5 if self._process.returncode is None and not self.busy else 0.05)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait(timeout_s)
    # All writers are inside: the end of the stream says that process 1 is gone.
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
      if select.select([self.fileno()], [], [], 0.05)[0] and not self._drained():
        break
    self._process.stdout.close()
    self._process.stderr.close()
    if not self._group:
      return []
    return cgroup.remove_all([self._group], 0.5, time.sleep)

  def _drained(self) -> bytes:
    try:
      return os.read(self.fileno(), 1 << 16)
    except BlockingIOError:
      return b'?'
