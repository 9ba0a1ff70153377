"""Rounds operands of matrix products to low-precision formats.

`quantize` gives what a kernel multiplies, `fake_quantize` the same numbers in float32. What
comes back from it is exactly what hardware with the format would multiply, so a product of two such
operands with float32 accumulation emulates its matrix product. Blocks and scales lie along one
axis, the contraction axis of the product. Rounding has no gradient here: who needs one decides what
it is (`composer_jax.models.precision`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from composer_jax.kernels import dispatch
from composer_jax.kernels.quantize import reference
from composer_jax.kernels.quantize.types import Format, Quantized

BLOCK = {'mxfp8': reference.MXFP8_BLOCK, 'nvfp4': reference.NVFP4_BLOCK}
TILE = 128  # rows and columns of a quantised matrix are padded to multiples of it

BACKENDS = (
    dispatch.Backend('reference', reference, reference.obstacle, ('cpu', 'gpu', 'tpu')),
)


def fake_quantize(x: Float[Array, '*shape'], format: Format, axis: int = -1, *, impl: str = 'auto'
                  ) -> Float[Array, '*shape']:
  """Returns `x` in float32, rounded to what the format can represent.

  - "float32": unchanged.
  - "bfloat16": round to nearest even.
  - "mxfp8" (Composer 2 report, section 6; OCP MX 1.0): E4M3 values under one power-of-two scale per
    32 elements, absmax / 448 rounded up, at least 2^-127; values saturate and round to nearest
    even.
  - "nvfp4" (the same, with a scale per token): E2M1 values under an E4M3 scale per 16 elements,
    absmax16 / (6 s), and a float32 scale per row, s = absmax / (6 * 448); a row is everything along
    `axis` at one place of the other axes. IEEE divisions.

  A length that is no multiple of the block leaves a shorter last block. Zeros stay zeros. A block
  ("nvfp4": row) with NaN or infinity becomes NaN, and one of finite numbers stays finite: what
  would round beyond float32 becomes the largest value within. Subnormal results may come out as
  zeros.

  Args:
    x: any shape, any floating type.
    format: one of the four.
    axis: contraction axis.
    impl: "auto" or a backend's name, which never falls back.

  Raises:
    ValueError: unknown format, or a backend that cannot run here.
  """
  functions = {'float32': 'unchanged', 'bfloat16': 'bfloat16', 'mxfp8': 'mxfp8', 'nvfp4': 'nvfp4'}
  if format not in functions:
    raise ValueError(f'unknown format {format!r} (there are: {", ".join(functions)})')
  backend = dispatch.choose('quantize', BACKENDS, impl)
  return getattr(backend.functions, functions[format])(x, axis)


def quantize(x: Float[Array, '*experts R K'], format: Format, axis: int = -1, *, impl: str = 'auto'
             ) -> Quantized:
  """Returns a matrix, or one per expert, in a block-scaled format; numbers as `fake_quantize`'s.

  Args:
    x: one or more matrices, any floating type.
    format: "mxfp8" or "nvfp4".
    axis: contraction axis, one of the last two; it comes back last.
    impl: "auto" or a backend's name, which never falls back.

  Raises:
    ValueError: another format or axis, or a backend that cannot run here.
  """
  if format not in BLOCK:
    raise ValueError(f'quantize: {format!r} has no blocks (there are: {", ".join(BLOCK)})')
  if x.ndim < 2 or axis % x.ndim < x.ndim - 2:
    raise ValueError(f'quantize: axis {axis} is none of the last two of {x.shape}')
  backend = dispatch.choose('quantize', BACKENDS, impl)
  x = jnp.moveaxis(x, axis, -1)
  fill = [(0, 0)] * (x.ndim - 2) + [(0, -side % TILE) for side in x.shape[-2:]]
  return getattr(backend.functions, f'quantize_{format}')(jnp.pad(x, fill))


def dequantize(q: Quantized, shape: tuple[int, ...] | None = None) -> Float[Array, '*experts R K']:
  """Returns what a quantised matrix stands for, in float32, cut to a shape if one is given."""
  whole = reference.dequantize(q)
  return whole if shape is None else whole[tuple(slice(side) for side in shape)]
