"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Composer 2 report, 3.1).

One more layer that, from the trunk's output at t and the token at t + 1, predicts the token at
t + 2 through the trunk's own head. Its parameters are the layer behind the last one of public
DeepSeek-V3 checkpoints (layer 61), in the same order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import block as block_lib
from composer_jax.models import cache as cache_lib
from composer_jax.models import config as config_lib
from composer_jax.models import layers, precision
from composer_jax.models import router as router_lib

Params = dict[str, Any]


class Mtp(nnx.Module):
  """`h'_t = [norm(embed(x_{t+1})), norm(h_t)] W`, one MoE block, a norm, the shared head.

  The embedding's half comes first, as in the checkpoint's `eh_proj` (the paper's eq. 21 writes the
  other order). Like the public DeepSeek-V3 code, h_t is the stream after the final norm.
  """

  def __init__(self, config: config_lib.ModelConfig):
    d = config.hidden_size
    self.config = config
    self.hidden_norm = layers.scale(d)
    self.embed_norm = layers.scale(d)
    self.project = layers.matrix(config, (2 * d, d), ('embed', None))
    self.block = block_lib.Block(config)
    self.norm = layers.scale(d)

  def __call__(self, hidden: Float[Array, 'B S D'], following: Float[Array, 'B S D'],
               context: block_lib.Context, cached: tuple[Float[Array, 'B M C+R'], ...] = ()
               ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S C+R'], router_lib.Choice]:
    """Returns the normalised output, the layer's latents and its routing."""
    c = self.config
    joined = jnp.concatenate([layers.rms_norm(following, self.embed_norm[...], c.rms_norm_eps),
                              layers.rms_norm(hidden, self.hidden_norm[...], c.rms_norm_eps)],
                             axis=-1)
    x = layers.linear(joined, self.project[...], c.precision.head)
    x, new, choice = self.block(x, context, cached)
    return layers.rms_norm(x, self.norm[...], c.rms_norm_eps), new, choice


def attach_mtp(config: config_lib.ModelConfig, params: Params, key: jax.Array) -> Params:
  """Returns the parameters with a fresh MTP layer, for a checkpoint that ships none.

  Kimi K2.5 is one; the report trains such layers from scratch on top of a checkpoint (section 3.1;
  `StageConfig.trainable = "mtp"`).

  Args:
    config: the model's shape, with `num_nextn_predict_layers` set to 1.
    params: of the same shape but for the MTP layer; the arrays themselves are handed on.
    key: a JAX random key.

  Raises:
    ValueError: the config has no MTP layer, or the parameters have one already.
  """
  if not config.num_nextn_predict_layers:
    raise ValueError('attach_mtp needs a config with num_nextn_predict_layers = 1')
  if 'mtp' in params:
    raise ValueError('the parameters have an MTP layer already')
  return params | {'mtp': layers.initial(Mtp, config, key)}


def over_sequence(config: config_lib.ModelConfig, params: Params, hidden: Float[Array, 'B S D'],
                  tokens: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'],
                  context: block_lib.Context
                  ) -> tuple[Float[Array, 'B S D'], Bool[Array, 'B S'], router_lib.Choice]:
  """Runs the layer over whole rows, as training does.

  Returns:
    Its normalised output, where it means something (t + 1 is in the same document as t), and its
    routing, in which the other positions count as padding.
  """
  pad = jnp.zeros_like(tokens[:, :1])
  following = jnp.concatenate([tokens[:, 1:], pad], axis=1)
  mask = jnp.concatenate([segment_ids[:, 1:], pad], axis=1) == segment_ids
  mask &= context.valid
  embedded = precision.embed(config.precision.embeddings, params['embed'], following)

  def layer(weights, hidden, embedded, context):
    out, _, choice = layers.bind(Mtp, config, weights)(hidden, embedded, context)
    return out, choice

  if config.remat == 'full':
    layer = jax.checkpoint(layer)
  context = dataclasses.replace(context, valid=mask)
  out, choice = layer(params['mtp'], hidden, embedded, context)
  return out, mask, choice


def draft(config: config_lib.ModelConfig, params: Params, hidden: Float[Array, 'N P D'],
          following: Int[Array, 'N P'], cache: cache_lib.Cache,
          segment_ids: Int[Array, 'N P'] | None = None
          ) -> tuple[Float[Array, 'N P D'], cache_lib.Cache]:
  """Runs the layer in generation, behind a cache of its own.

  Args:
    config: the model's shape.
    params: of the whole model.
    hidden: the trunk's output (`ForwardOut.hidden`) at positions t.
    following: the tokens at t + 1.
    cache: from `draft_cache`; it holds the layer's latents of the positions before.
    segment_ids: 0 where a row has no token, default none such.

  Returns:
    The layer's output, of which `transformer.head` makes the logits of the token at t + 2, and the
    cache with the new positions.
  """
  segment_ids = jnp.ones_like(following) if segment_ids is None else segment_ids
  positions = jnp.maximum(cache_lib.places(cache.length, segment_ids != 0), 0)
  context = block_lib.make_context(config, positions, segment_ids, (cache,))
  embedded = precision.embed(config.precision.embeddings, params['embed'], following)
  module = layers.bind(Mtp, config, params['mtp'])
  out, new, _ = module(hidden, embedded, context, cache.latent)
  return out, cache_lib.append(cache, (new,), segment_ids)


def draft_cache(config: config_lib.ModelConfig, slots: int, max_len: int) -> cache_lib.Cache:
  """Returns an empty cache of the MTP layer alone, for `draft`."""
  one = dataclasses.replace(config, num_hidden_layers=1, first_k_dense_replace=0)
  return cache_lib.init_cache(one, slots, max_len)
