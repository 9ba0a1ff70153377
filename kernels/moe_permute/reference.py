"""Definition of the op by one-hot matrices; any float width, any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def permute(x: Float[Array, 'T D'], source: Int[Array, 'M'], place: Int[Array, 'T K']
            ) -> Float[Array, 'M D']:
  """Returns `x[source[m] // K]` at each row m, zeros where the source is -1."""
  token = jnp.where(source >= 0, source // place.shape[1], x.shape[0])
  return _product(_one_hot(token, x.shape[0], x.dtype), x)


def combine(rows: Float[Array, 'M D'], place: Int[Array, 'T K'], weights: Float[Array, 'T K']
            ) -> Float[Array, 'T D']:
  """Returns `sum_k weights[t, k] rows[place[t, k]]`; rows that are not there count as zeros."""
  picked = _product(_one_hot(place.reshape(-1), rows.shape[0], rows.dtype), rows)
  return (picked.reshape(*place.shape, -1) * weights[:, :, None]).sum(axis=1)


def spread(dy: Float[Array, 'T D'], source: Int[Array, 'M'], weights: Float[Array, 'T K']
           ) -> Float[Array, 'M D']:
  """Returns the gradient of `rows` in `combine`."""
  every = dy[:, None, :] * weights[:, :, None]
  return _product(_one_hot(source, weights.size, dy.dtype), every.reshape(weights.size, -1))


def dots(rows: Float[Array, 'M D'], place: Int[Array, 'T K'], dy: Float[Array, 'T D']
         ) -> Float[Array, 'T K']:
  """Returns the gradient of `weights` in `combine`: the products of rows and `dy`."""
  picked = _product(_one_hot(place.reshape(-1), rows.shape[0], rows.dtype), rows)
  return (picked.reshape(*place.shape, -1) * dy[:, None, :]).sum(axis=-1)


def _one_hot(index, size, dtype):
  return (index[:, None] == jnp.arange(size)).astype(dtype)


def _product(a, b):
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
