"""Gathers in both directions, for any device.

The gradient of a gather is a scatter that adds up in any order; here every direction is a gather by
the inverse map and a sum in the order of K. XLA's gathers of whole rows move memory and compute
nothing, which a kernel of our own would do no faster.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def permute(x: Float[Array, 'T D'], source: Int[Array, 'M'], place: Int[Array, 'T K']
            ) -> Float[Array, 'M D']:
  """Returns `x[source[m] // K]` at each row m, zeros where the source is -1."""
  return _rows(x, source // place.shape[1], source >= 0)


def combine(rows: Float[Array, 'M D'], place: Int[Array, 'T K'], weights: Float[Array, 'T K']
            ) -> Float[Array, 'T D']:
  """Returns `sum_k weights[t, k] rows[place[t, k]]` in float32; missing rows count as zeros."""
  picked = _rows(rows, place, place < rows.shape[0])
  return (picked.astype(jnp.float32) * weights.astype(jnp.float32)[:, :, None]).sum(axis=1)


def spread(dy: Float[Array, 'T D'], source: Int[Array, 'M'], weights: Float[Array, 'T K']
           ) -> Float[Array, 'M D']:
  """Returns the gradient of `rows` in `combine`."""
  weight = _rows(weights.reshape(-1, 1), source, source >= 0)
  return _rows(dy, source // weights.shape[1], source >= 0) * weight.astype(dy.dtype)


def dots(rows: Float[Array, 'M D'], place: Int[Array, 'T K'], dy: Float[Array, 'T D']
         ) -> Float[Array, 'T K']:
  """Returns the gradient of `weights` in `combine`: the products of rows and `dy`, in float32."""
  picked = _rows(rows, place, place < rows.shape[0])
  return (picked.astype(jnp.float32) * dy.astype(jnp.float32)[:, None, :]).sum(axis=-1)


def _rows(x: Float[Array, 'N D'], index: Int[Array, '*places'], there) -> Float[Array, '*places D']:
  """Returns rows by index, zeros where there is none; NaN in a row not asked for stays there."""
  picked = x.at[jnp.clip(index, 0, x.shape[0] - 1)].get(mode='promise_in_bounds')
  return jnp.where(there[..., None], picked, jnp.zeros((), x.dtype))
