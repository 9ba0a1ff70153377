"""Checkpoints of a running stage: atomic, verified on reading, the newest good one wins."""

import contextlib
import dataclasses
import gc
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from composer_jax.checkpoint import leaves
from composer_jax.checkpoint.disk import UNRAISABLE, OrbaxFilter, disk_errors
from composer_jax.errors import InfrastructureError, UserError

_TEMPORARY = '*.orbax-checkpoint-tmp*'


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a checkpoint held.

  Attributes:
    step: the step it was saved at.
    state: tree of arrays with the structure of the target.
    loader_state: what the data iterator's `get_state` had returned.
    extra: the caller's cursors.
  """

  step: int
  state: Any
  loader_state: Any
  extra: dict[str, Any]


class CheckpointManager:
  """Saves in the background, keeps the newest few, and reads back only what is intact.

  A checkpoint is one atomic unit: arrays, data cursor and the caller's cursors appear together, by
  the rename of a finished folder, or not at all.
  """

  def __init__(self, folder: str | os.PathLike, *, max_to_keep: int = 2):
    """Opens (and makes) the folder; leftovers of an interrupted save are removed.

    Args:
      folder: one sub-folder a step is kept in it.
      max_to_keep: older ones are deleted after a newer one is complete; 2 or more leaves something
        to fall back to.
    """
    self.folder = Path(folder).absolute()
    _quiet_orbax()
    with disk_errors(f'{self.folder}'):
      self.folder.mkdir(parents=True, exist_ok=True)
    self._remove_leftovers()
    options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=False)
    self._manager = ocp.CheckpointManager(self.folder, options=options)
    self._saving: int | None = None

  def save(self, step: int, state: Any, *, loader_state: Any = None,
           extra: dict[str, Any] | None = None) -> None:
    """Starts to save and returns when `state` may be donated; the writing goes on behind.

    Args:
      step: names the checkpoint; a step that is already complete is left as it is.
      state: any tree of arrays.
      loader_state: JSON values, bytes or NumPy arrays.
      extra: JSON values, bytes or NumPy arrays.

    Raises:
      InfrastructureError: this save or the one before could not be written.
    """
    self.wait()
    if step in self.steps():
      return
    flat = leaves.flatten(state)
    meta = {'step': step, 'leaves': leaves.manifest(flat),
            'loader_state': leaves.to_json(loader_state), 'extra': leaves.to_json(extra or {})}
    self._saving = step
    with self._failures():
      self._manager.save(step, force=True, args=ocp.args.Composite(
          state=ocp.args.StandardSave(flat), meta=ocp.args.JsonSave(meta)))

  def wait(self) -> None:
    """Blocks until what was saved is complete on disk.

    Raises:
      InfrastructureError: it could not be written.
    """
    with self._failures():
      self._manager.wait_until_finished()
    self._saving = None

  def steps(self) -> list[int]:
    """Returns the steps that are complete on disk, rising."""
    # From the names alone: Orbax's memory includes unfinished steps, and its own listing looks into
    # folders that its writer thread may be deleting.
    return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

  def restore_latest(self, target: Any) -> Restored | None:
    """Reads the newest checkpoint that is intact.

    Damaged newer ones are renamed to `STEP.unreadable`, with a warning.

    Args:
      target: tree of arrays (or `jax.ShapeDtypeStruct`) with the wanted structure and sharding.

    Returns:
      None when there is no checkpoint at all.

    Raises:
      UserError: the checkpoint is of another model or optimizer.
      InfrastructureError: there are checkpoints and none can be read.
    """
    self.wait()
    damaged: list[int] = []
    for step in reversed(self.steps()):
      try:
        with _quiet_coroutines():
          restored = self._restore(step, target)
      except (UserError, MemoryError):
        raise
      except Exception as error:  # noqa: BLE001 (Orbax raises bare Exception for unreadable arrays)
        print(f'warning: checkpoint {self.folder / str(step)} is damaged '
              f'({_first_line(error)}); trying the one before', file=sys.stderr)
        damaged.append(step)
        continue
      self._set_aside(damaged)
      return restored
    if damaged:
      raise InfrastructureError(f'{self.folder}: none of the checkpoints {damaged} can be read; '
                                'move the folder away to start this stage over')
    return None

  def _set_aside(self, steps: list[int]) -> None:
    """Makes place for new checkpoints of these steps; the cause may have been a passing one."""
    for step in steps:
      aside = self.folder / f'{step}.unreadable'
      shutil.rmtree(aside, ignore_errors=True)
      (self.folder / str(step)).rename(aside)
    if steps:
      self._manager.reload()

  def _restore(self, step: int, target: Any) -> Restored:
    meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
    wanted = leaves.flatten(target)
    leaves.check_same_shape(meta['leaves'], wanted, f'checkpoint {self.folder / str(step)}')
    flat = self._manager.restore(step, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(_abstract(wanted))))['state']
    leaves.check_content(meta['leaves'], flat)
    state = jax.tree.unflatten(jax.tree.structure(target), [flat[name] for name in wanted])
    return Restored(step, state, leaves.from_json(meta['loader_state']),
                    leaves.from_json(meta['extra']))

  def close(self) -> None:
    """Waits for the writer and ends its threads."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def __enter__(self) -> 'CheckpointManager':
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    if error is None:
      self.close()
    else:  # the block's own error is the one to report
      with contextlib.suppress(InfrastructureError):
        self.close()

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    """Reports a failed write, and frees what it had already put on the disk."""
    try:
      steps = self.steps()
      kept = f'checkpoint {steps[-1]} is intact' if steps else 'there was none before'
      with disk_errors(f'checkpoint {self.folder / str(self._saving)}', kept):
        yield
    except InfrastructureError:
      self._saving = None
      self._remove_leftovers()
      self._manager.reload()  # forget the step that was never completed
      raise

  def _remove_leftovers(self) -> None:
    for path in self.folder.glob(_TEMPORARY):
      shutil.rmtree(path)


