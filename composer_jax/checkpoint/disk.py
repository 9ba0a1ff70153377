"""A full disk told from other faults, in one line."""

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from composer_jax.errors import InfrastructureError

_FULL_ERRNO = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = ('No space left on device', 'Disk quota exceeded')


@contextlib.contextmanager
def disk_errors(what: str, kept: str = '') -> Iterator[None]:
  """Turns a failed write inside the block into one clear line.

  Args:
    what: what was being written, for the message.
    kept: what is still intact, for the message.

  Raises:
    InfrastructureError: the disk is full, or the file system refused the write.
  """
  try:
    yield
  except Exception as error:  # TensorStore reports a full disk as a ValueError
    reason = write_failure(error)
    if reason is None:
      raise
    tail = f'; {kept}' if kept else ''
    raise InfrastructureError(f'{what} was not written: {reason}{tail}') from error


def write_failure(error: BaseException) -> str | None:
  """Returns why the file system refused a write, None when the error is of another kind."""
  seen = set()
  link: BaseException | None = error
  while link is not None and id(link) not in seen:
    seen.add(id(link))
    if _is_full(link):
      return 'the disk is full'
    if isinstance(link, OSError):
      return link.strerror or str(link)
    if 'os_error_code=' in str(link):
      return str(link).rpartition(': ')[2]
    link = link.__cause__ or link.__context__
  return None


def _is_full(error: BaseException) -> bool:
  by_number = isinstance(error, OSError) and error.errno in _FULL_ERRNO
  return by_number or any(text in str(error) for text in _FULL_TEXT)


class OrbaxFilter(logging.Filter):
  """Drops log records about failures that are raised to our caller as well.

  These are Orbax's own, and asyncio's about the writes that Orbax gave up after the first failed.
  """

  def filter(self, record: logging.LogRecord) -> bool:
    """Returns False for records written inside Orbax, and for writes the disk refused."""
    error = record.exc_info[1] if record.exc_info else None
    refused = record.name == 'asyncio' and error is not None and write_failure(error) is not None
    return not refused and f'{os.sep}orbax{os.sep}' not in record.pathname


class Unraisable:
  """The process's hook for failures in places that cannot raise; installed once, for good.

  TensorStore's and asyncio's threads report to it at any time. The interpreter holds no reference
  to a hook while it runs, so one that is put back meanwhile is freed under a running thread, which
  ends the process. Blocks that want silence therefore say so here, and the hook stays.
  """

  def __init__(self):
    self._shown: Callable[[Any], Any] | None = None
    self._lock = threading.Lock()
    self._quiet_blocks = 0

  def install(self) -> None:
    """Puts the hook in front of the present one; calling it again does nothing."""
    with self._lock:
      if self._shown is None:
        self._shown = sys.unraisablehook
        sys.unraisablehook = self

  @contextlib.contextmanager
  def quiet(self) -> Iterator[None]:
    """Hides what coroutines report that a failing read in the block leaves behind."""
    with self._lock:
      self._quiet_blocks += 1
    try:
      yield
    finally:
      with self._lock:
        self._quiet_blocks -= 1

  def __call__(self, report: Any) -> None:
    """Shows a report, unless it is about something that is raised to our caller as well."""
    trace = report.exc_traceback
    outermost = trace.tb_frame.f_code.co_filename if trace else ''
    closed = str(report.exc_value) == 'Event loop is closed'
    late = closed and f'{os.sep}asyncio{os.sep}' in outermost  # after a failed save
    if late or self._quiet_blocks and (closed or hasattr(report.object, 'cr_code')):
      return
    self._shown(report)


UNRAISABLE = Unraisable()
