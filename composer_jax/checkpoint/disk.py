"""A full disk told from other faults, in one line."""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator

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
  """Drops Orbax's own log records: each failure they describe is raised to our caller as well."""

  def filter(self, record: logging.LogRecord) -> bool:
    """Returns False for records written inside Orbax."""
    return f'{os.sep}orbax{os.sep}' not in record.pathname
