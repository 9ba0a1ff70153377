"""Attention over entries of which a mask says who sees what: for generation, with a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from composer_jax.kernels.mla_attention import api

MASKED = api.MASKED


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
  return api.masked_forward(q, k, v, mask)[0]


def _backward(residual, gradient):
  return *api.masked_backward(residual, gradient), None


_attend.defvjp(api.masked_forward, _backward)
