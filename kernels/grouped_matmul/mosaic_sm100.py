"""Grouped matmul for Blackwell: tcgen05, accumulators in tensor memory, hardware block scaling.

One persistent kernel serves all passes and formats. A program a streaming multiprocessor takes
tasks (`schedule`) round-robin. Its first warpgroup has a warp that loads tiles by TMA into a ring
of stages, and a warp that issues the matrix products; its second warpgroup writes finished
accumulators out while the next product runs. There are two of them, which overlap where they do not
both fit beside the block scales; what they share is written out first. Block scales go from global
to shared to tensor memory in the layout in which the quantiser left them; the scales per token of
NVFP4 multiply the accumulator's rows and columns on its way out (Composer 2 report, section 6.1).

With `collective` two multiprocessors work on one tile of twice the rows, each holding half of the
columns' operand (2-CTA mode, report section 7.2).
"""

import dataclasses
import functools
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
from composer_jax.kernels.quantize.types import Quantized

NATIVE = frozenset({'bfloat16', 'mxfp8', 'nvfp4'})
_ROWS = tiles.ROWS  # of an accumulator in one multiprocessor's tensor memory
_BF16_K = 64  # 128 bytes
_TENSOR_MEMORY = 512  # columns of 128 numbers of 32 bits


def obstacle() -> str | None:
  """Says what is missing, None on a Blackwell GPU."""
  return platform.obstacle('sm100')


@dataclasses.dataclass(frozen=True)
class Config:
  """How a problem is cut.

  Attributes:
    columns: columns of an output tile: 128 or 256.
    stages: tiles along the contraction that are in flight.
    collective: two multiprocessors work on a tile, of 256 rows.
    band: height of a band of tiles, see `schedule`.
  """

  columns: int = 128
  stages: int = 4
  collective: bool = False
  band: int = 8

  @property
  def height(self) -> int:
    """Multiprocessors that work on a tile, and its height in tiles of 128 rows."""
    return 2 if self.collective else 1


# 256 x 256 leaves tensor memory for one accumulator and its scales.
PAIRS = Config(columns=256, collective=True)


