"""Definition of the op: every group's matrix on every row, masked; any float width, any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def membership(rows: int, group_sizes: Int[Array, 'E']) -> Bool[Array, 'M E']:
  """Returns which group each row belongs to; padding rows belong to none."""
  ends = jnp.cumsum(group_sizes)
  row = jnp.arange(rows)[:, None]
  return (row >= ends - group_sizes) & (row < ends)


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool) -> Float[Array, 'M N']:
  """Returns the grouped product, with the last two axes of `w` swapped when `transpose`."""
  member = membership(x.shape[0], group_sizes)
  x = jnp.where(member.any(axis=1)[:, None], x, 0)
  w = jnp.swapaxes(w, 1, 2) if transpose else w
  every = jnp.einsum('mk,ekn->men', x, w, precision=jax.lax.Precision.HIGHEST)
  return jnp.where(member[:, :, None], every, 0).sum(axis=1)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E']
                    ) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy`, summed up and returned in float32 or wider."""
  member = membership(x.shape[0], group_sizes)
  real = member.any(axis=1)[:, None]
  x, dy = jnp.where(real, x, 0), jnp.where(real, dy, 0)
  return jnp.einsum('me,mk,mn->ekn', member.astype(x.dtype), x, dy,
                    precision=jax.lax.Precision.HIGHEST,
                    preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
