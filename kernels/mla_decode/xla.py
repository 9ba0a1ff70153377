"""For any device: a loop over chunks of pages with a running softmax.

It ends with the longest row, so that a short batch does not pay for what a page table could hold.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_MASKED = -1e30  # exp of it is exactly 0


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def forward(q: Float[Array, 'B H C+R'], pages: Float[Array, 'N page C+R'],
            page_table: Int[Array, 'B most'], lengths: Int[Array, 'B'], latent: int, chunk: int
            ) -> Float[Array, 'B H C']:
  """Returns the averages of the cached latents, in float32."""
  size, (batch, heads, _) = pages.shape[1], q.shape
  table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % chunk)))
  table = jnp.clip(table, 0, pages.shape[0] - 1)
  product = lambda subscripts, a, b: jnp.einsum(  # noqa: E731
      subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

  def body(carry):
    i, largest, total, out = carry
    entries = pages[lax.dynamic_slice_in_dim(table, i * chunk, chunk, axis=1)]
    entries = entries.reshape(batch, chunk * size, -1)
    seen = i * chunk * size + jnp.arange(chunk * size) < lengths[:, None]
    # What lies past the length may be anything, and 0 * NaN is not 0.
    entries = jnp.where(seen[:, :, None], entries, jnp.zeros((), entries.dtype))
    logits = jnp.where(seen[:, None], product('bhc,bmc->bhm', q, entries), _MASKED)
    new = jnp.maximum(largest, logits.max(axis=-1))
    weights = jnp.where(seen[:, None], jnp.exp(logits - new[..., None]), 0)
    scale = jnp.exp(largest - new)
    part = product('bhm,bmc->bhc', weights.astype(entries.dtype), entries[..., :latent])
    return (i + 1, new, total * scale + weights.sum(axis=-1), out * scale[..., None] + part)

  chunks = -(-lengths.max(initial=0) // (chunk * size))
  zero = jnp.zeros((batch, heads), jnp.float32)
  _, _, total, out = lax.while_loop(
      lambda carry: carry[0] < chunks, body,
      (jnp.int32(0), zero + _MASKED, zero, jnp.zeros((batch, heads, latent), jnp.float32)))
  return out / jnp.where(total > 0, total, 1)[..., None]
