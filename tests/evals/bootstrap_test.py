import numpy as np
import pytest

from composer_jax.evals.bootstrap import mean_interval


def test_seed_decides_and_constant_values_have_no_width():
  values = np.random.default_rng(0).random(30)
  assert mean_interval(values, seed=1) == mean_interval(values, seed=1)
  assert mean_interval(values, seed=1) != mean_interval(values, seed=2)
  assert mean_interval(np.full(5, 0.25)) == (0.25, 0.25)
  low, high = mean_interval(values)
  assert low < values.mean() < high


def test_width_matches_the_normal_approximation():
  values = np.random.default_rng(1).random(400)
  low, high = mean_interval(values)
  assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
  low80, high80 = mean_interval(values, level=0.8)
  assert high80 - low80 == pytest.approx(2 * 1.2816 * values.std() / 20, rel=0.05)


def test_coverage_is_near_its_level():
  rng = np.random.default_rng(2)
  hits = 0
  for trial in range(400):
    # tasks of different difficulty, 4 samples each: the unit that varies is the task
    difficulty = rng.beta(1, 1, 60)
    values = rng.binomial(4, difficulty) / 4
    low, high = mean_interval(values, resamples=400, seed=trial)
    hits += low <= 0.5 <= high
  assert 0.91 < hits / 400 < 0.98


@pytest.mark.parametrize('values, level', [([], 0.95), ([[1.0]], 0.95), ([1.0], 1.0)])
def test_bad_arguments(values, level):
  with pytest.raises(ValueError):
    mean_interval(np.asarray(values), level=level)
