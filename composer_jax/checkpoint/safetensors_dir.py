"""Folders of safetensors shards, read and written tensor by tensor with bounded memory.

The `safetensors` package is not used here: its NumPy front end has neither bfloat16 nor FP8, it
maps whole files, which leaves the resident size of a 600 GB import to the kernel, and it writes
files from dicts that hold all tensors at once.
"""

import contextlib
import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.checkpoint.disk import disk_errors
from composer_jax.checkpoint.safetensors_format import (
  DTYPES,
  INDEX,
  SINGLE,
  TensorInfo,
  read_header,
  read_index,
  unreadable,
)
from composer_jax.errors import UserError
from composer_jax.files import fsync_folder, replacing

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_NUMBERED = re.compile(r'-(\d+)-of-(\d+)\.safetensors$')


class TensorFolder:
  """The tensors of a folder, by name; nothing but the headers is read until `read`.

  Attributes:
    path: the folder.
    infos: every tensor, in the order of the shards' names and of the bytes in them.
    largest_file_bytes: size of the largest shard.
  """

  def __init__(self, path: str | os.PathLike):
    """Reads and checks the index and all headers.

    Raises:
      UserError: there are no shards, one is missing or damaged, or index and shards disagree.
    """
    self.path = Path(path)
    if not self.path.is_dir():
      raise UserError(f'{self.path}: is no folder')
    index = self.path / INDEX
    placed = read_index(index) if os.path.lexists(index) else None
    self.infos: dict[str, TensorInfo] = {}
    self.largest_file_bytes = 0
    for file in self._shards(placed):
      found, size = read_header(file)
      self.largest_file_bytes = max(self.largest_file_bytes, size)
      for name, info in found.items():
        if name in self.infos:
          raise UserError(f'{file}: {name} is also in {self.infos[name].file.name}; remove the '
                          'file that does not belong to this checkpoint')
        self.infos[name] = info
    if placed is not None:
      self._check_index(placed)

  def read(self, name: str, rows: slice | None = None) -> np.ndarray:
    """Returns a tensor, or some rows of its first axis, from exactly their bytes.

    Args:
      name: one of `infos`.
      rows: with step 1; None is all.

    Raises:
      UserError: there is no such tensor, or the file has changed or cannot be read.
    """
    info = self.infos.get(name)
    if info is None:
      raise UserError(f'{self.path}: holds no tensor {name}')
    shape, start = info.shape, info.start
    if rows is not None:
      first, last, step = rows.indices(shape[0])
      if step != 1:
        raise ValueError('rows must have step 1')
      row_bytes = math.prod(shape[1:]) * info.dtype.itemsize
      shape = (max(last - first, 0), *shape[1:])
      start += first * row_bytes
    array = np.empty(shape, info.dtype)
    _read_into(info.file, start, array.reshape(-1).view(np.uint8), name)
    return array

  def sample(self, name: str, size: int) -> bytes:
    """Returns at most `size` bytes from the middle of a tensor; all of one that has no more.

    Raises:
      UserError: the file has changed or cannot be read.
    """
    info = self.infos[name]
    size = min(size, info.nbytes)
    piece = np.empty(size, np.uint8)
    _read_into(info.file, info.start + (info.nbytes - size) // 2, piece, name)
    return piece.tobytes()

  def _shards(self, placed: dict[str, str] | None) -> list[Path]:
    if placed is not None:
      files = [self.path / shard for shard in sorted(set(placed.values()))]
    elif os.path.lexists(self.path / SINGLE):
      files = [self.path / SINGLE]
    else:
      files = sorted(self.path.glob('*.safetensors'))
      _check_count(files)
    if not files:
      raise UserError(f'{self.path}: holds no *.safetensors')
    for file in files:
      if not file.is_file():
        broken = ' (a symlink that points nowhere)' if file.is_symlink() else ''
        raise UserError(f'{file}: is missing{broken}; download it again')
    return files

  def _check_index(self, placed: dict[str, str]) -> None:
    for name, shard in placed.items():
      if name not in self.infos:
        raise UserError(f'{self.path / INDEX}: names {name}, which no shard holds; '
                        'download index and shards again')
      if self.infos[name].file.name != shard:
        raise UserError(f'{self.path / INDEX}: places {name} in {shard}, it is in '
                        f'{self.infos[name].file.name}; download the index again')
    for name, info in self.infos.items():
      if name not in placed:
        raise UserError(f'{info.file}: holds {name}, which {INDEX} does not name; '
                        'download the index again')


class TensorWriter:
  """Writes tensors of a plan into shards, one in memory at a time; a context manager.

  Nothing in the folder looks finished until the block has ended with everything written: shards are
  hidden drafts until then, and the index comes last.
  """

  def __init__(self, folder: str | os.PathLike,
               plan: list[tuple[str, np.dtype, tuple[int, ...]]], max_shard_bytes: int,
               metadata: dict[str, str]):
    """Makes the folder and divides the plan into shards.

    Args:
      folder: made if missing; must not hold a checkpoint.
      plan: name, dtype and shape of each tensor in the order of writing.
      max_shard_bytes: of the tensors' data; a tensor that is larger gets a shard of its own.
      metadata: for the header of each shard, such as `{'format': 'pt'}`.

    Raises:
      UserError: the folder holds a checkpoint already.
      ValueError: a name appears twice, or the format has no such dtype.
      InfrastructureError: the folder cannot be made.
    """
    self.folder = Path(folder)
    self._metadata = dict(metadata)
    self._plan = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in plan]
    names = [name for name, *_ in self._plan]
    unknown = {str(dtype) for _, dtype, _ in self._plan if dtype not in _NAMES}
    if not names or len(set(names)) != len(names) or '__metadata__' in names or unknown:
      raise ValueError(f'the plan is empty, names a tensor twice or has dtypes {unknown}')
    with disk_errors(f'{self.folder}'):
      self.folder.mkdir(parents=True, exist_ok=True)
      for old in self.folder.glob('.*.safetensors.draft'):  # left behind by a killed writer
        old.unlink()
    for old in sorted([*self.folder.glob('*.safetensors'), *self.folder.glob(INDEX)]):
      raise UserError(f'{self.folder}: holds {old.name} already; choose another folder')
    self._shards = _divide(self._plan, max_shard_bytes)
    self._position = 0  # of the next tensor in the plan
    self._rows = 0  # of that tensor, already written
    self._shard = -1
    self._stream: Any = None
    self._places: dict[str, int] = {}  # name -> first byte, in the open shard

  def write(self, name: str, array: np.ndarray) -> None:
    """Writes the next tensor of the plan.

    Raises:
      ValueError: it is not the next one, or has another dtype or shape.
      InfrastructureError: the disk is full.
    """
    self._append(name, array, whole=True)

  def write_rows(self, name: str, array: np.ndarray) -> None:
    """Writes the next rows (first axis) of the next tensor of the plan.

    Raises:
      ValueError: they do not continue the plan, or have another dtype or shape.
      InfrastructureError: the disk is full.
    """
    self._append(name, array, whole=False)

  def __enter__(self) -> 'TensorWriter':
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    try:
      if error is None:
        if self._position < len(self._plan):
          raise ValueError(f'{self._plan[self._position][0]} was not written')
        self._publish()
    finally:
      if self._stream is not None:
        self._stream.close()
      for number in range(len(self._shards)):
        with contextlib.suppress(OSError):
          self._draft(number).unlink(missing_ok=True)

  def _append(self, name: str, array: np.ndarray, *, whole: bool) -> None:
    if self._position == len(self._plan):
      raise ValueError(f'{name} comes after the end of the plan')
    expected, dtype, shape = self._plan[self._position]
    wanted = shape if whole else (len(array), *shape[1:])
    if (name, array.dtype, array.shape) != (expected, dtype, wanted) or whole and self._rows:
      raise ValueError(f'{name} {array.dtype}{list(array.shape)} is not what the plan says: '
                       f'{expected} {dtype}{list(shape)}, {self._rows} rows written')
    if not whole and self._rows + len(array) > shape[0]:
      raise ValueError(f'{name} has {shape[0]} rows, not {self._rows + len(array)}')
    with disk_errors(f'{self.folder}', 'no part of it is kept'):
      if self._stream is None:
        self._open_next()
      row_bytes = math.prod(shape[1:]) * dtype.itemsize
      start = self._places[name] + (0 if whole else self._rows * row_bytes)
      _write_from(self._stream.fileno(), start, array)
      self._rows += 0 if whole else len(array)
      if whole or self._rows == shape[0]:
        self._position, self._rows = self._position + 1, 0
        if name == self._shards[self._shard][-1][0]:
          self._close_shard()

  def _open_next(self) -> None:
    self._shard += 1
    # Wide dtypes first, as the `safetensors` package orders them: every tensor is aligned then.
    placed = sorted(self._shards[self._shard], key=lambda tensor: -tensor[1].itemsize)
    header: dict[str, Any] = {'__metadata__': self._metadata} if self._metadata else {}
    end = 0
    for name, dtype, shape in placed:
      start, end = end, end + math.prod(shape) * dtype.itemsize
      header[name] = {'dtype': _NAMES[dtype], 'shape': list(shape), 'data_offsets': [start, end]}
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % 8)
    self._places = {name: 8 + len(text) + header[name]['data_offsets'][0] for name, *_ in placed}
    self._stream = self._draft(self._shard).open('wb', buffering=0)
    _write_from(self._stream.fileno(), 0,
                np.frombuffer(struct.pack('<Q', len(text)) + text, np.uint8))

  def _close_shard(self) -> None:
    os.fsync(self._stream.fileno())
    self._stream.close()
    self._stream = None

  def _publish(self) -> None:
    with disk_errors(f'{self.folder}'):
      for number in range(len(self._shards)):
        self._draft(number).rename(self.folder / self._name(number))
      if len(self._shards) > 1:
        total = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self._plan)
        placed = {name: self._name(number) for number, shard in enumerate(self._shards)
                  for name, *_ in shard}
        with replacing(self.folder / INDEX) as stream:
          json.dump({'metadata': {'total_size': total}, 'weight_map': placed}, stream, indent=2)
      fsync_folder(self.folder)

  def _name(self, number: int) -> str:
    count = len(self._shards)
    return f'model-{number + 1:05}-of-{count:05}.safetensors' if count > 1 else SINGLE

  def _draft(self, number: int) -> Path:
    return self.folder / f'.{self._name(number)}.draft'


