"""Grouped matmul for Hopper: wgmma, accumulators in registers.

One persistent kernel serves all passes. A program a streaming multiprocessor takes tasks
(`schedule`) round-robin: one warpgroup loads tiles by TMA into a ring of stages, two others
multiply 64 rows of a tile each and write them out.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform, tiles
from composer_jax.kernels.grouped_matmul import schedule
from composer_jax.kernels.mosaic import padded, tile

NATIVE = frozenset({'bfloat16'})
_ROWS = tiles.ROWS
_CONSUMERS = 2
_OWN_ROWS = _ROWS // _CONSUMERS
_LOADER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of each thread; 504 x 128 fit the register file


def obstacle() -> str | None:
  """Says what is missing, None on a Hopper GPU."""
  return platform.obstacle('sm90')


@dataclasses.dataclass(frozen=True)
class Config:
  """How a problem is cut.

  Attributes:
    columns: columns of an output tile: 128 or 256.
    k: width of a tile along the contraction, in elements: 128 bytes.
    stages: tiles along the contraction that are in flight.
    band: height of a band of tiles, see `schedule`.
  """

  columns: int = 256
  k: int = 64
  stages: int = 4
  band: int = 8


DEFAULT = Config()
# FP8 sums are carried over into a second set of registers, which halves the tile.
DEFAULT_FP8 = Config(columns=128, k=128, stages=6)


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool, dtype: Any = jnp.bfloat16, config: Config = DEFAULT
            ) -> Float[Array, 'M N']:
  """Returns the grouped product in `dtype`, with the last axes of `w` swapped when `transpose`."""
  where = tiles.layout(group_sizes, x.shape[0])
  y = forward_aligned(tiles.spread(x, where), w, where, transpose=transpose, dtype=dtype,
                      config=config)
  return tiles.gather(y, where)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E'],
                    *, config: Config = DEFAULT) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32."""
  where = tiles.layout(group_sizes, x.shape[0])
  return weight_gradient_aligned(tiles.spread(x, where), tiles.spread(dy, where), where,
                                 config=config)


def forward_aligned(x: Float[Array, 'A K'], w: Float[Array, 'E K N'], where: tiles.Layout, *,
                    transpose: bool, dtype: Any = jnp.bfloat16, config: Config = DEFAULT
                    ) -> Float[Array, 'A N']:
  """Returns the grouped product of bfloat16 operands in the aligned layout, in `dtype`.

  Rows of tiles past the last group are not written.
  """
  contracted, kept = (2, 1) if transpose else (1, 2)
  n = w.shape[kept]
  x = padded(x, {1: config.k})
  w = padded(w, {contracted: config.k, kept: config.columns})
  tasks = schedule.forward(where, w.shape[kept] // config.columns, x.shape[1] // config.k,
                           band=config.band)
  out = jax.ShapeDtypeStruct((x.shape[0], w.shape[kept]), dtype)
  return _run(tasks, x, w, out, config, a_k_minor=True, b_k_minor=transpose)[:, :n]


def forward_fp8(x: Float[Array, 'A K'], w: Float[Array, 'E N K'], x_scale: Float[Array, 'A'],
                w_scale: Float[Array, 'E N'], where: tiles.Layout, *, dtype: Any = jnp.bfloat16,
                config: Config = DEFAULT_FP8) -> Float[Array, 'A N']:
  """Returns the grouped product of E4M3 operands with a float32 scale a row and a column.

  The tensor core adds FP8 products with about 14 bits, so every 128 of them its sum is carried over
  to float32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

  Args:
    x: rows in the aligned layout.
    w: one matrix per group, contraction last.
    x_scale: factor of each row.
    w_scale: factor of each column of the result.
    where: the layout of the rows.
    dtype: of the result.
    config: how the problem is cut.
  """
  n = w.shape[1]
  x, w = padded(x, {1: config.k}), padded(w, {1: config.columns, 2: config.k})
  w_scale = padded(w_scale, {1: config.columns})
  tasks = schedule.forward(where, w.shape[1] // config.columns, x.shape[1] // config.k,
                           band=config.band)
  out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), dtype)
  return _run(tasks, x, w, out, config, a_k_minor=True, b_k_minor=True, a_token=x_scale,
              b_token=w_scale)[:, :n]


