"""The one table between our parameters and the tensors of a Hugging Face checkpoint.

A tensor of the checkpoint is one layer (and one expert, and the gate or the up half) of one of our
leaves. Matrices are `[in, out]` here and `[out, in]` there. The names are those of DeepSeek-V3's
public files; its multi-token-prediction layer is the one after the last (`model.layers.61`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from composer_jax import models
from composer_jax.checkpoint import leaves
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig

# Of our leaf inside a block -> the tensor's name there.
_VECTORS = {'attention_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm',
            'attention.q_norm': 'self_attn.q_a_layernorm',
            'attention.kv_norm': 'self_attn.kv_a_layernorm'}
_MATRICES = {'attention.q': 'self_attn.q_proj', 'attention.q_a': 'self_attn.q_a_proj',
             'attention.q_b': 'self_attn.q_b_proj', 'attention.kv_b': 'self_attn.kv_b_proj',
             'attention.kv_a': 'self_attn.kv_a_proj_with_mqa', 'attention.o': 'self_attn.o_proj',
             'moe.router.weight': 'mlp.gate'}
_FEED_FORWARDS = {'mlp': 'mlp', 'moe.shared': 'mlp.shared_experts'}
_HALVES = ('gate_proj', 'up_proj')


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of the checkpoint and its place in our parameters.

  Attributes:
    key: the tensor's name.
    leaf: dotted name of our leaf.
    index: layer, or layer and expert, on the leaf's leading axes.
    half: 0 for the gate and 1 for the up half of the last axis, None for the whole.
    in_axes: axes of ours that are the input of a matrix; 0 for what is not transposed.
    part: shape of our side, `leaf[index]` or its half.
    copy: a second copy of a leaf that another entry holds too (DeepSeek-V3 repeats embedding and
      head in its MTP layer).
  """

  key: str
  leaf: str
  index: tuple[int, ...]
  half: int | None
  in_axes: int
  part: tuple[int, ...]
  copy: bool = False

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the tensor, `[out, in]` for a matrix."""
    if not self.in_axes:
      return self.part
    return math.prod(self.part[self.in_axes:]), math.prod(self.part[:self.in_axes])

  @property
  def place(self) -> tuple[slice, ...]:
    """Slices of the leaf that this tensor fills."""
    where = [slice(i, i + 1) for i in self.index] + [slice(0, size) for size in self.part]
    if self.half:
      where[-1] = slice(self.part[-1], 2 * self.part[-1])
    return tuple(where)

  def to_hf(self, ours: np.ndarray) -> np.ndarray:
    """Returns our side as the tensor; a view where that is possible."""
    return ours.reshape(self.shape[::-1]).T if self.in_axes else ours.reshape(self.shape)

  def to_ours(self, tensor: np.ndarray) -> np.ndarray:
    """Returns the tensor as our side; a view where that is possible."""
    return (tensor.T if self.in_axes else tensor).reshape(self.part)


@functools.cache
def shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shape of each of our leaves by its dotted name; nothing is allocated."""
  return leaves.flatten(jax.eval_shape(lambda: models.init(config, jax.random.key(0))))


