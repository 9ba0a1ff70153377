"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; Kimi K2.5 shapes).

Keys and values of all heads are made from one latent of width C per token, and one rotary key of
width R is shared by the heads, so the cache holds C + R floats per token. The "expanded" form makes
keys and values for every head, from the new tokens' latents and, with a cache, from the cached ones
too. The "absorbed" form folds that up-projection into the query and the output instead, and attends
in the latent space. Both compute the same function, with and without a cache.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from composer_jax.kernels.mla_attention.api import mla_attention
from composer_jax.models import attend, layers, precision, rope
from composer_jax.models import config as config_lib


def choose_form(config: config_lib.ModelConfig, tokens: int, cached: int) -> str:
  """Returns "expanded" or "absorbed" for `attention`, S new tokens a row and M cached entries.

  Multiplications of a row and head, with P, V the widths of a key (without rotary part) and a
  value, and T = M + S:
  - expanded: T C (P + V) to make keys and values, S T (P + R + V) to use them;
  - absorbed: S C (P + V) to fold, 2 S T (C + R) to use the latents.

  "auto" takes the cheaper one with a cache, and "expanded" without one. At Kimi K2.5's widths with
  a long cache, expanded is cheaper from 158 new tokens on: prefill is expanded, decoding absorbed.
  """
  if config.attention != 'auto':
    return config.attention
  if not cached:
    return 'expanded'
  c, seen = config, cached + tokens
  fold = c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
  expanded = seen * fold + tokens * seen * (c.qk_head_dim + c.v_head_dim)
  absorbed = tokens * fold + 2 * tokens * seen * c.latent_dim
  return 'expanded' if expanded < absorbed else 'absorbed'


