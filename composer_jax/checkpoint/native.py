"""The project's own folder of parameters for big checkpoints: chunked, resumable, checked.

One zarr3 array a leaf (`arrays/<name>`, written by TensorStore, readable by any zarr3 library) and
`store.json`: what the leaves are, the caller's `meta`, and a mark that is set when all is there.

* Each chunk carries a CRC-32C, checked on every read. `store.json` carries a CRC-32.
* A chunk file appears by a rename after its bytes are on the disk, and only whole chunks are
  written, so the file is the record that the chunk is done. There is no second mark, and no moment
  at which chunk and mark could disagree: a process killed before the rename leaves the chunk to be
  written again.
* Parameters have their dotted names in the parameter tree; arrays that belong to the checkpoint but
  are no parameters, such as scales of the quantised original, have names that start with `SIDE`.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from composer_jax.checkpoint import device_pieces
from composer_jax.checkpoint import leaves as leaves_lib
from composer_jax.checkpoint.disk import disk_errors, write_failure
from composer_jax.errors import UserError
from composer_jax.files import read_json, replacing

SIDE = 'side.'
_FILE = 'store.json'
_FORMAT = 1
_CRC_BYTES = 4
_CODECS = [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'crc32c'}]

Index = device_pieces.Index


@dataclasses.dataclass(frozen=True)
class Leaf:
  """What one array is.

  Attributes:
    shape: its axes.
    dtype: any NumPy or ml_dtypes dtype that zarr3 has.
    chunks: of one file, an axis each; the last chunk of an axis may reach beyond the array.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  chunks: tuple[int, ...]

  def __post_init__(self):
    for name, kind in (('shape', tuple), ('dtype', np.dtype), ('chunks', tuple)):
      object.__setattr__(self, name, kind(getattr(self, name)))
    if len(self.chunks) != len(self.shape) or any(
        not 1 <= chunk <= max(size, 1)
        for chunk, size in zip(self.chunks, self.shape, strict=True)):
      raise ValueError(f'{self.shape} cannot have chunks of {self.chunks}')

  @property
  def grid(self) -> tuple[int, ...]:
    """Returns the number of chunks along each axis."""
    return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))

  @property
  def file_bytes(self) -> int:
    """Returns the size of each chunk's file; those at an edge are filled up."""
    return math.prod(self.chunks) * self.dtype.itemsize + _CRC_BYTES