@functools.cache
def table(config: ModelConfig) -> tuple[Entry, ...]:
  """Returns an entry for each tensor of a checkpoint of this shape; experts in numeric order."""
  ours, entries = shapes(config), []

  def add(key: str, leaf: str, index: tuple[int, ...] = (), *, half: int | None = None,
          in_axes: int = 0, copy: bool = False) -> None:
    part = ours[leaf].shape[len(index):]
    if half is not None:
      part = (*part[:-1], part[-1] // 2)
    entries.append(Entry(key, leaf, index, half, in_axes, part, copy))

  def feed_forward(key: str, scope: str, index: tuple[int, ...], joint: str = '.') -> None:
    for half, name in enumerate(_HALVES):
      add(f'{key}.{name}.weight', f'{scope}{joint}gate_up', index, half=half, in_axes=1)
    add(f'{key}.down_proj.weight', f'{scope}{joint}down', index, in_axes=1)

  def block(key: str, scope: str, index: tuple[int, ...]) -> None:
    for leaf, name in _VECTORS.items():
      if f'{scope}.{leaf}' in ours:
        add(f'{key}.{name}.weight', f'{scope}.{leaf}', index)
    for leaf, name in _MATRICES.items():
      if f'{scope}.{leaf}' in ours:
        add(f'{key}.{name}.weight', f'{scope}.{leaf}', index,
            in_axes=2 if leaf == 'attention.o' else 1)
    for leaf, name in _FEED_FORWARDS.items():
      if f'{scope}.{leaf}.down' in ours:
        feed_forward(f'{key}.{name}', f'{scope}.{leaf}', index)
    if f'{scope}.moe.router.weight' in ours:
      add(f'{key}.mlp.gate.e_score_correction_bias', f'{scope}.moe.router.selection_bias', index)
      for expert in range(config.n_routed_experts):
        feed_forward(f'{key}.mlp.experts.{expert}', f'{scope}.moe.experts', (*index, expert), '_')

  add('model.embed_tokens.weight', 'embed')
  for layer in range(config.num_hidden_layers):
    moe = layer - config.first_k_dense_replace
    scope, index = ('moe_layers', moe) if moe >= 0 else ('dense_layers', layer)
    block(f'model.layers.{layer}', scope, (index,))
  add('model.norm.weight', 'norm')
  head, in_axes = ('embed', 0) if config.tie_word_embeddings else ('head', 1)
  if head == 'head':
    add('lm_head.weight', head, in_axes=in_axes)
  if config.num_nextn_predict_layers:
    key = f'model.layers.{config.num_hidden_layers}'
    add(f'{key}.embed_tokens.weight', 'embed', copy=True)
    add(f'{key}.enorm.weight', 'mtp.embed_norm')
    add(f'{key}.hnorm.weight', 'mtp.hidden_norm')
    add(f'{key}.eh_proj.weight', 'mtp.project', in_axes=1)
    block(key, 'mtp.block', ())
    add(f'{key}.shared_head.norm.weight', 'mtp.norm')
    add(f'{key}.shared_head.head.weight', head, in_axes=in_axes, copy=True)
  return tuple(entries)


def check_keys(config: ModelConfig, found: Mapping[str, Any], where: str) -> None:
  """Checks that a checkpoint holds just the tensors of this shape.

  Raises:
    UserError: names tensors that are missing, or that nothing here would read.
  """
  wanted = {entry.key: entry.copy for entry in table(config)}
  missing = [key for key, copy in wanted.items() if not copy and key not in found]
  unread = [key for key in found if key not in wanted]
  if missing:
    raise UserError(f'{where}: {len(missing)} tensors are missing: {_few(missing)}')
  if unread:
    raise UserError(f'{where}: {len(unread)} tensors belong to nothing in this model: '
                    f'{_few(unread)}')


def to_hf(config: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
  """Returns parameters as the tensors of a checkpoint, in memory.

  Raises:
    UserError: a leaf that the table does not have, or lacks; or of another shape.
  """
  flat = {name: np.asarray(leaf) for name, leaf in leaves.flatten(params).items()}
  check_leaves(config, flat)
  return {entry.key: entry.to_hf(flat[entry.leaf][entry.place]) for entry in table(config)}


def from_hf(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns parameters from the tensors of a checkpoint, in memory; the inverse of `to_hf`.

  Raises:
    UserError: tensors that are missing, that nothing reads, or of another shape; several dtypes in
      one leaf; copies of embedding or head that differ from the main ones.
  """
  check_keys(config, tensors, 'tensors')
  flat: dict[str, np.ndarray] = {}
  sizes = shapes(config)
  for entry in table(config):
    if entry.key not in tensors:
      continue  # a copy
    tensor = np.asarray(tensors[entry.key])
    if tensor.shape != entry.shape:
      raise UserError(f'{entry.key}: has shape {list(tensor.shape)}, the config needs '
                      f'{list(entry.shape)}')
    if entry.leaf not in flat:
      flat[entry.leaf] = np.empty(sizes[entry.leaf].shape, tensor.dtype)
    if entry.copy:
      check_copy(entry, tensor, entry.to_hf(flat[entry.leaf]))
      continue
    if tensor.dtype != flat[entry.leaf].dtype:
      raise UserError(f'{entry.key}: is {tensor.dtype}, other parts of {entry.leaf} are '
                      f'{flat[entry.leaf].dtype}')
    flat[entry.leaf][entry.place] = entry.to_ours(tensor).reshape(
        [part.stop - part.start for part in entry.place])
  return leaves.nest(flat)


def check_copy(entry: Entry, tensor: np.ndarray, main: np.ndarray) -> None:
  """Raises UserError when the MTP layer's copy of embedding or head is not the main one."""
  if not np.array_equal(tensor.astype(np.float32), main.astype(np.float32)):
    raise UserError(f'{entry.key}: differs from the main model\'s {entry.leaf}, which it shares')


def check_leaves(config: ModelConfig, flat: Mapping[str, Any], where: str = 'parameters') -> None:
  """Checks names and shapes of our leaves against the config.

  Raises:
    UserError: names a leaf that is missing, superfluous or of another shape.
  """
  wanted = shapes(config)
  for name in sorted(wanted.keys() ^ flat.keys()):
    raise UserError(f'{where}: leaf {name} is {"missing" if name in wanted else "not known"}')
  for name, leaf in wanted.items():
    if tuple(flat[name].shape) != leaf.shape:
      raise UserError(f'{where}: leaf {name} has shape {list(flat[name].shape)}, the config needs '
                      f'{list(leaf.shape)}')


@functools.cache
def by_key(config: ModelConfig) -> dict[str, Entry]:
  """Returns the entries by the tensor's name."""
  return {entry.key: entry for entry in table(config)}


@functools.cache
def by_leaf(config: ModelConfig) -> dict[str, list[Entry]]:
  """Returns the entries of each leaf, without copies."""
  groups: dict[str, list[Entry]] = {}
  for entry in table(config):
    if not entry.copy:
      groups.setdefault(entry.leaf, []).append(entry)
  return groups


def _few(keys: list[str]) -> str:
  return ', '.join(keys[:3]) + (', ...' if len(keys) > 3 else '')
