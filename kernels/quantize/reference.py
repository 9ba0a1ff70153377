"""Definition of the formats in jnp, exact on any device.

Values are rounded by arithmetic on powers of two instead of conversions to narrow types: compilers
may drop a conversion there and back. Nor is a division left to itself: XLA turns one by a constant
or by a broadcast value into a multiplication with a rounded reciprocal (`_divide`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels.quantize import types

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16
# Rows below this become zeros, so that every scale that is divided by is a normal float32.
_NVFP4_LEAST = 2.0 ** -116 * 6 * 448


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def unchanged(x: Float[Array, '*shape'], axis: int) -> Float[Array, '*shape']:
  """Returns `x` in float32."""
  del axis
  return x.astype(jnp.float32)


def bfloat16(x: Float[Array, '*shape'], axis: int) -> Float[Array, '*shape']:
  """Returns `x` rounded to bfloat16."""
  del axis
  return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def mxfp8(x: Float[Array, '*shape'], axis: int) -> Float[Array, '*shape']:
  """Returns `x` rounded to E4M3 with an E8M0 scale per 32 elements; see `api.fake_quantize`."""
  values, power, finite = _mxfp8(_blocks(x, axis, MXFP8_BLOCK))
  return _whole(jnp.where(finite, _times_power_of_two(values, power), jnp.nan), x, axis)


def nvfp4(x: Float[Array, '*shape'], axis: int) -> Float[Array, '*shape']:
  """Returns `x` rounded to E2M1 with two levels of scales; see `api.fake_quantize`."""
  values, block, token, finite = _nvfp4(_blocks(x, axis, NVFP4_BLOCK))
  return _whole(jnp.where(finite, values * block * token, jnp.nan), x, axis)


def quantize(x: Float[Array, '*experts R K'], format: types.Format) -> types.Quantized:
  """Returns `x`, whose last two axes are multiples of 128, in a format; see `api.quantize`."""
  return {'mxfp8': quantize_mxfp8, 'nvfp4': quantize_nvfp4}[format](x)


def quantize_both(x: Float[Array, 'A K'], tiles: Int[Array, '1'], format: types.Format
                  ) -> tuple[types.Quantized, types.Quantized]:
  """Returns both copies of all rows, sides multiples of 128; see `api.quantize_both`."""
  del tiles
  return quantize(x, format), quantize_mxfp8(x.T)


def swiglu_quantize(gate_up: Float[Array, 'A F2'], tiles: Int[Array, '1'], format: types.Format
                    ) -> types.Quantized:
  """Returns the product of all rows, A and F multiples of 128; see `api.swiglu_quantize`."""
  del tiles
  gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
  return quantize(gate * jax.nn.sigmoid(gate) * up, format)


def dequantize_int4(packed: Int[Array, '*experts R K/8'], scale: Float[Array, '*experts R K/32']
                    ) -> Float[Array, '*experts R K']:
  """Returns INT4 weights in float32; see `api.dequantize_int4`."""
  codes = (packed[..., None] >> (4 * jnp.arange(8, dtype=jnp.int32))) & 15
  groups = (codes - 8).astype(jnp.float32).reshape(*scale.shape, 32)
  return (groups * scale.astype(jnp.float32)[..., None]).reshape(*packed.shape[:-1], -1)


def dequantize_block_fp8(values: Float[Array, '*experts R K'],
                         scale_inv: Float[Array, '*experts R/128 K/128']
                         ) -> Float[Array, '*experts R K']:
  """Returns FP8 weights in float32; see `api.dequantize_block_fp8`."""
  wide = jnp.repeat(jnp.repeat(scale_inv.astype(jnp.float32), 128, axis=-2), 128, axis=-1)
  rows, columns = values.shape[-2:]
  return values.astype(jnp.float32) * wide[..., :rows, :columns]


def quantize_mxfp8(x: Float[Array, '*experts R K']) -> types.Quantized:
  """Returns `x`, whose last two axes are multiples of 128, in MXFP8; see `api.quantize`."""
  values, power, finite = _mxfp8(_blocks(x, -1, MXFP8_BLOCK))
  scales = jnp.where(finite, power + 127, 255)[..., 0].astype(jnp.uint8)  # 255 is NaN
  return types.Quantized(
      values.reshape(x.shape).astype(jnp.float8_e4m3fn),
      pack_scales(jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)))


def quantize_nvfp4(x: Float[Array, '*experts R K']) -> types.Quantized:
  """Returns `x`, whose last two axes are multiples of 128, in NVFP4; see `api.quantize`."""
  values, block, token, finite = _nvfp4(_blocks(x, -1, NVFP4_BLOCK))
  token = jnp.where(finite, token, jnp.nan)
  return types.Quantized(values.reshape(x.shape).astype(jnp.float4_e2m1fn),
                         pack_scales(block[..., 0].astype(jnp.float8_e4m3fn)), token[..., 0, 0])


def dequantize(q: types.Quantized) -> Float[Array, '*experts R K']:
  """Returns what a quantised matrix stands for, in float32."""
  scales = unpack_scales(q.scales)
  values = q.values.astype(jnp.float32)
  blocks = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
  if q.token_scale is not None:
    wide = blocks * scales.astype(jnp.float32)[..., None] * q.token_scale[..., None, None]
    return wide.reshape(values.shape)
  byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)[..., None]
  wide = jnp.where(byte == 255, jnp.nan, _times_power_of_two(blocks, byte - 127))
  return wide.reshape(values.shape)


def pack_scales(scales: Float[Array, '*experts R C']) -> Float[Array, '*experts R/128 C/4 32 16']:
  """Returns scales in the tcgen05 layout, see `types.Quantized`."""
  *experts, rows, blocks = scales.shape
  split = scales.reshape(*experts, rows // 128, 4, 32, blocks // 4, 4)
  moved = jnp.moveaxis(split, (-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
  return moved.reshape(*experts, rows // 128, blocks // 4, 32, 16)


def unpack_scales(packed: Float[Array, '*experts R/128 C/4 32 16']) -> Float[Array, '*experts R C']:
  """Inverse of `pack_scales`."""
  *experts, tiles, quads, _, _ = packed.shape
  split = packed.reshape(*experts, tiles, quads, 32, 4, 4)
  moved = jnp.moveaxis(split, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
  return moved.reshape(*experts, tiles * 128, quads * 4)


def _mxfp8(blocks: Float[Array, '... blocks 32']) -> tuple[Array, Array, Array]:
  """Returns values in units of their scale, log2 of the scales, and which blocks are finite."""
  largest = jnp.abs(blocks).max(axis=-1, keepdims=True)
  # absmax = m 2^e with 1 <= m < 2 and 448 = 1.75 * 2^8: rounded up, the scale is 2^(e - 8) or twice
  # that. No division, and no scale below 2^-127 (which itself is no normal float32).
  exponent, fraction = _split(largest)
  power = jnp.maximum(exponent - 8 + (fraction > 0x600000), -127)
  most = jnp.where(power < 120, 448.0, 240.0)  # 256 * 2^120 would be infinite
  values = jnp.clip(_e4m3(blocks * _power_of_two(-power)), -most, most)
  return values, power, _all_finite(blocks, -1)


def _times_power_of_two(values: Array, power: Int[Array, '...']) -> Array:
  half = power // 2
  return values * _power_of_two(half) * _power_of_two(power - half)


def _nvfp4(blocks: Float[Array, '... blocks 16']) -> tuple[Array, Array, Array, Array]:
  """Returns values in units of both scales, block scales, row scales, and which rows are finite."""
  largest = jnp.abs(blocks).max(axis=-1, keepdims=True)
  row = largest.max(axis=-2, keepdims=True)
  some = row >= _NVFP4_LEAST
  token = _divide(jnp.where(some, row, 1.0), 6.0 * 448.0)
  block = _e4m3(_divide(largest, 6.0 * token))
  scale = block * token
  values = _round(_divide(blocks, jnp.where(scale > 0, scale, 1.0)), 1, 0, 6.0)
  values = jnp.where(some & (scale > 0), values, 0.0)
  return values, block, token, _all_finite(blocks, (-2, -1))


def _all_finite(blocks: Array, axis: int | tuple[int, ...]) -> Array:
  """Tells what has only finite numbers; a maximum would not, as XLA:CPU lets one lose a NaN."""
  return jnp.isfinite(blocks).all(axis=axis, keepdims=True)


def _blocks(x: Array, axis: int, size: int) -> Float[Array, '... blocks size']:
  """Returns the axis last and cut into blocks, the last one filled up with zeros."""
  x = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
  short = -x.shape[-1] % size
  x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, short),))
  return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _whole(blocks: Float[Array, '... blocks size'], like: Array, axis: int) -> Array:
  """Inverse of `_blocks`."""
  flat = blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
  return jnp.moveaxis(flat[..., :like.shape[axis]], -1, axis)


def _e4m3(x: Array) -> Array:
  """Rounds to E4M3 without infinities (largest 448), saturating."""
  return _round(x, 3, -6, 448.0)


def _round(x: Array, bits: int, least: int, largest: float) -> Array:
  """Rounds to `bits` fraction bits, to nearest even, with exponents from `least` on."""
  exponent, _ = _split(x)
  step = jnp.maximum(exponent, least) - bits
  x = jnp.round(x * _power_of_two(-step)) * _power_of_two(step)
  return jnp.clip(x, -largest, largest)


def _split(x: Array) -> tuple[Int[Array, '...'], Int[Array, '...']]:
  """Returns floor(log2 |x|) (-127 for zero and subnormals) and the 23 fraction bits."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return ((bits >> 23) & 0xFF) - 127, bits & 0x7FFFFF


def _power_of_two(exponent: Int[Array, '...']) -> Float[Array, '...']:
  """Returns 2^exponent for exponents of normal numbers, -126 to 127."""
  return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)


def _divide(x: Array, y: Array | float) -> Array:
  """Returns the IEEE quotient: the divisor depends on `x` in name, so no compiler shares it."""
  return x / jnp.where(jnp.isnan(x), jnp.nan, y)
