"""Which format each matrix product runs in, as data, and the products that obey it.

Parameters are float32 masters whatever the policy: operands are rounded on their way into a
product, the product accumulates in float32, and gradients come back in float32. Rounding is
emulated (`kernels.quantize`). A product whose formats are all "float32" is the plain one, in the
type that its operands have, without any of the machinery here in the compiled program.

Every product asks for the highest precision: by default a TPU multiplies float32 in one pass of
bfloat16, and a GPU in TF32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels.grouped_matmul import api as grouped_matmul_api
from composer_jax.kernels.quantize import api as quantize_api
from composer_jax.kernels.quantize.types import FLOAT32, Format, Formats

BFLOAT16 = Formats('bfloat16', 'bfloat16', 'bfloat16')
MXFP8 = Formats('mxfp8', 'mxfp8', 'mxfp8')
_BLOCK_FORMATS = ('mxfp8', 'nvfp4')
_HIGHEST = jax.lax.Precision.HIGHEST

einsum = functools.partial(jnp.einsum, precision=_HIGHEST)


@dataclasses.dataclass(frozen=True)
class Policy:
  """Formats of every class of matrix products in the model.

  Attributes:
    attention: the projections of attention. Scores and the average of the values stay as wide as
      their operands, and the up-projection from the latent is at least bfloat16, see `kv_b`.
    router: float32, always: near ties decide which experts run.
    shared_expert: feed-forward of the shared experts.
    routed_experts: feed-forward of the routed experts.
    dense_mlp: feed-forward of the layers without experts.
    head: the output head, and the projection in front of the MTP layer.
    embeddings: a lookup, so "float32" or "bfloat16": `forward` rounds what is looked up, `wgrad`
      the gradient that is added to the table.
  """

  attention: Formats = FLOAT32
  router: Formats = FLOAT32
  shared_expert: Formats = FLOAT32
  routed_experts: Formats = FLOAT32
  dense_mlp: Formats = FLOAT32
  head: Formats = FLOAT32
  embeddings: Formats = FLOAT32

  def __post_init__(self):
    if not self.router.plain:
      raise ValueError('precision.router must be float32: rounded scores choose other experts than '
                       'the sampler, and train on the wrong ones')
    used = {self.embeddings.forward, self.embeddings.dgrad, self.embeddings.wgrad}
    if used.intersection(_BLOCK_FORMATS):
      raise ValueError('precision.embeddings can be float32 or bfloat16: a lookup contracts '
                       'nothing that a block scale could follow')

  @classmethod
  def named(cls) -> 'dict[str, Policy]':
    """Returns the policies that a config may name."""
    return POLICIES

  @property
  def kv_b(self) -> Formats:
    """Formats of the up-projection from the latent: those of attention, at least bfloat16.

    Its contraction axis differs between the expanded and the absorbed form, and block scales would
    make them different functions (LMSYS, end-to-end MXFP8 and NVFP4 RL, July 2026).
    """
    a = self.attention
    return Formats(*('bfloat16' if f in _BLOCK_FORMATS else f
                     for f in (a.forward, a.dgrad, a.wgrad)))


_BFLOAT16_POLICY = Policy(attention=BFLOAT16, shared_expert=BFLOAT16, routed_experts=BFLOAT16,
                          dense_mlp=BFLOAT16, head=BFLOAT16, embeddings=BFLOAT16)
# The report trains in MXFP8 (section 3.1) and does not say what is left out: the shared expert is
# bfloat16 for stability ("Mixture of Kittens", August 2026); attention, head and embeddings are as
# in DeepSeek-V3 (arXiv 2412.19437, section 3.3.1), and the dense layer goes with the experts.
_MXFP8_CPT = dataclasses.replace(_BFLOAT16_POLICY, routed_experts=MXFP8, dense_mlp=MXFP8)
# RL: the experts' forward pass in the sampler's format, their backward pass in MXFP8 (section 6);
# the dense layer is bfloat16, NVFP4 being for experts only.
_NVFP4_RL = dataclasses.replace(_BFLOAT16_POLICY,
                                routed_experts=Formats('nvfp4', 'mxfp8', 'mxfp8'))

POLICIES: dict[str, Policy] = {'float32': Policy(), 'bfloat16': _BFLOAT16_POLICY,
                               'mxfp8_cpt': _MXFP8_CPT, 'nvfp4_rl': _NVFP4_RL}


def matmul(formats: Formats, x: Float[Array, 'T D'], w: Float[Array, 'D F']
           ) -> Float[Array, 'T F']:
  """Returns `x @ w` in the given formats, in the type of `x`."""
  return jnp.matmul(x, w, precision=_HIGHEST) if formats.plain else _matmul(formats, x, w)


def grouped(formats: Formats, x: Float[Array, 'M K'], w: Float[Array, 'E K N'],
            group_sizes: Int[Array, 'E']) -> Float[Array, 'M N']:
  """Returns `kernels.grouped_matmul` in the given formats, in the type of `x`.

  Along the rows, which the weight gradient contracts, blocks start anew with each group.
  """
  return grouped_matmul_api.grouped_matmul(x, w, group_sizes, formats=formats)


def embed(formats: Formats, table: Float[Array, 'V D'], tokens: Int[Array, 'B S']
          ) -> Float[Array, 'B S D']:
  """Returns the tokens' rows of the table; ids outside of it take the nearest row."""
  rows = jnp.take(table, tokens, axis=0, mode='clip')
  return rows if formats.plain else _rounded(formats, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(formats, x, w):
  return _dot(formats.forward, x, w, (1, 0)).astype(x.dtype)


def _matmul_forward(formats, x, w):
  return _matmul(formats, x, w), (x, w)


def _matmul_backward(formats, residual, dy):
  x, w = residual
  dx, dw = _dot(formats.dgrad, dy, w, (1, 1)), _dot(formats.wgrad, x, dy, (0, 0))
  return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _dot(format: Format, a: Array, b: Array, axes: tuple[int, int]) -> Array:
  """Contracts an axis of each of two matrices, both rounded along it, in float32."""
  a, b = (quantize_api.fake_quantize(side, format, axis)
          for side, axis in zip((a, b), axes, strict=True))
  return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), precision=_HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(formats, rows):
  return quantize_api.fake_quantize(rows, formats.forward).astype(rows.dtype)


def _rounded_forward(formats, rows):
  return _rounded(formats, rows), None


def _rounded_backward(formats, _, gradient):
  return (quantize_api.fake_quantize(gradient, formats.wgrad).astype(gradient.dtype),)


_rounded.defvjp(_rounded_forward, _rounded_backward)
