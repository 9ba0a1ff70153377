"""Length penalty against known values, KL in the reward against the exact gradient."""

import numpy as np
import pytest

from composer_jax.rl import shaping
from composer_jax.rl.config import RLConfig
from composer_jax.rl.shaping import LengthPenaltyConfig, length_penalty
from composer_jax.rl.trainer import zero_signal


@pytest.mark.parametrize('k,q,values', [
    (0.1, 0.5, [0.9762, 8.2843, 46.3325, 180.9975]),
    (1.0, 1.0, [0.6931, 2.3979, 4.6151, 6.9088]),
    (1.0, 2.0, [0.5, 0.9091, 0.9901, 0.9990]),
    (0.3, 0.0, [1.0, 10.0, 100.0, 1000.0])])
def test_penalty_values(k, q, values):
  np.testing.assert_allclose(length_penalty(np.array([1, 10, 100, 1000]), k, q), values, atol=5e-5)


def test_penalty_near_its_limits():
  x = np.array([0.0, 1e-9, 3.0, 1e6])
  for q in (1 - 1e-9, 1 + 1e-9, 1.0):
    np.testing.assert_allclose(length_penalty(x, 0.7, q), np.log1p(0.7 * x) / 0.7, rtol=1e-6)
  for q in (0.0, 0.5, 1.0, 3.0):
    assert length_penalty(0.0, 0.2, q) == 0
    np.testing.assert_allclose(length_penalty(1e-9, 0.2, q), 1e-9, rtol=1e-6)  # slope 1 at 0
  assert length_penalty(1e12, 0.5, 3.0) == pytest.approx(1 / (0.5 * 2))  # saturates
  values = length_penalty(np.linspace(0, 50, 200), 0.2, 0.6)
  assert np.all(np.diff(values) > 0) and np.all(np.diff(values, 2) < 0)


def test_effort_is_the_weighted_sum_and_only_correct_rollouts_pay(fakes):
  config = LengthPenaltyConfig(weight=0.1, k=1.0, q=1.0, thinking_tokens=0.5, call_tokens=0.1,
                               result_tokens=0.01, final_tokens=0.2, calls=1.0, turns=2.0)
  counts = {'thinking_tokens': 2, 'call_tokens': 10, 'result_tokens': 100, 'final_tokens': 5,
            'calls': 3, 'turns': 4}
  x = 1 + 1 + 1 + 1 + 3 + 8
  right = fakes.sample(1.0, logical='r', **counts)
  wrong = fakes.sample(0.0, logical='w', **counts)
  parts = shaping.reward_parts([right, wrong], config, {})
  assert parts['r'] == {'correct': 1.0, 'length': pytest.approx(-0.1 * np.log1p(x))}
  assert parts['w'] == {'correct': 0.0}
  everyone = LengthPenaltyConfig(weight=0.1, scope='all')
  assert shaping.reward_parts([wrong], everyone, {})['w']['length'] < 0


def test_no_effort_and_no_correct_member_cost_nothing(fakes):
  samples = [fakes.sample(c, logical=str(i)) for i, c in enumerate([0.0, 0.0, 1.0])]
  for some in (samples, samples[:2]):
    parts = shaping.reward_parts(some, LengthPenaltyConfig(), {})
    assert all(sum(p.values()) == p['correct'] for p in parts.values())


def test_behaviour_and_kl_parts(fakes):
  sample = fakes.sample(1.0, logical='a', call_errors=3.0)
  sampled = sample.rollout.logprobs[sample.rollout.sampled]
  parts = shaping.reward_parts([sample], LengthPenaltyConfig(weight=0), {'call_errors': -0.02},
                               0.5, [sampled - 0.25])
  assert parts['a']['call_errors'] == pytest.approx(-0.06)
  assert parts['a']['kl'] == pytest.approx(-0.5 * 0.25 * len(sampled))


def test_segments_share_one_kl(fakes):
  rows = [fakes.sample(1.0, logical='a', segment=i, seed=i) for i in (1, 0)]
  reference = [s.rollout.logprobs[s.rollout.sampled] - 0.1 for s in rows]
  parts = shaping.reward_parts(rows, LengthPenaltyConfig(weight=0), {}, 1.0, reference)
  assert parts['a']['kl'] == pytest.approx(-0.1 * sum(len(r) for r in reference), rel=1e-5)


def test_zero_signal_looks_at_correctness_unless_told_otherwise(fakes):
  short = fakes.sample(1.0, logical='s', calls=1.0)
  long = fakes.sample(1.0, logical='l', calls=9.0)
  wrong = fakes.sample(0.0, logical='w', calls=9.0)
  assert zero_signal(RLConfig(), [short, long])
  assert not zero_signal(RLConfig(), [short, wrong])
  assert not zero_signal(RLConfig(zero_signal='shaped'), [short, long])


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
  """Exact expectations over all groups of two rollouts of a two-action policy."""
  theta, reference, beta, rewards = 0.7, -0.4, 0.3, np.array([1.0, 0.2])

  def probabilities(t):
    return np.array([1 / (1 + np.exp(-t)), 1 / (1 + np.exp(t))])

  p, r = probabilities(theta), probabilities(reference)
  score = np.array([p[1], -p[0]])  # d log p(a) / d theta
  shaped = rewards - beta * np.array(
      [shaping.k1(np.log(p[a:a + 1]), np.log(r[a:a + 1])) for a in (0, 1)])
  expected = 0.0
  for a in (0, 1):
    for b in (0, 1):
      mean = (shaped[a] + shaped[b]) / 2
      expected += p[a] * p[b] * ((shaped[a] - mean) * score[a] + (shaped[b] - mean) * score[b]) / 2

  def objective(t):
    kl = probabilities(t) @ (np.log(probabilities(t)) - np.log(r))
    return probabilities(t) @ rewards - beta * kl

  exact = (objective(theta + 1e-5) - objective(theta - 1e-5)) / 2e-5
  # a group mean that includes the rollout itself scales by (G - 1) / G and changes nothing else
  assert expected == pytest.approx(exact / 2, rel=1e-6)
  # the same estimate, differentiated as a loss, has expected gradient zero
  assert p @ score == pytest.approx(0, abs=1e-12)


def test_k1_variance_of_shifted_gaussians():
  """q = N(0,1), p = N(3,1): E k1 = 4.5 and Var k1 = 9, where k3 has variance e^9 - 10."""
  x = np.random.default_rng(0).normal(size=200_000)
  values = np.array([shaping.k1([-0.5 * a * a], [-0.5 * (a - 3) ** 2]) for a in x[:20_000]])
  closed = -0.5 * x ** 2 + 0.5 * (x - 3) ** 2
  np.testing.assert_allclose(values, closed[:20_000])
  assert closed.mean() == pytest.approx(4.5, abs=0.05) and closed.var() == pytest.approx(9, rel=.02)
