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

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from composer_jax.kernels import platform, tiles
from composer_jax.kernels.grouped_matmul import schedule
from composer_jax.kernels.grouped_matmul.sm100_config import Config, Operands, accumulators_of
from composer_jax.kernels.mosaic import tile

_ROWS = tiles.ROWS  # of an accumulator in one multiprocessor's tensor memory


def run(tasks: tuple[Array, Array], operands: Operands, out: jax.ShapeDtypeStruct, config: Config
        ) -> jax.Array:
  """Runs the kernel over the tasks.

  Args:
    tasks: see `schedule`.
    operands: both sides.
    out: shape and type of the result, with a leading axis of groups for weight gradients.
    config: how the problem is cut.

  Returns:
    The result; tiles without a task are not written.
  """
  o, c = operands, config
  scaled, pairs = o.a_scale is not None, c.height
  own_columns = c.columns // pairs
  out_columns = 64 if out.dtype == jnp.bfloat16 else 32  # 128 bytes
  accumulators = accumulators_of(o, c, out_columns)
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
  body = functools.partial(_body, operands=operands, config=config, accumulators=accumulators,
                           out_columns=out_columns)
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
