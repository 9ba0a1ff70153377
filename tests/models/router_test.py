"""Routing: selection against weights, replay and its filter, index width, precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import models
from composer_jax.models import layers
from composer_jax.models.router import Router

CONFIG = models.ModelConfig(hidden_size=12, n_routed_experts=8, num_experts_per_tok=3,
                            routed_scaling_factor=2.5)
WIDE = dataclasses.replace(CONFIG, n_routed_experts=384, num_experts_per_tok=8)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 12)).astype(np.float32)
VALID = np.arange(20) != 4


def _params(config):
  e = config.n_routed_experts
  return {'weight': RNG.standard_normal((12, e)).astype(np.float32),
          'selection_bias': 0.1 * RNG.standard_normal(e).astype(np.float32)}


def _route(config, params, x=X, valid=VALID, **replay):
  @jax.jit
  def run(params, x, valid, replay):
    return layers.bind(Router, config, params)(x, valid, **replay)
  return run(params, x, valid, replay)


def _scores(params, x=X):
  return 1 / (1 + np.exp(-x.astype(np.float64) @ params['weight'].astype(np.float64)))


@pytest.mark.parametrize('config', [CONFIG, WIDE], ids=['8', '384'])
def test_selection_uses_the_bias_and_weights_do_not(config):
  params = _params(config)
  choice = _route(config, params)
  scores = _scores(params)
  k = config.num_experts_per_tok
  best = np.argsort(-(scores + params['selection_bias']), axis=1, kind='stable')[:, :k]
  np.testing.assert_array_equal(choice.indices, best)
  picked = np.take_along_axis(scores, best, axis=1)
  want = np.zeros_like(scores)
  np.put_along_axis(want, best, 2.5 * picked / picked.sum(1, keepdims=True), axis=1)
  np.testing.assert_allclose(choice.weights, want * VALID[:, None], atol=1e-6)
  np.testing.assert_array_equal(choice.counts, np.bincount(best[VALID].ravel(),
                                                           minlength=config.n_routed_experts))


def test_huge_bias_selects_but_does_not_weigh():
  params = _params(CONFIG)
  params['selection_bias'][5] = 1e4
  choice = _route(CONFIG, params)
  assert np.all(np.asarray(choice.indices)[:, 0] == 5)
  scores = _scores(params)
  picked = np.take_along_axis(scores, np.asarray(choice.indices), axis=1)
  np.testing.assert_allclose(np.asarray(choice.weights)[VALID, 5],
                             (2.5 * scores[:, 5] / picked.sum(1))[VALID], rtol=1e-5)
  grad = jax.grad(lambda p: jnp.sum(layers.bind(Router, CONFIG, p)(X, VALID).weights ** 2))(params)
  assert not np.any(grad['selection_bias']) and np.any(grad['weight'])


def test_without_normalisation_weights_are_scaled_scores():
  config = dataclasses.replace(CONFIG, norm_topk_prob=False)
  params = _params(config)
  choice = _route(config, params)
  picked = np.asarray(choice.weights) > 0
  np.testing.assert_allclose(np.asarray(choice.weights)[picked], 2.5 * _scores(params)[picked],
                             rtol=1e-5)


@pytest.mark.parametrize('config', [CONFIG, WIDE], ids=['8', '384'])
def test_ties_go_to_the_lower_index(config):
  params = {'weight': np.zeros((12, config.n_routed_experts), np.float32),
            'selection_bias': np.zeros(config.n_routed_experts, np.float32)}
  np.testing.assert_array_equal(_route(config, params).indices[0],
                                np.arange(config.num_experts_per_tok))


def test_router_is_float32_whatever_the_stream():
  x = X.astype(jnp.bfloat16)
  jaxpr = jax.make_jaxpr(lambda p, x: layers.bind(Router, WIDE, p)(x, VALID))(_params(WIDE), x)
  for equation in jaxpr.jaxpr.eqns:
    if equation.primitive.name in ('dot_general', 'logistic', 'top_k'):
      assert {v.aval.dtype for v in equation.invars} == {jnp.dtype('float32')}


def test_pure_replay_uses_the_record_and_trains_the_router():
  params = _params(WIDE)
  recorded = np.stack([RNG.permutation(384)[:8] for _ in range(20)]).astype(np.uint16)
  recorded[0] = [383, 256, 0, 1, 2, 3, 4, 5]  # the first two do not fit eight bits
  mask = np.arange(20) % 2 == 0
  choice = _route(WIDE, params, recorded=recorded, mask=mask, slack=np.float32(np.inf))
  own = _route(WIDE, params)
  replayed = mask & VALID
  np.testing.assert_array_equal(np.asarray(choice.indices)[replayed],
                                np.sort(recorded[replayed], axis=1))
  np.testing.assert_array_equal(choice.indices[~replayed], own.indices[~replayed])
  assert int(choice.replaced) == 0
  scores = _scores(params)
  for t in np.flatnonzero(replayed):
    chosen = recorded[t].astype(int)
    np.testing.assert_allclose(np.asarray(choice.weights)[t, chosen],
                               2.5 * scores[t, chosen] / scores[t, chosen].sum(), rtol=1e-5)
  for slack in (np.inf, 0.0):
    grad = jax.grad(lambda p, s=slack: jnp.sum(layers.bind(Router, WIDE, p)(
        X, VALID, recorded=recorded, mask=mask, slack=s).weights ** 2))(params)
    assert np.any(grad['weight'])


def test_no_slack_is_the_router_s_own_choice():
  params = _params(CONFIG)
  recorded = np.stack([RNG.permutation(8)[:3] for _ in range(20)]).astype(np.int32)
  replayed = _route(CONFIG, params, recorded=recorded, mask=np.ones(20, bool), slack=0.0)
  own = _route(CONFIG, params)
  np.testing.assert_array_equal(np.sort(replayed.indices, axis=1), np.sort(own.indices, axis=1))
  np.testing.assert_allclose(replayed.weights, own.weights, rtol=1e-6)
  wrong = [len(set(map(int, r)) - set(map(int, o)))
           for r, o in zip(recorded, np.asarray(own.indices), strict=True)]
  assert int(replayed.replaced) == sum(np.array(wrong)[VALID])


def test_the_filter_replaces_only_what_is_implausible():
  """Hand-made: biased scores 0.9 0.8 0.7 0.6 0.5 ..., record {1, 3, 4}, slack 0.15."""
  logits = np.log(np.array([.9, .8, .7, .6, .5, .4, .3, .2]) /
                  (1 - np.array([.9, .8, .7, .6, .5, .4, .3, .2])))
  params = {'weight': np.zeros((12, 8), np.float32), 'selection_bias': np.zeros(8, np.float32)}
  params['weight'][0] = logits
  x = np.zeros((1, 12), np.float32)
  x[0, 0] = 1
  choice = _route(CONFIG, params, x=x, valid=np.array([True]), recorded=np.array([[4, 3, 1]]),
                  mask=np.array([True]), slack=np.float32(0.15))
  # Threshold 0.7 - 0.15: expert 4 (0.5) goes, the router's best remaining candidate, 0, comes.
  assert sorted(np.asarray(choice.indices)[0]) == [0, 1, 3]
  assert int(choice.replaced) == 1
  np.testing.assert_allclose(choice.weights[0, [0, 1, 3]], 2.5 * np.array([.9, .8, .6]) / 2.3,
                             rtol=1e-5)


@pytest.mark.usefixtures('quick_compilation')
def test_replay_through_the_model_by_layer_and_rate():
  config = models.ModelConfig(
      vocab_size=20, hidden_size=8, num_hidden_layers=3, first_k_dense_replace=1,
      intermediate_size=8, moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2,
      num_attention_heads=1, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
      initializer_range=0.5)
  params = models.init(config, jax.random.key(0))
  tokens = RNG.integers(0, 20, (2, 6)).astype(np.int32)
  indices = np.stack([np.tile([0, 3], (2, 6, 1)), np.tile([2, 1], (2, 6, 1))]).astype(np.uint16)
  mask = np.ones((2, 6), bool)
  mask[1, 4:] = False
  run = jax.jit(lambda slack: models.forward(
      config, params, tokens, routing=models.Routing(indices, mask, slack)).router)
  pure = run(np.inf)
  np.testing.assert_array_equal(np.sort(pure.indices, axis=-1)[:, mask],
                                np.sort(indices, axis=-1)[:, mask])
  assert not np.any(pure.replaced)
  filtered = run(0.0)
  own = np.asarray(filtered.indices)[0]
  missed = sum(len({0, 3} - set(own[b, t])) for b, t in np.argwhere(mask))
  assert int(filtered.replaced[0]) == missed


def test_records_of_the_wrong_width_are_refused():
  config = dataclasses.replace(models.tiny(), n_routed_experts=384)
  params = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
  tokens = jnp.zeros((1, 4), jnp.int32)
  for dtype in (jnp.uint8, jnp.int8):
    routing = models.Routing(jnp.zeros((2, 1, 4, 2), dtype), jnp.ones((1, 4), bool))
    with pytest.raises(ValueError, match='cannot name 384'):
      models.forward(config, params, tokens, routing=routing)
