"""Packed documents and padding: isolation to the bit, and nothing but finite numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import models

CONFIG = models.ModelConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
    num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6,
    num_nextn_predict_layers=1, initializer_range=0.3)
TOKENS = np.random.default_rng(0).integers(0, 50, (3, 12)).astype(np.int32)


@pytest.fixture(scope='module')
def params():
  return models.init(CONFIG, jax.random.key(0))


@functools.partial(jax.jit, static_argnums=3)
def _run(params, tokens, segments, impl):
  config = dataclasses.replace(CONFIG, moe_impl=impl)
  return models.forward(config, params, tokens, segment_ids=segments, mtp=True)


@functools.partial(jax.jit, static_argnums=2)
@functools.partial(jax.value_and_grad, has_aux=True)
def _loss(params, segments, impl):
  config = dataclasses.replace(CONFIG, moe_impl=impl)
  out = models.forward(config, params, TOKENS, segment_ids=segments, mtp=True)
  return jnp.sum(jnp.square(out.logits)) + jnp.sum(jnp.square(out.mtp_logits)), out


@pytest.mark.parametrize('impl', ['dense', 'grouped'])
def test_a_document_does_not_see_its_neighbours(params, impl):
  segments = np.array([[1] * 5 + [2] * 7, [1] * 4 + [2] * 4 + [3] * 4, [1] * 6 + [0] * 6],
                      np.int32)
  before = _run(params, TOKENS, segments, impl)
  changed = TOKENS.copy()
  changed[0, :5], changed[1, :4], changed[1, 8:], changed[2, 6:] = 7, 8, 9, 10
  after = _run(params, changed, segments, impl)
  for name in ('logits', 'mtp_logits'):
    a, b = np.asarray(getattr(before, name)), np.asarray(getattr(after, name))
    inside = 1 if name == 'mtp_logits' else 0  # the last token's MTP input is the next document
    np.testing.assert_array_equal(a[0, 5:], b[0, 5:])
    np.testing.assert_array_equal(a[1, 4:8 - inside], b[1, 4:8 - inside])
    np.testing.assert_array_equal(a[2, :6 - inside], b[2, :6 - inside])
    assert np.any(a[0, :5] != b[0, :5])


@pytest.mark.parametrize('impl', ['dense', 'grouped'])
def test_padding_is_not_counted(params, impl):
  segments = np.ones((3, 12), np.int32)
  short = _run(params, TOKENS, segments, impl)
  long_tokens = np.concatenate([TOKENS, np.zeros((3, 108), np.int32)], axis=1)
  long_segments = np.concatenate([segments, np.zeros((3, 108), np.int32)], axis=1)
  padded = _run(params, long_tokens, long_segments, impl)
  np.testing.assert_array_equal(short.router.counts, padded.router.counts)
  np.testing.assert_allclose(short.logits, padded.logits[:, :12], atol=1e-5)
  assert int(short.router.counts[0].sum()) == 3 * 12 * CONFIG.num_experts_per_tok
  assert int(short.router.counts[-1].sum()) == 3 * 11 * CONFIG.num_experts_per_tok


@pytest.mark.usefixtures('quick_compilation')
@pytest.mark.parametrize('impl', ['dense', 'grouped'])
@pytest.mark.parametrize('real', [0, 5])
def test_padding_gives_finite_gradients(params, impl, real):
  segments = np.zeros((3, 12), np.int32)
  segments[0, :real] = 1
  (value, out), grad = _loss(params, segments, impl)
  assert np.isfinite(value)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grad))
  assert int(out.router.counts[0].sum()) == real * CONFIG.num_experts_per_tok


def test_mtp_reads_the_next_token_and_only_its_own_document(params):
  """MTP output at t depends on tokens up to t + 1, and its mask drops each document's last."""
  segments = np.array([[1] * 5 + [2] * 6 + [0]] * 3, np.int32)
  before = _run(params, TOKENS, segments, 'dense')
  np.testing.assert_array_equal(
      before.mtp_mask[0], [True] * 4 + [False] + [True] * 5 + [False, False])
  changed = TOKENS.copy()
  changed[:, 3] = (changed[:, 3] + 1) % 50
  after = _run(params, changed, segments, 'dense')
  difference = np.abs(np.asarray(before.mtp_hidden - after.mtp_hidden)).max(axis=(0, 2))
  assert np.all(difference[:2] == 0) and np.all(difference[2:4] > 0)
  assert np.all(difference[5:] == 0)


def test_mtp_leaves_the_trunk_alone(params):
  segments = np.ones((3, 12), np.int32)
  with_mtp = _run(params, TOKENS, segments, 'dense')
  without = jax.jit(lambda p: models.forward(CONFIG, p, TOKENS))(params)
  np.testing.assert_array_equal(with_mtp.logits, without.logits)
  np.testing.assert_array_equal(with_mtp.router.counts[:-1], without.router.counts)
