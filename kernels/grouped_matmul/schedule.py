"""Which output tiles a persistent kernel computes, in which order: plain jnp, outside the kernel.

A task is one tile of an output, six numbers: see the constants. Programs on the device take
tasks round-robin, so tasks next to each other run at the same time and share what they read in L2.
Tasks of one group are therefore walked in bands: `band` tiles of rows high, column by column, so
that what runs at once is near square within one expert (Composer 2 report, section 7.3, calls it
expert-wise supergrouping; the height of the band is our choice).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from composer_jax.kernels import tiles

# A task: tile of 128 output rows, tile of output columns, group, the first and the number of tiles
# along the contraction, and how many tiles of 128 output rows there are to write.
ROW, COLUMN, GROUP, FIRST_K, K_TILES, HEIGHT = range(6)


def forward(where: tiles.Layout, columns: int, k_tiles: int, *, rows_per_tile: int = 1,
            band: int = 8) -> tuple[Int[Array, 'T 6'], Int[Array, '1']]:
  """Returns the tasks of `y = x w` on the aligned layout and how many of them are real.

  Args:
    where: the layout of the rows.
    columns: tiles of columns of the output.
    k_tiles: tiles along the contraction.
    rows_per_tile: layout tiles in one output tile; a tile reaches past the end of a group with an
      odd number of them, into rows that belong to the next group, and does not write there.
    band: height of a band in output tiles.
  """
  total = where.tile_group.shape[0]
  of_group = -(-where.sizes // tiles.ROWS)
  out_tiles = -(-of_group // rows_per_tile)
  ends = jnp.cumsum(out_tiles)
  most = min(total, -(-total // rows_per_tile) + where.sizes.shape[0])
  task = jnp.arange(most * columns, dtype=jnp.int32)
  group = jnp.minimum(jnp.searchsorted(ends * columns, task, side='right'),
                      where.sizes.shape[0] - 1)
  inside = task - (ends - out_tiles)[group] * columns
  row, column = _banded(inside, out_tiles[group], columns, band)
  first = where.starts[group] // tiles.ROWS + row * rows_per_tile
  zero = jnp.zeros_like(task)
  height = jnp.minimum(of_group[group] - row * rows_per_tile, rows_per_tile)
  return (_stack(first, column, group, zero, zero + k_tiles, height),
          (ends[-1:] * columns).astype(jnp.int32))


def weight_gradient(where: tiles.Layout, rows: int, columns: int, rows_per_k_tile: int, *,
                    rows_per_tile: int = 1, band: int = 8
                    ) -> tuple[Int[Array, 'T 6'], Int[Array, '1']]:
  """Returns the tasks of `dw = x^T dy`, which contracts each group's aligned rows.

  Args:
    where: the layout of the rows.
    rows: tiles of 128 rows of a group's output, a multiple of `rows_per_tile`.
    columns: tiles of columns of a group's output.
    rows_per_k_tile: aligned rows in a tile along the contraction: 64 or 128.
    rows_per_tile: tiles of 128 rows in one output tile.
    band: height of a band in output tiles.
  """
  groups, rows = where.sizes.shape[0], rows // rows_per_tile
  task = jnp.arange(groups * rows * columns, dtype=jnp.int32)
  group = task // (rows * columns)
  row, column = _banded(task % (rows * columns), jnp.full_like(task, rows), columns, band)
  first = where.starts[group] // rows_per_k_tile
  length = -(-where.sizes[group] // rows_per_k_tile)
  return (_stack(row * rows_per_tile, column, group, first, length,
                 jnp.full_like(task, rows_per_tile)),
          jnp.full((1,), task.shape[0], jnp.int32))


def _banded(index: Int[Array, 'T'], rows: Int[Array, 'T'], columns: int, band: int
            ) -> tuple[Int[Array, 'T'], Int[Array, 'T']]:
  """Returns row and column of the index-th tile of a matrix walked in bands, every other back."""
  above = index // (band * columns) * band
  height = jnp.clip(rows - above, 1, band)
  inside = index - above * columns
  column = inside // height
  column = jnp.where(above // band % 2 == 0, column, columns - 1 - column)
  return above + inside % height, column


def _stack(*columns: Int[Array, 'T']) -> Int[Array, 'T 6']:
  return jnp.stack([jax.lax.convert_element_type(c, jnp.int32) for c in columns], axis=1)
