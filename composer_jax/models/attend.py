"""Softmax attention with its gradient written out, the inner loop of training.

Automatic differentiation of a softmax keeps and re-reads several `[B, H, S, T]` arrays. Here the
forward pass normalises after the product with the values, and the backward pass rebuilds the
weights from the logits and their log-sum (the algebra of FlashAttention-2, arXiv 2307.08691).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from composer_jax.models import precision

MASKED = -1e30  # exp of it is exactly 0: what is masked cannot change a bit of the result


def attend(q: Float[Array, 'B S H P'], k: Float[Array, 'B T H P'], v: Float[Array, 'B T H N'],
           mask: Bool[Array, 'B S T']) -> Float[Array, 'B S H N']:
  """Returns `softmax(q k^T, where=mask) v` for every head.

  Args:
    q: queries, already scaled.
    k: keys.
    v: values.
    mask: which query sees which key; every query sees at least one.
  """
  by_head = [jnp.swapaxes(a, 1, 2) for a in (q, k, v)]
  return jnp.swapaxes(_attend(*by_head, mask), 1, 2)


@jax.custom_vjp
def _attend(q, k, v, mask):
  return _forward(q, k, v, mask)[0]


def _forward(q, k, v, mask):
  logits = jnp.where(mask[:, None], precision.einsum('bhsd,bhtd->bhst', q, k), MASKED)
  largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
  weights = jnp.exp(logits - largest)
  total = weights.sum(axis=-1, keepdims=True)
  out = precision.einsum('bhst,bhtn->bhsn', weights, v) / total
  return out, (q, k, v, logits, largest + jnp.log(total), out)


def _backward(residual, gradient):
  # Without the barrier the compiler would keep the forward pass's weights after all.
  q, k, v, logits, log_total, out = jax.lax.optimization_barrier(residual)
  weights = jnp.exp(logits - log_total)
  mean = (gradient * out).sum(axis=-1, keepdims=True)
  d_logits = weights * (precision.einsum('bhsn,bhtn->bhst', gradient, v) - mean)
  return (precision.einsum('bhst,bhtd->bhsd', d_logits, k),
          precision.einsum('bhst,bhsd->bhtd', d_logits, q),
          precision.einsum('bhst,bhsn->bhtn', weights, gradient), None)


_attend.defvjp(_forward, _backward)