def weight_gradient_aligned(x: Float[Array, 'A K'], dy: Float[Array, 'A N'], where: tiles.Layout, *,
                            config: Config = DEFAULT) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32; both are in the aligned layout, in bfloat16."""
  k, n = x.shape[1], dy.shape[1]
  x, dy = padded(x, {1: _ROWS}), padded(dy, {1: config.columns})
  tasks = schedule.weight_gradient(where, x.shape[1] // _ROWS, dy.shape[1] // config.columns,
                                   config.k, band=config.band)
  out = jax.ShapeDtypeStruct((where.sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
  return _run(tasks, x, dy, out, config, a_k_minor=False, b_k_minor=False)[:, :k, :n]


def _run(tasks: tuple[Array, Array], a: Array, b: Array, out: jax.ShapeDtypeStruct, config: Config,
         *, a_k_minor: bool, b_k_minor: bool, a_token: Array | None = None,
         b_token: Array | None = None) -> jax.Array:
  """Runs the kernel over the tasks; see `mosaic_sm100` for how operands may lie."""
  c = config
  out_columns = 64 if out.dtype == jnp.bfloat16 else 32  # 128 bytes
  tile_of = lambda rows, k_minor: (rows, c.k) if k_minor else (c.k, rows)  # noqa: E731
  tokens = [] if a_token is None else [a_token, b_token]
  names = ('tasks', 'count', 'a', 'b', *(('a_token', 'b_token') if tokens else ()), 'out')

  def kernel(*refs, **scratch):
    _body(dict(zip(names, refs, strict=True)), scratch, config=c, a_k_minor=a_k_minor,
          b_k_minor=b_k_minor, out_columns=out_columns)

  return plgpu.kernel(
      kernel, out_type=out, grid=(platform.current().cores,), grid_names=('sm',),
      num_threads=_CONSUMERS + 1, thread_name='wg', kernel_name='grouped_matmul_sm90',
      scratch_types={
          'a_s': tile(tile_of(_ROWS, a_k_minor), a.dtype, c.stages),
          'b_s': tile(tile_of(c.columns, b_k_minor), b.dtype, c.stages),
          'out_s': tile((_OWN_ROWS, out_columns), out.dtype, 2 * _CONSUMERS),
          'full': plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
          'empty': plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=c.stages),
      },
      compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
  )(*tasks, a, b, *tokens)


def _body(gmem, scratch, *, config, a_k_minor, b_k_minor, out_columns):
  """What every program does."""
  sm, cores, wg = lax.axis_index('sm'), lax.axis_size('sm'), lax.axis_index('wg')
  own_tasks = lax.div(gmem['count'][0] - sm + cores - 1, cores)

  def task(i):
    return [gmem['tasks'][sm + i * cores, field] for field in range(6)]

  @pl.when(wg == _CONSUMERS)
  def _():
    plgpu.set_max_registers(_LOADER_REGISTERS, action='decrease')
    _load(task, own_tasks, gmem, scratch, config, a_k_minor, b_k_minor)

  @pl.when(wg < _CONSUMERS)
  def _():
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action='increase')
    _consume(task, own_tasks, gmem, scratch, wg, config, a_k_minor, b_k_minor, out_columns)


def _load(task, own_tasks, gmem, scratch, config, a_k_minor, b_k_minor):
  """Copies the tiles of both operands into the ring."""
  c = config

  def per_task(i, step):
    row, column, group, first_k, k_tiles, _ = task(i)
    b = gmem['b'].at[group] if len(gmem['b'].shape) == 3 else gmem['b']
    rows, columns = pl.ds(row * _ROWS, _ROWS), pl.ds(column * c.columns, c.columns)

    def per_tile(ki, step):
      slot = lax.rem(step, c.stages)

      @pl.when(step >= c.stages)
      def _():
        plgpu.barrier_wait(scratch['empty'].at[slot])

      ks = pl.ds((first_k + ki) * c.k, c.k)
      plgpu.copy_gmem_to_smem(gmem['a'].at[(rows, ks) if a_k_minor else (ks, rows)],
                              scratch['a_s'].at[slot], scratch['full'].at[slot])
      plgpu.copy_gmem_to_smem(b.at[(columns, ks) if b_k_minor else (ks, columns)],
                              scratch['b_s'].at[slot], scratch['full'].at[slot])
      return step + 1

    return lax.fori_loop(0, k_tiles, per_tile, step)

  steps = lax.fori_loop(0, own_tasks, per_task, jnp.int32(0))

  def drain(step, carry):
    plgpu.barrier_wait(scratch['empty'].at[lax.rem(step, c.stages)])
    return carry

  lax.fori_loop(lax.max(steps - c.stages, 0), steps, drain, None)


def _consume(task, own_tasks, gmem, scratch, wg, config, a_k_minor, b_k_minor, out_columns):
  """Multiplies 64 rows of each tile and writes them out."""
  c = config
  own = pl.ds(wg * _OWN_ROWS, _OWN_ROWS)

  def multiply(acc, slot):
    a = scratch['a_s'].at[slot, own] if a_k_minor else scratch['a_s'].at[slot, :, own]
    b = scratch['b_s'].at[slot]
    plgpu.wgmma(acc, a if a_k_minor else a.transpose((1, 0)),
                b.transpose((1, 0)) if b_k_minor else b)

  def release(step):
    plgpu.barrier_arrive(scratch['empty'].at[lax.rem(step, c.stages)])

  def whole_sum(first, k_tiles):
    """One accumulator over all tiles; a tile is released when the next one's product runs."""
    def scope(acc):
      def per_tile(ki, carry):
        slot = lax.rem(first + ki, c.stages)
        plgpu.barrier_wait(scratch['full'].at[slot])
        multiply(acc, slot)
        plgpu.wgmma_wait(1)

        @pl.when(ki > 0)
        def _():
          release(first + ki - 1)
        return carry

      lax.fori_loop(0, k_tiles, per_tile, None)
      value = acc[...]

      @pl.when(k_tiles > 0)
      def _():
        release(first + k_tiles - 1)
      return value

    return pl.run_scoped(scope, plgpu.ACC((_OWN_ROWS, c.columns), jnp.float32))

  def carried_sum(first, k_tiles):
    """A fresh accumulator for every tile, added up in registers."""
    def per_tile(ki, total):
      slot = lax.rem(first + ki, c.stages)
      plgpu.barrier_wait(scratch['full'].at[slot])

      def scope(acc):
        multiply(acc, slot)
        return acc[...]

      part = pl.run_scoped(scope, plgpu.ACC((_OWN_ROWS, c.columns), jnp.float32))
      release(first + ki)
      return total + part

    zero = plgpu.layout_cast(jnp.zeros((_OWN_ROWS, c.columns), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, k_tiles, per_tile, zero)

  def per_task(i, step):
    row, column, group, _, k_tiles, _ = task(i)
    out = gmem['out'].at[group] if len(gmem['out'].shape) == 3 else gmem['out']
    value = (carried_sum if 'a_token' in gmem else whole_sum)(step, k_tiles)
    rows = pl.ds(row * _ROWS + wg * _OWN_ROWS, _OWN_ROWS)
    if 'a_token' in gmem:
      of_row = plgpu.load(gmem['a_token'].at[rows], layout=plgpu.Layout.WGMMA.reduce(1),
                          optimized=False)
      of_column = plgpu.load(
          gmem['b_token'].at[group].at[pl.ds(column * c.columns, c.columns)],
          layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
      value = (value * lax.broadcast_in_dim(of_row, value.shape, (0,))
               * lax.broadcast_in_dim(of_column, value.shape, (1,)))
    value = value.astype(gmem['out'].dtype)
    for part in range(c.columns // out_columns):
      slot = wg * 2 + part % 2
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      scratch['out_s'][slot] = value[:, part * out_columns:(part + 1) * out_columns]
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
          scratch['out_s'].at[slot],
          out.at[rows, pl.ds(column * c.columns + part * out_columns, out_columns)])
    return step + k_tiles

  lax.fori_loop(0, own_tasks, per_task, jnp.int32(0))
  plgpu.wait_smem_to_gmem(0)
