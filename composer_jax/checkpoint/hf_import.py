"""From a Hugging Face checkpoint to our parameters: onto devices, or into a folder of our own.

Neither holds the checkpoint in host memory. The folder (`Imported`) keeps, beside the parameters,
the scales of quantised weights, with which an export gives untrained weights back byte for byte,
and the files of config and tokenizer.
"""

import collections
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from composer_jax.checkpoint import device_pieces, leaves, names, target_folder
from composer_jax.checkpoint.disk import disk_errors
from composer_jax.checkpoint.hf_source import Advance, HfSource, Index
from composer_jax.checkpoint.native import SIDE, Leaf, ParamStore
from composer_jax.checkpoint.safetensors_format import unreadable
from composer_jax.config import as_dict, build
from composer_jax.errors import UserError
from composer_jax.files import read_json, replacing
from composer_jax.models.config import ModelConfig

STORE = 'params'
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
_CHUNK_BYTES = 2**26  # of what has no layer or expert axis: embedding and head
_SHARDS = ('.safetensors', '.safetensors.index.json', '.bin', '.pt', '.pth', '.gguf')
_KEPT_BYTES = 2**26  # largest file that is copied beside the parameters

class Imported:
  """An imported checkpoint: the parameter store and the files beside it.

  Attributes:
    folder: where it lies.
    config: the model's shape.
    raw: the object of the original `config.json`.
    quantization: what the original was stored as.
    store: the parameters, and the scales as side arrays.
  """

  def __init__(self, folder: str | Path):
    """Opens a finished import.

    Raises:
      UserError: there is none, it is unfinished or damaged.
    """
    self.folder = Path(folder)
    self.store = ParamStore.open(self.folder / STORE)
    self.config = build(ModelConfig, self.store.meta['model'], f'{self.folder}: model')
    self.quantization = self.store.meta['quantization']
    self.raw = read_json(self.folder / 'config.json')
    names.check_leaves(self.config, {name: leaf for name, leaf in self.store.leaves.items()
                                     if not name.startswith(SIDE)}, str(self.folder))

  def identity(self) -> str:
    """Returns the identity of the checkpoint that was imported; see `HfSource.identity`."""
    return self.store.meta['source']

  @property
  def dtypes(self) -> dict[str, np.dtype]:
    """Dtype of each leaf."""
    return {name: leaf.dtype for name, leaf in self.store.leaves.items()
            if not name.startswith(SIDE)}

  def read(self, leaf: str, index: Index) -> np.ndarray:
    """Returns part of a leaf."""
    return self.store.read(leaf, index)

  def scale(self, entry: names.Entry) -> np.ndarray | None:
    """Returns the scales that a tensor had, None if it was not quantised."""
    name = SIDE + entry.leaf
    if name not in self.store.leaves:
      return None
    index = _scale_index(entry, self.store.leaves[name])
    return self.store.read(name, index)[(0,) * (len(entry.index) + 1)]

  def format(self, entry: names.Entry) -> str:
    """Returns the name of the dtype that a tensor has here."""
    return str(self.dtypes[entry.leaf])


def is_imported(folder: str | Path) -> bool:
  """Returns whether a folder is an import, finished or not."""
  return (Path(folder) / STORE / 'store.json').exists()


def is_hugging_face(folder: str | Path) -> bool:
  """Returns whether a folder looks like a Hugging Face checkpoint."""
  path = Path(folder) / 'config.json'
  return path.is_file() and 'model_type' in read_json(path)


def open_checkpoint(folder: str | Path) -> HfSource | Imported:
  """Returns the checkpoint in a folder, an import or a Hugging Face one.

  Raises:
    UserError: there is none, or it is unfinished, damaged or of another family.
  """
  return Imported(folder) if is_imported(folder) else HfSource(folder)


def load(source: HfSource | Imported, shardings: Any = None, dtype: Any = None) -> dict[str, Any]:
  """Returns the parameters as a nested dict of `jax.Array`, each device's piece read on its own.

  Args:
    source: an opened checkpoint.
    shardings: one for all leaves, or a nested dict of them; None is the default device.
    dtype: what the leaves become, selection biases excepted (always float32); None keeps theirs.

  Raises:
    UserError: a tensor is damaged or holds a number that is not finite.
  """
  if isinstance(source, HfSource):
    source.check_copies()
  default = shardings
  if shardings is None:
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  placed = leaves.flatten(shardings) if isinstance(shardings, dict) else {}
  flat = {}
  for name, leaf in names.shapes(source.config).items():
    stored = jax.ShapeDtypeStruct(leaf.shape, source.dtypes[name])
    bias = name.endswith('selection_bias')
    target = stored.dtype if dtype is None or bias else np.dtype(dtype)
    flat[name] = device_pieces.assemble(
        functools.partial(source.read, name), stored, placed[name] if placed else default, target)
  return leaves.nest(flat)


def import_folder(source: HfSource, target: str | Path, dtype: str | None = None,
                  advance: Advance = lambda size: None) -> Imported:
  """Writes a checkpoint as a folder of ours; the same call continues what a kill cut short.

  Host memory holds a few pieces at a time: a layer's matrix, one expert's, 64 MB of the embedding.

  Args:
    source: the opened checkpoint.
    target: made if missing; holds nothing else.
    dtype: "float32" or "bfloat16" of all leaves, selection biases excepted; None keeps that of the
      files, and bfloat16 for quantised weights.
    advance: called with the bytes of each piece, whether written now or before.

  Raises:
    UserError: the target holds something else, or a tensor cannot be used.
    InfrastructureError: the disk is full.
  """
  target = Path(target)
  check_target(target)
  source.check_copies()
  stored = store_leaves(source, dtype)
  meta = {'source': source.identity(), 'model': as_dict(source.config),
          'quantization': source.quantization, 'skipped': source.skipped}
  with target_folder.held(target):
    store = ParamStore.create(target / STORE, stored, meta)
    if store.complete:
      _copy_files(source.folder, target, missing_only=True)
      advance(total_bytes(stored))
    else:
      _copy_files(source.folder, target)
      for entry, place in _pieces(source, stored):
        _write(store, source, entry, place)
        advance(_nbytes(stored[entry.leaf], place))
      store.finish()
    return Imported(target)


