import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from composer_jax.rollout import sampling

LOGITS = np.array([1.0, 0.0, -1.0, 2.0, 0.5])


def draw(count, temperature, logits=LOGITS, greedy=False):
  keys = np.stack([sampling.session_key(0, f's{i}') for i in range(count)])
  rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
  return sampling.sample(rows, keys, jnp.full(count, 3), temperature, greedy)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_chi_square_and_log_probabilities(temperature):
  tokens, logprobs = draw(20_000, temperature)
  scaled = LOGITS / temperature
  exact = np.exp(scaled) / np.exp(scaled).sum()
  counts = np.bincount(tokens, minlength=5)
  assert stats.chisquare(counts, exact * 20_000).pvalue > 1e-3
  np.testing.assert_allclose(logprobs, np.log(exact)[np.asarray(tokens)], atol=1e-6)


def test_positions_and_sessions_are_independent_streams():
  keys = np.stack([sampling.session_key(0, f's{i}') for i in range(3000)])
  rows = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (3000, 5))
  first, _ = sampling.sample(rows, keys, jnp.full(3000, 3), 1.0)
  second, _ = sampling.sample(rows, keys, jnp.full(3000, 4), 1.0)
  table = np.zeros((5, 5))
  np.add.at(table, (np.asarray(first), np.asarray(second)), 1)
  assert stats.chi2_contingency(table).pvalue > 1e-3
  again, _ = sampling.sample(rows, keys, jnp.full(3000, 3), 1.0)
  np.testing.assert_array_equal(first, again)


def test_greedy_takes_the_best_and_scores_the_untempered_softmax():
  tokens, logprobs = draw(4, 1.0, greedy=True)
  assert np.asarray(tokens).tolist() == [3] * 4
  np.testing.assert_allclose(logprobs, np.log(np.exp(2) / np.exp(LOGITS).sum()), atol=1e-6)


def test_a_token_that_cannot_happen_is_never_drawn():
  tokens, logprobs = draw(5000, 1.0, np.array([-1e30, 0.0, -1e30, 0.0, -1e30]))
  assert set(np.asarray(tokens).tolist()) == {1, 3}
  np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_keys_are_distinct():
  keys = {tuple(sampling.session_key(seed, f'{group}/{i}'))
          for seed in range(2) for group in range(6250) for i in range(8)}
  assert len(keys) == 100_000
