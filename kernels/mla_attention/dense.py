"""For short rows on a CPU: all logits at once, kept for the backward pass.

Automatic differentiation of a softmax keeps and re-reads several `[B, H, S, T]` arrays. Here the
forward pass normalises after the product with the values, and the backward pass rebuilds the
weights from the logits and their log sum exp (the algebra of FlashAttention-2, arXiv 2307.08691).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from composer_jax.kernels.mla_attention import reference

MASKED = -1e30  # exp of it is exactly 0: what is masked cannot change a bit of the result
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def refuses(q: Float[Array, 'B S H P'], chunk_bytes: int, **_) -> str | None:
  """Says when the logits take more than the bytes that there are for them."""
  batch, length, heads, _ = q.shape
  needed = 4 * batch * heads * length ** 2
  return None if needed <= chunk_bytes else f'logits of {needed} bytes, more than {chunk_bytes}'


def forward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
            segment_ids: Int[Array, 'B S'], chunk_bytes: int
            ) -> tuple[Float[Array, 'B S H N'], tuple[Array, ...]]:
  """Returns the averages and, for the gradient, all sides by head with the logits."""
  del chunk_bytes
  seen = reference.visible(segment_ids) | jnp.eye(segment_ids.shape[1], dtype=bool)
  out, residual = masked_forward(*(jnp.swapaxes(a, 1, 2) for a in (q, k, v)), seen)
  return jnp.swapaxes(out, 1, 2), residual


def backward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
             segment_ids: Int[Array, 'B S'], out: Float[Array, 'B S H N'],
             residual: tuple[Array, ...], d_out: Float[Array, 'B S H N'], chunk_bytes: int
             ) -> tuple[Float[Array, 'B S H P'], Float[Array, 'B S H P'], Float[Array, 'B S H N']]:
  """Returns the gradients of `q`, `k` and `v`."""
  del q, k, v, segment_ids, out, chunk_bytes
  return tuple(jnp.swapaxes(g, 1, 2)
               for g in masked_backward(residual, jnp.swapaxes(d_out, 1, 2)))


def masked_forward(q: Float[Array, 'B H S P'], k: Float[Array, 'B H T P'],
                   v: Float[Array, 'B H T N'], mask: Bool[Array, 'B S T']
                   ) -> tuple[Float[Array, 'B H S N'], tuple[Array, ...]]:
  """Returns `softmax(q k^T, where=mask) v` and what its gradient needs.

  Args:
    q: queries, already scaled.
    k: keys.
    v: values.
    mask: which query sees which key; every query sees at least one.
  """
  logits = jnp.where(mask[:, None], _einsum('bhsd,bhtd->bhst', q, k), MASKED)
  largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
  weights = jnp.exp(logits - largest)
  total = weights.sum(axis=-1, keepdims=True)
  out = _einsum('bhst,bhtn->bhsn', weights, v) / total
  return out, (q, k, v, logits, largest + jnp.log(total), out)


def masked_backward(residual: tuple[Array, ...], gradient: Float[Array, 'B H S N']
                    ) -> tuple[Float[Array, 'B H S P'], Float[Array, 'B H T P'],
                               Float[Array, 'B H T N']]:
  """Returns the gradients of `q`, `k` and `v` of `masked_forward`."""
  # Without the barrier the compiler would keep the forward pass's weights after all.
  q, k, v, logits, log_total, out = jax.lax.optimization_barrier(residual)
  weights = jnp.exp(logits - log_total)
  mean = (gradient * out).sum(axis=-1, keepdims=True)
  d_logits = weights * (_einsum('bhsn,bhtn->bhst', gradient, v) - mean)
  return (_einsum('bhst,bhtd->bhsd', d_logits, k), _einsum('bhst,bhsd->bhtd', d_logits, q),
          _einsum('bhst,bhsn->bhtn', weights, gradient))