def _default() -> Config:
  return PAIRS if platform.current().pairs else Config()


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool, dtype: Any = jnp.bfloat16, config: Config | None = None
            ) -> Float[Array, 'M N']:
  """Returns the grouped product in `dtype`, with the last axes of `w` swapped when `transpose`."""
  where = tiles.layout(group_sizes, x.shape[0])
  y = forward_aligned(tiles.spread(x, where), w, where, transpose=transpose, dtype=dtype,
                      config=config)
  return tiles.gather(y, where)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E'],
                    *, config: Config | None = None) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32."""
  where = tiles.layout(group_sizes, x.shape[0])
  return weight_gradient_aligned(tiles.spread(x, where), tiles.spread(dy, where), where,
                                 config=config)


def forward_aligned(x: Float[Array, 'A K'], w: Float[Array, 'E K N'], where: tiles.Layout, *,
                    transpose: bool, dtype: Any = jnp.bfloat16, config: Config | None = None
                    ) -> Float[Array, 'A N']:
  """Returns the grouped product of bfloat16 operands in the aligned layout, in `dtype`.

  Rows of tiles past the last group are not written.
  """
  config = config or _default()
  contracted, kept = (2, 1) if transpose else (1, 2)
  n = w.shape[kept]
  x = padded(x, {1: _BF16_K})
  w = padded(w, {contracted: _BF16_K, kept: config.columns})
  operands = _Operands(x, w, a_k_minor=True, b_k_minor=transpose, k=_BF16_K)
  tasks = schedule.forward(where, w.shape[kept] // config.columns, x.shape[1] // _BF16_K,
                           rows_per_tile=config.height, band=config.band)
  out = jax.ShapeDtypeStruct((x.shape[0], w.shape[kept]), dtype)
  return _run(tasks, operands, out, config)[:, :n]


def weight_gradient_aligned(x: Float[Array, 'A K'], dy: Float[Array, 'A N'], where: tiles.Layout, *,
                            config: Config | None = None) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32; both are in the aligned layout, in bfloat16."""
  config = config or _default()
  k, n = x.shape[1], dy.shape[1]
  x, dy = padded(x, {1: _ROWS * config.height}), padded(dy, {1: config.columns})
  operands = _Operands(x, dy, a_k_minor=False, b_k_minor=False, k=_BF16_K)
  tasks = schedule.weight_gradient(
      where, x.shape[1] // _ROWS, dy.shape[1] // config.columns, _BF16_K,
      rows_per_tile=config.height, band=config.band)
  out = jax.ShapeDtypeStruct((where.sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
  return _run(tasks, operands, out, config)[:, :k, :n]


def forward_scaled(x: Quantized, w: Quantized, where: tiles.Layout, *, dtype: Any = jnp.bfloat16,
                   config: Config | None = None) -> Float[Array, "A N'"]:
  """Returns the grouped product of MXFP8 or NVFP4 operands.

  Args:
    x: `[A, K]` in the aligned layout.
    w: `[E, N, K]`; for the gradient of rows `[E, K, N]`, quantised along N.
    where: the layout of the rows of `x`.
    dtype: of the result; products are accumulated in float32.
    config: how the problem is cut.

  Returns:
    All columns, those that fill N up to N' are zero. Rows of tiles past the last group are not
    written.
  """
  config = _fitting(config or _default(), w.values.shape[1])
  operands = _scaled(x, w)
  tasks = schedule.forward(where, w.values.shape[1] // config.columns,
                           x.values.shape[1] // operands.k, rows_per_tile=config.height,
                           band=config.band)
  out = jax.ShapeDtypeStruct((x.values.shape[0], w.values.shape[1]), dtype)
  return _run(tasks, operands, out, config)


def weight_gradient_scaled(x: Quantized, dy: Quantized, where: tiles.Layout, *,
                           config: Config | None = None) -> Float[Array, "E K' N'"]:
  """Returns each group's `x.T @ dy` in float32, of MXFP8 operands `[K, A]` and `[N, A]`."""
  config = _fitting(config or _default(), dy.values.shape[0])
  if x.values.shape[0] % (_ROWS * config.height):
    config = dataclasses.replace(config, collective=False, columns=128)
  operands = dataclasses.replace(_scaled(x, dy), k=_ROWS)
  tasks = schedule.weight_gradient(
      where, x.values.shape[0] // _ROWS, dy.values.shape[0] // config.columns, operands.k,
      rows_per_tile=config.height, band=config.band)
  out = jax.ShapeDtypeStruct(
      (where.sizes.shape[0], x.values.shape[0], dy.values.shape[0]), jnp.float32)
  return _run(tasks, operands, out, config)


@dataclasses.dataclass(frozen=True)
class _Operands:
  """Both sides of a product, and how their tiles lie.

  Attributes:
    a: rows of the output; `[rows, K]`, or `[K, rows]` if not `a_k_minor`.
    b: columns of the output; `[columns, K]` or `[K, columns]`, with a leading axis of groups unless
      all groups share it.
    a_k_minor: the contraction axis of `a` is its last one.
    b_k_minor: the same for `b`.
    k: width of a tile along the contraction.
    a_scale: block scales of `a`, if it has any, then `b` has too.
    b_scale: those of `b`.
    a_token: factors of the rows, if there are any, then of the columns too.
    b_token: factors of the columns.
  """

  a: jax.Array
  b: jax.Array
  a_k_minor: bool
  b_k_minor: bool
  k: int
  a_scale: jax.Array | None = None
  b_scale: jax.Array | None = None
  a_token: jax.Array | None = None
  b_token: jax.Array | None = None

  @property
  def arrays(self) -> dict[str, jax.Array]:
    """What the kernel reads, by name."""
    names = ('a', 'b', 'a_scale', 'b_scale', 'a_token', 'b_token')
    return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

  @property
  def scale_quads(self) -> int:
    """Block scales of a row of a tile, in fours."""
    return self.k // self.block // 4

  @property
  def block(self) -> int:
    """Numbers under one scale."""
    return self.a.shape[1] // (self.a_scale.shape[1] * 4)


def _scaled(a: Quantized, b: Quantized) -> _Operands:
  """Takes 128 bytes of a row at a time, half of that for NVFP4 rows that are no multiple of it."""
  k = 256 if a.token_scale is not None and a.values.shape[1] % 256 == 0 else 128
  return _Operands(a.values, b.values, True, True, k, a.scales, b.scales, a.token_scale,
                   b.token_scale)


def _fitting(config: Config, columns: int) -> Config:
  """Narrows the tile when the columns are no multiple of it."""
  if columns % config.columns == 0:
    return config
  return dataclasses.replace(config, columns=128, collective=False)


@dataclasses.dataclass(frozen=True)
class _Accumulators:
  """Where the two accumulators lie in tensor memory.

  Attributes:
    step: columns from the start of one to the start of the other.
    shared: columns that belong to both.
  """

  step: int
  shared: int

  @property
  def lag(self) -> int:
    """How many tasks ago columns were last used that a product writes."""
    return 1 if self.shared else 2


def _accumulators(operands: _Operands, config: Config, part: int) -> _Accumulators:
  """Keeps the accumulators as far apart as tensor memory allows, in parts that are stored at once.

  The scales of 128 rows take a column for every number along the contraction.
  """
  scales = 0
  if operands.a_scale is not None:
    scales = config.stages * operands.scale_quads * 4 * (1 + config.columns // _ROWS)
  step = min((_TENSOR_MEMORY - scales - config.columns) // part * part, config.columns)
  if step <= 0:
    raise ValueError(f'grouped_matmul: {config.stages} stages of scales and an accumulator of '
                     f'{config.columns} columns do not fit tensor memory')
  return _Accumulators(step, config.columns - step)


def _run(tasks: tuple[Array, Array], operands: _Operands, out: jax.ShapeDtypeStruct, config: Config
         ) -> jax.Array:
  """Runs the kernel over the tasks."""
  o, c = operands, config
  scaled, pairs = o.a_scale is not None, c.height
  own_columns = c.columns // pairs
  out_columns = 64 if out.dtype == jnp.bfloat16 else 32  # 128 bytes
  accumulators = _accumulators(o, c, out_columns)
  tile_of = lambda rows, k_minor: (rows, o.k) if k_minor else (o.k, rows)  # noqa: E731
  scratch = {
      'a_s': tile(tile_of(_ROWS, o.a_k_minor), o.a.dtype, c.stages),
      'b_s': tile(tile_of(own_columns, o.b_k_minor), o.b.dtype, c.stages),
      'out_s': tile((_ROWS, out_columns), out.dtype, 2),
      'acc': plgpu.TMEM((_ROWS, c.columns + accumulators.step), jnp.float32,
                        collective=c.collective),
      'full': plgpu.Barrier(num_arrivals=4 if scaled else 2, num_barriers=c.stages),
      'empty': plgpu.Barrier(num_barriers=c.stages, orders_tensor_core=True),
      'done': plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
      'stored': (plgpu.ClusterBarrier(collective_axes=('pair',), num_barriers=accumulators.lag,
                                      orders_tensor_core=True) if c.collective else
                 plgpu.Barrier(num_barriers=accumulators.lag, orders_tensor_core=True)),
  }
  if scaled:
    tiles_b = c.columns // _ROWS
    layout = plgpu.TMEMLayout.SCALES_LAYOUT
    scratch |= {
        'a_scale_s': plgpu.SMEM((c.stages, 1, o.scale_quads, 32, 16), o.a_scale.dtype),
        'b_scale_s': plgpu.SMEM((c.stages, tiles_b, o.scale_quads, 32, 16), o.b_scale.dtype),
        # One set a stage: the copy for the next product must not meet the running one.
        'a_scale_t': [plgpu.TMEM((_ROWS, o.scale_quads * 4), o.a_scale.dtype, layout=layout,
                                 collective=c.collective) for _ in range(c.stages)],
        'b_scale_t': [plgpu.TMEM((c.columns, o.scale_quads * 4), o.b_scale.dtype, layout=layout,
                                 collective=c.collective) for _ in range(c.stages)],
    }
  body = functools.partial(_body, operands=operands, config=config,
                           accumulators=accumulators, out_columns=out_columns)
  cores = max(platform.current().cores // pairs, 1)
  names = ('tasks', 'count', *o.arrays)

  def kernel(*refs, **scratch):
    body(dict(zip((*names, 'out'), refs, strict=True)), scratch)

  return plgpu.kernel(
      kernel, out_type=out, grid=(cores,), grid_names=('sm',), num_threads=2, thread_name='wg',
      cluster=(pairs,) if c.collective else (), cluster_names=('pair',) if c.collective else (),
      scratch_types=scratch, kernel_name='grouped_matmul_sm100',
      compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
  )(*tasks, *o.arrays.values())


def _body(gmem, scratch, *, operands, config, accumulators, out_columns):
  """What every program does: loads and products in one warpgroup, stores in the other."""
  sm, cores = lax.axis_index('sm'), lax.axis_size('sm')
  rank = lax.axis_index('pair') if config.collective else 0
  own_tasks = lax.div(gmem['count'][0] - sm + cores - 1, cores)

  def task(i):
    return [gmem['tasks'][sm + i * cores, field] for field in range(6)]

  @pl.when(lax.axis_index('wg') == 0)
  def _():
    @plgpu.warp_map
    def _(warp):
      @pl.when(warp == 0)
      def _():
        _load(task, own_tasks, gmem, scratch, operands, config)

      @pl.when((warp == 1) & (rank == 0))
      def _():
        _multiply(task, own_tasks, scratch, operands, config, accumulators)

  @pl.when(lax.axis_index('wg') == 1)
  def _():
    _store(task, own_tasks, gmem, scratch, rank, config, accumulators, out_columns)


def _load(task, own_tasks, gmem, scratch, operands, config):
  """Copies the tiles of both operands, and their scales, into the ring."""
  o, c = operands, config
  pair = 'pair' if c.collective else None

  def copy(source, target, slot, partition):
    plgpu.copy_gmem_to_smem(source, target.at[slot], scratch['full'].at[slot],
                            collective_axes=pair, leader_tracked=partition if pair else None)

  def split(axis):
    return plgpu.CopyPartition.PARTITIONED(axis)

  def per_task(i, step):
    row, column, group, first_k, k_tiles, _ = task(i)
    b = gmem['b'].at[group] if o.b.ndim == 3 else gmem['b']
    rows, columns = pl.ds(row * _ROWS, _ROWS * c.height), pl.ds(column * c.columns, c.columns)

    def per_tile(ki, step):
      slot = lax.rem(step, c.stages)

      @pl.when(step >= c.stages)
      def _():
        plgpu.barrier_wait(scratch['empty'].at[slot])

      ks = pl.ds((first_k + ki) * o.k, o.k)
      copy(gmem['a'].at[(rows, ks) if o.a_k_minor else (ks, rows)], scratch['a_s'], slot,
           split(0 if o.a_k_minor else 1))
      copy(b.at[(columns, ks) if o.b_k_minor else (ks, columns)], scratch['b_s'], slot,
           split(0 if o.b_k_minor else 1))
      if o.a_scale is not None:
        quads = pl.ds((first_k + ki) * o.scale_quads, o.scale_quads)
        tiles_b = c.columns // _ROWS
        b_scale = gmem['b_scale'].at[group] if o.b.ndim == 3 else gmem['b_scale']
        copy(gmem['a_scale'].at[pl.ds(row, c.height), quads], scratch['a_scale_s'], slot, split(0))
        copy(b_scale.at[pl.ds(column * tiles_b, tiles_b), quads], scratch['b_scale_s'], slot,
             plgpu.CopyPartition.REPLICATED)
      return step + 1

    return lax.fori_loop(0, k_tiles, per_tile, step)

  steps = lax.fori_loop(0, own_tasks, per_task, jnp.int32(0))

  def drain(step, carry):
    plgpu.barrier_wait(scratch['empty'].at[lax.rem(step, c.stages)])
    return carry

  lax.fori_loop(lax.max(steps - c.stages, 0), steps, drain, None)


def _multiply(task, own_tasks, scratch, operands, config, accumulators):
  """Multiplies what is in the ring, one accumulator a task."""
  o, c = operands, config
  pair = 'pair' if c.collective else None

  def product(slot, acc, accumulate):
    a, b = scratch['a_s'].at[slot], scratch['b_s'].at[slot]
    a = a if o.a_k_minor else a.transpose((1, 0))
    b = b.transpose((1, 0)) if o.b_k_minor else b
    multiply = functools.partial(plgpu.tcgen05_mma, acc, a, b, scratch['empty'].at[slot],
                                 accumulate=accumulate, collective_axis=pair)
    if o.a_scale is None:
      multiply()
      return
    for stage in range(c.stages):  # tensor memory has no dynamic index
      @pl.when(slot == stage)
      def _(stage=stage):
        a_scale, b_scale = scratch['a_scale_t'][stage], scratch['b_scale_t'][stage]
        plgpu.async_copy_scales_to_tmem(scratch['a_scale_s'].at[stage], a_scale,
                                        collective_axis=pair)
        plgpu.async_copy_scales_to_tmem(scratch['b_scale_s'].at[stage], b_scale,
                                        collective_axis=pair)
        multiply(a_scale=a_scale, b_scale=b_scale)

  def per_task(i, step):
    k_tiles, which = task(i)[schedule.K_TILES], lax.rem(i, 2)
    acc = scratch['acc'].at[:, pl.ds(which * accumulators.step, c.columns)]

    @pl.when(i >= accumulators.lag)
    def _():
      plgpu.barrier_wait(scratch['stored'].at[lax.rem(i, accumulators.lag)])

    def per_tile(ki, step):
      slot = lax.rem(step, c.stages)
      plgpu.barrier_wait(scratch['full'].at[slot])
      product(slot, acc, ki > 0)
      return step + 1

    step = lax.fori_loop(0, k_tiles, per_tile, step)
    plgpu.tcgen05_commit_arrive(scratch['done'].at[which], collective_axis=pair)
    return step

  lax.fori_loop(0, own_tasks, per_task, jnp.int32(0))

  def drain(i, carry):
    plgpu.barrier_wait(scratch['stored'].at[lax.rem(i, accumulators.lag)])
    return carry

  lax.fori_loop(lax.max(own_tasks - accumulators.lag, 0), own_tasks, drain, None)


def _store(task, own_tasks, gmem, scratch, rank, config, accumulators, out_columns):
  """Writes finished accumulators, scaled by row and column where there are such scales."""
  c, parts = config, config.columns // out_columns

  def per_task(i, carry):
    row, column, group, _, k_tiles, height = task(i)
    which = lax.rem(i, 2)
    row += rank
    out = gmem['out'].at[group] if len(gmem['out'].shape) == 3 else gmem['out']
    if 'a_token' in gmem:
      # The second half of the last pair may lie past the end: it is read in place and not written.
      inside = lax.min(row, gmem['a_token'].shape[0] // _ROWS - 1)
      of_row = plgpu.load(gmem['a_token'].at[pl.ds(inside * _ROWS, _ROWS)],
                          layout=plgpu.Layout.TCGEN05.reduce(1), optimized=False)
    plgpu.barrier_wait(scratch['done'].at[which])
    for index in range(parts):
      # What the accumulators share comes first: the last columns of one, the first of the other.
      first = jnp.where(which == 0, parts - 1 - index, index) * out_columns
      value = plgpu.async_load_tmem(
          scratch['acc'].at[:, pl.ds(which * accumulators.step + first, out_columns)],
          layout=plgpu.Layout.TCGEN05)
      columns = pl.ds(column * c.columns + first, out_columns)
      if 'a_token' in gmem:
        of_column = plgpu.load(gmem['b_token'].at[group].at[columns],
                               layout=plgpu.Layout.TCGEN05.reduce(0), optimized=False)
        value = (value * lax.broadcast_in_dim(of_row, value.shape, (0,))
                 * lax.broadcast_in_dim(of_column, value.shape, (1,)))
      if len(gmem['out'].shape) == 3:
        # A group without rows has no product: what the accumulator holds is of another task.
        value = jnp.where(jnp.broadcast_to(k_tiles > 0, value.shape), value,
                          jnp.zeros(value.shape, value.dtype))
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      scratch['out_s'][index % 2] = value.astype(gmem['out'].dtype)
      if index + 1 == (accumulators.shared // out_columns or parts):
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(scratch['stored'].at[lax.rem(i, accumulators.lag)])
      plgpu.commit_smem()

      @pl.when(rank < height)
      def _(index=index, columns=columns):
        plgpu.copy_smem_to_gmem(scratch['out_s'].at[index % 2],
                                out.at[pl.ds(row * _ROWS, _ROWS), columns])
    return carry

  lax.fori_loop(0, own_tasks, per_task, None)
  plgpu.wait_load_tmem()
  plgpu.wait_smem_to_gmem(0)
