"""A peer in its own interpreter: one JSON object a line in, one out."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from composer_jax.errors import InfrastructureError, UserError

START_S = 180.0  # importing torch from a cold disk
ANSWER_S = 600.0
# The last one would hide the module that the peers' scripts share.
_NOT_THE_PEERS = ('PYTHONPATH', 'PYTHONHOME', 'PYTHONSAFEPATH')
_PEERS = Path(__file__).parent / 'peers'


def peer_script(name: str) -> Path:
  """Returns the path of a script of `peers`."""
  return _PEERS / f'{name}.py'


class Worker:
  """A running peer; use it in a `with` block, whose end ends the process in any case.

  The process is in a session of its own, so that Ctrl-C reaches only this one, which then closes
  the peer. Should this process be killed, the peer sees the end of its input and ends too.
  """

  def __init__(self, python: str, script: Path, threads: int):
    """Starts the peer and waits for its first line.

    Args:
      python: the interpreter.
      script: what it runs.
      threads: OpenMP threads.

    Raises:
      UserError: there is no such interpreter, or it lacks what the script imports.
    """
    self._python, self._left = python, b''
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
    # An idle OpenMP pool that spins would slow the other side down. This environment's packages are
    # not the peer's, and what it needs lies on disk.
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_THE_PEERS}
    environment |= {'OMP_WAIT_POLICY': 'PASSIVE', 'OMP_NUM_THREADS': str(threads),
                    'MKL_NUM_THREADS': str(threads), 'HF_HUB_OFFLINE': '1',
                    'TRANSFORMERS_VERBOSITY': 'error'}
    try:
      self._process = subprocess.Popen(
          [python, '-u', str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
          stderr=self._errors, env=environment, start_new_session=True)
    except OSError as error:
      self._errors.close()
      raise UserError(f'--peer_python={python}: {error.strerror}') from error
    try:
      self.about = self._read(START_S)
    except InfrastructureError as error:
      self.close()
      raise UserError(f'--peer_python={python}: {error}; it has to be a Python with torch and '
                      'transformers') from error
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> 'Worker':
    return self

  def __exit__(self, *unused_exception) -> None:
    self.close()

  def ask(self, do: str, **values: Any) -> dict[str, Any]:
    """Sends one request and returns the answer.

    Raises:
      InfrastructureError: the peer failed, died, or does not answer.
    """
    with contextlib.suppress(BrokenPipeError):  # reading then says how it ended
      self._process.stdin.write(json.dumps({'do': do, **values}).encode() + b'\n')
      self._process.stdin.flush()
    answer = self._read(ANSWER_S)
    if 'error' in answer:
      raise InfrastructureError(f'the peer failed in {do!r}: {answer["error"]}')
    return answer

  def close(self) -> None:
    """Ends the process."""
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.kill()
    self._process.wait()
    self._process.stdout.close()
    self._errors.close()

  def _read(self, limit_s: float) -> dict[str, Any]:
    end = time.monotonic() + limit_s
    while b'\n' not in self._left:
      ready, _, _ = select.select([self._process.stdout], [], [], max(0, end - time.monotonic()))
      if not ready:
        self._process.kill()  # its late answer would be taken for that to the next request
        raise InfrastructureError(f'the peer gave no answer for {limit_s:.0f} s')
      piece = os.read(self._process.stdout.fileno(), 65536)
      if not piece:
        self._process.wait()
        raise InfrastructureError(f'the peer ended with code {self._process.returncode}: '
                                  f'{self._last_error_line()}')
      self._left += piece
    line, _, self._left = self._left.partition(b'\n')
    try:
      answer = json.loads(line)
    except ValueError:
      answer = None
    if not isinstance(answer, dict):
      raise InfrastructureError('the peer answered with something other than JSON: '
                                f'{line[:80].decode(errors="replace")}')
    return answer

  def _last_error_line(self) -> str:
    self._errors.seek(0)
    lines = self._errors.read().decode(errors='replace').split('\n')
    return next((line.strip() for line in reversed(lines) if line.strip()), 'it said nothing')
