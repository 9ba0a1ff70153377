"""A tree of arrays as a flat `{name: array}` with a manifest that proves what was read back."""

import base64
import json
import zlib
from typing import Any

import jax
import numpy as np

from composer_jax.errors import UserError


class DamagedError(Exception):
  """What was read back is not what was written."""


def flatten(tree: Any) -> dict[str, Any]:
  """Returns `{'params.head.kernel': array, ...}`; dataclass and tuple fields become path parts.

  Raises:
    ValueError: two leaves get the same name (a key that holds a dot).
  """
  pairs = [(jax.tree_util.keystr(path, simple=True, separator='.'), leaf)
           for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
  flat = dict(pairs)
  if len(flat) != len(pairs):
    raise ValueError('two leaves of the tree have the same dotted name')
  return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
  """Returns the nested dict whose `flatten` is `flat`."""
  tree: dict[str, Any] = {}
  for name, leaf in flat.items():
    *folders, last = name.split('.')
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
    node[last] = leaf
  return tree


def manifest(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns shape, dtype and CRC-32 of each leaf.

  TensorStore's chunks carry no checksum: a flipped bit on disk would come back as a wrong weight.
  A leaf that this process does not hold completely has a null `crc`.
  """
  return {name: {'shape': list(np.shape(leaf)), 'dtype': str(leaf.dtype), 'crc': _crc(leaf)}
          for name, leaf in flat.items()}


def check_same_shape(saved: dict[str, dict[str, Any]], wanted: dict[str, Any], where: str) -> None:
  """Checks that a checkpoint belongs to this model and optimizer.

  Raises:
    UserError: a leaf is missing, superfluous, or has another shape or dtype.
  """
  for name in sorted(saved.keys() ^ wanted.keys()):
    raise UserError(f'{where} belongs to another model or optimizer: '
                    f'{name} is only in the {"checkpoint" if name in saved else "config"}')
  for name, leaf in wanted.items():
    have = (tuple(saved[name]['shape']), saved[name]['dtype'])
    want = (tuple(leaf.shape), str(leaf.dtype))
    if have != want:
      raise UserError(f'{where} belongs to another model or optimizer: {name} is '
                      f'{have[1]}{list(have[0])}, the config needs {want[1]}{list(want[0])}')


def check_content(saved: dict[str, dict[str, Any]], flat: dict[str, Any]) -> None:
  """Raises `DamagedError` when a leaf's bytes are not those that were saved."""
  for name, leaf in flat.items():
    if saved[name]['crc'] is not None and saved[name]['crc'] != _crc(leaf):
      raise DamagedError(f'{name} has other bytes than were saved')


def _crc(leaf: Any) -> int | None:
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    return None
  return zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1).data)


def to_json(value: Any) -> Any:
  """Returns the value with bytes and NumPy arrays wrapped so that JSON can hold them exactly.

  Raises:
    TypeError: a value of a type that would not come back as it was.
  """
  if isinstance(value, dict):
    if not all(isinstance(key, str) for key in value):
      raise TypeError('keys must be strings')
    return {key: to_json(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_json(item) for item in value]
  if isinstance(value, bytes):
    return {'__bytes__': base64.b64encode(value).decode()}
  if isinstance(value, np.ndarray):
    data = base64.b64encode(np.ascontiguousarray(value)).decode()
    return {'__array__': data, 'dtype': value.dtype.str, 'shape': list(value.shape)}
  if isinstance(value, np.generic):
    return value.item()
  json.dumps(value)  # raises TypeError for anything else
  return value


def from_json(value: Any) -> Any:
  """Inverse of `to_json` (tuples come back as lists, NumPy scalars as Python numbers)."""
  if isinstance(value, list):
    return [from_json(item) for item in value]
  if not isinstance(value, dict):
    return value
  if '__bytes__' in value:
    return base64.b64decode(value['__bytes__'])
  if '__array__' in value:
    data = np.frombuffer(base64.b64decode(value['__array__']), np.dtype(value['dtype']))
    return data.reshape(value['shape']).copy()
  return {key: from_json(item) for key, item in value.items()}
