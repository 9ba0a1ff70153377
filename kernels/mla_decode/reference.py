"""Definition of the op: every row's pages gathered, all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def forward(q: Float[Array, 'B H C+R'], pages: Float[Array, 'N page C+R'],
            page_table: Int[Array, 'B most'], lengths: Int[Array, 'B'], latent: int, chunk: int
            ) -> Float[Array, 'B H C']:
  """Returns the averages of the cached latents."""
  del chunk
  entries = pages[jnp.clip(page_table, 0, pages.shape[0] - 1)]
  entries = entries.reshape(page_table.shape[0], -1, pages.shape[2])
  seen = jnp.arange(entries.shape[1]) < lengths[:, None]
  entries = jnp.where(seen[:, :, None], entries, 0)
  logits = jnp.einsum('bhc,bmc->bhm', q, entries, precision=_HIGHEST)
  weights = jax.nn.softmax(logits, axis=-1, where=seen[:, None])
  weights = jnp.where(seen[:, None], weights, 0)
  return jnp.einsum('bhm,bmc->bhc', weights, entries[..., :latent], precision=_HIGHEST)
