"""A Hugging Face checkpoint on disk, read as slices of our leaves."""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.checkpoint import block_fp8, names, packed_int4, quantization
from composer_jax.checkpoint.safetensors_dir import TensorFolder
from composer_jax.errors import UserError
from composer_jax.files import read_json
from composer_jax.models import hf_fields
from composer_jax.models.config import ModelConfig

Index = tuple[slice, ...]
Advance = Callable[[int], None]  # is told what has been done since the last call

_PLAIN = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
_SAMPLE_BYTES = 256  # of each tensor, for `identity`
_WRAPPER_PREFIX = 'language_model.'
# Tensors that are no part of the text model, and buffers that old files hold and config.json gives.
_VISION = ('vision_tower.', 'mm_projector.')
_BUFFERS = ('.rotary_emb.inv_freq',)


@dataclasses.dataclass(frozen=True)
class _Stored:
  """The tensors behind one entry: one, or the values and scales of a quantised weight."""

  format: str  # "none", "fp8" or "int4"
  weight: str
  scale: str = ''


class HfSource:
  """A checkpoint whose names, shapes and dtypes have been checked; weights are read on demand.

  Attributes:
    folder: where it lies.
    raw: the object of its `config.json`.
    config: the model's shape; without an MTP layer when the files hold none.
    quantization: "none", "fp8" (128 x 128 blocks) or "int4" (groups of 32).
    skipped: how many tensors were left out, by kind.
    dtypes: dtype of each of our leaves as stored here; quantised ones are decoded to bfloat16.
    largest_file_bytes: size of the largest shard.
    total_bytes: of all tensors in the files.
  """

  def __init__(self, folder: str | Path):
    """Opens a checkpoint and reads its headers.

    Raises:
      UserError: one line about what is missing, damaged, unknown or not implemented.
    """
    self.folder = Path(folder)
    path = self.folder / 'config.json'
    if not path.is_file():
      raise UserError(f'{self.folder}: holds no config.json')
    self.raw = read_json(path)
    self.config = ModelConfig.from_hf(self.raw, str(path))
    self._declared = quantization.parse(quantization.find(self.raw), str(path))
    self.quantization = self._declared.form
    self._tensors = TensorFolder(self.folder)
    self.largest_file_bytes = self._tensors.largest_file_bytes
    self.total_bytes = sum(info.nbytes for info in self._tensors.infos.values())
    found, self.skipped = self._known_names()
    mtp = f'model.layers.{self.config.num_hidden_layers}.'
    if self.config.num_nextn_predict_layers and not any(key.startswith(mtp) for key in found):
      # transformers writes its default of one MTP layer and never its weights
      self.config = dataclasses.replace(self.config, num_nextn_predict_layers=0)
      self.skipped['MTP layer (declared, not in the files)'] = 0
    self._stored = self._match(found)
    self.dtypes = self._leaf_dtypes()

  def describe(self, entry: names.Entry) -> tuple[str, int]:
    """Returns the file and the offset of an entry, to read in the order of the disk."""
    info = self._tensors.infos[self._stored[entry.key].weight]
    return info.file.name, info.start

  def format(self, entry: names.Entry) -> str:
    """Returns what a tensor is stored as: "fp8", "int4", or the name of its dtype."""
    stored = self._stored[entry.key]
    plain = stored.format == 'none'
    return str(self._tensors.infos[stored.weight].dtype) if plain else stored.format

  def has(self, entry: names.Entry) -> bool:
    """Returns whether the tensor is there; only copies may be missing."""
    return entry.key in self._stored

  def tensor(self, entry: names.Entry, rows: slice | None = None) -> np.ndarray:
    """Returns a tensor `[out, in]`, decoded to float32 when it is quantised.

    Args:
      entry: of `names.table(config)`.
      rows: of the first axis, for tensors that are not quantised.

    Raises:
      UserError: it holds a number that is not finite, or cannot be read.
    """
    stored = self._stored[entry.key]
    if stored.format == 'fp8':
      return block_fp8.decode(self._tensors.read(stored.weight), self.scale(entry),
                              name=stored.weight)
    if stored.format == 'int4':
      return packed_int4.decode(self._tensors.read(stored.weight), self.scale(entry),
                                name=stored.weight)
    value = self._tensors.read(stored.weight, rows)
    if not np.isfinite(value).all():
      raise UserError(f'{self.folder}: {stored.weight} holds NaN or infinity')
    return value

  def scale(self, entry: names.Entry) -> np.ndarray | None:
    """Returns the scales of a quantised tensor as they are stored; None for others."""
    stored = self._stored[entry.key]
    return self._tensors.read(stored.scale) if stored.scale else None

  def read(self, leaf: str, index: Index) -> np.ndarray:
    """Returns part of one of our leaves in the dtype of `dtypes`; reads little more than that.

    Args:
      leaf: dotted name.
      index: slices with start and stop, one an axis.
    """
    entries = self._by_place[leaf]
    lead = len(next(iter(entries))) - 1
    out = np.empty([part.stop - part.start for part in index], self.dtypes[leaf])
    for place in itertools.product(*(range(part.start, part.stop) for part in index[:lead])):
      target = out[tuple(i - part.start for i, part in zip(place, index[:lead], strict=True))]
      self._read_part(entries, place, index[lead:], target)
    return out

  def _read_part(self, entries: Mapping[tuple, names.Entry], place: tuple[int, ...],
                 index: Index, target: np.ndarray) -> None:
    if (*place, None) in entries:
      entry = entries[(*place, None)]
      target[...] = self._piece(entry, index)
      return
    for half in (0, 1):
      entry = entries[(*place, half)]
      width = entry.part[-1]
      start = max(index[-1].start - half * width, 0)
      stop = min(index[-1].stop - half * width, width)
      if start < stop:
        into = start + half * width - index[-1].start
        target[..., into:into + stop - start] = self._piece(
            entry, (*index[:-1], slice(start, stop)))

  def _piece(self, entry: names.Entry, index: Index) -> np.ndarray:
    plain = self._stored[entry.key].format == 'none'
    if plain and len(entry.part) == 2:  # the rows there are our rows, or our columns
      axis = 1 if entry.in_axes else 0
      value = self.tensor(entry, index[axis])
      value = value.T if entry.in_axes else value
      other = index[1 - axis]
      return value[other] if axis else value[:, other]
    return entry.to_ours(self.tensor(entry))[index]

  def _known_names(self) -> tuple[dict[str, str], dict[str, int]]:
    """Returns name without the wrapper's prefix -> name in the files, and what was left out."""
    wrapped = self.raw.get('model_type') == hf_fields.WRAPPER_TYPE
    found, skipped = {}, collections.Counter()
    for name in self._tensors.infos:
      if wrapped and name.startswith(_VISION):
        skipped['vision'] += 1
      elif name.endswith(_BUFFERS):
        skipped['rotary buffers'] += 1
      else:
        found[name.removeprefix(_WRAPPER_PREFIX) if wrapped else name] = name
    return found, dict(skipped)

  def _match(self, found: dict[str, str]) -> dict[str, _Stored]:
    """Returns what each entry is stored as; every tensor must be used."""
    stored, left = {}, dict(found)
    for entry in names.table(self.config):
      packed = quantization.int4_names(entry.key)
      if entry.key in left:
        scale = left.pop(f'{entry.key}_scale_inv', '')
        stored[entry.key] = _Stored('fp8' if scale else 'none', left.pop(entry.key), scale)
      elif packed.packed in left:
        weight, scale, shape = (left.pop(name, '') for name in packed)
        if not scale or not shape:
          raise UserError(f'{self.folder}: {packed.packed} has no {packed.scale} or no '
                          f'{packed.shape}')
        self._declared.check_packed(entry.key, str(self.folder / 'config.json'))
        self._check_packed_shape(entry, shape)
        stored[entry.key] = _Stored('int4', weight, scale)
    # with quantised ones under their plain names, the message is about what is really missing
    names.check_keys(self.config, dict.fromkeys(stored) | left, str(self.folder))
    for key, kind in stored.items():
      self._check(names.by_key(self.config)[key], kind)
    return stored

  def _check_packed_shape(self, entry: names.Entry, shape: str) -> None:
    if self._tensors.infos[shape].shape != (2,):
      raise UserError(f'{self.folder}: {shape} has shape {list(self._tensors.infos[shape].shape)}, '
                      'must have two numbers')
    told = tuple(int(size) for size in self._tensors.read(shape))
    if told != entry.shape:
      raise UserError(f'{self.folder}: {shape} says {list(told)}, the config needs '
                      f'{list(entry.shape)}')

  def _check(self, entry: names.Entry, stored: _Stored) -> None:
    info = self._tensors.infos[stored.weight]
    shape = entry.shape
    if stored.format == 'int4':
      shape = (*shape[:-1], -(-shape[-1] // packed_int4.PER_WORD))
    if info.shape != shape:
      raise UserError(f'{self.folder}: {stored.weight} has shape {list(info.shape)}, the config '
                      f'needs {list(shape)}')
    if stored.format not in ('none', self.quantization):
      raise UserError(f'{self.folder}: {stored.weight} is {stored.format}, but config.json says '
                      f'quantization {self.quantization}')
    if stored.format == 'none' and info.dtype not in _PLAIN:
      raise UserError(f'{self.folder}: {stored.weight} is {info.dtype}, which is no dtype of a '
                      'weight without scales')

  def _leaf_dtypes(self) -> dict[str, np.dtype]:
    self._by_place: dict[str, dict[tuple, names.Entry]] = {}
    dtypes = {}
    for leaf, entries in names.by_leaf(self.config).items():
      kinds = {self._stored[entry.key].format for entry in entries}
      stored = {self._tensors.infos[self._stored[entry.key].weight].dtype for entry in entries}
      if len(stored) > 1 or len(kinds) > 1:
        raise UserError(f'{self.folder}: {leaf} is made of tensors of several dtypes: '
                        f'{", ".join(sorted(map(str, stored)))}')
      dtypes[leaf] = stored.pop() if kinds == {'none'} else np.dtype(ml_dtypes.bfloat16)
      self._by_place[leaf] = {(*entry.index, entry.half): entry for entry in entries}
    for leaf in dtypes:
      if leaf.endswith('selection_bias'):
        dtypes[leaf] = np.dtype(np.float32)
    return dtypes

  def identity(self) -> str:
    """Returns hex digits that differ for other weights, however they are divided into files.

    They are made of every tensor's name, dtype and shape and of a few bytes from its middle: what
    training changes, it changes nearly everywhere.
    """
    digest = hashlib.sha256()
    for name, info in sorted(self._tensors.infos.items()):
      digest.update(f'{name}:{info.dtype}{info.shape};'.encode())
      digest.update(self._tensors.sample(name, _SAMPLE_BYTES))
    return digest.hexdigest()[:16]

  def check_copies(self) -> None:
    """Checks DeepSeek-V3's second copies of embedding and head, some rows at a time.

    Raises:
      UserError: one differs from the main model's.
    """
    for entry in names.table(self.config):
      if entry.copy and self.has(entry):
        main = names.by_leaf(self.config)[entry.leaf][0]
        for start in range(0, entry.shape[0], 4096):
          rows = slice(start, min(start + 4096, entry.shape[0]))
          names.check_copy(entry, self.tensor(entry, rows), self.tensor(main, rows))


def text_extras(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the token ids of a `config.json`, which an export carries over."""
  text = raw.get('text_config', raw)
  return {key: text.get(key, raw.get(key)) for key in
          ('bos_token_id', 'eos_token_id', 'pad_token_id')
          if text.get(key, raw.get(key)) is not None}
