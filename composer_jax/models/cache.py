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
  """N independent sequences (slots) of up to M tokens.

  Setting a slot's `length` to 0 empties it; entries past the length are never read.

  Attributes:
    latent: normalised latent and rotated key of every token, one array a layer, dense layers first.
      Apart, because taking a layer out of a common array would copy it at every decoded token.
    length: tokens held by each slot.
  """

  latent: tuple[Float[Array, 'N M C+R'], ...]
  length: Int[Array, 'N']


def init_cache(config: config_lib.ModelConfig, slots: int, max_len: int) -> Cache:
  """Returns an empty cache.

  Args:
    config: the model's shape.
    slots: N.
    max_len: M, tokens per slot. Tokens beyond it are not written, so whoever feeds the model keeps
      `length + new tokens <= M`.
  """
  shape = (slots, max_len, config.latent_dim)
  return Cache(tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.num_hidden_layers)),
               jnp.zeros((slots,), jnp.int32))


def pieces(cache: Cache | Sequence[Cache] | None) -> tuple[Cache, ...]:
  """Returns the pieces of a cache, () for None."""
  if cache is None:
    return ()
  return (cache,) if isinstance(cache, Cache) else tuple(cache)


def places(length: Int[Array, 'N'], valid: Bool[Array, 'N P']) -> Int[Array, 'N P']:
  """Returns the place of each new token behind `length` others; only meaningful where `valid`."""
  return length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1


def append(cache: Cache, new: Sequence[Float[Array, 'N P C+R']], valid: Bool[Array, 'N P']
           ) -> Cache:
  """Returns the cache with the valid new tokens at the end of their slots."""
  max_len = cache.latent[0].shape[1]
  entry = jnp.where(valid, places(cache.length, valid), max_len)
  slot = jnp.arange(valid.shape[0])[:, None]
  latent = tuple(old.at[slot, entry].set(fresh, mode='drop')
                 for old, fresh in zip(cache.latent, new, strict=True))
  length = jnp.minimum(cache.length + valid.sum(axis=1, dtype=jnp.int32), max_len)
  return Cache(latent, length)
