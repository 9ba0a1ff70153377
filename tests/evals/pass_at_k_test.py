import itertools

import pytest

from composer_jax.evals.pass_at_k import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize('samples', range(1, 9))
def test_equals_the_share_of_subsets_with_a_correct_sample(samples):
  for correct in range(samples + 1):
    outcomes = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
      subsets = list(itertools.combinations(outcomes, k))
      expected = sum(any(s) for s in subsets) / len(subsets)
      assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-12)


def test_large_counts_do_not_overflow():
  assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)
  assert pass_at_k(100_000, 50_000, 100) == pytest.approx(1.0)


def test_tasks_weigh_the_same():
  assert mean_pass_at_k([(8, 8), (8, 0), (2, 1)], 1) == pytest.approx(0.5)


@pytest.mark.parametrize('args', [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_out_of_range(args):
  with pytest.raises(ValueError):
    pass_at_k(*args)


def test_no_tasks():
  with pytest.raises(ValueError, match='no tasks'):
    mean_pass_at_k([], 1)
