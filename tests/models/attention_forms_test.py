"""Attention's three forms: expanded, expanded from the cache, absorbed; packed rows in each."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import models
from composer_jax.models import block, layers, mla

PLAIN = models.ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, first_k_dense_replace=1,
    intermediate_size=24, num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=5, initializer_range=0.3)
YARN = dataclasses.replace(
    PLAIN, num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=12,
    rope_scaling=models.RopeScaling(factor=2.0, original_max_position_embeddings=8))
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 50, (2, 14)).astype(np.int32)
# Documents cross the chunks below: [0, 5), [5, 10), then one token at a time.
SEGMENTS = np.array([[1] * 7 + [2] * 7, [1] * 3 + [2] * 5 + [3] * 6], np.int32)
CHUNKS = ((0, 5), (5, 10), *((i, i + 1) for i in range(10, 14)))


@functools.cache
def _params(config):
  return models.init(dataclasses.replace(config, attention='auto'), jax.random.key(0))


@functools.partial(jax.jit, static_argnums=0)
def _run(config, params, tokens, segments, cache):
  return models.forward(config, params, tokens, segment_ids=segments, cache=cache)


def _logits(config, form, cached, tokens=TOKENS, segments=SEGMENTS, poison=0.0):
  """Logits of whole rows, or of the chunks of a cache whose unused entries hold poison."""
  config, params = dataclasses.replace(config, attention=form), _params(config)
  if not cached:
    return np.asarray(_run(config, params, tokens, segments, None).logits)
  cache, out = models.init_cache(config, 2, 16, packed=True), []
  cache = dataclasses.replace(cache, latent=tuple(x + poison for x in cache.latent))
  for begin, end in CHUNKS:
    step = _run(config, params, tokens[:, begin:end], segments[:, begin:end], cache)
    cache = step.cache
    out.append(step.logits)
  return np.concatenate(out, axis=1)


FORMS = [('expanded', False), ('expanded', True), ('absorbed', True), ('absorbed', False)]


def test_all_forms_are_equal():
  """In chunks and decoding, with documents that cross the chunks."""
  _check_equal(YARN)


@pytest.mark.usefixtures('quick_compilation')
def test_all_forms_are_equal_without_query_bottleneck_and_yarn():
  _check_equal(PLAIN)


def _check_equal(config):
  want = _logits(config, *FORMS[0])
  for form in FORMS[1:]:
    got = _logits(config, *form)
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize('form', FORMS)
def test_documents_do_not_see_each_other(form):
  changed = TOKENS.copy()
  changed[0, :7], changed[1, :3], changed[1, 8:] = 7, 8, 9
  before, after = _logits(YARN, *form), _logits(YARN, *form, tokens=changed)
  np.testing.assert_array_equal(before[0, 7:], after[0, 7:])
  np.testing.assert_array_equal(before[1, 3:8], after[1, 3:8])
  assert np.any(before[0, :7] != after[0, :7])


@pytest.mark.parametrize('form', ['expanded', 'absorbed'])
@pytest.mark.parametrize('poison', [np.nan, np.inf, 1e30])
def test_unused_entries_may_hold_anything(form, poison):
  np.testing.assert_array_equal(_logits(YARN, form, True),
                                _logits(YARN, form, True, poison=poison))


@pytest.mark.parametrize('form', FORMS)
def test_padding_may_hold_anything(form):
  segments = SEGMENTS.copy()
  segments[0, 3:5], segments[1, 12:] = 0, 0
  other = np.where(segments == 0, 31, TOKENS)
  real = segments != 0
  np.testing.assert_array_equal(_logits(YARN, *form, segments=segments)[real],
                                _logits(YARN, *form, tokens=other, segments=segments)[real])


def test_a_row_of_one_document_continues_whatever_its_number():
  """Without document numbers in the cache a slot is one document."""
  params, config = _params(YARN), YARN
  packed, plain = (models.init_cache(config, 2, 16, packed=p) for p in (True, False))
  assert plain.segment is None
  ones = np.ones((2, 5), np.int32)
  first, again = (_run(config, params, TOKENS[:, :5], ones, c) for c in (packed, plain))
  np.testing.assert_array_equal(first.cache.segment[:, :6], [[1] * 5 + [0]] * 2)
  second, other = (_run(config, params, TOKENS[:, 5:10], ones, r.cache) for r in (first, again))
  np.testing.assert_array_equal(second.logits, other.logits)
  renamed = _run(config, params, TOKENS[:, 5:10], 3 * ones, again.cache)
  np.testing.assert_array_equal(renamed.logits, other.logits)


@pytest.mark.usefixtures('quick_compilation')
def test_gradients_of_expanded_and_absorbed_agree():
  layer = jax.tree.map(lambda v: v[0], _params(YARN)['dense_layers']['attention'])
  x, direction = RNG.standard_normal((2, 2, 14, 16)).astype(np.float32)
  positions = jnp.broadcast_to(jnp.arange(14), (2, 14))

  def run(form):
    config = dataclasses.replace(YARN, attention=form)

    def total(layer, x):
      context = block.make_context(config, positions, SEGMENTS)
      out, _ = layers.bind(mla.Attention, config, layer)(
          x, context.cos, context.sin, context.segment_ids, context.mask)
      return jnp.sum(out * direction)

    return jax.jit(jax.value_and_grad(total, (0, 1)))(layer, x)

  (value, grads), (value2, grads2) = run('expanded'), run('absorbed')
  assert float(value) == pytest.approx(float(value2), rel=1e-5)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * float(jnp.abs(a).max()))


def test_the_form_that_auto_takes():
  kimi = models.kimi_k2_5()
  assert mla.choose_form(kimi, 4096, 0) == 'expanded'
  assert mla.choose_form(kimi, 1, 4096) == 'absorbed'
  assert mla.choose_form(kimi, 157, 10**7) == 'absorbed'
  assert mla.choose_form(kimi, 158, 10**7) == 'expanded'
  assert mla.choose_form(dataclasses.replace(kimi, attention='absorbed'), 4096, 0) == 'absorbed'
