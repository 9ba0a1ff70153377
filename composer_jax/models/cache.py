"""The latent key/value cache of generation: C + R floats per token and layer."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import config as config_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """N independent rows (slots) of up to M tokens.

  Setting a slot's `length` to 0 empties it; entries past the length are never read.

  Attributes:
    latent: normalised latent and rotated key of every token, one array a layer, dense layers first.
      Apart, because taking a layer out of a common array would copy it at every decoded token.
    length: tokens held by each slot.
    segment: document of each token, for slots that hold several: a new token sees the entries whose
      number is its own `segment_ids`. None: each slot holds one document.
  """

  latent: tuple[Float[Array, 'N M C+R'], ...]
  length: Int[Array, 'N']
  segment: Int[Array, 'N M'] | None = None


def init_cache(config: config_lib.ModelConfig, slots: int, max_len: int, *,
               packed: bool = False) -> Cache:
  """Returns an empty cache.

  Args:
    config: the model's shape.
    slots: N.
    max_len: M, tokens per slot. Tokens beyond it are not written, so whoever feeds the model keeps
      `length + new tokens <= M`.
    packed: slots may hold several documents, told apart by their `segment_ids`.
  """
  shape = (slots, max_len, config.latent_dim)
  return Cache(tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.num_hidden_layers)),
               jnp.zeros((slots,), jnp.int32),
               jnp.zeros((slots, max_len), jnp.int32) if packed else None)


def pieces(cache: Cache | Sequence[Cache] | None) -> tuple[Cache, ...]:
  """Returns the pieces of a cache, () for None."""
  if cache is None:
    return ()
  return (cache,) if isinstance(cache, Cache) else tuple(cache)


def places(length: Int[Array, 'N'], valid: Bool[Array, 'N P']) -> Int[Array, 'N P']:
  """Returns the place of each new token behind `length` others; only meaningful where `valid`."""
  return length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1


def visible(cache: Cache, segment_ids: Int[Array, 'N P']) -> Bool[Array, 'N Q M']:
  """Returns which entries each new token sees; Q is 1 when a slot is one document."""
  held = (jnp.arange(cache.latent[0].shape[1]) < cache.length[:, None])[:, None]
  if cache.segment is None:
    return held
  return held & (cache.segment[:, None] == segment_ids[:, :, None])


def append(cache: Cache, new: Sequence[Float[Array, 'N P C+R']], segment_ids: Int[Array, 'N P']
           ) -> Cache:
  """Returns the cache with the new tokens, but for padding, at the end of their slots."""
  max_len, valid = cache.latent[0].shape[1], segment_ids != 0
  entry = jnp.where(valid, places(cache.length, valid), max_len)
  slot = jnp.arange(valid.shape[0])[:, None]
  latent = tuple(old.at[slot, entry].set(fresh, mode='drop')
                 for old, fresh in zip(cache.latent, new, strict=True))
  length = jnp.minimum(cache.length + valid.sum(axis=1, dtype=jnp.int32), max_len)
  segment = cache.segment
  if segment is not None:
    segment = segment.at[slot, entry].set(segment_ids, mode='drop')
  return Cache(latent, length, segment)
