import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.batch import Batch
from composer_jax.train import losses, state, step


def copy(tree):
  return jax.tree.map(np.array, tree)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, copy(a), copy(b))


def test_split_into_micro_batches_changes_nothing(model_config, params, make_batch):
  """1x8, 2x4 and 8x1 with unequal lengths: equal gradients, and equal biases to the bit."""
  tx = optax.sgd(1.0)  # the change of a parameter is minus its gradient
  model_config = dataclasses.replace(model_config, num_nextn_predict_layers=0)
  params = {name: leaf for name, leaf in params.items() if name != 'mtp'}
  step_fn = step.make_train_step(
      losses.make_lm_loss(model_config, losses.LossConfig(z_weight=0.01)), tx, bias_rate=0.01)
  batch = make_batch(8, 16)
  results = []
  for accumulate in (1, 2, 8):
    after, metrics = step_fn(state.create(params, tx), step.micro_batches(batch, accumulate))
    results.append(copy((after, metrics)))
  (first, first_metrics), *others = results
  assert np.any(first.frozen['moe_layers']['moe']['router']['selection_bias'])
  for after, metrics in others:
    same(after.frozen, first.frozen)
    same(metrics['counts'], first_metrics['counts'])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
                 after.params, first.params)
    np.testing.assert_allclose(metrics['loss'], first_metrics['loss'], rtol=1e-6)
    np.testing.assert_allclose(metrics['z'], first_metrics['z'], rtol=1e-6)


# What follows is about the step alone: a linear model compiles in no time.

def linear_loss(params, batch):
  """sum_t w_t (a . onehot(token) x advantage) / N, its gradient known by hand."""
  value = params['a'][batch.tokens] * batch.advantages
  counts = jnp.zeros((1, 4), jnp.int32).at[0, batch.tokens.reshape(-1)].add(
      (batch.segment_ids > 0).reshape(-1).astype(jnp.int32))
  return (jnp.sum(batch.weights * value) / batch.denominator,
          {'counts': counts, 'value': jnp.sum(batch.weights * value) / batch.denominator,
           'peak_max': jnp.max(jnp.abs(batch.advantages))})


BIAS = {'moe': {'router': {'selection_bias': jnp.zeros((1, 4))}}}


def linear_params():
  return {'a': jnp.arange(1., 5.), 'moe_layers': BIAS}


def linear_batch(advantages, weights=1.0, padded=()):
  """One row of four tokens 0..3 per micro-batch."""
  advantages = np.asarray(advantages, np.float32)
  rows = len(advantages)
  tokens = np.tile(np.arange(4, dtype=np.int32), (rows, 1))
  segments = np.ones_like(tokens)
  weights = np.broadcast_to(np.float32(weights), tokens.shape).copy()
  for row in padded:
    segments[row], weights[row] = 0, 0.0
  batch = Batch(tokens, tokens, weights, tokens, segments, weights.sum(),
                advantages=np.repeat(advantages[:, None], 4, 1))
  return step.micro_batches(batch, rows)


@pytest.fixture(scope='module')
def linear():
  tx = optax.chain(optax.clip_by_global_norm(1e3), optax.adamw(0.1, weight_decay=0.1))
  return tx, step.make_train_step(linear_loss, tx, bias_rate=0.01)


@pytest.mark.parametrize('values', [[1.], [1., 2., 3.]])
def test_batch_without_trainable_tokens_is_bit_identical(linear, values):
  tx, step_fn = linear
  before, _ = step_fn(state.create(linear_params(), tx), linear_batch(values))
  kept = copy(before)
  for batch in (linear_batch(values, weights=0.0),
                linear_batch(values, padded=range(len(values))),
                linear_batch([1e38, *values[1:]], weights=0.0)):
    before, metrics = step_fn(before, batch)
    same(before, kept)
    assert metrics['skipped'] == 1 and metrics['tokens'] == 0 and metrics['bad_micro'] == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(copy(metrics)))


def test_one_compilation_for_any_number_of_filled_micro_batches(linear):
  tx, _ = linear
  step_fn = step.make_train_step(linear_loss, tx, bias_rate=0.01)
  now = state.create(linear_params(), tx)
  for padded in ((), (0,), (1, 2), (0, 1, 2)):
    now, _ = step_fn(now, linear_batch([1., 2., 3.], padded=padded))
  now, _ = step_fn(now, linear_batch([np.nan, 2., np.inf]))
  assert step_fn._cache_size() == 1


def test_padding_micro_batches_are_not_computed(linear):
  tx, step_fn = linear
  poison = linear_batch([np.nan, 2., 3.], padded=(0,))
  clean = linear_batch([0., 2., 3.], padded=(0,))
  (a, metrics), (b, _) = (step_fn(state.create(linear_params(), tx), x) for x in (poison, clean))
  same(a, b)
  assert metrics['bad_micro'] == 0 and metrics['peak_max'] == 3


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_bad_micro_batch_leaves_the_divisor(poison):
  """The result is that of the batch without it: sum over the rest / tokens of the rest."""
  tx = optax.sgd(1.0)
  step_fn = step.make_train_step(linear_loss, tx, bias_rate=0.01)
  after, metrics = step_fn(state.create(linear_params(), tx), linear_batch([1., poison, 3.]))
  gradient = (1. + 3.) / 8  # of each entry of `a`
  np.testing.assert_allclose(after.params['a'], np.arange(1., 5.) - gradient, rtol=1e-6)
  assert metrics['bad_micro'] == 1 and metrics['skipped'] == 0 and metrics['bad_steps'] == 0
  np.testing.assert_allclose(metrics['value'], (1 + 2 + 3 + 4) * gradient, rtol=1e-6)
  np.testing.assert_array_equal(metrics['counts'], [[2, 2, 2, 2]])
  assert metrics['peak_max'] == 3


@pytest.mark.parametrize('bad', [[np.nan], [np.nan, np.inf, -np.inf]])
def test_update_without_finite_gradient_is_lost_and_counted(linear, bad):
  tx, step_fn = linear
  now, _ = step_fn(state.create(linear_params(), tx), linear_batch([1., 2., 3.]))
  kept = copy(now)
  for lost in (1, 2):
    now, metrics = step_fn(now, linear_batch(bad))
    assert metrics['bad_micro'] == len(bad)
    same(now.replace(bad_steps=0), kept.replace(bad_steps=0))
    assert metrics['bad_steps'] == now.bad_steps == lost and metrics['step'] == 1
  now, _ = step_fn(now, linear_batch([1., 2., 3.], weights=0.0))
  assert now.bad_steps == 2  # an empty batch says nothing
  now, metrics = step_fn(now, linear_batch([1., 2., 3.]))
  assert now.bad_steps == 0 and now.step == 2


def test_bias_moves_once_per_step(linear):
  tx, step_fn = linear
  batch = linear_batch([1., 2., 3., 4.])
  tokens = np.array([[[0, 0, 0, 1]], [[0, 0, 0, 1]], [[0, 0, 0, 1]], [[2, 2, 1, 1]]], np.int32)
  after, metrics = step_fn(state.create(linear_params(), tx), batch.replace(tokens=tokens))
  bias = after.frozen['moe_layers']['moe']['router']['selection_bias']
  np.testing.assert_allclose(bias, [[-0.01, -0.01, 0.01, 0.01]])  # loads 9, 5, 2, 0; mean 4
  assert metrics['load_max'] == pytest.approx(9 / 4)


def test_rows_have_to_divide():
  with pytest.raises(ValueError, match='micro-batches'):
    step.micro_batches(linear_batch([1., 2., 3.]), 2)
