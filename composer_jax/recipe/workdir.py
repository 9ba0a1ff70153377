"""The run folder: who owns it, what is finished in it, and how its files are written."""

import contextlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from composer_jax.config import as_dict, fingerprint
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.files import locked, read_json, replacing

FOREIGN_KEYS = ('stages',)  # which stages to run may change from one call to the next


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON so that a reader sees either the old file or the whole new one.

  Raises:
    InfrastructureError: the disk is full or the folder cannot be written.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
      json.dump(as_dict(value), file, indent=1)
      file.write('\n')
  except OSError as error:
    raise InfrastructureError(f'cannot write {path}: {error.strerror or error}') from error


def claim(workdir: pathlib.Path, config: Any, version: dict[str, str]) -> None:
  """Creates the run folder for a config, or checks that it already belongs to that config.

  Raises:
    UserError: the folder holds another config (the first differing key is named), or holds files
      that are not a run.
    InfrastructureError: the folder cannot be created or written.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except (FileExistsError, NotADirectoryError) as error:
    raise UserError(f'--workdir={workdir} is not a folder') from error
  except OSError as error:
    raise InfrastructureError(f'cannot create {workdir}: {error.strerror or error}') from error
  path = workdir / 'config.json'
  resolved = as_dict(config)
  if not path.exists():
    strangers = foreign_files(workdir)
    if strangers:
      raise UserError(f'--workdir={workdir} is not empty and holds no run ({strangers[0]}, ...)')
    write_json(path, {'run_id': uuid.uuid4().hex[:12], 'config': resolved,
                      'fingerprint': fingerprint(_identity(resolved)), 'version': version})
    return
  stored = read_json(path, 'config')['config']
  difference = first_difference(_identity(stored), _identity(resolved))
  if difference:
    key, old, new = difference
    raise UserError(f'--workdir={workdir} belongs to another config: {key} is {old!r} there and '
                    f'{new!r} here; choose another folder')


def foreign_files(folder: pathlib.Path) -> list[str]:
  """Returns the names in a folder that is to become a run or a sweep; hidden ones do not count."""
  return sorted(p.name for p in folder.iterdir() if not p.name.startswith('.'))


def _identity(config: dict[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in config.items() if k not in FOREIGN_KEYS}


def first_difference(old: Any, new: Any, path: str = '') -> tuple[str, Any, Any] | None:
  """Returns (key path, old value, new value) of the first difference, or None."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in sorted(old.keys() | new.keys()):
      found = first_difference(old.get(key), new.get(key), f'{path}.{key}' if path else key)
      if found:
        return found
    return None
  return None if old == new else (path, old, new)


@contextlib.contextmanager
def exclusive(workdir: pathlib.Path) -> Iterator[None]:
  """Holds the run folder for this process; the kernel lets go of it however the process ends.

  Raises:
    UserError: another process is running in the folder.
  """
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(
          locked(workdir / '.lock', f'--workdir={workdir}: another process is running there'))
    except OSError as error:
      raise InfrastructureError(
          f'cannot write in {workdir}: {error.strerror or error}') from error
    yield


def finished(stage_dir: pathlib.Path, stage_fingerprint: str) -> dict[str, Any] | None:
  """Returns the summary of a finished stage, or None when there is still work to do.

  Raises:
    UserError: the stage was finished under other settings.
  """
  path = stage_dir / 'summary.json'
  if not path.exists():
    return None
  summary = read_json(path, 'fingerprint')
  if summary['fingerprint'] != stage_fingerprint:
    raise UserError(f'{stage_dir} was made with other settings; choose another --workdir')
  return summary


def adopt(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a finished folder into another run; `target` is the whole copy or what it was before.

  Raises:
    InfrastructureError: the disk is full, or a file cannot be read.
  """
  draft = target.with_name(f'.{target.name}.part')
  try:
    if draft.exists():
      shutil.rmtree(draft)
    shutil.copytree(source, draft)
    if target.exists():
      shutil.rmtree(target)
    draft.replace(target)
  except OSError as error:  # that of copytree is a list of errors, without a number
    raise InfrastructureError(f'cannot copy {source} to {target}: '
                              f'{error.strerror or error}') from error