def save_params(folder: str | os.PathLike, params: dict[str, Any],
                meta: dict[str, Any] | None = None) -> None:
  """Writes parameters for the next stage, or for `api.load`; an older version is replaced.

  Args:
    folder: appears complete or not at all.
    params: nested dict of arrays; keys hold no dots.
    meta: JSON values to keep beside them, such as the model config.

  Raises:
    InfrastructureError: the disk is full.
  """
  path = Path(folder).absolute()
  _quiet_orbax()
  flat = leaves.flatten(params)
  content = {'leaves': leaves.manifest(flat), 'meta': leaves.to_json(meta or {})}
  with disk_errors(f'{path}'):
    path.parent.mkdir(parents=True, exist_ok=True)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
      writer.save(path, force=True, args=ocp.args.Composite(
          state=ocp.args.StandardSave(flat), meta=ocp.args.JsonSave(content)))


def load_params(folder: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads what `save_params` wrote.

  Returns:
    The nested dict of arrays on the default device, and `meta`.

  Raises:
    UserError: there is nothing of the kind in the folder.
    InfrastructureError: the files are damaged.
  """
  path = Path(folder).absolute()
  if not (path / 'meta').is_dir():
    raise UserError(f'{path}: holds no parameters')
  _quiet_orbax()
  try:
    with _quiet_coroutines(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
      content = reader.restore(path, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
      wanted = {name: jax.ShapeDtypeStruct(tuple(leaf['shape']), leaf['dtype'])
                for name, leaf in content['leaves'].items()}
      flat = reader.restore(path, args=ocp.args.Composite(
          state=ocp.args.StandardRestore(_abstract(wanted))))['state']
    leaves.check_content(content['leaves'], flat)
  except Exception as error:  # Orbax raises bare Exception when an array cannot be read
    raise InfrastructureError(f'{path}: damaged parameters ({_first_line(error)})') from error
  return leaves.nest(flat), leaves.from_json(content['meta'])


def _abstract(flat: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape, dtype and sharding of each leaf; the default device where none is given."""
  local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype,
                                     sharding=getattr(leaf, 'sharding', None) or local)
          for name, leaf in flat.items()}


def _first_line(error: BaseException) -> str:
  return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _quiet_orbax() -> None:
  """Keeps what Orbax says of its failures off the screen: they are raised to the caller."""
  UNRAISABLE.install()
  for logger in (logging.getLogger('absl'), logging.getLogger('asyncio')):
    if not any(isinstance(known, OrbaxFilter) for known in logger.filters):
      logger.addFilter(OrbaxFilter())


@contextlib.contextmanager
def _quiet_coroutines() -> Iterator[None]:
  """Drops the "Exception ignored" reports that a failing read in the block leaves behind."""
  with UNRAISABLE.quiet():
    try:
      yield
    except Exception:
      with warnings.catch_warnings():
        warnings.simplefilter('ignore', RuntimeWarning)  # coroutines that were never awaited
        gc.collect()  # so that what is left of the failed read reports now and not later
      raise
