"""INT4 weights in groups of 32, as compressed-tensors' "pack-quantized" format stores them.

Kimi K2.5's routed experts are published so. A matrix [N, K] = [out, in] is two arrays:

* `weight_packed`, int32 [N, K/8]: element i of a word lies in bits 4i to 4i + 3, as value + 8
  (offset binary), so code 0 is -8 and code 15 is 7;
* `weight_scale`, bfloat16 [N, K/32]: one scale for 32 neighbours along the input axis.

The weight is value * scale. Layout and the formula of a fresh scale: compressed-tensors,
`compressors/pack_quantized/helpers.py` and `quantization/utils/helpers.py` (`calculate_qparams`).
All functions take further leading axes, such as experts.
"""

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int32

from composer_jax.errors import UserError

GROUP = 32
PER_WORD = 8
_LOWEST, _HIGHEST = -8, 7
_BF16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
_SCALE_MAX = _BF16_MAX / 8  # above it -8 * scale is not finite
_EMPTY_GROUP_SCALE = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)  # compressed-tensors' choice

# Byte -> its two values, low nibble first. NumPy looks up one 8-byte number six times as fast as
# two 4-byte ones, so a pair is held as one.
_VALUES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1).astype(np.float32) + _LOWEST
_PAIRS = _VALUES.view(np.uint64).reshape(256)


def decode(packed: Int32[np.ndarray, '*B N W'], scale: Float[np.ndarray, '*B N G'], *,
           name: str = 'weight') -> Float[np.ndarray, '*B N K']:
  """Returns the weights in float32; the products are exact.

  Args:
    packed: eight values a word.
    scale: bfloat16, one for four words.
    name: of the tensor, for messages.

  Raises:
    UserError: dtypes or shapes do not fit, or a scale is not finite.
  """
  _check_pair(packed, scale, name)
  # Bytes in the order of the file, on any machine: two values a byte.
  halves = np.ascontiguousarray(packed).astype('<i4', copy=False).view(np.uint8)
  weight = _PAIRS[halves].view(np.float32).reshape(*scale.shape, GROUP)
  weight *= scale.astype(np.float32)[..., None]
  return weight.reshape(*packed.shape[:-1], packed.shape[-1] * PER_WORD)


def encode(weight: Float[np.ndarray, '*B N K'], scale: Float[np.ndarray, '*B N G'] | None = None, *,
           name: str = 'weight') -> tuple[Int32[np.ndarray, '*B N W'],
                                          Float[np.ndarray, '*B N G']]:
  """Returns the packed words and their bfloat16 scales.

  A fresh scale is absmax / 7.5, compressed-tensors' symmetric min-max rule (half of the range of
  -8 to 7); values are rounded to nearest, ties to even, and 7.5 saturates to 7. A group of zeros
  gets compressed-tensors' 2^-7.

  Args:
    weight: any float dtype.
    scale: what the weights were stored with before. A group keeps its own where `fits` says so, the
      others get a fresh one; groups that were not trained therefore come back byte for byte.
    name: of the tensor, for messages.

  Raises:
    UserError: K is no multiple of 32, a weight is not finite, or the scales do not fit the weight.
  """
  groups = _groups(weight, name)
  extremes = groups.min(-1), groups.max(-1)
  used = _fresh_scale(extremes, name)
  if scale is not None:
    used = np.where(_kept(extremes, scale, name), scale, used)
  values = np.rint(groups / used.astype(np.float32)[..., None])
  np.clip(values, _LOWEST, _HIGHEST, out=values)
  # Unsigned: 15 << 4 overflows int8, and on some machines saturates.
  codes = (values - _LOWEST).astype(np.uint8).reshape(*weight.shape[:-1], -1)
  halves = codes[..., 0::2] | codes[..., 1::2] << 4
  return np.ascontiguousarray(halves).view('<i4').astype(np.int32, copy=False), used


def fits(weight: Float[np.ndarray, '*B N K'], scale: Float[np.ndarray, '*B N G'], *,
         name: str = 'weight') -> Bool[np.ndarray, '*B N G']:
  """Returns which groups may keep a scale: those where no value would saturate.

  It holds for every group that was only decoded, also after the weights were rounded to bfloat16:
  that moves a quotient of at most 8 by 8 * 2^-9, far less than the 0.5 to the next code.

  Raises:
    UserError: K is no multiple of 32, or the scales do not fit the weight.
  """
  groups = _groups(weight, name)
  return _kept((groups.min(-1), groups.max(-1)), scale, name)


def _kept(extremes: tuple[np.ndarray, np.ndarray], scale: np.ndarray, name: str) -> np.ndarray:
  """Rounded quotients are monotone, so the smallest and largest weight decide for the group."""
  _check_scale(scale, name)
  if scale.shape != extremes[0].shape:
    raise UserError(f'{name}: scales are {list(scale.shape)}, the weights need '
                    f'{list(extremes[0].shape)}')
  factor = scale.astype(np.float32)
  kept = factor != 0
  for extreme in extremes:
    value = np.rint(extreme / np.where(kept, factor, 1))
    kept = kept & (value >= _LOWEST) & (value <= _HIGHEST)
  return kept


def _groups(weight: np.ndarray, name: str) -> np.ndarray:
  """Returns a float32 view or copy [..., N, G, 32]."""
  if weight.ndim < 2 or weight.shape[-1] % GROUP:
    raise UserError(f'{name}: {list(weight.shape)} cannot be INT4: the input width (last axis) '
                    f'must be a multiple of {GROUP}')
  return weight.astype(np.float32, copy=False).reshape(*weight.shape[:-1], -1, GROUP)


def _fresh_scale(extremes: tuple[np.ndarray, np.ndarray], name: str) -> np.ndarray:
  largest = np.maximum(extremes[1], -extremes[0])
  if not np.isfinite(largest).all():  # the maximum of a group with a NaN is NaN
    raise UserError(f'{name}: holds weights that are not finite')
  scale = np.minimum(largest / np.float32(7.5), np.float32(_SCALE_MAX)).astype(ml_dtypes.bfloat16)
  return np.where(scale == 0, ml_dtypes.bfloat16(_EMPTY_GROUP_SCALE), scale)


def _check_pair(packed: np.ndarray, scale: np.ndarray, name: str) -> None:
  if packed.dtype != np.int32 or packed.ndim < 2:
    raise UserError(f'{name}: packed INT4 is {packed.dtype}{list(packed.shape)}, '
                    'must be int32 with two axes or more')
  _check_scale(scale, name)
  words = GROUP // PER_WORD
  if packed.shape != (*scale.shape[:-1], scale.shape[-1] * words):
    raise UserError(f'{name}: packed {list(packed.shape)} and scale {list(scale.shape)} do not '
                    f'belong together (one scale for {words} words)')


def _check_scale(scale: np.ndarray, name: str) -> None:
  if scale.dtype != ml_dtypes.bfloat16:
    raise UserError(f'{name}: INT4 scales are {scale.dtype}, must be bfloat16')
  if not (np.abs(scale.astype(np.float32)) <= _SCALE_MAX).all():
    raise UserError(f'{name}: holds INT4 scales that are not finite')
