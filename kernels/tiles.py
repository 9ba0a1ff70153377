"""The aligned layout of ragged groups: every group starts at a multiple of a tile's rows.

GPU kernels work in it: a tile then belongs to one group, block scales of 128 rows lie as the
hardware reads them, and a product that contracts rows never mixes groups. The rows that fill up a
group's last tile are zeros.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS = 128


def capacity(rows: int, groups: int, tile: int = ROWS) -> int:
  """Returns rows enough for any sizes of `groups` groups that sum up to at most `rows`."""
  most = rows + min(groups, rows) * (tile - 1)
  return max(most // tile, 1) * tile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
  """Where groups lie in the aligned layout; A is its capacity, R = A / tile.

  Attributes:
    starts: first aligned row of each group, a multiple of the tile.
    sizes: rows of each group.
    tile_group: group of each tile of rows; tiles past `tiles` repeat the last group.
    tiles: number of tiles in use, `[1]`.
    source: packed row that lies at each aligned row, or -1 where none does.
    place: aligned row of each packed row; A, out of range, for rows past the last group.
  """

  starts: Int[Array, 'E']
  sizes: Int[Array, 'E']
  tile_group: Int[Array, 'R']
  tiles: Int[Array, '1']
  source: Int[Array, 'A']
  place: Int[Array, 'M']


def layout(group_sizes: Int[Array, 'E'], rows: int, tile: int = ROWS) -> Layout:
  """Returns the aligned layout of `rows` packed rows, those past the groups' sum left out."""
  groups = group_sizes.shape[0]
  aligned = capacity(rows, groups, tile)
  group_sizes = jnp.asarray(group_sizes, jnp.int32)
  tiles_of = -(-group_sizes // tile)
  tile_ends = jnp.cumsum(tiles_of)
  starts = (tile_ends - tiles_of) * tile
  ends = jnp.cumsum(group_sizes)
  packed_starts = ends - group_sizes
  last = groups - 1
  tile_group = jnp.minimum(
      jnp.searchsorted(tile_ends, jnp.arange(aligned // tile), side='right'), last)
  row = jnp.arange(aligned)
  group = tile_group[row // tile]
  inside = row - starts[group]
  used = (inside < group_sizes[group]) & (row < tile_ends[last] * tile)
  source = jnp.where(used, packed_starts[group] + inside, -1)
  packed = jnp.arange(rows)
  packed_group = jnp.minimum(jnp.searchsorted(ends, packed, side='right'), last)
  place = jnp.where(packed < ends[last],
                    starts[packed_group] + packed - packed_starts[packed_group], aligned)
  return Layout(starts.astype(jnp.int32), group_sizes, tile_group.astype(jnp.int32),
                tile_ends[last:].astype(jnp.int32), source.astype(jnp.int32),
                place.astype(jnp.int32))


def spread(x: Float[Array, 'M K'], where: Layout) -> Float[Array, 'A K']:
  """Returns packed rows at their aligned places, zeros elsewhere."""
  return jnp.where(where.source[:, None] >= 0, x[jnp.maximum(where.source, 0)],
                   jnp.zeros((), x.dtype))


def gather(x: Float[Array, 'A K'], where: Layout) -> Float[Array, 'M K']:
  """Returns aligned rows in packed order, zeros past the last group; inverse of `spread`."""
  return x.at[where.place].get(mode='fill', fill_value=0)
