"""Files that survive kills: replaced whole, or appended to line by line."""

import contextlib
import fcntl
import glob
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any, Literal

from composer_jax.errors import UserError


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: Literal['w', 'wb'] = 'w') -> Iterator[IO]:
  """Gives a stream whose content takes the place of `path` when the block ends.

  The content is on the disk before the name points to it. A block that raises leaves `path` as it
  was, and no draft; the draft of a process that was killed goes with the next replacement. Text is
  UTF-8.

  Raises:
    OSError: the disk is full, or the folder cannot be written.
  """
  path = pathlib.Path(path)
  draft = path.with_name(f'.{path.name}.{os.getpid()}.tmp')  # two processes may write one page
  _sweep(path)
  try:
    with draft.open(mode, encoding='utf-8' if mode == 'w' else None) as stream:
      yield stream
      stream.flush()
      os.fsync(stream.fileno())
    draft.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      draft.unlink()
    raise


def fsync_folder(path: str | os.PathLike) -> None:
  """Waits until the names in a folder are on the disk.

  Raises:
    OSError: the disk refuses it.
  """
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def locked(path: str | os.PathLike, busy: str) -> Iterator[None]:
  """Holds a lock file for this process; the kernel lets go of it however the process ends.

  Args:
    path: made, and removed at the end.
    busy: what to say when another process holds it.

  Raises:
    UserError: another process holds it.
    OSError: the file cannot be made.
  """
  descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # The holder before may have removed the file between our open and our lock.
      ours = os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(descriptor))
    except BlockingIOError:
      ours = False
    if not ours:
      raise UserError(busy)
    try:
      yield
    finally:
      with contextlib.suppress(OSError):
        os.unlink(path)
  finally:
    os.close(descriptor)


def read_json(path: str | os.PathLike, *required: str) -> dict[str, Any]:
  """Returns the object of a JSON file.

  Args:
    path: the file.
    *required: keys that it must have.

  Raises:
    UserError: it cannot be read, or is damaged: no JSON, no object, or without a required key.
  """
  try:
    value = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  except OSError as error:
    raise UserError(f'{path}: cannot be read ({error.strerror or error})') from error
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is damaged: {error}') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} is damaged: is no JSON object')
  for key in required:
    if key not in value:
      raise UserError(f'{path} is damaged: holds no {key}')
  return value


def json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the objects of a JSONL file, without an unfinished last line that a kill has left.

  Raises:
    UserError: another line is no JSON object.
  """
  rows = []
  for number, line in enumerate(pathlib.Path(path).read_bytes().split(b'\n')[:-1], 1):
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if not isinstance(row, dict):
      raise UserError(f'{path}:{number}: is damaged (no JSON object)')
    rows.append(row)
  return rows


def _sweep(path: pathlib.Path) -> None:
  """Removes drafts of `path` whose process is gone."""
  for old in path.parent.glob(f'.{glob.escape(path.name)}.*.tmp'):
    pid = old.name.split('.')[-2]
    if pid.isdigit() and not os.path.exists(f'/proc/{pid}'):
      with contextlib.suppress(OSError):
        old.unlink()
