"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; Kimi K2.5 shapes).

Keys and values of all heads are made from one latent of width C per token, and one rotary key of
width R is shared by the heads, so the cache holds C + R floats per token. Without a cache the
latent is expanded to keys and values ("expanded"); with one, the up-projection is folded into the
query and the output instead ("absorbed"), and attention runs in the latent space. Both compute the
same function.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from composer_jax.models import attend, layers, rope
from composer_jax.models import config as config_lib


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
      x = layers.rms_norm(layers.linear(x, self.q_a[...]), self.q_norm[...], c.latent_norm_eps)
    q = layers.linear(x, (self.q_b if c.q_lora_rank else self.q)[...]) * rope.softmax_scale(c)
    nope, rotary = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    return nope, rope.rotate(rotary, cos[:, :, None, :], sin[:, :, None, :])

  def latents(self, x: Float[Array, 'B S D'], cos: Float[Array, 'B S R2'],
              sin: Float[Array, 'B S R2']) -> Float[Array, 'B S C+R']:
    """Returns what the cache keeps: the normalised latent and, after it, the rotated shared key."""
    c = self.config
    latent, rotary = jnp.split(layers.linear(x, self.kv_a[...]), [c.kv_lora_rank], axis=-1)
    latent = layers.rms_norm(latent, self.kv_norm[...], c.latent_norm_eps)
    return jnp.concatenate([latent, rope.rotate(rotary, cos, sin)], axis=-1)

  def expanded(self, x: Float[Array, 'B S D'], cos: Float[Array, 'B S R2'],
               sin: Float[Array, 'B S R2'], mask: Bool[Array, 'B S S']) -> Float[Array, 'B S D']:
    """Attention with keys and values made for every head; `mask` says who may see whom."""
    c = self.config
    nope, rotary = self.queries(x, cos, sin)
    latent, shared = jnp.split(self.latents(x, cos, sin), [c.kv_lora_rank], axis=-1)
    kv = layers.linear(latent, self.kv_b[...])
    keys, values = jnp.split(kv, [c.qk_nope_head_dim], axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None, :], (*keys.shape[:3], shared.shape[-1]))
    out = attend.attend(jnp.concatenate([nope, rotary], axis=-1),
                        jnp.concatenate([keys, shared], axis=-1), values, mask)
    return self._project(out)

  def absorbed(self, x: Float[Array, 'B S D'], cos: Float[Array, 'B S R2'],
               sin: Float[Array, 'B S R2'], mask: Bool[Array, 'B S S'],
               cached: Sequence[tuple[Float[Array, 'B M C+R'], Bool[Array, 'B M']]]
               ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S C+R']]:
    """Attention over cached latents and over the new tokens themselves.

    Args:
      x: normalised residual stream of the new tokens.
      cos: cosine table of their positions.
      sin: sine table.
      mask: which new tokens see which.
      cached: pieces of the cache: latents of earlier tokens, and which entries hold one.

    Returns:
      The attention output and the new tokens' latents, for the cache.
    """
    c = self.config
    nope, rotary = self.queries(x, cos, sin)
    new = self.latents(x, cos, sin)
    key_up, value_up = jnp.split(self.kv_b[...], [c.qk_nope_head_dim], axis=-1)
    query = jnp.concatenate([jnp.einsum('bshn,chn->bshc', nope, key_up), rotary], axis=-1)
    # Heads and new tokens share one row axis, and the whole cache entry (rotary part included) is
    # averaged and cut afterwards: both keep XLA:CPU from copying the cache. So does weighing the
    # pieces one by one under a common maximum.
    batch, length, heads, width = query.shape
    query = query.reshape(batch, length * heads, width)
    pieces = [(entries, held[:, None]) for entries, held in cached]
    pieces.append((new, jnp.repeat(mask, heads, axis=1)))
    logits = [jnp.where(seen, jnp.einsum('bqc,bmc->bqm', query, entries), attend.MASKED)
              for entries, seen in pieces]
    top = functools.reduce(jnp.maximum, [piece.max(-1, keepdims=True) for piece in logits])
    weights = [jnp.exp(piece - top) for piece in logits]
    total = sum(piece.sum(-1, keepdims=True) for piece in weights)
    out = sum(jnp.einsum('bqm,bmc->bqc', piece, entries)
              for piece, (entries, _) in zip(weights, pieces, strict=True)) / total
    out = out.reshape(batch, length, heads, width)[..., :c.kv_lora_rank]
    return self._project(jnp.einsum('bshc,chv->bshv', out, value_up)), new

  def _project(self, out: Float[Array, 'B S H V']) -> Float[Array, 'B S D']:
    weight = self.o[...]
    return layers.linear(out.reshape(*out.shape[:2], -1), weight.reshape(-1, weight.shape[-1]))
