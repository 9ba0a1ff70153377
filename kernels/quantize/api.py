"""`fake_quantize`: rounds an operand to a low-precision format and back to float32.

What comes back is exactly what hardware with the format would multiply, so a product of two such
operands with float32 accumulation emulates its matrix product. Blocks and scales lie along one
axis, the contraction axis of the product. Rounding has no gradient here: who needs one decides what
it is (`composer_jax.models.precision`).
"""

from jaxtyping import Array, Float

from composer_jax.kernels import dispatch
from composer_jax.kernels.quantize import reference
from composer_jax.kernels.quantize.types import Format

BLOCK = {'mxfp8': reference.MXFP8_BLOCK, 'nvfp4': reference.NVFP4_BLOCK}

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
