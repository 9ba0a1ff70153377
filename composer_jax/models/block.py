"""One transformer layer, and what all layers of one forward pass share."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import cache as cache_lib
from composer_jax.models import config as config_lib
from composer_jax.models import layers, mla, moe, rope
from composer_jax.models import router as router_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
  """What every layer of one forward pass shares.

  Attributes:
    cos: cosine table of the tokens' positions.
    sin: sine table.
    segment_ids: documents 1, 2, ... of each row, 0 for padding.
    mask: which token sees which other token of this call.
    valid: False for padding.
    held: for each piece of the cache, which of its entries each token sees (a middle axis of 1 when
      all tokens of a row see the same); None without a cache.
    sequences: what the router's losses are averaged over, None when nobody asks for them.
  """

  cos: Float[Array, 'B S R2']
  sin: Float[Array, 'B S R2']
  segment_ids: Int[Array, 'B S']
  mask: Bool[Array, 'B S S']
  valid: Bool[Array, 'B S']
  held: tuple[Bool[Array, 'B Q M'], ...] | None = None
  sequences: router_lib.Sequences | None = None


def make_context(config: config_lib.ModelConfig, positions: Int[Array, 'B S'],
                 segment_ids: Int[Array, 'B S'], caches: Sequence[cache_lib.Cache] = (),
                 document_weights: Float[Array, 'B S'] | None = None) -> Context:
  """Returns the context of B rows; arguments as in `transformer.forward`."""
  cos, sin = rope.tables(config, positions)
  order = jnp.arange(segment_ids.shape[1])
  mask = (order[:, None] >= order) & (segment_ids[:, :, None] == segment_ids[:, None, :])
  held = tuple(cache_lib.visible(cache, segment_ids) for cache in caches)
  sequences = None
  if document_weights is not None:
    sequences = router_lib.Sequences.of(segment_ids, document_weights)
  return Context(cos, sin, segment_ids, mask, segment_ids != 0, held or None, sequences)


class Block(nnx.Module):
  """Pre-norm attention and feed-forward; `routed` says which kind of feed-forward."""

  routed = True

  def __init__(self, config: config_lib.ModelConfig):
    self.config = config
    self.attention_norm = layers.scale(config.hidden_size)
    self.attention = mla.Attention(config)
    self.ffn_norm = layers.scale(config.hidden_size)
    if self.routed:
      self.moe = moe.Moe(config)
    else:
      self.mlp = layers.Mlp(config, config.intermediate_size, config.precision.dense_mlp)

  def __call__(self, x: Float[Array, 'B S D'], context: Context,
               cached: Sequence[Float[Array, 'B M C+R']] = (), replay: dict | None = None
               ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S C+R'], router_lib.Choice | None]:
    """Returns the new residual stream, the tokens' latents and the routing (None if dense)."""
    eps = self.config.rms_norm_eps
    normed = layers.rms_norm(x, self.attention_norm[...], eps)
    pieces = list(zip(cached, context.held or (), strict=True))
    out, new = self.attention(normed, context.cos, context.sin, context.segment_ids, context.mask,
                              pieces)
    x = x + out
    normed = layers.rms_norm(x, self.ffn_norm[...], eps)
    if not self.routed:
      return x + self.mlp(normed), new, None
    flat = normed.reshape(-1, normed.shape[-1])
    out, choice = self.moe(flat, context.valid.reshape(-1), sequences=context.sequences,
                           **(replay or {}))
    return x + out.reshape(x.shape), new, choice


class DenseBlock(Block):
  """A block with a plain feed-forward."""

  routed = False
