"""The formats' arithmetic on registers of a GPU: what `reference` defines, block by block."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

INFINITY = 0x7F800000  # bits of float32


def bits(x: Float[Array, '...']) -> Int[Array, '...']:
  """Returns the bits of |x|, whose order is that of the numbers, infinity and NaN last."""
  return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def wide(x: Array, shape: tuple[int, ...], layout: Any) -> Array:
  """Returns `x` repeated along a new last axis, in a layout of registers."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, tuple(range(x.ndim))), layout)


def mxfp8(x: Float[Array, 'R 32'], layout: Any) -> tuple[Array, Array]:
  """Returns E4M3 values and biased exponents of scales (255: NaN), as `reference` defines them."""
  largest = bits(x).max(axis=1)
  power = jnp.maximum((largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).astype(jnp.int32), 0)
  inverse = lax.bitcast_convert_type((254 - power) << 23, jnp.float32)
  # 256 * 2^120 is infinite.
  most = wide(jnp.where(power < 247, jnp.float32(448), jnp.float32(240)), x.shape, layout)
  values = jnp.minimum(jnp.maximum(x * wide(inverse, x.shape, layout), -most), most)
  return values.astype(jnp.float8_e4m3fn), jnp.where(largest < INFINITY, power, 255)


def nvfp4(x: Float[Array, 'R 16'], token: Float[Array, 'R'], layout: Any) -> tuple[Array, Array]:
  """Returns E2M1 values and block scales in float32, as `reference` defines them."""
  repeat = lambda a: wide(a, x.shape, layout)  # noqa: E731
  largest = lax.bitcast_convert_type(bits(x).max(axis=1), jnp.float32)
  ratio = jnp.minimum(quotient(largest, 6.0 * token), jnp.float32(448))
  block = ratio.astype(jnp.float8_e4m3fn).astype(jnp.float32)
  # Rows of small numbers are scaled up so that even subnormal ones are divided exactly.
  factor = jnp.where(token < 2.0 ** -60, jnp.float32(2.0 ** 64), jnp.float32(1))
  scale = block * token * factor
  scale = jnp.where(scale > 0, scale, jnp.float32(2.0 ** 126))  # makes zeros of x < 2^-7 token
  values = quotient(x * repeat(factor), scale, repeat)
  return values.astype(jnp.float4_e2m1fn), block


def quotient(x: Array, y: Array, repeat: Callable[[Array], Array] = lambda a: a) -> Array:
  """Returns the IEEE quotient of a normal number by a positive one, as far as it is normal.

  Zeros and subnormal x give less than 2^-125 / y; quotients are kept in 2^-120 to 2^121.

  Mosaic GPU divides approximately, which would now and then show in a rounded value. Here a
  reciprocal gives a first guess of the quotient's 24 bits. What it leaves of x is small, so the
  lowest 32 bits of that are all, and integer arithmetic is exact.
  """
  x_bits, y_bits = (lax.bitcast_convert_type(a, jnp.int32) for a in (x, y))
  one, fraction = 0x3F800000, 0x7FFFFF
  of_one = lambda bits: lax.bitcast_convert_type((bits & fraction) | one, jnp.float32)  # noqa: E731
  inverse = 1.0 / of_one(y_bits)
  exponent = (x_bits >> 23 & 0xFF) - repeat(y_bits >> 23 & 0xFF)
  x_whole, y_whole = ((bits & fraction) | 0x800000 for bits in (x_bits, y_bits))
  y_whole, inverse = repeat(y_whole), repeat(inverse)
  less = (x_whole < y_whole).astype(jnp.int32)  # a quotient of fractions below one: one more bit
  guess = lax.bitcast_convert_type(of_one(x_bits) * inverse, jnp.int32) + (less << 23)
  guess = jnp.minimum(jnp.maximum(guess, one), one + fraction) - one + 0x800000
  rest = (x_whole << 23 << less) - guess * y_whole
  more = (rest.astype(jnp.float32) * (inverse * jnp.float32(2.0 ** -23))).astype(jnp.int32)
  rest = 2 * (rest - more * y_whole)
  more = more + (rest > y_whole).astype(jnp.int32) - (rest < -y_whole).astype(jnp.int32)
  exponent = jnp.minimum(jnp.maximum(exponent - less, -120), 120) + 126
  sign = x_bits & ~0x7FFFFFFF
  return lax.bitcast_convert_type((guess + more + (exponent << 23)) | sign, jnp.float32)
