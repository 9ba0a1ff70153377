"""The number formats of matrix products, and what a quantised matrix is made of."""

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Float

Format = Literal['float32', 'bfloat16', 'mxfp8', 'nvfp4']


@dataclasses.dataclass(frozen=True)
class Formats:
  """Formats of one class of products `y = x w`.

  Both operands of a product are rounded from the float32 originals along its contraction axis: D in
  the forward pass, the outputs in `dx = dy w^T`, the rows in `dw = x^T dy` (Composer 2 report,
  section 6, says neither what the backward pass rounds nor, for weights, what the scale "per token"
  of NVFP4 is: originals, and a scale per output column, are our choices).

  Attributes:
    forward: format of `x` and `w`.
    dgrad: format of `dy` and `w` in the gradient of `x`.
    wgrad: format of `x` and `dy` in the gradient of `w`; not "nvfp4", whose scale per token would
      span tokens there.
  """

  forward: Format = 'float32'
  dgrad: Format = 'float32'
  wgrad: Format = 'float32'

  def __post_init__(self):
    if self.wgrad == 'nvfp4':
      raise ValueError('wgrad: "nvfp4" has one scale per token, which does not exist in a product '
                       'that contracts tokens (take "mxfp8")')

  @property
  def plain(self) -> bool:
    """True if nothing is rounded."""
    return self == FLOAT32


FLOAT32 = Formats()


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