class ParamStore:
  """A folder of arrays, made with `create` or opened with `open`.

  Attributes:
    folder: where it lies.
    leaves: the arrays by dotted name.
    meta: what the caller gave to `create`.
    complete: False while it is being written.
  """

  def __init__(self, folder: Path, leaves: dict[str, Leaf], meta: dict[str, Any], complete: bool,
               max_pending_bytes: int = 0):
    self.folder, self.leaves, self.meta, self.complete = folder, leaves, meta, complete
    self._arrays: dict[str, ts.TensorStore] = {}
    self._max_pending_bytes = max_pending_bytes
    self._pending: collections.deque[tuple[Any, int]] = collections.deque()
    self._lock = threading.Lock()
    # Nothing is kept in memory between calls.
    self._context = ts.Context({'cache_pool': {'total_bytes_limit': 0}})

  @classmethod
  def create(cls, folder: str | os.PathLike, leaves: dict[str, Leaf],
             meta: dict[str, Any] | None = None, *,
             max_pending_bytes: int = 2**28) -> 'ParamStore':
    """Begins a store, or continues one of the same description, also when it is complete.

    One process writes to a folder at a time.

    Args:
      folder: made if missing; must hold nothing else.
      leaves: the arrays by dotted name.
      meta: JSON values, bytes or NumPy arrays to keep beside them.
      max_pending_bytes: of chunks that `write` has taken and the disk has not; one is always taken.

    Raises:
      UserError: the folder holds something else, or a store of another description.
      InfrastructureError: the disk is full.
    """
    path = Path(folder).absolute()
    store = cls(path, dict(leaves), dict(meta or {}), False, max_pending_bytes)
    if (path / _FILE).exists():
      store.complete = store._check_same(_read_description(path))
    else:
      if path.exists() and not path.is_dir():
        raise UserError(f'{path}: is no folder')
      for other in path.iterdir() if path.exists() else ():
        if not other.name.startswith(f'.{_FILE}.'):  # a draft of a killed process
          raise UserError(f'{path}: holds {other.name} and is no parameter store; '
                          'choose another folder')
    with disk_errors(f'{path}'):
      path.mkdir(parents=True, exist_ok=True)
      if not store.complete:
        store._remove_drafts()
        store._write_description()
    return store

  @classmethod
  def open(cls, folder: str | os.PathLike) -> 'ParamStore':
    """Opens a complete store for reading.

    Raises:
      UserError: there is none, it is unfinished, or something is damaged or missing.
    """
    path = Path(folder).absolute()
    if not (path / _FILE).exists():
      raise UserError(f'{path}: holds no {_FILE}, so it is no parameter store')
    content = _read_description(path)
    if not content['complete']:
      raise UserError(f'{path}: is unfinished; give the command that made it again')
    store = cls(path, _leaves_of(content), leaves_lib.from_json(content['meta']), True)
    store._check_chunks()
    return store

  def chunks(self, name: str) -> Iterator[Index]:
    """Gives the index of every chunk of a leaf, the last axis fastest."""
    leaf = self.leaves[name]
    for cell in itertools.product(*map(range, leaf.grid)):
      yield tuple(slice(i * chunk, min((i + 1) * chunk, size))
                  for i, chunk, size in zip(cell, leaf.chunks, leaf.shape, strict=True))

  def is_done(self, name: str, index: Index) -> bool:
    """Returns whether all chunks of an index are on the disk, from the names and sizes of files.

    Raises:
      ValueError: the index cuts through a chunk.
    """
    return all(self._chunk_is_there(name, cell) for cell in self._cells(name, index))

  def write(self, name: str, index: Index, array: np.ndarray) -> None:
    """Begins to write whole chunks; the array may be changed on return.

    Blocks while more than `max_pending_bytes` are on their way to the disk. May be called from
    several threads.

    Args:
      name: of the leaf.
      index: one slice an axis, along the borders of chunks.
      array: dtype of the leaf.

    Raises:
      ValueError: the store is complete, or index, shape or dtype do not fit the leaf.
      InfrastructureError: this chunk or one before could not be written.
    """
    leaf = self.leaves[name]
    if self.complete:
      raise ValueError(f'{self.folder} is complete')
    self._cells(name, index)
    bounds = _bounds(index, leaf.shape)
    if array.dtype != leaf.dtype or array.shape != tuple(s.stop - s.start for s in bounds):
      raise ValueError(f'{name}: {array.dtype}{list(array.shape)} does not fit '
                       f'{leaf.dtype} {bounds}')
    with self._lock, self._failures():
      self._wait_below(max(self._max_pending_bytes - array.nbytes, 0))
      write = self._array(name)[bounds].write(array)
      self._pending.append((write, array.nbytes))
      write.copy.result()

  def flush(self) -> None:
    """Waits until everything written is on the disk.

    Raises:
      InfrastructureError: it could not be written.
    """
    with self._lock, self._failures():
      self._wait_below(0)

  def finish(self) -> None:
    """Waits for the writes and marks the store as complete.

    Raises:
      ValueError: a chunk was not written.
      InfrastructureError: the disk is full.
    """
    self.flush()
    for name in self.leaves:
      with self._failures():
        self._array(name)  # an array without chunks has not been opened yet
      missing = [index for index in self.chunks(name) if not self.is_done(name, index)]
      if missing:
        raise ValueError(f'{len(missing)} chunks of {name} were not written, first {missing[0]}')
    self.complete = True
    with disk_errors(f'{self.folder}'):
      self._write_description()

  def read(self, name: str, index: Index | None = None) -> np.ndarray:
    """Returns a leaf, or any part of it.

    Raises:
      UserError: there is no such leaf, or a chunk of it is missing or damaged.
    """
    if name not in self.leaves:
      raise UserError(f'{self.folder}: holds no {name}')
    shape = self.leaves[name].shape
    bounds = _bounds(index or (), shape)
    array = self._array(name)
    try:
      return np.asarray(array[bounds].read().result())
    except ValueError as error:
      raise UserError(f'{self.folder}: {name} is damaged ({_fault(error)}); '
                      'make the folder again') from error

  def load(self, shardings: Any = None, dtype: Any = None,
           names: list[str] | None = None) -> dict[str, Any]:
    """Returns parameters as a nested dict of `jax.Array`, read piece by piece.

    Each device's piece of a leaf is read on its own, in slabs of 1 GiB at most, so that host memory
    does not grow with the model.

    Args:
      shardings: one for all, or a nested dict of them as the parameters are; None is the default
        device.
      dtype: what floating-point leaves become; None leaves them as stored.
      names: which leaves; None is all parameters, without the side arrays.

    Raises:
      UserError: a leaf is missing or damaged.
    """
    if names is None:
      names = [name for name in self.leaves if not name.startswith(SIDE)]
    default = shardings
    if shardings is None:
      default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = leaves_lib.flatten(shardings) if isinstance(shardings, dict) else {}
    flat = {}
    for name in names:
      if name not in self.leaves:
        raise UserError(f'{self.folder}: holds no {name}')
      leaf = self.leaves[name]
      floating = jax.numpy.issubdtype(leaf.dtype, np.floating)
      target = np.dtype(dtype) if dtype is not None and floating else leaf.dtype
      flat[name] = device_pieces.assemble(
          functools.partial(self.read, name), leaf, placed[name] if placed else default, target)
    return leaves_lib.nest(flat)

  def _array(self, name: str) -> ts.TensorStore:
    """Opens a leaf; what its own zarr.json says must be what `store.json` says."""
    if name not in self._arrays:
      try:
        self._arrays[name] = self._open_array(name)
      except ValueError as error:  # TensorStore's only exception
        if not self.complete and write_failure(error):
          raise
        raise UserError(f'{self.folder}: {name} is damaged ({_fault(error)}); '
                        'make the folder again') from error
    return self._arrays[name]

  def _open_array(self, name: str) -> ts.TensorStore:
    leaf = self.leaves[name]
    return ts.open({
        'driver': 'zarr3',
        'kvstore': {'driver': 'file', 'path': f'{self.folder / "arrays" / name}/'},
        'metadata': {
            'shape': list(leaf.shape), 'data_type': str(leaf.dtype), 'codecs': _CODECS,
            'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': list(leaf.chunks)}},
            'chunk_key_encoding': {'name': 'default', 'configuration': {'separator': '.'}}},
        'store_data_equal_to_fill_value': True,  # a chunk of zeros is no missing chunk
        'fill_missing_data_reads': False,
    }, open=True, create=not self.complete, context=self._context).result()

  def _wait_below(self, limit: int) -> None:
    while self._pending and sum(size for _, size in self._pending) > limit:
      self._pending[0][0].result()
      self._pending.popleft()

  def _failures(self):
    return disk_errors(f'{self.folder}', 'the chunks before are intact')

  def _cells(self, name: str, index: Index) -> list[tuple[int, ...]]:
    """Returns the chunks, by grid position, that an index consists of."""
    leaf = self.leaves[name]
    ranges = []
    parts = zip(_bounds(index, leaf.shape), leaf.chunks, leaf.shape, strict=True)
    for bounds, chunk, size in parts:
      if bounds.start % chunk or bounds.stop % chunk and bounds.stop != size:
        raise ValueError(f'{name}: {index} cuts through chunks of {leaf.chunks}')
      ranges.append(range(bounds.start // chunk, -(-bounds.stop // chunk)))
    return list(itertools.product(*ranges))

  def _chunk_file(self, name: str, cell: tuple[int, ...]) -> Path:
    return self.folder / 'arrays' / name / '.'.join(['c', *map(str, cell)])

  def _chunk_is_there(self, name: str, cell: tuple[int, ...]) -> bool:
    try:
      return os.stat(self._chunk_file(name, cell)).st_size == self.leaves[name].file_bytes
    except FileNotFoundError:
      return False

  def _check_chunks(self) -> None:
    for name, leaf in self.leaves.items():
      for cell in itertools.product(*map(range, leaf.grid)):
        if not self._chunk_is_there(name, cell):
          file = self._chunk_file(name, cell)
          fault = 'has another size than was written' if file.exists() else 'is missing'
          raise UserError(f'{file}: {fault}; make {self.folder} again')

  def _remove_drafts(self) -> None:
    """Removes what TensorStore had begun to write when its process was killed."""
    for draft in self.folder.glob('arrays/*/*.__lock'):
      draft.unlink()

  def _description(self) -> dict[str, Any]:
    leaves = {name: {'shape': list(leaf.shape), 'dtype': str(leaf.dtype),
                     'chunks': list(leaf.chunks)} for name, leaf in self.leaves.items()}
    return {'format': _FORMAT, 'leaves': leaves, 'meta': leaves_lib.to_json(self.meta)}

  def _write_description(self) -> None:
    content = self._description() | {'complete': self.complete}
    with replacing(self.folder / _FILE) as stream:
      json.dump(content | {'crc': _crc(content)}, stream, indent=1)

  def _check_same(self, found: dict[str, Any]) -> bool:
    """Returns whether the store on disk is complete."""
    wanted = json.loads(json.dumps(self._description()))
    for name in sorted(wanted['leaves'].keys() | found['leaves'].keys()):
      if wanted['leaves'].get(name) != found['leaves'].get(name):
        raise UserError(f'{self.folder}: holds a store of another description: {name} is '
                        f'{found["leaves"].get(name)} there, {wanted["leaves"].get(name)} here; '
                        'choose another folder')
    if wanted['meta'] != found['meta']:
      keys = [key for key in sorted(wanted['meta'].keys() | found['meta'].keys())
              if wanted['meta'].get(key) != found['meta'].get(key)]
      raise UserError(f'{self.folder}: holds a store of another description ({", ".join(keys)} '
                      'differ); choose another folder')
    return found['complete']


def _read_description(folder: Path) -> dict[str, Any]:
  file = folder / _FILE
  content = read_json(file, 'crc', 'format')
  if content['format'] != _FORMAT:
    raise UserError(f'{file}: has format {content["format"]}, this version reads {_FORMAT}')
  if content.pop('crc') != _crc(content):
    raise UserError(f'{file} is damaged: its checksum does not match; make the folder again')
  return content


def _leaves_of(content: dict[str, Any]) -> dict[str, Leaf]:
  # The string of an ml_dtypes dtype is known to NumPy once jax has been imported.
  return {name: Leaf(leaf['shape'], leaf['dtype'], leaf['chunks'])
          for name, leaf in content['leaves'].items()}


def _crc(content: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _bounds(index: Index, shape: tuple[int, ...]) -> Index:
  """Returns one slice an axis with start and stop."""
  whole = (*index, *[slice(None)] * (len(shape) - len(index)))
  return tuple(slice(*part.indices(size)[:2]) for part, size in zip(whole, shape, strict=True))


def _fault(error: ValueError) -> str:
  """Returns TensorStore's reason without its annotations."""
  text = str(error).split(' [')[0].split('\n')[0]
  return re.sub(r'^[A-Z_]+: (Error reading )?', '', text)[:300]
