"""For any device: a loop over blocks of queries, each against all keys.

The backward pass rebuilds the weights from the logits and their log sum exp (the algebra of
FlashAttention-2, arXiv 2307.08691). Half of the products are of masked pairs.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_MASKED = -1e30  # exp of it is exactly 0: what is masked cannot change a bit of the result
_BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def forward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
            segment_ids: Int[Array, 'B S'], chunk_bytes: int
            ) -> tuple[Float[Array, 'B S H N'], Float[Array, 'B H S']]:
  """Returns the averages and, for the gradient, log sum exp of each query's logits."""
  def block(carry, piece):
    logits = _logits(piece['q'], k, piece['row'], piece['segment'], segment_ids)
    largest = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    out = _einsum('bhst,bthn->bshn', weights.astype(v.dtype), v)
    real = piece['segment'] > 0
    out = jnp.where(real[:, :, None, None], out / jnp.swapaxes(total, 1, 2), 0)
    lse = jnp.where(real[:, None], (largest + jnp.log(total))[..., 0], 0)
    return carry, {'out': out.astype(v.dtype), 'lse': jnp.swapaxes(lse, 1, 2)}

  pieces = _cut(q, segment_ids, chunk_bytes, {})
  _, out = lax.scan(block, None, pieces)
  return _joined(out['out'], q.shape[1]), jnp.swapaxes(_joined(out['lse'], q.shape[1]), 1, 2)


def backward(q: Float[Array, 'B S H P'], k: Float[Array, 'B S H P'], v: Float[Array, 'B S H N'],
             segment_ids: Int[Array, 'B S'], out: Float[Array, 'B S H N'],
             lse: Float[Array, 'B H S'], d_out: Float[Array, 'B S H N'], chunk_bytes: int
             ) -> tuple[Float[Array, 'B S H P'], Float[Array, 'B S H P'], Float[Array, 'B S H N']]:
  """Returns the gradients of `q`, `k` and `v`, the latter two summed up in float32."""
  def block(carry, piece):
    d_k, d_v = carry
    logits = _logits(piece['q'], k, piece['row'], piece['segment'], segment_ids)
    weights = jnp.exp(logits - jnp.swapaxes(piece['lse'], 1, 2)[..., None])
    weights = jnp.where((piece['segment'] > 0)[:, None, :, None], weights, 0)
    gradient = piece['d_out']
    mean = (gradient.astype(jnp.float32) * piece['out'].astype(jnp.float32)).sum(axis=-1)
    d_logits = weights * (_einsum('bshn,bthn->bhst', gradient, v)
                          - jnp.swapaxes(mean, 1, 2)[..., None])
    d_logits = d_logits.astype(q.dtype)
    d_k += _einsum('bhst,bshp->bthp', d_logits, piece['q'])
    d_v += _einsum('bhst,bshn->bthn', weights.astype(q.dtype), gradient)
    return (d_k, d_v), _einsum('bhst,bthp->bshp', d_logits, k).astype(q.dtype)

  pieces = _cut(q, segment_ids, chunk_bytes,
                {'out': out, 'd_out': d_out, 'lse': jnp.swapaxes(lse, 1, 2)})
  zeros = tuple(jnp.zeros(side.shape, jnp.float32) for side in (k, v))
  (d_k, d_v), d_q = lax.scan(block, zeros, pieces)
  return _joined(d_q, q.shape[1]), d_k, d_v


def _einsum(subscripts: str, a: Array, b: Array) -> Array:
  return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST,
                    preferred_element_type=jnp.float32)


def _logits(q, k, row, segment, segments):
  """Returns the logits of a block of queries, those of what they do not see masked."""
  seen = (segment[:, :, None] == segments[:, None, :]) & (
      row[0][:, None] >= jnp.arange(segments.shape[1]))
  return jnp.where(seen[:, None], _einsum('bshp,bthp->bhst', q, k), _MASKED)


def _cut(q, segment_ids, chunk_bytes, more):
  """Cuts what belongs to queries into blocks, as many queries as logits fit into the bytes."""
  batch, length, heads, _ = q.shape
  fitting = chunk_bytes // (4 * batch * heads * length)
  size = length if fitting >= length else max([b for b in _BLOCKS if b <= fitting] or [_BLOCKS[0]])
  rows = jnp.broadcast_to(jnp.arange(length), (batch, length))

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, -length % size), *((0, 0) for _ in x.shape[2:])])
    return jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

  return jax.tree.map(split, {'q': q, 'segment': segment_ids, 'row': rows} | more)


def _joined(blocks, length):
  joined = jnp.moveaxis(blocks, 0, 1)
  return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]
