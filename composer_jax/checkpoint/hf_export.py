"""From our parameters to a Hugging Face checkpoint in bfloat16, float32, block FP8 or INT4."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from composer_jax.checkpoint import (
  block_fp8,
  leaves,
  names,
  packed_int4,
  quantization,
  target_folder,
)
from composer_jax.checkpoint.disk import disk_errors
from composer_jax.checkpoint.hf_import import copy_file, finite_cast
from composer_jax.checkpoint.hf_source import Advance, HfSource, Index, text_extras
from composer_jax.checkpoint.safetensors_dir import TensorWriter
from composer_jax.checkpoint.safetensors_format import INDEX
from composer_jax.errors import UserError
from composer_jax.files import fsync_folder, replacing
from composer_jax.models.config import ModelConfig

FORMATS = ('bfloat16', 'float32', 'fp8', 'int4')
_BFLOAT16, _FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
_DRAFT, _LAST = '.draft', 'config.json'
_ROW_BYTES = 2**27  # tensors above this are written some rows at a time
# Tokenizer and template files, and the programs that belong to Kimi's (never run here).
_CARRIED = ('tokenizer.json', 'tiktoken.model', 'tokenizer_config.json', 'special_tokens_map.json',
            'chat_template.jinja', 'generation_config.json', 'tokenization_kimi.py',
            'tool_declaration_ts.py')


class Reader(Protocol):
  """What is exported or compared: an import, a Hugging Face checkpoint, or `InMemory`."""

  config: ModelConfig
  raw: Mapping[str, Any]
  dtypes: Mapping[str, np.dtype]

  def read(self, leaf: str, index: Index) -> np.ndarray:
    """Returns part of one of our leaves."""

  def scale(self, entry: names.Entry) -> np.ndarray | None:
    """Returns the scales that a tensor had before, if any."""

  def format(self, entry: names.Entry) -> str:
    """Returns what a tensor is stored as: "fp8", "int4", or the name of its dtype."""


class InMemory:
  """Parameters in memory, such as those of a finished stage.

  Attributes:
    config: the model's shape.
    raw: the `config.json` that training started from, for its token ids.
    dtypes: dtype of each leaf.
  """

  def __init__(self, config: ModelConfig, params: dict[str, Any],
               raw: Mapping[str, Any] | None = None,
               scales: Callable[[names.Entry], np.ndarray | None] = lambda entry: None):
    """Takes parameters of this shape, and where to find the scales of weights not trained.

    Raises:
      UserError: a leaf is missing, superfluous or of another shape.
    """
    self.config, self.raw, self.scale = config, raw or {}, scales
    self._flat = {name: np.asarray(leaf) for name, leaf in leaves.flatten(params).items()}
    names.check_leaves(config, self._flat)
    self.dtypes = {name: leaf.dtype for name, leaf in self._flat.items()}

  def read(self, leaf: str, index: Index) -> np.ndarray:
    """Returns part of a leaf."""
    return self._flat[leaf][index]

  def format(self, entry: names.Entry) -> str:
    """Returns the name of the dtype that a tensor has here."""
    return str(self.dtypes[entry.leaf])


def export_folder(source: Reader, target: str | Path, form: str, *, shard_bytes: int = 4 * 10**9,
                  files: str | Path | None = None, advance: Advance = lambda size: None) -> None:
  """Writes a checkpoint that transformers and inference engines load.

  A quantised weight keeps the scales it had where it still fits them, group by group: weights that
  were not trained come back byte for byte.

  Args:
    source: what to write.
    target: must not exist, or be empty. It gets its `config.json` last, so it is a checkpoint only
      when it is whole; what a kill left there goes with the next export.
    form: "bfloat16", "float32", "fp8" (linear maps in blocks of 128 x 128) or "int4" (routed
      experts in groups of 32, the rest bfloat16).
    shard_bytes: largest shard.
    files: folder whose tokenizer and template files are copied.
    advance: called with the bytes of each tensor written.

  Raises:
    UserError: the target holds something, or a weight is not finite or does not fit the format.
    InfrastructureError: the disk is full.
  """
  target = Path(target)
  if form not in FORMATS:
    raise UserError(f'--format={form}: can be {", ".join(FORMATS)}')
  check_target(target)
  if isinstance(source, HfSource):
    source.check_copies()
  with target_folder.held(target), _draft(target) as draft:
    power_of_two = _power_of_two(source)
    with TensorWriter(draft, plan(source.config, form), shard_bytes, {'format': 'pt'}) as writer:
      for entry in names.table(source.config):
        _write(writer, source, entry, form, power_of_two)
        advance(tensor_bytes(entry, form))
    if files is not None:
      for name in _CARRIED:
        if (Path(files) / name).is_file():
          copy_file(Path(files) / name, draft / name)
    with disk_errors(str(target)):
      with replacing(draft / _LAST) as stream:
        stream.write(json.dumps(config_json(source, form), indent=2) + '\n')
      _publish(draft, target)


def check_target(target: Path) -> None:
  """Raises UserError when an export cannot go to a folder."""
  cut_short = (target / _DRAFT).is_dir() and not (target / _LAST).exists()
  target_folder.check(target, lambda name: cut_short and _is_product(name))


def config_json(source: Reader, form: str) -> dict[str, Any]:
  """Returns the `config.json` of an export: that of the text model, in DeepSeek-V3's form."""
  out = source.config.to_hf() | text_extras(source.raw)
  out['torch_dtype'] = 'float32' if form == 'float32' else 'bfloat16'
  declared = quantization.declare(form, _power_of_two(source))
  return out | ({'quantization_config': declared} if declared else {})


