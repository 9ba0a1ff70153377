"""Exact formulation for XLA:CPU: a loop over row blocks, one plain GEMM each.

A group of s rows is cut into ceil(s / block) blocks. A block that reaches past its group's end
writes wrong rows there, and the next group's first block, which runs later, overwrites them; so no
row is masked in the forward pass and no FLOP is spent on a group that has no rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_BLOCK = 64  # rows; 32-64 were fastest at F = 128-512 on two AVX2 cores


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool) -> Float[Array, 'M N']:
  """Returns the grouped product, with the last two axes of `w` swapped when `transpose`."""
  rows, width = x.shape[0], w.shape[1 if transpose else 2]
  group, start, _, blocks = _blocks(rows, group_sizes)
  padded = jnp.pad(x, ((0, _BLOCK), (0, 0)))
  contract = (((1,), (1 if transpose else 0,)), ((), ()))

  def body(i, y):
    block = lax.dynamic_slice(padded, (start[i], 0), (_BLOCK, x.shape[1]))
    weight = lax.dynamic_index_in_dim(w, group[i], axis=0, keepdims=False)
    return lax.dynamic_update_slice(y, lax.dot_general(block, weight, contract), (start[i], 0))

  y = lax.fori_loop(0, blocks, body, jnp.zeros((rows + _BLOCK, width), jnp.result_type(x, w)))
  return jnp.where(jnp.arange(rows)[:, None] < group_sizes.sum(), y[:rows], 0)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E']
                    ) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy`, accumulated block by block."""
  group, start, count, blocks = _blocks(x.shape[0], group_sizes)
  x_padded = jnp.pad(x, ((0, _BLOCK), (0, 0)))
  dy_padded = jnp.pad(dy, ((0, _BLOCK), (0, 0)))

  def body(i, dw):
    # Both sides are masked: a neighbour's row must not count, and 0 * NaN would not be 0.
    inside = jnp.arange(_BLOCK)[:, None] < count[i]
    x_block = lax.dynamic_slice(x_padded, (start[i], 0), (_BLOCK, x.shape[1]))
    dy_block = lax.dynamic_slice(dy_padded, (start[i], 0), (_BLOCK, dy.shape[1]))
    product = lax.dot_general(jnp.where(inside, x_block, 0), jnp.where(inside, dy_block, 0),
                              (((0,), (0,)), ((), ())))
    old = lax.dynamic_index_in_dim(dw, group[i], axis=0)
    return lax.dynamic_update_slice(dw, old + product[None], (group[i], 0, 0))

  shape = (group_sizes.shape[0], x.shape[1], dy.shape[1])
  return lax.fori_loop(0, blocks, body, jnp.zeros(shape, jnp.result_type(x, dy)))


def _blocks(rows: int, group_sizes: Int[Array, 'E']
            ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns each block's group, first row and row count, and the number of blocks (traced)."""
  groups = group_sizes.shape[0]
  most = -(-rows // _BLOCK) + groups
  per_group = (group_sizes + _BLOCK - 1) // _BLOCK
  block_ends, row_ends = jnp.cumsum(per_group), jnp.cumsum(group_sizes)
  block = jnp.arange(most)
  group = jnp.minimum(jnp.searchsorted(block_ends, block, side='right'), groups - 1)
  start = row_ends[group] - group_sizes[group] + _BLOCK * (
      block - (block_ends - per_group)[group])
  return group, start, jnp.clip(row_ends[group] - start, 0, _BLOCK), block_ends[-1]
