"""Exact formulation for XLA:CPU: one batched GEMM for most rows, a loop for the rest.

The first C rows of every group are laid out as `[E, C, K]` and meet the weights in one batched
GEMM; C is a static capacity a little above the mean group. Rows beyond it go through a loop over
blocks, one plain GEMM each, whose number depends on the sizes: none when the groups are balanced,
most rows when one group has nearly all. No row is dropped, and nothing depends on the sizes but the
number of iterations. Few rows take the loop alone, which compiles faster.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 64  # rows of one iteration
_SMALL_BLOCK = 32  # the same for small groups, most of which overflow by a few rows
_LEAST_MEAN = 8  # mean rows a group below which the batched layout would be mostly empty
_LEAST_ROWS = 512

# With the default precision an accelerator would round float32 operands.
_dot = functools.partial(lax.dot_general, precision=lax.Precision.HIGHEST)


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def capacity(rows: int, groups: int) -> int:
  """Returns C, the rows of each group in the batched GEMM; 0 for the loop alone.

  The mean and 1.25 times its root (the standard deviation of a balanced draw), up to a multiple of
  8: about one group in ten of a balanced draw overflows.
  """
  mean = rows / groups
  if rows < _LEAST_ROWS or mean < _LEAST_MEAN:
    return 0
  return 8 * math.ceil((mean + 1.25 * math.sqrt(mean)) / 8)


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool) -> Float[Array, 'M N']:
  """Returns the grouped product, with the last two axes of `w` swapped when `transpose`."""
  (rows, _), groups = x.shape, w.shape[0]
  width, axis = w.shape[1 if transpose else 2], 1 if transpose else 0
  c = capacity(rows, groups)
  if c:
    index, _ = _layout(rows, group_sizes, c)
    # Places past a group's end read some neighbour's row and are not read back.
    batch = _rows(x, index)
    products = _dot(batch, w, (((2,), (axis + 1,)), ((0,), (0,))))
    y = _read_back(products, rows, group_sizes)
  else:
    y = jnp.zeros((rows, width), jnp.result_type(x, w))
  group, start, count, blocks, size = _blocks(rows, group_sizes, c)

  def body(i, y):
    first, inside = _window(rows, size, start[i], count[i])
    block = lax.dynamic_slice(x, (first, 0), (size, x.shape[1]))
    weight = lax.dynamic_index_in_dim(w, group[i], axis=0, keepdims=False)
    product = _dot(block, weight, (((1,), (axis,)), ((), ())))
    old = lax.dynamic_slice(y, (first, 0), (size, width))
    return lax.dynamic_update_slice(y, jnp.where(inside, product, old), (first, 0))

  return lax.fori_loop(0, blocks, body, y)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E']
                    ) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy`, summed up and returned in float32 or wider."""
  rows, groups = x.shape[0], group_sizes.shape[0]
  wide = jnp.promote_types(jnp.result_type(x, dy), jnp.float32)
  c = capacity(rows, groups)
  # Both sides are masked, here and below: a neighbour's row must not count, and 0 * NaN is not 0.
  if c:
    index, inside = _layout(rows, group_sizes, c)
    x_batch, dy_batch = (jnp.where(inside[:, :, None], _rows(a, index), 0)
                         for a in (x, dy))
    dw = _dot(x_batch, dy_batch, (((1,), (1,)), ((0,), (0,))), preferred_element_type=wide)
  else:
    dw = jnp.zeros((groups, x.shape[1], dy.shape[1]), wide)
  group, start, count, blocks, size = _blocks(rows, group_sizes, c)

  def body(i, dw):
    first, inside = _window(rows, size, start[i], count[i])
    x_block, dy_block = (
        jnp.where(inside, lax.dynamic_slice(a, (first, 0), (size, a.shape[1])), 0)
        for a in (x, dy))
    product = _dot(x_block, dy_block, (((0,), (0,)), ((), ())), preferred_element_type=wide)
    old = lax.dynamic_index_in_dim(dw, group[i], axis=0)
    return lax.dynamic_update_slice(dw, old + product[None], (group[i], 0, 0))

  return lax.fori_loop(0, blocks, body, dw)


def _layout(rows: int, group_sizes: Int[Array, 'E'], c: int
            ) -> tuple[Int[Array, 'E C'], Bool[Array, 'E C']]:
  """Returns the row at each place of the batched layout, and which places hold one."""
  place = jnp.arange(c, dtype=jnp.int32)
  start = jnp.cumsum(group_sizes) - group_sizes
  index = jnp.minimum(start[:, None] + place, rows - 1)
  return index, place < group_sizes[:, None]


def _read_back(products: Float[Array, 'E C N'], rows: int, group_sizes: Int[Array, 'E']
               ) -> Float[Array, 'M N']:
  """Returns the batched products in the order of the rows, zero for padding and overflow."""
  groups, c, width = products.shape
  ends = jnp.cumsum(group_sizes)
  row = jnp.arange(rows, dtype=jnp.int32)
  group = jnp.minimum((row[:, None] >= ends).sum(axis=1, dtype=jnp.int32), groups - 1)
  place = row - (ends - group_sizes)[group]
  flat = _rows(products.reshape(-1, width), group * c + jnp.minimum(place, c - 1))
  return jnp.where(((place < c) & (row < ends[-1]))[:, None], flat, 0)


def _rows(x: Float[Array, 'M K'], index: Int[Array, '*places']) -> Float[Array, '*places K']:
  """Returns rows by indices that are known to exist."""
  return x.at[index].get(mode='promise_in_bounds')


def _blocks(rows: int, group_sizes: Int[Array, 'E'], skip: int
            ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, int]:
  """Cuts the rows of each group after the first `skip` into blocks.

  Returns:
    Each block's group, first row and row count, the number of blocks (traced), rows of a block.
  """
  size = min(_SMALL_BLOCK if 0 < skip <= _BLOCK else _BLOCK, rows)
  groups = group_sizes.shape[0]
  most = -(-rows // max(size, 1)) + groups
  rest = jnp.maximum(group_sizes - skip, 0)
  per_group = (rest + size - 1) // max(size, 1)
  block_ends, row_ends = jnp.cumsum(per_group), jnp.cumsum(group_sizes)
  block = jnp.arange(most)
  group = jnp.minimum(jnp.searchsorted(block_ends, block, side='right'), groups - 1)
  start = row_ends[group] - rest[group] + size * (block - (block_ends - per_group)[group])
  return group, start, jnp.clip(row_ends[group] - start, 0, size), block_ends[-1], size


def _window(rows: int, size: int, start: Int[Array, ''], count: Int[Array, '']
            ) -> tuple[Int[Array, ''], Bool[Array, 'B 1']]:
  """Returns where to cut `size` rows out of all, and which of them are the block's."""
  first = jnp.minimum(start, rows - size)  # the last block would reach past the end
  row = first + jnp.arange(size)[:, None]
  return first, (row >= start) & (row < start + count)