def plan(config: ModelConfig, form: str) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
  """Returns name, dtype and shape of every tensor of an export, in order."""
  out: list[tuple[str, np.dtype, tuple[int, ...]]] = []
  for entry in names.table(config):
    rows, width = entry.shape[0], entry.shape[-1]
    if not quantization.is_quantized(entry.key, form):
      out.append((entry.key, _plain_dtype(entry, form), entry.shape))
    elif form == 'fp8':
      blocks = tuple(-(-size // block_fp8.BLOCK) for size in entry.shape)
      out += [(entry.key, block_fp8.FP8, entry.shape),
              (f'{entry.key}_scale_inv', _FLOAT32, blocks)]
    else:
      if width % packed_int4.GROUP:
        raise UserError(f'{entry.key}: {list(entry.shape)} cannot be INT4: the input width must be '
                        f'a multiple of {packed_int4.GROUP}')
      packed, scale, shape = quantization.int4_names(entry.key)
      out += [(packed, np.dtype(np.int32), (rows, width // packed_int4.PER_WORD)),
              (scale, _BFLOAT16, (rows, width // packed_int4.GROUP)),
              (shape, np.dtype(np.int32), (2,))]
  return out


def tensor_bytes(entry: names.Entry, form: str) -> int:
  """Returns the bytes of a tensor before quantisation, for progress."""
  return int(np.prod(entry.shape)) * _plain_dtype(entry, form).itemsize


def _plain_dtype(entry: names.Entry, form: str) -> np.dtype:
  bias = entry.leaf.endswith('selection_bias')
  return _FLOAT32 if form == 'float32' or bias else _BFLOAT16


def _power_of_two(source: Reader) -> bool:
  return quantization.parse(quantization.find(source.raw), 'config.json').power_of_two


def _is_product(name: str) -> bool:
  return name in (_DRAFT, INDEX, *_CARRIED) or name.endswith('.safetensors')


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
  """Gives an empty folder inside the target, on the same file system; it is gone afterwards."""
  check_target(target)  # again, now that the folder is held
  draft = target / _DRAFT
  with disk_errors(str(target)):
    for path in target.iterdir() if draft.exists() else ():
      if path != draft and _is_product(path.name):  # published by a process killed just then
        path.unlink()
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
  try:
    yield draft
  finally:
    shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, target: Path) -> None:
  for path in sorted(draft.iterdir(), key=lambda path: path.name == _LAST):
    if path.name == _LAST:
      fsync_folder(target)
    path.replace(target / path.name)
  fsync_folder(target)


def _write(writer: TensorWriter, source: Reader, entry: names.Entry, form: str,
           power_of_two: bool) -> None:
  if not quantization.is_quantized(entry.key, form):
    dtype = _plain_dtype(entry, form)
    for value in _rows(source, entry):
      writer.write_rows(entry.key, finite_cast(value, dtype, entry.key))
    return
  value = entry.to_hf(source.read(entry.leaf, entry.place)).astype(np.float32)
  scale = source.scale(entry)
  if form == 'fp8':
    scale = scale if scale is not None and scale.dtype == np.float32 else None
    weight, scale = block_fp8.encode(value, scale, power_of_two=power_of_two, name=entry.key)
    writer.write(entry.key, weight)
    writer.write(f'{entry.key}_scale_inv', scale)
    return
  scale = scale if scale is not None and scale.dtype == _BFLOAT16 else None
  packed_name, scale_name, shape_name = quantization.int4_names(entry.key)
  packed, scale = packed_int4.encode(value, scale, name=entry.key)
  writer.write(packed_name, packed)
  writer.write(scale_name, scale)
  writer.write(shape_name, np.array(entry.shape, np.int32))


def _rows(source: Reader, entry: names.Entry) -> Iterator[np.ndarray]:
  """Gives a tensor, a large one some of its rows at a time."""
  row_bytes = int(np.prod(entry.shape[1:])) * 4
  step = max(1, _ROW_BYTES // row_bytes)
  if len(entry.part) != 2 or step >= entry.shape[0] or entry.in_axes > 1:
    yield entry.to_hf(source.read(entry.leaf, entry.place))
    return
  axis = len(entry.index) + (1 if entry.in_axes else 0)
  for start in range(0, entry.shape[0], step):
    place = list(entry.place)
    first = place[axis].start + start
    place[axis] = slice(first, min(first + step, place[axis].stop))
    value = source.read(entry.leaf, tuple(place))[(0,) * len(entry.index)]
    yield value.T if entry.in_axes else value
