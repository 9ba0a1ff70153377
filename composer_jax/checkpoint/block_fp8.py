"""FP8 weights in blocks of 128 x 128, as DeepSeek-V3's checkpoints store them.

A matrix [N, K] = [out, in] is two arrays: `weight`, float8_e4m3fn [N, K], and `weight_scale_inv`,
float32 [ceil(N / 128), ceil(K / 128)], whose name says what the quantiser divides by: the weight is
fp8 * weight_scale_inv. Blocks at the lower and right edge may be smaller. Source: `weight_dequant`
and `act_quant` in deepseek-ai/DeepSeek-V3 `inference/kernel.py`.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float

from composer_jax.errors import UserError

BLOCK = 128
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
_LARGEST = 448.0
_ROUNDS_TO_LARGEST = 464.0  # half-way to 480, which the format does not have; the tie goes to 448
_TINY = np.finfo(np.float32).tiny
# Below it 448 * scale stays finite in float32.
_SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(_LARGEST), np.float32(0))


def decode(weight: Float[np.ndarray, 'N K'], scale_inv: Float[np.ndarray, 'R C'], *,
           name: str = 'weight') -> Float[np.ndarray, 'N K']:
  """Returns the weights in float32: one rounded product each. Negative zeros stay negative.

  Args:
    weight: float8_e4m3fn.
    scale_inv: float32, one a block.
    name: of the tensor, for messages.

  Raises:
    UserError: dtypes or shapes do not fit, a code is NaN (0x7f, 0xff), or a scale is not finite.
  """
  if weight.dtype != FP8:
    raise UserError(f'{name}: is {weight.dtype}, must be {FP8} to have block scales')
  _check_scale(weight.shape, scale_inv, name)
  nans = (weight.view(np.uint8) & 0x7f) == 0x7f
  if nans.any():
    at = np.unravel_index(int(nans.argmax()), nans.shape)
    raise UserError(f'{name}: holds {int(nans.sum())} NaN codes, the first at '
                    f'{[int(i) for i in at]}')
  decoded = _VALUES[weight.view(np.uint8)]  # three times as fast as a cast
  for strip, factors in _strips(decoded, scale_inv):
    strip *= factors
  return decoded


def encode(weight: Float[np.ndarray, 'N K'], scale_inv: Float[np.ndarray, 'R C'] | None = None, *,
           power_of_two: bool = False, name: str = 'weight'
           ) -> tuple[Float[np.ndarray, 'N K'], Float[np.ndarray, 'R C']]:
  """Returns the float8_e4m3fn codes and their float32 scales.

  A fresh scale is absmax / 448 (1 for a block of zeros); quotients are rounded to nearest, ties to
  even.

  Args:
    weight: any float dtype.
    scale_inv: what the weights were stored with before. A block keeps its own where `fits` says so,
      the others get a fresh one; blocks that were not trained therefore come back byte for byte.
    power_of_two: fresh scales are rounded up to a power of two, as DeepSeek-V3.1's are
      (`scale_fmt` "ue8m0").
    name: of the tensor, for messages.

  Raises:
    UserError: a weight is not finite, or the scales do not fit the weight.
  """
  largest = _block_absmax(weight, name)
  if not np.isfinite(largest).all():  # the maximum of a block with a NaN is NaN
    raise UserError(f'{name}: holds weights that are not finite')
  used = np.where(largest == 0, np.float32(1), np.clip(largest / _LARGEST, _TINY, _SCALE_MAX))
  if power_of_two:
    used = _power_above(used)
  if scale_inv is not None:
    used = np.where(_kept(largest, scale_inv), scale_inv, used)
  codes = np.empty(weight.shape, FP8)
  strips = zip(_strips(weight, used), _strips(codes, used), strict=True)
  for (strip, factors), (target, _) in strips:
    quotient = strip.astype(np.float32, copy=False) / factors
    # The cast turns larger ones into NaN.
    target[...] = np.clip(quotient, -_LARGEST, _LARGEST, out=quotient)
  return codes, used


def fits(weight: Float[np.ndarray, 'N K'], scale_inv: Float[np.ndarray, 'R C'], *,
         name: str = 'weight') -> Bool[np.ndarray, 'R C']:
  """Returns which blocks may keep a scale: those where no value would saturate.

  It holds for every block that was only decoded, also after the weights were rounded to bfloat16
  (normal numbers): that moves a quotient by a factor of at most 1 + 2^-9, less than the 2^-5 to the
  next code.

  Raises:
    UserError: the scales do not fit the weight.
  """
  _check_scale(weight.shape, scale_inv, name)
  return _kept(_block_absmax(weight, name), scale_inv)


def _power_above(scale: np.ndarray) -> np.ndarray:
  """Returns the smallest powers of two that are not below the scales, or the format's largest."""
  fraction, exponent = np.frexp(scale)  # the fraction is in [0.5, 1)
  largest = int(np.frexp(_SCALE_MAX)[1]) - 1
  return np.ldexp(np.float32(1), np.minimum(exponent - (fraction == 0.5), largest))


def _kept(largest: np.ndarray, scale_inv: np.ndarray) -> np.ndarray:
  usable = scale_inv != 0
  quotient = largest / np.where(usable, np.abs(scale_inv), 1)
  return usable & (quotient <= _ROUNDS_TO_LARGEST)


def _block_absmax(weight: np.ndarray, name: str) -> np.ndarray:
  if weight.ndim != 2 or not weight.size:
    raise UserError(f'{name}: {list(weight.shape)} cannot be block FP8, it must be a matrix')
  starts = [np.arange(0, size, BLOCK) for size in weight.shape]
  by_rows = np.maximum.reduceat(np.abs(weight.astype(np.float32, copy=False)), starts[0], axis=0)
  return np.maximum.reduceat(by_rows, starts[1], axis=1)


def _check_scale(shape: tuple[int, ...], scale_inv: np.ndarray, name: str) -> None:
  blocks = tuple(-(-size // BLOCK) for size in shape)
  if len(shape) != 2 or scale_inv.shape != blocks:
    raise UserError(f'{name}: {list(shape)} and its scales {list(scale_inv.shape)} do not belong '
                    f'together (blocks of {BLOCK} x {BLOCK} need {list(blocks)})')
  if scale_inv.dtype != np.float32:
    raise UserError(f'{name}: block scales are {scale_inv.dtype}, must be float32')
  if not (np.abs(scale_inv) <= _SCALE_MAX).all():
    raise UserError(f'{name}: holds block scales that are not finite')


def _strips(weight: np.ndarray, scale: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Gives a view of each row of blocks, and the scale of each of its columns."""
  for row, factors in enumerate(scale):
    columns = np.repeat(factors, BLOCK)[:weight.shape[1]]
    yield weight[row * BLOCK:(row + 1) * BLOCK], columns