def check_target(target: Path) -> None:
  """Raises UserError when an import cannot go to, or go on in, a folder."""
  target_folder.check(target, lambda name: is_imported(target) or name == STORE
                      or name.startswith('.'))


def store_leaves(source: HfSource, dtype: str | None = None) -> dict[str, Leaf]:
  """Returns what the store of a checkpoint holds: parameters, and scales as side arrays."""
  stored, shapes = {}, names.shapes(source.config)
  for leaf, entries in names.by_leaf(source.config).items():
    shape, first = shapes[leaf].shape, entries[0]
    kind = source.dtypes[leaf]
    if dtype is not None and not leaf.endswith('selection_bias'):
      kind = DTYPES[dtype]
    part = list(first.part)
    if not first.index and len(part) == 2 and leaf in ('embed', 'head'):
      axis = 1 if first.in_axes else 0  # the vocabulary's
      row_bytes = part[1 - axis] * kind.itemsize
      part[axis] = max(1, min(part[axis], _CHUNK_BYTES // row_bytes))
    stored[leaf] = Leaf(shape, kind, (*(1 for _ in first.index), *part))
    scale = source.scale(first)
    if scale is not None:
      halves = 1 if first.half is None else 2
      lead = (*shape[:len(first.index)], halves)
      stored[SIDE + leaf] = Leaf((*lead, *scale.shape), scale.dtype,
                                 ((1,) * len(lead)) + scale.shape)
  return stored


def total_bytes(stored: dict[str, Leaf]) -> int:
  """Returns the bytes of all parameters of a store, which `advance` adds up to."""
  return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for name, leaf in stored.items()
             if not name.startswith(SIDE))


def _pieces(source: HfSource, stored: dict[str, Leaf]) -> Iterator[tuple[names.Entry, Index]]:
  """Gives the chunks to write with their entries, in the order of the source's files."""
  entries = sorted((entry for entry in names.table(source.config) if not entry.copy),
                   key=source.describe)
  for entry in entries:
    chunk = stored[entry.leaf].chunks
    axes = [range(part.start, part.stop, size)
            for part, size in zip(entry.place, chunk, strict=True)]
    split = [axis for axis, steps in enumerate(axes) if len(steps) > 1]
    if not split:
      yield entry, entry.place
      continue
    axis, = split  # only the vocabulary is cut
    for start in axes[axis]:
      place = list(entry.place)
      place[axis] = slice(start, min(start + chunk[axis], place[axis].stop))
      yield entry, tuple(place)


def _write(store: ParamStore, source: HfSource, entry: names.Entry, place: Index) -> None:
  side = SIDE + entry.leaf
  if side in store.leaves:
    index = _scale_index(entry, store.leaves[side])
    if not store.is_done(side, index):
      scale = source.scale(entry)
      if scale.shape != store.leaves[side].shape[len(entry.index) + 1:]:
        raise UserError(f'{source.folder}: scales of {entry.key} have shape {list(scale.shape)}')
      store.write(side, index, scale.reshape([part.stop - part.start for part in index]))
  if not store.is_done(entry.leaf, place):
    dtype = store.leaves[entry.leaf].dtype
    store.write(entry.leaf, place, finite_cast(source.read(entry.leaf, place), dtype, entry.key))


def finite_cast(value: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
  """Returns weights in another dtype.

  Raises:
    UserError: one is not finite there.
  """
  with np.errstate(over='ignore'):
    cast = value.astype(dtype, copy=False)
  if not np.isfinite(cast).all():
    raise UserError(f'{name}: holds weights that are not finite in {dtype}')
  return cast


def _scale_index(entry: names.Entry, leaf: Leaf) -> Index:
  """Returns where a tensor's scales lie in the side array `[layers, experts, halves, ...]`."""
  place = (*entry.index, entry.half or 0)
  return tuple(slice(i, i + 1) for i in place) + tuple(
      slice(0, size) for size in leaf.shape[len(place):])


def _nbytes(leaf: Leaf, place: Index) -> int:
  return int(np.prod([part.stop - part.start for part in place])) * leaf.dtype.itemsize


def _copy_files(source: Path, target: Path, missing_only: bool = False) -> None:
  """Copies config, tokenizer and template files, so that an export has them."""
  for path in sorted(source.iterdir()):
    if (path.is_file() and not path.name.startswith('.') and not path.name.endswith(_SHARDS)
        and path.stat().st_size <= _KEPT_BYTES
        and not (missing_only and (target / path.name).exists())):
      copy_file(path, target / path.name)


def copy_file(source: Path, target: Path) -> None:
  """Copies a small file; the copy is there whole or not at all.

  Raises:
    UserError: the source cannot be read.
    InfrastructureError: the target cannot be written.
  """
  with unreadable(source):
    content = source.read_bytes()
  with disk_errors(str(target)), replacing(target, 'wb') as stream:
    stream.write(content)


def formats(source: HfSource) -> dict[str, int]:
  """Returns how many tensors are stored in which format, for display."""
  return dict(collections.Counter(source.format(entry) for entry in names.table(source.config)
                                  if source.has(entry)))
