"""`mla_attention`: softmax attention for training and prefill, on packed rows.

Keys have their own width (192 for Kimi K2.5: 128 and a rotary part of 64) and values theirs (128).
A token sees itself and what comes before it in its own document. Padding (segment 0) gives zeros,
has no gradient, and may hold anything.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels import dispatch
from composer_jax.kernels.mla_attention import dense, mosaic_sm90, reference, splash_tpu, xla

MASKED, masked_forward, masked_backward = (
    dense.MASKED, dense.masked_forward, dense.masked_backward)
BACKENDS = (
    dispatch.Backend('dense', dense, dense.obstacle, ('cpu',), dense.refuses),
    dispatch.Backend('mosaic_sm90', mosaic_sm90, mosaic_sm90.obstacle, ('gpu',),
                     mosaic_sm90.refuses),
    dispatch.Backend('splash_tpu', splash_tpu, splash_tpu.obstacle, ('tpu',)),
    dispatch.Backend('xla', xla, xla.obstacle, ('cpu', 'gpu', 'tpu')),
    dispatch.Backend('reference', reference, reference.obstacle, ()),
)


def mla_attention(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'],
                  v: Float[Array, 'B S H N'], segment_ids: Int[Array, 'B S'], *,
                  chunk_bytes: int = 2 ** 28, impl: str = 'auto') -> Float[Array, 'B S H N']:
  """Returns `softmax(q k^T) v` for every head, within the documents of each row.

  Args:
    q: queries, already scaled.
    k: keys.
    v: values.
    segment_ids: documents 1, 2, ... of each row, each in one piece; 0 for padding.
    chunk_bytes: size of the logits, in float32, that "xla" holds at once and "dense" at all; our
      choice.
    impl: "auto", "dense" (keeps the logits for the backward pass), "mosaic_sm90" (Hopper),
      "splash_tpu" (JAX's kernel), "xla" or "reference". A named one never falls back.

  Raises:
    ValueError: shapes or types that do not fit, or a backend that cannot run here or cannot take
      them.
  """
  if (q.ndim != 4 or q.shape != k.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]
      or segment_ids.shape != q.shape[:2]):
    raise ValueError(f'mla_attention: q and k [B, S, H, P], v [B, S, H, N] and segment_ids [B, S] '
                     f'do not fit: {q.shape}, {k.shape}, {v.shape}, {segment_ids.shape}')
  if not (jnp.issubdtype(q.dtype, jnp.floating) and q.dtype == k.dtype == v.dtype):
    raise ValueError(f'mla_attention: q, k and v have to be of one floating type, not {q.dtype}, '
                     f'{k.dtype} and {v.dtype}')
  if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise ValueError(f'mla_attention: segment_ids have to be integers, not {segment_ids.dtype}')
  backend = dispatch.choose('mla_attention', BACKENDS, impl, q=q, v=v, chunk_bytes=chunk_bytes)
  # What nobody sees may be anything, and 0 * NaN is not 0.
  real = (segment_ids > 0)[:, :, None, None]
  q, k, v = (jnp.where(real, side, jnp.zeros((), side.dtype)) for side in (q, k, v))
  return _attention(backend.name, chunk_bytes, q, k, v, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(impl, chunk_bytes, q, k, v, segment_ids):
  return _functions(impl).forward(q, k, v, segment_ids, chunk_bytes)[0].astype(v.dtype)


def _forward(impl, chunk_bytes, q, k, v, segment_ids):
  out, more = _functions(impl).forward(q, k, v, segment_ids, chunk_bytes)
  return out.astype(v.dtype), (q, k, v, segment_ids, out, more)


def _backward(impl, chunk_bytes, residual, d_out):
  # Without the barrier the compiler would keep the forward pass's weights after all.
  q, k, v, segment_ids, out, more = jax.lax.optimization_barrier(residual)
  gradients = _functions(impl).backward(q, k, v, segment_ids, out, more, d_out, chunk_bytes)
  return *(g.astype(side.dtype) for g, side in zip(gradients, (q, k, v), strict=True)), None


_attention.defvjp(_forward, _backward)


def _functions(impl) -> Any:
  return next(b.functions for b in BACKENDS if b.name == impl)
