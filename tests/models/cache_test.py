"""Generation with the latent cache gives what the full forward pass gives."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from composer_jax import models

CONFIG = models.ModelConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
    num_attention_heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5, initializer_range=0.3,
    rope_scaling=models.RopeScaling(factor=2.0, original_max_position_embeddings=8))
TOKENS = np.random.default_rng(0).integers(0, 50, (3, 14)).astype(np.int32)


@pytest.fixture(scope='module')
def params():
  return models.init(CONFIG, jax.random.key(0))


@functools.cache
def _step(config):
  return jax.jit(lambda p, t, s, c: models.forward(config, p, t, segment_ids=s, cache=c))


@functools.partial(jax.jit, static_argnums=0)
def _full(config, params):
  return models.forward(config, params, TOKENS)


@pytest.mark.parametrize('impl', ['auto', 'grouped'])
def test_chunked_prefill_and_decode_equal_the_full_pass(params, impl):
  config = dataclasses.replace(CONFIG, moe_impl=impl)
  full = _full(config, params)
  step, cache, logits, indices = _step(config), models.init_cache(config, 3, 20), [], []
  for begin, end in ((0, 4), (4, 8), (8, 9), (9, 10), (10, 11), (11, 12), (12, 13), (13, 14)):
    chunk = TOKENS[:, begin:end]
    out = step(params, chunk, np.ones_like(chunk), cache)
    cache = out.cache
    logits.append(out.logits)
    indices.append(out.router.indices)
  np.testing.assert_allclose(np.concatenate(logits, axis=1), full.logits, atol=1e-5)
  np.testing.assert_array_equal(np.concatenate(indices, axis=2), full.router.indices)
  np.testing.assert_array_equal(cache.length, [14, 14, 14])


def test_slots_of_different_length_padding_and_reset(params):
  """Slots get 4, 2 and 0 of a padded chunk, then one token each; the last starts over."""
  step, cache = _step(CONFIG), models.init_cache(CONFIG, 3, 20)
  segments = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], np.int32)
  first = step(params, TOKENS[:, :4], segments, cache)
  np.testing.assert_array_equal(first.cache.length, [4, 2, 0])
  assert all(not np.any(layer[1, 2:]) and not np.any(layer[2]) for layer in first.cache.latent)
  assert np.all(np.isfinite(first.logits))
  np.testing.assert_array_equal(first.router.counts.sum(axis=1), [12, 12])
  one = np.ones((3, 1), np.int32)
  token = np.stack([TOKENS[0, 4:5], TOKENS[1, 2:3], TOKENS[2, 0:1]])
  second = step(params, token, one, first.cache)
  full = _full(CONFIG, params).logits
  np.testing.assert_allclose(second.logits[:, 0], np.stack([full[0, 4], full[1, 2], full[2, 0]]),
                             atol=1e-5)
  np.testing.assert_array_equal(second.cache.length, [5, 3, 1])
  emptied = dataclasses.replace(second.cache, length=np.array([5, 3, 0], np.int32))
  again = step(params, TOKENS[:, :1], np.array([[0], [0], [1]], np.int32), emptied)
  np.testing.assert_allclose(again.logits[2, 0], full[2, 0], atol=1e-5)
  np.testing.assert_array_equal(np.stack(again.cache.latent)[:, :2],
                                np.stack(second.cache.latent)[:, :2])


def test_a_cache_in_two_pieces(params):
  """The first piece stays, the second takes the new tokens; slots are of different length."""
  step, whole = _step(CONFIG), models.init_cache(CONFIG, 3, 20)
  segments = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], np.int32)
  first = step(params, TOKENS[:, :4], segments, whole).cache
  one, tail = np.ones((3, 1), np.int32), models.init_cache(CONFIG, 3, 5)
  for i in range(4, 8):
    out = step(params, TOKENS[:, i:i + 1], one, (first, tail))
    want = step(params, TOKENS[:, i:i + 1], one, whole if i > 4 else first)
    tail, whole = out.cache, want.cache
    np.testing.assert_allclose(out.logits, want.logits, atol=1e-5)
    for latents, piece in zip(out.latents, tail.latent, strict=True):
      np.testing.assert_array_equal(latents[:, 0], piece[:, i - 4])
  np.testing.assert_array_equal(tail.length, [4, 4, 4])
  np.testing.assert_array_equal(whole.length, [8, 6, 4])


def test_refused_arguments(params):
  with pytest.raises(ValueError, match='3 rows for a cache of 2 slots'):
    models.forward(CONFIG, params, TOKENS, cache=models.init_cache(CONFIG, 2, 8))
