"""Attention for Hopper: wgmma, an online softmax in registers; the backward pass is XLA's.

A program takes 128 queries of a head: one warpgroup loads blocks of keys and values by TMA, two
others take 64 queries each (FlashAttention-3, arXiv 2407.08608). Blocks of keys before the first
document of the queries and after their own place are never loaded.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform
from composer_jax.kernels.mla_attention import xla
from composer_jax.kernels.mosaic import padded, tile

_QUERIES, _CONSUMERS = 128, 2
_KEYS, _STAGES = 64, 3  # two stages of 128 keys would not fit shared memory
_OWN = _QUERIES // _CONSUMERS
_LOADER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
_MASKED = -1e30
_LOG2_E = 1.4426950408889634

backward = xla.backward


def obstacle() -> str | None:
  """Says what is missing, None on a Hopper GPU."""
  return platform.obstacle('sm90')


def refuses(q: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'], **_) -> str | None:
  """Says what the kernel cannot take, None when it can."""
  if q.dtype != jnp.bfloat16:
    return f'it multiplies bfloat16, not {q.dtype}'
  if q.shape[-1] % 64 or v.shape[-1] % 64:
    return f'widths have to be multiples of 64, not {q.shape[-1]} and {v.shape[-1]}'
  if q.shape[-1] > 192 or v.shape[-1] > 128:
    return (f'shared memory holds keys of width 192 and values of width 128, not {q.shape[-1]} and '
            f'{v.shape[-1]}')
  return None


def forward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
            segment_ids: Int[Array, 'B S'], chunk_bytes: int
            ) -> tuple[Float[Array, 'B S H N'], Float[Array, 'B H S']]:
  """Returns the averages in bfloat16 and log sum exp of each query's logits in float32."""
  del chunk_bytes
  length, width, heads = q.shape[1], v.shape[-1], q.shape[2]
  q, k, v = (padded(side, {1: _QUERIES}) for side in (q, k, v))
  segments = padded(jnp.asarray(segment_ids, jnp.int32), {1: _QUERIES})
  batch, rows = segments.shape
  out, lse = plgpu.kernel(
      _body,
      out_type=(jax.ShapeDtypeStruct((batch, rows, heads, width), q.dtype),
                jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)),
      grid=(heads, rows // _QUERIES, batch), grid_names=('head', 'block', 'row'),
      num_threads=_CONSUMERS + 1, thread_name='wg', kernel_name='mla_attention_sm90',
      scratch_types={
          'q_s': tile((_OWN, q.shape[-1]), q.dtype, _CONSUMERS),
          'k_s': tile((_KEYS, q.shape[-1]), q.dtype, _STAGES),
          'v_s': tile((_KEYS, width), q.dtype, _STAGES),
          'out_s': tile((_OWN, width), q.dtype, _CONSUMERS),
          'lse_s': plgpu.SMEM((_CONSUMERS, _OWN), jnp.float32),
          'q_full': plgpu.Barrier(num_barriers=_CONSUMERS),
          'k_full': plgpu.Barrier(num_barriers=_STAGES),
          'v_full': plgpu.Barrier(num_barriers=_STAGES),
          'k_empty': plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
          'v_empty': plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
      },
      compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
  )(q, k, v, segments, _first_blocks(segments))
  return out[:, :length], lse[:, :, :length]


