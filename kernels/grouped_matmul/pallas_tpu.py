"""Grouped matmul for TPUs: rows stay packed, a tile that two groups share is visited by each.

The visits (a tile of rows and a group) are listed outside of the kernel and prefetched, so that the
grid walks exactly them, as in MegaBlocks (arXiv 2211.15841). Rows of other groups are masked: in
the forward pass when a tile is written, in the weight gradient when it is read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform
from composer_jax.kernels.mosaic import padded

NATIVE = frozenset({'bfloat16'})
_LANES = 128
_ROWS, _COLUMNS, _K = 128, 512, 512  # of a tile, at most


def obstacle() -> str | None:
  """Says what is missing, None on a TPU."""
  return platform.obstacle('tpu')


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool, dtype: Any = None) -> Float[Array, 'M N']:
  """Returns the grouped product, with the last two axes of `w` swapped when `transpose`.

  Products are accumulated in float32; float32 operands are multiplied in full precision.
  """
  (m, k), n = x.shape, w.shape[1 if transpose else 2]
  tile_n, tile_k = _width(n, _COLUMNS), _width(k, _K)
  contracted, kept = (2, 1) if transpose else (1, 2)
  x = padded(x, {0: _ROWS, 1: tile_k})
  w = padded(w, {contracted: tile_k, kept: tile_n})
  visits = _visits(group_sizes, x.shape[0])
  most = visits[0].shape[0]
  w_tile = (1, tile_n, tile_k) if transpose else (1, tile_k, tile_n)

  def w_index(n, v, k, row_tile, group, *_):
    return (group[v], n, k) if transpose else (group[v], k, n)

  kernel = functools.partial(_forward_kernel, transpose=transpose, k_tiles=x.shape[1] // tile_k)
  out = pl.pallas_call(
      kernel, name='grouped_matmul_tpu',
      out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[kept]), dtype or x.dtype),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=4, grid=(w.shape[kept] // tile_n, most, x.shape[1] // tile_k),
          in_specs=[pl.BlockSpec((_ROWS, tile_k), lambda n, v, k, row_tile, *_: (row_tile[v], k)),
                    pl.BlockSpec(w_tile, w_index)],
          out_specs=pl.BlockSpec((_ROWS, tile_n), lambda n, v, k, row_tile, *_: (row_tile[v], n)),
          scratch_shapes=[pltpu.VMEM((_ROWS, tile_n), jnp.float32)]),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'arbitrary', 'arbitrary')),
  )(*visits, x, w)
  return out[:m, :n]


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E']
                    ) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32."""
  k, n, groups = x.shape[1], dy.shape[1], group_sizes.shape[0]
  tile_n, tile_k = _width(n, _COLUMNS), _width(k, _K)
  x, dy = padded(x, {0: _ROWS, 1: tile_k}), padded(dy, {0: _ROWS, 1: tile_n})
  visits = _visits(group_sizes, x.shape[0], empty_groups=True)
  out = pl.pallas_call(
      _weight_gradient_kernel, name='grouped_matmul_tpu_wgrad',
      out_shape=jax.ShapeDtypeStruct((groups, x.shape[1], dy.shape[1]), jnp.float32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=4,
          grid=(x.shape[1] // tile_k, dy.shape[1] // tile_n, visits[0].shape[0]),
          in_specs=[pl.BlockSpec((_ROWS, tile_k), lambda k, n, v, row_tile, *_: (row_tile[v], k)),
                    pl.BlockSpec((_ROWS, tile_n), lambda k, n, v, row_tile, *_: (row_tile[v], n))],
          out_specs=pl.BlockSpec((1, tile_k, tile_n),
                                 lambda k, n, v, row_tile, group, *_: (group[v], k, n)),
          scratch_shapes=[pltpu.VMEM((tile_k, tile_n), jnp.float32)]),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'parallel', 'arbitrary')),
  )(*visits, x, dy)
  return out[:, :k, :n]


