"""`mla_decode`: one new token a row against its cached latents, in the absorbed form of MLA.

The cache keeps for each token a latent of width C and a rotary key of width R, which all heads
share (512 and 64 for Kimi K2.5), in pages that a table assigns to rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from composer_jax.kernels import dispatch
from composer_jax.kernels.mla_decode import reference, xla

BACKENDS = (
    dispatch.Backend('xla', xla, xla.obstacle, ('cpu', 'gpu', 'tpu')),
    dispatch.Backend('reference', reference, reference.obstacle, ()),
)


def mla_decode(q_latent: Float[Array, 'B H C'], q_rope: Float[Array, 'B H R'],
               pages: Float[Array, 'N page C+R'], page_table: Int[Array, 'B most'],
               lengths: Int[Array, 'B'], *, chunk: int = 16, impl: str = 'auto'
               ) -> Float[Array, 'B H C']:
  """Returns each head's softmax average of the row's latents, in the type of `q_latent`.

  A row of length 0 gives zeros. Pages past a row's length, and entries past it in its last page,
  may hold anything. Rows do not influence each other, to the bit.

  Args:
    q_latent: queries with the key half of the up-projection folded in, already scaled.
    q_rope: their rotated parts, already scaled.
    pages: the cache: latents, and after them the rotated keys.
    page_table: pages of each row, in order.
    lengths: tokens of each row.
    chunk: pages that "xla" gathers at once; our choice.
    impl: "auto", "xla" or "reference". A named one never falls back.

  Raises:
    ValueError: shapes or types that do not fit, lengths or pages (where they are known) that the
      table or the cache does not have, or a backend that cannot run here.
  """
  batch, latent = q_latent.shape[0], q_latent.shape[-1]
  if (q_latent.ndim != 3 or q_rope.shape[:2] != q_latent.shape[:2] or q_rope.ndim != 3
      or pages.ndim != 3 or pages.shape[2] != latent + q_rope.shape[2]
      or page_table.ndim != 2 or page_table.shape[0] != batch or lengths.shape != (batch,)):
    raise ValueError(f'mla_decode: q_latent [B, H, C], q_rope [B, H, R], pages [N, page, C + R], '
                     f'page_table [B, most] and lengths [B] do not fit: {q_latent.shape}, '
                     f'{q_rope.shape}, {pages.shape}, {page_table.shape}, {lengths.shape}')
  if not all(jnp.issubdtype(a.dtype, jnp.integer) for a in (page_table, lengths)):
    raise ValueError(f'mla_decode: page_table and lengths have to be integers, not '
                     f'{page_table.dtype} and {lengths.dtype}')
  _check_known(pages, page_table, lengths)
  backend = dispatch.choose('mla_decode', BACKENDS, impl)
  q = jnp.concatenate([q_latent, q_rope], axis=-1)
  out = backend.functions.forward(q, *map(jnp.asarray, (pages, page_table, lengths)), latent, chunk)
  return out.astype(q_latent.dtype)


def _check_known(pages, page_table, lengths) -> None:
  if any(isinstance(a, jax.core.Tracer) for a in (page_table, lengths)):
    return
  table, lengths = np.asarray(page_table), np.asarray(lengths)
  most = table.shape[1] * pages.shape[1]
  if lengths.size and (lengths.min() < 0 or lengths.max() > most):
    raise ValueError(f'mla_decode: lengths from {lengths.min()} to {lengths.max()}, and a row has '
                     f'room for {most}')
  used = table[np.arange(table.shape[1]) * pages.shape[1] < lengths[:, None]]
  if used.size and (used.min() < 0 or used.max() >= pages.shape[0]):
    raise ValueError(f'mla_decode: pages {used.min()} to {used.max()} of {pages.shape[0]}')
