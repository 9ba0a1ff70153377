"""Advantages by group id, per logical rollout."""

import numpy as np
import pytest

from composer_jax.rl.advantage import group_advantages


def test_reward_minus_group_mean_without_deviation_or_length():
  out = group_advantages(['a', 'a', 'a', 'b', 'b'], list('12345'), [1, 0, 0, 5, 3])
  np.testing.assert_allclose(out, [2 / 3, -1 / 3, -1 / 3, 1, -1])
  # ten times smaller differences give ten times smaller advantages
  np.testing.assert_allclose(group_advantages(['a', 'a'], ['1', '2'], [1.1, 1.0]), [0.05, -0.05])


def test_equal_rewards_give_exact_zeros():
  out = group_advantages(['a'] * 3, list('123'), [0.1 + 0.2] * 3)
  assert np.array_equal(out, np.zeros(3))


def test_membership_is_by_id_and_not_by_order():
  rng = np.random.default_rng(0)
  groups = [f'g{i // 4}' for i in range(20)]  # the same prompt may stand behind several groups
  ids, rewards = [str(i) for i in range(20)], rng.normal(size=20)
  plain = dict(zip(ids, group_advantages(groups, ids, rewards), strict=True))
  order = rng.permutation(20)
  shuffled = group_advantages([groups[i] for i in order], [ids[i] for i in order], rewards[order])
  assert np.array_equal(shuffled, [plain[ids[i]] for i in order])


@pytest.mark.parametrize('parts', [1, 4])
def test_segments_of_one_rollout_count_once(parts):
  groups = ['g'] * (parts + 2)
  out = group_advantages(groups, ['long'] * parts + ['x', 'y'], [1.0] * parts + [0.0, 0.5])
  np.testing.assert_allclose(out, [0.5] * parts + [-0.5, 0.0])


def test_contradicting_rows_and_bad_rewards_are_refused():
  with pytest.raises(ValueError, match='disagree'):
    group_advantages(['g', 'g'], ['l', 'l'], [1.0, 0.0])
  with pytest.raises(ValueError, match='disagree'):
    group_advantages(['g', 'h'], ['l', 'l'], [1.0, 1.0])
  with pytest.raises(ValueError, match='not finite'):
    group_advantages(['g'], ['l'], [float('nan')])