def _width(size: int, most: int) -> int:
  """Returns the widest tile of whole lanes that wastes no whole lanes more than needed."""
  lanes = -(-size // _LANES)
  return _LANES * next(d for d in range(min(most // _LANES, lanes), 0, -1) if lanes % d == 0)


def _visits(group_sizes: Int[Array, 'E'], rows: int, empty_groups: bool = False
            ) -> tuple[Int[Array, 'V'], Int[Array, 'V'], Int[Array, 'E'], Int[Array, 'E']]:
  """Lists the tiles of each group in order, then those that no group reaches.

  Args:
    group_sizes: rows of each group.
    rows: a multiple of a tile's.
    empty_groups: a group without rows gets a visit too, to any tile.

  Returns:
    Tile of rows and group of each visit (what is past the last tile repeats it), first row of each
    group and the row after its last.
  """
  tiles, groups = rows // _ROWS, group_sizes.shape[0]
  group_sizes = jnp.asarray(group_sizes, jnp.int32)
  ends = jnp.cumsum(group_sizes)
  starts = ends - group_sizes
  first = starts // _ROWS
  of_group = jnp.where(group_sizes > 0, -(-ends // _ROWS) - first, int(empty_groups))
  visit_ends = jnp.cumsum(of_group)
  visit = jnp.arange(tiles + groups * (1 + empty_groups))
  group = jnp.minimum(jnp.searchsorted(visit_ends, visit, side='right'), groups - 1)
  inside = first[group] + visit - (visit_ends - of_group)[group]
  beyond = -(-ends[-1] // _ROWS) + visit - visit_ends[-1]
  row_tile = jnp.minimum(jnp.where(visit < visit_ends[-1], inside, beyond), tiles - 1)
  return row_tile.astype(jnp.int32), group.astype(jnp.int32), starts, ends


def _own_rows(visit, row_tile, group, starts, ends) -> Array:
  """Tells which rows of a visit's tile are the group's, `[128, 1]`."""
  row = row_tile[visit] * _ROWS + lax.broadcasted_iota(jnp.int32, (_ROWS, 1), 0)
  return (row >= starts[group[visit]]) & (row < ends[group[visit]])


def _is_repeat(visit, row_tile, group) -> Array:
  """Tells that a visit only fills up the grid."""
  before = jnp.maximum(visit - 1, 0)
  return (visit > 0) & (row_tile[visit] == row_tile[before]) & (group[visit] == group[before])


def _precision(dtype) -> lax.Precision | None:
  return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _forward_kernel(row_tile, group, starts, ends, x, w, out, acc, *, transpose, k_tiles):
  visit, k = pl.program_id(1), pl.program_id(2)
  repeat = _is_repeat(visit, row_tile, group)

  @pl.when(k == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)

  @pl.when(jnp.logical_not(repeat))
  def _():
    acc[...] += lax.dot_general(x[...], w[0], (((1,), (1 if transpose else 0,)), ((), ())),
                                precision=_precision(x.dtype), preferred_element_type=jnp.float32)

  @pl.when((k == k_tiles - 1) & jnp.logical_not(repeat))
  def _():
    # The tile stays in memory while visits to it follow each other; the first one clears it.
    first = (visit == 0) | (row_tile[visit] != row_tile[jnp.maximum(visit - 1, 0)])
    old = jnp.where(first, jnp.zeros(out.shape, jnp.float32), out[...].astype(jnp.float32))
    own = _own_rows(visit, row_tile, group, starts, ends)
    out[...] = jnp.where(own, acc[...], old).astype(out.dtype)


def _weight_gradient_kernel(row_tile, group, starts, ends, x, dy, out, acc):
  visit, visits = pl.program_id(2), pl.num_programs(2)
  repeat = _is_repeat(visit, row_tile, group)
  before, after = jnp.maximum(visit - 1, 0), jnp.minimum(visit + 1, visits - 1)

  @pl.when((visit == 0) | (group[visit] != group[before]))
  def _():
    acc[...] = jnp.zeros_like(acc)

  @pl.when(jnp.logical_not(repeat))
  def _():
    # Both sides: 0 * NaN is not 0.
    own = _own_rows(visit, row_tile, group, starts, ends)
    sides = [jnp.where(own, side[...], jnp.zeros((), side.dtype)) for side in (x, dy)]
    acc[...] += lax.dot_general(*sides, (((0,), (0,)), ((), ())), precision=_precision(x.dtype),
                                preferred_element_type=jnp.float32)

  @pl.when((visit == visits - 1) | (group[visit] != group[after]))
  def _():
    out[0] = acc[...]
