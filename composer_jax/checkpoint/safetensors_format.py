"""The safetensors format: one checked header at a time.

A file is eight bytes (little-endian length of the header), a JSON header
`{name: {dtype, shape, data_offsets}}`, and the tensors' bytes without holes; several files come
with `model.safetensors.index.json` (https://github.com/huggingface/safetensors, README).
"""

import contextlib
import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.errors import UserError

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
DTYPES = {
    'BOOL': np.bool_, 'U8': np.uint8, 'I8': np.int8, 'U16': np.uint16, 'I16': np.int16,
    'U32': np.uint32, 'I32': np.int32, 'U64': np.uint64, 'I64': np.int64,
    'F16': np.float16, 'BF16': ml_dtypes.bfloat16, 'F32': np.float32, 'F64': np.float64,
    'F8_E4M3': ml_dtypes.float8_e4m3fn, 'F8_E5M2': ml_dtypes.float8_e5m2,
    'F8_E8M0': ml_dtypes.float8_e8m0fnu, 'C64': np.complex64,
}
_HEADER_LIMIT = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies.

  Attributes:
    dtype: NumPy or ml_dtypes dtype.
    shape: its axes.
    file: the shard.
    start: of its first byte, counted from the beginning of the file.
    stop: behind its last byte.
  """

  dtype: np.dtype
  shape: tuple[int, ...]
  file: Path
  start: int
  stop: int

  @property
  def nbytes(self) -> int:
    """Returns the size in bytes."""
    return self.stop - self.start


def read_index(path: Path) -> dict[str, str]:
  """Returns tensor name -> file name.

  Raises:
    UserError: the file is damaged, or places a tensor outside of its folder.
  """
  with unreadable(path):
    content = _parse(path, path.read_bytes())
  placed = content.get('weight_map')
  if not isinstance(placed, dict) or not placed:
    raise UserError(f'{path} is damaged: holds no weight_map; download it again')
  for name, shard in placed.items():
    # A shard outside of the folder is somebody else's file.
    if not isinstance(shard, str) or not shard or shard in ('.', '..') or set(shard) & set('/\\\0'):
      raise UserError(f'{path}: places {name} in {shard!r}, which is no file name in this folder')
  return placed


def read_header(file: Path) -> tuple[dict[str, TensorInfo], int]:
  """Returns a shard's tensors in the order of their bytes, and the size of the file.

  Raises:
    UserError: the file is damaged or truncated, names what is wrong.
  """
  with unreadable(file), file.open('rb') as stream:
    size = os.fstat(stream.fileno()).st_size
    head = stream.read(8)
    length = struct.unpack('<Q', head)[0] if len(head) == 8 else 0
    if len(head) < 8 or length > size - 8:
      raise UserError(f'{file} is truncated: its header needs {8 + length} bytes, the file has '
                      f'{size}; download it again')
    if length > _HEADER_LIMIT:
      raise UserError(f'{file} is damaged: a header of {length} bytes is not allowed')
    content = _parse(file, stream.read(length))
  content.pop('__metadata__', None)
  base = 8 + length
  infos = {name: _info(file, name, entry, base) for name, entry in content.items()}
  infos = dict(sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)))
  _check_layout(file, infos, base, size)
  return infos, size


def _info(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
  """Returns one checked entry of a header."""
  where = f'{file}: {name}'
  if not isinstance(entry, dict) or not {'dtype', 'shape', 'data_offsets'} <= entry.keys():
    raise UserError(f'{where} is damaged: its header has no dtype, shape and data_offsets')
  shape, offsets = entry['shape'], entry['data_offsets']
  if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
    raise UserError(f'{where} is damaged: shape {shape} or data_offsets {offsets} are no sizes')
  if not isinstance(entry['dtype'], str) or entry['dtype'] not in DTYPES:
    raise UserError(f'{where} has the unknown dtype {entry["dtype"]}; known are {" ".join(DTYPES)}')
  dtype = np.dtype(DTYPES[entry['dtype']])
  needed = math.prod(shape) * dtype.itemsize
  if offsets[1] - offsets[0] != needed:
    raise UserError(f'{where} is damaged: {entry["dtype"]}{shape} takes {needed} bytes, its '
                    f'data_offsets hold {offsets[1] - offsets[0]}; download the file again')
  return TensorInfo(dtype, tuple(shape), file, base + offsets[0], base + offsets[1])


def _are_sizes(values: Any) -> bool:
  return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_layout(file: Path, infos: dict[str, TensorInfo], base: int, size: int) -> None:
  """Checks that the tensors follow each other without holes up to the end of the file."""
  end = base
  for name, info in infos.items():
    if info.start != end:
      fault = 'overlaps another tensor' if info.start < end else 'lies behind a hole'
      raise UserError(f'{file}: {name} {fault} (byte {info.start}, expected {end}); '
                      'download the file again')
    end = info.stop
    if end > size:
      whole = max(info.stop for info in infos.values())
      raise UserError(f'{file} is truncated: {size} of {whole} bytes, {name} is not complete; '
                      'download it again')
  if end != size:
    raise UserError(f'{file} is damaged: {size - end} bytes behind the last tensor; '
                    'download it again')


def _parse(file: Path, text: bytes) -> dict[str, Any]:
  """Returns a JSON object whose keys are all different."""

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
      seen: set[str] = set()
      twice = next(key for key, _ in pairs if key in seen or seen.add(key))
      raise UserError(f'{file} is damaged: names {twice} twice')
    return content

  try:
    content = json.loads(text.decode('utf-8'), object_pairs_hook=unique)
  except UnicodeDecodeError as error:
    raise UserError(f'{file} is damaged: its header is not UTF-8; download it again') from error
  except (ValueError, RecursionError) as error:
    raise UserError(f'{file} is damaged: its header is no JSON; download it again') from error
  if not isinstance(content, dict):
    raise UserError(f'{file} is damaged: its header is no JSON object; download it again')
  return content


@contextlib.contextmanager
def unreadable(file: Path) -> Iterator[None]:
  """Turns a failed read inside the block into a `UserError` that names the file."""
  try:
    yield
  except OSError as error:
    raise UserError(f'{file}: cannot be read ({error.strerror or error})') from error
