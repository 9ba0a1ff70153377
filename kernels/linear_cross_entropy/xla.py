"""For any device: a loop over chunks of classes with a running log sum exp.

The backward pass computes each chunk's logits again. Beside results and operands, the memory taken
is that of a chunk of logits in float32, a few times, and of the gradient of `hidden` in float32.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform
from composer_jax.kernels.quantize import api as quantize_api
from composer_jax.kernels.quantize.types import Format, Formats


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def forward(hidden: Float[Array, 'T D'], w: Float[Array, 'D V'], targets: Int[Array, 'T'],
            formats: Formats, columns: int) -> tuple[Float[Array, 'T'], Float[Array, 'T']]:
  """Returns the logit of each target, 0 for one outside [0, V), and log sum exp of all logits."""
  def chunk(start, piece, carry):
    largest, total, logit = carry
    logits = _product(hidden, piece, formats.forward, (1, 0))
    new = jnp.maximum(largest, logits.max(axis=1))
    total = total * jnp.exp(largest - new) + jnp.exp(logits - new[:, None]).sum(axis=1)
    return new, total, logit + jnp.where(_hit(start, piece, targets), logits, 0).sum(axis=1)

  zero = jnp.zeros(targets.shape, jnp.float32)
  largest, total, logit = _over_chunks(chunk, w, columns, (zero - jnp.inf, zero, zero))
  return logit, largest + jnp.log(total)


def backward(hidden: Float[Array, 'T D'], w: Float[Array, 'D V'], targets: Int[Array, 'T'],
             lse: Float[Array, 'T'], d_logit: Float[Array, 'T'], d_lse: Float[Array, 'T'],
             formats: Formats, columns: int) -> tuple[Float[Array, 'T D'], Float[Array, 'D V']]:
  """Returns the gradients of `hidden` in float32 and of `w` in its type."""
  def chunk(start, piece, carry):
    d_hidden, d_w = carry
    probabilities = jnp.exp(_product(hidden, piece, formats.forward, (1, 0)) - lse[:, None])
    gradient = probabilities * d_lse[:, None]
    gradient += jnp.where(_hit(start, piece, targets), d_logit[:, None], 0)
    if formats.plain:  # as wide as the operands, or the products would be in float32
      gradient = gradient.astype(hidden.dtype)
    d_hidden += _product(gradient, piece, formats.dgrad, (1, 1))
    d_piece = _product(hidden, gradient, formats.wgrad, (0, 0)).astype(w.dtype)
    return d_hidden, lax.dynamic_update_slice_in_dim(d_w, d_piece, start, axis=1)

  return _over_chunks(chunk, w, columns,
                      (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(w.shape, w.dtype)))


def _over_chunks(chunk: Callable[..., Any], w: Float[Array, 'D V'], columns: int, carry: Any
                 ) -> Any:
  """Calls `chunk(first column, columns of w, carry)` for all of them, the rest of V last."""
  whole = w.shape[1] // columns

  def body(i, carry):
    start = i * columns
    return chunk(start, lax.dynamic_slice_in_dim(w, start, columns, axis=1), carry)

  carry = lax.fori_loop(0, whole, body, carry) if whole > 1 else (
      body(0, carry) if whole else carry)
  start = whole * columns
  return chunk(start, w[:, start:], carry) if start < w.shape[1] else carry


def _hit(start: int | Array, piece: Float[Array, 'D C'], targets: Int[Array, 'T']) -> Array:
  return start + jnp.arange(piece.shape[1]) == targets[:, None]


def _product(a: Array, b: Array, format: Format, axes: tuple[int, int]) -> Array:
  """Contracts an axis of each, both rounded along it, in float32."""
  if format == 'bfloat16' and platform.current().kind is not None:
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # a CPU multiplies float32 faster
  elif format != 'float32':
    a, b = (quantize_api.fake_quantize(side, format, axis)
            for side, axis in zip((a, b), axes, strict=True))
  return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())),
                         precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