def _first_blocks(segments: Int[Array, 'B S']) -> Int[Array, 'B Q']:
  """Returns the first block of keys that some query of each block of queries sees."""
  batch, rows = segments.shape
  row = jnp.arange(rows, dtype=jnp.int32)
  begins = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], 1)
  start = lax.cummax(jnp.where(begins, row, 0), axis=1)
  start = jnp.where(segments > 0, start, row)
  return start.reshape(batch, rows // _QUERIES, _QUERIES).min(axis=2) // _KEYS


def _body(q, k, v, segments, first_blocks, out, lse, *, q_s, k_s, v_s, out_s, lse_s, q_full, k_full,
          v_full, k_empty, v_empty):
  """What every program does: 128 queries of a head."""
  wg, head, block, row = (lax.axis_index(name) for name in ('wg', 'head', 'block', 'row'))
  first = first_blocks[row, block]
  steps = (block + 1) * (_QUERIES // _KEYS) - first

  @pl.when(wg == _CONSUMERS)
  def _():
    plgpu.set_max_registers(_LOADER_REGISTERS, action='decrease')

    def load(step, carry):
      slot = lax.rem(step, _STAGES)
      keys = pl.ds((first + step) * _KEYS, _KEYS)
      for source, target, full, empty in ((k, k_s, k_full, k_empty), (v, v_s, v_full, v_empty)):
        @pl.when(step >= _STAGES)
        def _(empty=empty):
          plgpu.barrier_wait(empty.at[slot])
        plgpu.copy_gmem_to_smem(source.at[row, keys, head], target.at[slot], full.at[slot])
      return carry

    lax.fori_loop(0, steps, load, None)

    def drain(step, carry):
      plgpu.barrier_wait(k_empty.at[lax.rem(step, _STAGES)])
      plgpu.barrier_wait(v_empty.at[lax.rem(step, _STAGES)])
      return carry

    lax.fori_loop(lax.max(steps - _STAGES, 0), steps, drain, None)

  @pl.when(wg < _CONSUMERS)
  def _():
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action='increase')
    begin = block * _QUERIES + wg * _OWN
    own = pl.ds(begin, _OWN)
    plgpu.copy_gmem_to_smem(q.at[row, own, head], q_s.at[wg], q_full.at[wg])
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    own_segment = plgpu.load(segments.at[row, own], layout=by_row, optimized=False)
    plgpu.barrier_wait(q_full.at[wg])

    def attend(step, carry):
      acc, largest, total = carry
      slot = lax.rem(step, _STAGES)
      keys = (first + step) * _KEYS
      plgpu.barrier_wait(k_full.at[slot])

      def products(acc_ref):
        plgpu.wgmma(acc_ref, q_s.at[wg], k_s.at[slot].transpose((1, 0)))
        return acc_ref[...]

      logits = pl.run_scoped(products, plgpu.ACC((_OWN, _KEYS), jnp.float32))
      plgpu.barrier_arrive(k_empty.at[slot])
      segment = plgpu.load(segments.at[row, pl.ds(keys, _KEYS)], layout=by_column, optimized=False)
      place = functools.partial(plgpu.broadcasted_iota, jnp.int32, (_OWN, _KEYS),
                                layout=plgpu.Layout.WGMMA)
      seen = ((place(dimension=0) + begin >= place(dimension=1) + keys)
              & (_spread(own_segment, 0) == _spread(segment, 1)))
      logits = jnp.where(seen, logits * _LOG2_E, jnp.full_like(logits, _MASKED))
      new = jnp.maximum(largest, logits.max(axis=1))
      scale = jnp.exp2(largest - new)
      weights = jnp.where(seen, jnp.exp2(logits - _spread(new, 0)), jnp.zeros_like(logits))
      total = total * scale + weights.sum(axis=1)
      plgpu.barrier_wait(v_full.at[slot])

      def average(acc_ref):
        plgpu.wgmma(acc_ref, weights.astype(q.dtype), v_s.at[slot])
        return acc_ref[...]

      part = pl.run_scoped(average, plgpu.ACC((_OWN, v.shape[-1]), jnp.float32))
      plgpu.barrier_arrive(v_empty.at[slot])
      return acc * _spread(scale, 0, acc.shape) + part, new, total

    full = lambda shape, value, layout: plgpu.layout_cast(  # noqa: E731
        jnp.full(shape, value, jnp.float32), layout)
    acc, largest, total = lax.fori_loop(0, steps, attend, (
        full((_OWN, v.shape[-1]), 0.0, plgpu.Layout.WGMMA), full((_OWN,), _MASKED, by_row),
        full((_OWN,), 0.0, by_row)))
    # Padding sees itself only and is zero; the caller knows.
    out_s[wg] = (acc / _spread(total, 0, acc.shape)).astype(q.dtype)
    lse_s[wg] = largest * (1 / _LOG2_E) + jnp.log(total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s.at[wg], out.at[row, own, head])
    plgpu.copy_smem_to_gmem(lse_s.at[wg], lse.at[row, head, own])
    plgpu.wait_smem_to_gmem(0)


def _spread(x, axis, shape=(_OWN, _KEYS)):
  return lax.broadcast_in_dim(x, shape, (axis,))
