import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.train.optimizer import OptimizerConfig, make_optimizer, make_schedule


def rates(steps=20, **fields):
  schedule = make_schedule(OptimizerConfig(lr=1.0, final_fraction=0.1, **fields), steps)
  return np.array([schedule(i) for i in range(steps + 5)])


@pytest.mark.parametrize('schedule', ['constant', 'linear', 'cosine', 'wsd'])
def test_warm_up_then_peak(schedule):
  r = rates(warmup_steps=4, schedule=schedule)
  np.testing.assert_allclose(r[:4], [0.25, 0.5, 0.75, 1.0])
  assert np.all(np.diff(r[4:]) <= 1e-7) and r.max() == pytest.approx(1.0)


def test_shapes_by_hand():
  np.testing.assert_allclose(rates(warmup_steps=0, schedule='linear')[[0, 10, 20, 24]],
                             [1.0, 0.55, 0.1, 0.1], rtol=1e-6)
  np.testing.assert_allclose(rates(warmup_steps=0, schedule='cosine')[[0, 10, 20]],
                             [1.0, 0.55, 0.1], rtol=1e-6)
  np.testing.assert_allclose(rates(warmup_steps=0, schedule='wsd')[[0, 16, 18, 20]],
                             [1.0, 1.0, 0.55, 0.1], rtol=1e-6)
  np.testing.assert_allclose(rates(warmup_steps=0, schedule='linear', decay_steps=10)[[5, 10, 19]],
                             [0.55, 0.1, 0.1], rtol=1e-6)
  assert set(rates(warmup_steps=0, schedule='constant')) == {1.0}


def test_one_adamw_update_by_hand():
  config = OptimizerConfig(lr=0.1, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5, clip_norm=1.0,
                           warmup_steps=0, schedule='constant')
  tx = make_optimizer(config, 10)
  params = {'matrix': jnp.array([2.0, -1.0]), 'attention_norm': jnp.array([2.0])}
  grads = {'matrix': jnp.array([3.0, 0.0]), 'attention_norm': jnp.array([4.0])}  # norm 5, clipped
  updates, _ = tx.update(grads, tx.init(params), params)
  after = optax.apply_updates(params, updates)
  # Adam's first update is the sign of the gradient; only the matrix decays: 0.1 * 0.5 * value
  np.testing.assert_allclose(after['matrix'], [2.0 - 0.1 - 0.1, -1.0 + 0.05], rtol=1e-5)
  np.testing.assert_allclose(after['attention_norm'], [1.9], rtol=1e-5)


def test_bad_values_are_refused():
  with pytest.raises(ValueError, match='lr'):
    OptimizerConfig(lr=-1.0)
