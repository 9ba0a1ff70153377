"""`jax.lax.ragged_dot`: what JAX itself offers; fast where the compiler has a kernel for it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_WEIGHT_GRADIENT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[])
_HIGHEST = jax.lax.Precision.HIGHEST  # or an accelerator would round float32 operands


def obstacle() -> str | None:
  """Runs everywhere (on CPU it runs every group on every row)."""
  return None


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool) -> Float[Array, 'M N']:
  """Returns the grouped product, with the last two axes of `w` swapped when `transpose`."""
  w = jnp.swapaxes(w, 1, 2) if transpose else w
  real = _real_rows(x.shape[0], group_sizes)
  return jnp.where(real, jax.lax.ragged_dot(jnp.where(real, x, 0), w, group_sizes, _HIGHEST), 0)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E']
                    ) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy`, summed up and returned in float32 or wider."""
  real = _real_rows(x.shape[0], group_sizes)
  wide = jnp.promote_types(jnp.result_type(x, dy), jnp.float32)
  return jax.lax.ragged_dot_general(jnp.where(real, x, 0), jnp.where(real, dy, 0), group_sizes,
                                    _WEIGHT_GRADIENT, _HIGHEST, wide)


def _real_rows(rows: int, group_sizes: Int[Array, 'E']):
  # Padding rows are undefined in some backends of ragged_dot, and may hold NaN on the way in.
  return jnp.arange(rows)[:, None] < group_sizes.sum()
