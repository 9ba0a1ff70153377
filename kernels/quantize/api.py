"""Rounds operands of matrix products to low-precision formats.

`quantize` gives what a kernel multiplies, `fake_quantize` the same numbers in float32. What
comes back from it is exactly what hardware with the format would multiply, so a product of two such
operands with float32 accumulation emulates its matrix product. Blocks and scales lie along one
axis, the contraction axis of the product. Rounding has no gradient here: who needs one decides what
it is (`composer_jax.models.precision`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels import dispatch
from composer_jax.kernels import tiles as tiles_lib
from composer_jax.kernels.mosaic import padded
from composer_jax.kernels.quantize import mosaic_gpu, reference
from composer_jax.kernels.quantize.types import Format, Quantized

BLOCK = {'mxfp8': reference.MXFP8_BLOCK, 'nvfp4': reference.NVFP4_BLOCK}
TILE = 128  # rows and columns of a quantised matrix are padded to multiples of it

_REFERENCE = dispatch.Backend('reference', reference, reference.obstacle, ('cpu', 'gpu', 'tpu'))
BACKENDS = {
    'mxfp8': (dispatch.Backend('mosaic_gpu', mosaic_gpu, mosaic_gpu.obstacle, ('gpu',)),
              _REFERENCE),
    'nvfp4': (dispatch.Backend('mosaic_gpu', mosaic_gpu, mosaic_gpu.obstacle_nvfp4, ('gpu',)),
              _REFERENCE),
}


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
  backend = dispatch.choose('fake_quantize', (_REFERENCE,), impl)
  return getattr(backend.functions, functions[format])(x, axis)


def quantize(x: Float[Array, '*experts R K'], format: Format, axis: int = -1, *, impl: str = 'auto'
             ) -> Quantized:
  """Returns a matrix, or one per expert, in a block-scaled format; numbers as `fake_quantize`'s.

  Args:
    x: one or more matrices, any floating type.
    format: "mxfp8" or "nvfp4".
    axis: contraction axis, one of the last two; it comes back last.
    impl: "auto", "mosaic_gpu" (Hopper and Blackwell; "nvfp4" only Blackwell) or "reference" (jnp).
      A named one never falls back.

  Raises:
    ValueError: another format or axis, or a backend that cannot run here.
  """
  if x.ndim < 2 or axis % x.ndim < x.ndim - 2:
    raise ValueError(f'quantize: axis {axis} is none of the last two of {x.shape}')
  functions = _functions('quantize', format, impl)
  x = jnp.moveaxis(x, axis, -1)
  return functions.quantize(padded(x, {x.ndim - 2: TILE, x.ndim - 1: TILE}), format)


def quantize_both(x: Float[Array, 'A K'], format: Format, layout: tiles_lib.Layout, *,
                  impl: str = 'auto') -> tuple[Quantized, Quantized]:
  """Returns rows in both directions that products of a layer contract, reading them once.

  Groups start at multiples of 128 rows, so no block of the transposed copy has rows of two groups.

  Args:
    x: rows in the aligned layout, zeros where it has none.
    format: of the row-wise copy, "mxfp8" or "nvfp4".
    layout: of the rows.
    impl: as in `quantize`.

  Returns:
    The rows in `format`, quantised along K, and their transpose `[K, A]` in MXFP8, quantised along
    A: `quantize(x, format)` and `quantize(x, 'mxfp8', 0)`. What lies past the tiles in use may be
    undefined.

  Raises:
    ValueError: another format, shapes that do not fit, or a backend that cannot run here.
  """
  if x.ndim != 2 or x.shape[0] != layout.source.shape[0] or x.shape[0] % TILE:
    raise ValueError(f'quantize_both: {x.shape} are no rows of a layout of '
                     f'{layout.source.shape[0]} rows, a multiple of {TILE}')
  functions = _functions('quantize_both', format, impl)
  return functions.quantize_both(padded(x, {1: TILE}), layout.tiles, format)


def swiglu_quantize(gate_up: Float[Array, 'A F2'], format: Format,
                    layout: tiles_lib.Layout | None = None, *, impl: str = 'auto') -> Quantized:
  """Returns `silu(gate) * up`, computed in float32, in a block-scaled format, reading it once.

  Args:
    gate_up: rows of F gates, then F factors.
    format: "mxfp8" or "nvfp4".
    layout: of the rows, if only the tiles in use are needed; what lies past them may be undefined.
    impl: as in `quantize`.

  Raises:
    ValueError: another format, shapes that do not fit, or a backend that cannot run here.
  """
  rows, width = gate_up.shape if gate_up.ndim == 2 else (0, 1)
  if width % 2 or (layout is not None and layout.source.shape[0] != rows):
    raise ValueError(f'swiglu_quantize: {gate_up.shape} must be [rows, 2 F]'
                     + ('' if layout is None else f', {layout.source.shape[0]} rows'))
  functions = _functions('swiglu_quantize', format, impl)
  halves = padded(gate_up.reshape(rows, 2, width // 2), {0: TILE, 2: TILE})
  every = jnp.full((1,), halves.shape[0] // TILE, jnp.int32)
  return functions.swiglu_quantize(halves.reshape(halves.shape[0], -1),
                                   every if layout is None else layout.tiles, format)


def dequantize(q: Quantized, shape: tuple[int, ...] | None = None) -> Float[Array, '*experts R K']:
  """Returns what a quantised matrix stands for, in float32, cut to a shape if one is given."""
  whole = reference.dequantize(q)
  return whole if shape is None else whole[tuple(slice(side) for side in shape)]


def dequantize_int4(packed: Int[Array, '*experts R K/8'], scale: Float[Array, '*experts R K/32']
                    ) -> Float[Array, '*experts R K']:
  """Returns the weights of compressed-tensors' "pack-quantized" format in float32, exactly.

  Args:
    packed: int32; element i of a word lies in bits 4i to 4i + 3, as value + 8.
    scale: a factor for 32 neighbours (four words).

  Raises:
    ValueError: types or shapes that do not fit.
  """
  if packed.dtype != jnp.int32 or packed.shape != (*scale.shape[:-1], 4 * scale.shape[-1]):
    raise ValueError(f'dequantize_int4: int32 words, four a scale, expected: {packed.dtype} '
                     f'{packed.shape} and {scale.shape}')
  return reference.dequantize_int4(packed, scale)


def dequantize_block_fp8(values: Float[Array, '*experts R K'],
                         scale_inv: Float[Array, '*experts R/128 K/128']
                         ) -> Float[Array, '*experts R K']:
  """Returns E4M3 weights with a factor for 128 x 128 of them in float32 (DeepSeek-V3's format).

  Args:
    values: float8_e4m3fn.
    scale_inv: the factors; the last blocks may be smaller.

  Raises:
    ValueError: types or shapes that do not fit.
  """
  blocks = (*values.shape[:-2], *(-(-side // TILE) for side in values.shape[-2:]))
  if values.dtype != jnp.float8_e4m3fn or values.ndim < 2 or scale_inv.shape != blocks:
    raise ValueError(f'dequantize_block_fp8: float8_e4m3fn matrices and factors {blocks} expected: '
                     f'{values.dtype} {values.shape} and {scale_inv.shape}')
  return reference.dequantize_block_fp8(values, scale_inv)


def _functions(op: str, format: Format, impl: str):
  if format not in BACKENDS:
    raise ValueError(f'{op}: {format!r} has no blocks (there are: {", ".join(BACKENDS)})')
  return dispatch.choose(op, BACKENDS[format], impl).functions
