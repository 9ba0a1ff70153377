"""The routers' balance and z-loss against float64, and training of the MTP layer alone."""

import functools

import jax
import numpy as np
import optax
import pytest

from composer_jax import models
from composer_jax.models import layers
from composer_jax.models import router as router_lib
from composer_jax.train import losses, state, step


@pytest.mark.parametrize('groups', [1, 2])
def test_against_float64(groups):
  """DeepSeek-V3 eq. 17-20 document by document; padding holds NaN."""
  config = models.ModelConfig(hidden_size=6, n_routed_experts=8, num_experts_per_tok=2,
                              n_group=groups, topk_group=1, initializer_range=1.0)
  rng = np.random.default_rng(groups)
  segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]])
  share = {(0, 1): 0.4, (0, 2): 0.1, (1, 1): 0.2, (1, 2): 0.3}
  weights = np.array([[share.get((row, s), 0.0) for s in line]
                      for row, line in enumerate(segments)], np.float32)
  x = rng.standard_normal((12, 6)).astype(np.float32)
  valid = (segments > 0).reshape(-1)
  x[~valid] = np.nan
  params = layers.initial(router_lib.Router, config, jax.random.key(0))
  router = layers.bind(router_lib.Router, config, params)
  choice = router(x, valid, sequences=router_lib.Sequences.of(segments, weights))
  logits = x.astype(np.float64) @ np.asarray(params['weight'], np.float64)
  scores = 1 / (1 + np.exp(-logits))
  balance = z = 0.0
  for (row, document), weight in share.items():
    tokens = np.flatnonzero((segments == document).reshape(-1) & (np.arange(12) // 6 == row))
    chosen = np.zeros(8)
    for t in tokens:
      chosen[np.asarray(choice.indices)[t]] += 1
    f = 8 / (2 * len(tokens)) * chosen
    p = (scores[tokens] / scores[tokens].sum(-1, keepdims=True)).mean(0)
    balance += weight * (f * p).sum()
    z += weight * (np.log(np.exp(logits[tokens]).sum(-1)) ** 2).mean()
  np.testing.assert_allclose(choice.losses['balance'], balance, rtol=2e-6)
  np.testing.assert_allclose(choice.losses['z'], z, rtol=2e-6)


def test_documents_of_one_token_add_nothing_in_the_mtp_layer(model_config, params):
  """With equal scores a document's balance is 1, and its z log(4)^2, over the positions it has."""
  params = jax.tree.map_with_path(
      lambda path, leaf: 0 * leaf if 'router' in jax.tree_util.keystr(path) else leaf, params)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(params, segments, weights):
    router = models.forward(model_config, params, np.arange(8)[None], mtp=True, output='hidden',
                            segment_ids=segments, document_weights=weights).router
    return router.balance[-1] + router.z[-1], router

  z = np.log(4) ** 2
  # Lengths 1, 3 and 2 (in the MTP layer 0, 2 and 1) and padding; then lengths of 1 alone.
  for segments, share, trunk, mtp in (
      ([1, 2, 2, 2, 3, 3, 0, 0], [0, 0.5, 0.125, 0.375], 1.0, 0.5),
      ([1, 2, 3, 4, 5, 6, 0, 0], [0] + [0.125] * 6, 0.75, 0.0)):
    (_, router), gradient = run(params, np.array([segments]), np.float32(share)[[segments]])
    np.testing.assert_allclose(router.balance, [trunk, mtp], rtol=1e-6)
    np.testing.assert_allclose(router.z, [trunk * z, mtp * z], rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradient)) == (mtp > 0)


def test_the_mtp_layer_alone(model_config, params, make_batch):
  """Everything else stays bit-identical, the trunk's selection biases too."""
  tx = optax.adamw(1e-2, weight_decay=0.1)
  loss = losses.make_lm_loss(model_config, losses.LossConfig(mtp_weight=1.0))
  run = step.make_train_step(loss, tx, bias_rate=1e-3, trainable='mtp')
  batch = step.micro_batches(make_batch(2, 16))
  now, seen = state.create(params, tx, 'mtp'), []
  for _ in range(6):
    now, metrics = run(now, batch)
    seen.append(float(metrics['mtp_kl']))
  assert seen[-1] < seen[0]
  after = now.full_params()
  assert jax.tree.structure(after) == jax.tree.structure(params)
  for name in params:
    same = jax.tree.map(np.array_equal, after[name], params[name])
    assert all(jax.tree.leaves(same)) == (name != 'mtp'), name
  bias = after['mtp']['block']['moe']['router']['selection_bias']
  assert np.any(bias) and np.abs(bias).max() <= 6.1e-3
