"""Attention for TPUs by JAX's own splash attention kernel, forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform
from composer_jax.kernels.mosaic import padded

_BLOCK = 512


def obstacle() -> str | None:
  """Says what is missing, None on a TPU."""
  return platform.obstacle('tpu')


def forward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
            segment_ids: Int[Array, 'B S'], chunk_bytes: int
            ) -> tuple[Float[Array, 'B S H N'], jax.tree_util.Partial]:
  """Returns the averages and the function that gives the gradients of `q`, `k` and `v`."""
  del chunk_bytes
  return jax.vjp(functools.partial(_attention, segment_ids), q, k, v)


def backward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
             segment_ids: Int[Array, 'B S'], out: Float[Array, 'B S H N'],
             pull: jax.tree_util.Partial, d_out: Float[Array, 'B S H N'], chunk_bytes: int
             ) -> tuple[Float[Array, 'B S H P'], Float[Array, 'B S H P'], Float[Array, 'B S H N']]:
  """Returns the gradients of `q`, `k` and `v`."""
  del q, k, v, segment_ids, out, chunk_bytes
  return pull(d_out)


def _attention(segment_ids, q, k, v):
  # Imported here: elsewhere nobody needs it.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash
  length, heads = q.shape[1], q.shape[2]
  block = min(_BLOCK, -(-length // 128) * 128)
  q, k, v, segment_ids = (padded(side, {1: block}) for side in (q, k, v, segment_ids))
  rows = q.shape[1]
  mask = splash.MultiHeadMask([splash.CausalMask((rows, rows))] * heads)
  sizes = splash.BlockSizes(
      block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
      block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block)
  kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

  def one(q, k, v, ids):
    return kernel(*(jnp.swapaxes(side, 0, 1) for side in (q, k, v)),
                  segment_ids=splash.SegmentIds(ids, ids))

  # Row by row: a batch axis of the grid is what JAX's interpreter cannot do.
  out = jnp.swapaxes(jax.lax.map(lambda row: one(*row), (q, k, v, segment_ids)), 1, 2)
  return jnp.where(segment_ids[:, :, None, None] > 0, out, jnp.zeros((), out.dtype))[:, :length]