def _divide(plan: list[tuple[str, np.dtype, tuple[int, ...]]],
            limit: int) -> list[list[tuple[str, np.dtype, tuple[int, ...]]]]:
  """Returns the plan in runs of at most `limit` bytes, one tensor at least."""
  shards: list[list[Any]] = []
  room = 0
  for tensor in plan:
    size = math.prod(tensor[2]) * tensor[1].itemsize
    if not shards or size > room:
      shards.append([])
      room = limit
    shards[-1].append(tensor)
    room -= size
  return shards


def _check_count(files: list[Path]) -> None:
  """Checks that numbered shards without an index are all there."""
  numbered = [match for file in files if (match := _NUMBERED.search(file.name))]
  have = {int(match[1]) for match in numbered}
  for match in numbered:
    missing = sorted(set(range(1, int(match[2]) + 1)) - have)
    if missing:
      raise UserError(f'{files[0].parent}: shard {missing[0]} of {int(match[2])} is missing; '
                      'download it again')


def _write_from(descriptor: int, start: int, array: np.ndarray) -> None:
  """Writes the bytes of an array at a place of a file."""
  data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  done = 0
  while done < data.size:  # one call takes 2 GiB at most
    done += os.pwrite(descriptor, data[done:].data, start + done)


def _read_into(file: Path, start: int, buffer: np.ndarray, name: str) -> None:
  """Fills the bytes of `buffer` from the file."""
  with unreadable(file):
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
      done = 0
      while done < buffer.size:  # one call gives 2 GiB at most
        count = os.preadv(descriptor, [buffer[done:].data], start + done)
        if not count:
          raise UserError(f'{file}: {name} ends after {done} of {buffer.size} bytes; '
                          'the file was changed while it was read')
        done += count
    finally:
      os.close(descriptor)
