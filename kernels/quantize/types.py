"""What a quantised matrix is made of."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
  """A matrix, or one per expert, in a block-scaled format, contraction axis last.

  R rows and K columns are those of the matrix, padded with zeros to R' and K', multiples of 128.
  The block size b is K' / (blocks in a row): 32 for MXFP8, 16 for NVFP4.

  Attributes:
    values: float8_e4m3fn (MXFP8) or float4_e2m1fn (NVFP4).
    scales: float8_e8m0fnu (MXFP8) or float8_e4m3fn (NVFP4), as tcgen05 reads them: the scale of row
      r and block c lies at `[r // 128, c // 4, r % 32, r % 128 // 32 * 4 + c % 4]`.
    token_scale: a factor of each row in float32, applied to the product; NVFP4 only.
  """

  values: Float[Array, "*experts R' K'"]
  scales: Float[Array, "*experts R'/128 K'/4b 32 16"]
  token_scale: Float[Array, "*experts R'"] | None = None