class Attention(nnx.Module):
  """MLA with an optional low-rank query projection."""

  def __init__(self, config: config_lib.ModelConfig):
    c, heads = config, config.num_attention_heads
    self.config = c
    query = (heads, c.qk_head_dim)
    if c.q_lora_rank:
      self.q_a = layers.matrix(c, (c.hidden_size, c.q_lora_rank), ('embed', None))
      self.q_norm = layers.scale(c.q_lora_rank)
      self.q_b = layers.matrix(c, (c.q_lora_rank, *query), ('embed', 'heads', None))
    else:
      self.q = layers.matrix(c, (c.hidden_size, *query), ('embed', 'heads', None))
    self.kv_a = layers.matrix(c, (c.hidden_size, c.latent_dim), ('embed', None))
    self.kv_norm = layers.scale(c.kv_lora_rank)
    self.kv_b = layers.matrix(
        c, (c.kv_lora_rank, heads, c.qk_nope_head_dim + c.v_head_dim),
        ('embed', 'heads', None))
    self.o = layers.matrix(c, (heads, c.v_head_dim, c.hidden_size), ('heads', None, 'embed'))

  def queries(self, x: Float[Array, 'B S D'], cos: Float[Array, 'B S R2'],
              sin: Float[Array, 'B S R2']
              ) -> tuple[Float[Array, 'B S H P'], Float[Array, 'B S H R']]:
    """Returns the position-free and the rotated part of every head's query, softmax-scaled."""
    c = self.config
    if c.q_lora_rank:
      x = self._linear(x, self.q_a)
      x = layers.rms_norm(x, self.q_norm[...], c.latent_norm_eps)
    q = self._linear(x, self.q_b if c.q_lora_rank else self.q) * rope.softmax_scale(c)
    nope, rotary = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    return nope, rope.rotate(rotary, cos[:, :, None, :], sin[:, :, None, :])

  def latents(self, x: Float[Array, 'B S D'], cos: Float[Array, 'B S R2'],
              sin: Float[Array, 'B S R2']) -> Float[Array, 'B S C+R']:
    """Returns what the cache keeps: the normalised latent and, after it, the rotated shared key."""
    c = self.config
    latent, rotary = jnp.split(self._linear(x, self.kv_a), [c.kv_lora_rank], axis=-1)
    latent = layers.rms_norm(latent, self.kv_norm[...], c.latent_norm_eps)
    return jnp.concatenate([latent, rope.rotate(rotary, cos, sin)], axis=-1)

  def __call__(self, x: Float[Array, 'B S D'], cos: Float[Array, 'B S R2'],
               sin: Float[Array, 'B S R2'], segment_ids: Int[Array, 'B S'],
               mask: Bool[Array, 'B S S'],
               cached: Sequence[tuple[Float[Array, 'B M C+R'], Bool[Array, 'B Q M']]] = ()
               ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S C+R']]:
    """Attends over cached tokens and over the new ones.

    Args:
      x: normalised residual stream of the new tokens.
      cos: cosine table of their positions.
      sin: sine table.
      segment_ids: their documents, 0 for padding.
      mask: which new tokens see which.
      cached: pieces of the cache: latents of earlier tokens, and which of them each new token sees
        (Q is S, or 1 when all see the same).

    Returns:
      The attention output and the new tokens' latents, for the cache.
    """
    query, new = self.queries(x, cos, sin), self.latents(x, cos, sin)
    # What nobody sees may be anything, and 0 * NaN is not 0.
    pieces = [(jnp.where(seen.any(axis=1)[:, :, None], entries, 0), seen)
              for entries, seen in cached]
    pieces.append((new, mask))
    form = choose_form(self.config, x.shape[1], sum(entries.shape[1] for entries, _ in cached))
    if form == 'expanded':
      out = self._expanded(query, pieces, None if cached else segment_ids)
    else:
      out = self._absorbed(query, pieces)
    return self._linear(out.reshape(*out.shape[:2], -1), self.o, rows=2), new

  def _expanded(self, query, pieces, segment_ids):
    """Softmax attention over keys and values of every head; `segment_ids` None with a cache."""
    c, dtype = self.config, query[0].dtype
    entries = jnp.concatenate([entries.astype(dtype) for entries, _ in pieces], axis=1)
    shape = query[0].shape[:2]
    mask = jnp.concatenate([jnp.broadcast_to(seen, (*shape, seen.shape[-1]))
                            for _, seen in pieces], axis=-1)
    latent, shared = jnp.split(entries, [c.kv_lora_rank], axis=-1)
    kv = layers.linear(latent, self.kv_b[...], c.precision.kv_b)
    keys, values = jnp.split(kv, [c.qk_nope_head_dim], axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None, :], (*keys.shape[:3], shared.shape[-1]))
    query, keys = jnp.concatenate(query, axis=-1), jnp.concatenate([keys, shared], axis=-1)
    if segment_ids is None:
      return attend.attend(query, keys, values, mask)
    return mla_attention(query, keys, values, segment_ids)

  def _absorbed(self, query, pieces):
    """Softmax attention over latents; heads and new tokens share one row axis."""
    c, (nope, rotary) = self.config, query
    key_up, value_up = jnp.split(self.kv_b[...], [c.qk_nope_head_dim], axis=-1)
    query = jnp.concatenate([self._by_head('bshn,chn->bshc', nope, key_up), rotary], axis=-1)
    # One row axis, and the whole cache entry (rotary part included) is averaged and cut afterwards:
    # both keep XLA:CPU from copying the cache. So does weighing the pieces one by one under a
    # common maximum.
    batch, length, heads, width = query.shape
    query = query.reshape(batch, length * heads, width)
    pieces = [(entries, seen if seen.shape[1] == 1 else jnp.repeat(seen, heads, axis=1))
              for entries, seen in pieces]
    logits = [jnp.where(seen, precision.einsum('bqc,bmc->bqm', query, entries), attend.MASKED)
              for entries, seen in pieces]
    top = functools.reduce(jnp.maximum, [piece.max(-1, keepdims=True) for piece in logits])
    top = jax.lax.stop_gradient(top)
    weights = [jnp.exp(piece - top) for piece in logits]
    total = sum(piece.sum(-1, keepdims=True) for piece in weights)
    out = sum(precision.einsum('bqm,bmc->bqc', piece, entries)
              for piece, (entries, _) in zip(weights, pieces, strict=True)) / total
    # the cache is float32 whatever the model is
    out = out.astype(query.dtype).reshape(batch, length, heads, width)[..., :c.kv_lora_rank]
    return self._by_head('bshc,chv->bshv', out, value_up)

  def _by_head(self, subscripts, x, up):
    """One half of the up-projection, applied on the side of the queries or of the output."""
    formats = self.config.precision.kv_b
    if formats.plain:
      return precision.einsum(subscripts, x, up)
    up = up if subscripts.endswith('v') else jnp.swapaxes(up, 0, 2)
    rows = x.reshape(-1, *x.shape[2:])
    out = jax.vmap(functools.partial(precision.matmul, formats), 1, 1)(rows, up)
    return out.reshape(*x.shape[:3], -1)

  def _linear(self, x, weight, rows=1):
    """A projection with the formats of attention; the first `rows` axes of the weight go in."""
    weight = weight[...]
    return layers.linear(x, weight.reshape(-1, *weight.shape[rows:]),
                         self.config.precision.attention)
