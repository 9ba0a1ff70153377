"""The loss against float64 NumPy, and what must not change it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import models
from composer_jax.rl import objective, replay
from composer_jax.rl.objective import ObjectiveConfig, policy_loss


def numpy_gradient(logits, targets, sampler, advantages, weights, denominator, cap):
  """d/dlogits of -(1/N) sum w rho A log softmax(logits)[target], float64."""
  logits = logits.astype(np.float64)
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  grad = np.zeros_like(p)
  for i in np.ndindex(targets.shape):
    if weights[i] > 0:
      rho = min(p[i][targets[i]] / np.exp(sampler[i]), cap) if cap else 1.0
      onehot = np.eye(p.shape[-1])[targets[i]]
      grad[i] = -weights[i] * rho * advantages[i] * (onehot - p[i]) / denominator
  return grad


@pytest.mark.parametrize('cap', [0.0, 1.3, 2.0])
def test_gradient_matches_numpy(cap):
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(2, 5, 7)).astype(np.float32)
  targets = rng.integers(0, 7, (2, 5))
  sampler = -rng.exponential(1.5, (2, 5)).astype(np.float32)
  advantages = rng.normal(size=(2, 5)).astype(np.float32)
  weights = (rng.random((2, 5)) < 0.6).astype(np.float32)

  def loss(x):
    logp = jnp.take_along_axis(jax.nn.log_softmax(x), targets[..., None], -1)[..., 0]
    return policy_loss(logp, sampler, advantages, weights, 13.0, cap)[0]

  wanted = numpy_gradient(logits, targets, sampler, advantages, weights, 13.0, cap)
  np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(logits)), wanted, atol=2e-7)


def test_importance_weight_is_truncated_and_one_on_policy():
  logp = jnp.log(jnp.array([0.5, 0.5, 0.1]))
  sampler = jnp.log(jnp.array([0.5, 0.01, 0.4]))
  _, ratio = policy_loss(logp, sampler, jnp.ones(3), jnp.ones(3), 1.0, 2.0)
  np.testing.assert_allclose(ratio, [1.0, 2.0, 0.25], rtol=1e-6)


@pytest.mark.parametrize('poison', [np.nan, np.inf, -np.inf])
def test_masked_positions_may_hold_anything(poison):
  clean = [np.float32([-1, -2, -3])] * 3
  weights = np.float32([1, 0, 1])
  dirty = [np.where(weights > 0, x, poison).astype(np.float32) for x in clean]

  def run(arrays):
    def loss(logp):
      return policy_loss(logp, arrays[1], arrays[2], weights, 2.0, 2.0)[0]
    return jax.value_and_grad(loss)(jnp.asarray(arrays[0]))

  for a, b in zip(run(clean), run(dirty), strict=True):
    assert np.all(np.isfinite(b)) and np.array_equal(a, b)


@pytest.fixture(scope='module')
def model_config():
  """One MoE layer: what is tested here is the loss, and compilation takes most of the time."""
  return models.ModelConfig(
      vocab_size=64, hidden_size=16, num_hidden_layers=1, first_k_dense_replace=0,
      moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=2,
      kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
      max_position_embeddings=64, initializer_range=0.3)


@pytest.fixture(scope='module')
def params(model_config):
  return models.init(model_config, jax.random.key(0))


@pytest.fixture(scope='module')
def problem(fakes):
  """Eight rollouts of unequal lengths, and hand-made advantages."""
  masks = ['..##', '...#####..##', '..#', '....##.##', '.#.#.#', '..########', '...##', '..##..##']
  samples = []
  for i, mask in enumerate(masks):
    sample = fakes.sample(logical=str(i), sampled=mask, seed=i)
    routing = np.random.default_rng(i).integers(0, 4, (len(mask), 1, 2)).astype(np.uint16)
    routing[..., 1] = (routing[..., 0] + 1) % 4
    samples.append(dataclasses.replace(
        sample, rollout=dataclasses.replace(sample.rollout, routing=routing)))
  return samples, np.linspace(-1, 1, 8)


@pytest.fixture(scope='module')
def gradient(model_config, params):
  """Returns a function that sums the gradient over the micro-batches of a layout."""
  loss_fn = objective.make_rl_loss(model_config, ObjectiveConfig())
  grad_fn = jax.jit(jax.grad(lambda p, micro: loss_fn(p, micro)[0]))

  def call(samples, advantages, rows, row_len):
    layout = replay.plan([len(s.rollout.tokens) for s in samples], row_len, rows,
                         -(-len(samples) // rows))
    batch = replay.build_batch(samples, advantages, layout, 50.0, (1, 2))
    grads = []
    for i in range(layout.micro_batches_used):
      micro = jax.tree.map(lambda x, i=i: x[i], batch.replace(denominator=None))
      grads.append(grad_fn(params, micro.replace(denominator=batch.denominator)))
    return jax.tree.map(lambda *parts: sum(parts), *grads)
  return call


def close(a, b, atol=1e-7):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_no_split_changes_the_gradient(problem, gradient):
  samples, advantages = problem
  one = gradient(samples, advantages, 8, 12)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one)) > 1e-3
  close(one, gradient(samples, advantages, 1, 12))
  close(one, gradient(samples, advantages, 1, 24))  # packed


def test_a_rollout_is_not_divided_by_its_length(problem, gradient):
  """Twice the same row in a batch is twice its gradient; the divisor is a constant."""
  samples, advantages = problem
  alone = gradient(samples[1:2], advantages[1:2], 1, 12)
  twice = gradient([samples[1]] * 2, [advantages[1]] * 2, 1, 24)
  close(jax.tree.map(lambda x: 2 * x, alone), twice)

  # a longer rollout weighs its tokens like a short one: per-token terms do not see the length
  def token_terms(n):
    logp = jnp.full(n, -1.0)
    return jax.grad(lambda x: policy_loss(x, logp, jnp.ones(n), jnp.ones(n), 20.0, 2.0)[0])(logp)
  assert float(token_terms(3)[0]) == float(token_terms(6)[0]) == pytest.approx(-1 / 20)


def test_figures_of_a_step_without_tokens_are_finite():
  names = ('tokens', 'loss', 'grad_norm', 'entropy_sum', 'ratio_sum', 'capped_sum', 'gap_sum',
           'gap_max', 'replaced_sum', 'recorded_sum', 'load_max', 'bad_micro', 'step')
  zeros = dict.fromkeys(names, 0)
  figures = objective.summarise({**zeros, 'skipped': 1, 'gap_histogram': np.zeros(82)})
  assert figures.pop('skipped') == 1
  assert set(figures.values()) == {0}


def test_metrics_match_a_direct_computation(problem, model_config, params):
  samples, advantages = problem
  layout = replay.plan([len(s.rollout.tokens) for s in samples], 12, 8, 1)
  batch = replay.build_batch(samples, advantages, layout, 50.0, (1, 2))
  batch = jax.tree.map(lambda x: x[0], batch.replace(denominator=None)).replace(denominator=50.0)
  config = ObjectiveConfig(temperature=0.7, replay_slack=float('inf'))
  _, metrics = jax.jit(objective.make_rl_loss(model_config, config))(params, batch)
  routing = models.Routing(jnp.moveaxis(batch.routing, -2, 0), batch.routing_mask)
  out = models.forward(model_config, params, batch.tokens, positions=batch.positions,
                       segment_ids=batch.segment_ids, routing=routing)
  logp = np.asarray(jax.nn.log_softmax(out.logits / 0.7), np.float64)
  mask = batch.weights > 0
  chosen = np.take_along_axis(logp, batch.targets[..., None], -1)[..., 0]
  log_ratios = (chosen - batch.sampler_logprobs)[mask]
  gaps = np.abs(log_ratios)
  extra = {'tokens': mask.sum(), 'loss': 0, 'grad_norm': 0, 'load_max': 1, 'skipped': 0,
           'bad_micro': 0, 'step': 1}
  figures = objective.summarise({**metrics, **extra})
  entropy = -(np.exp(logp) * logp).sum(-1)[mask].mean()
  assert figures['entropy'] == pytest.approx(entropy, rel=1e-5)
  assert figures['gap_mean'] == pytest.approx(gaps.mean(), rel=1e-5)
  assert figures['gap_max'] == pytest.approx(gaps.max(), rel=1e-5)
  exact = np.sort(gaps)[int(np.ceil(0.99 * len(gaps))) - 1]
  assert exact * 0.999 <= figures['gap_p99'] <= exact * 10 ** (1 / 8) * 1.001
  assert figures['replay_override_fraction'] == 0
  cap = float(np.exp(np.quantile(log_ratios, 0.6)))
  _, metrics = jax.jit(objective.make_rl_loss(
      model_config, dataclasses.replace(config, importance_cap=cap)))(params, batch)
  capped = np.mean(log_ratios > np.log(cap) + 1e-6)
  assert 0.2 < capped < 0.6
  assert objective.summarise({**metrics, **extra})['importance_capped_fraction'] == pytest.approx(
      capped)
  # the trainer's own routing overrides exactly what differs from the record
  strict = objective.make_rl_loss(model_config, dataclasses.replace(config, replay_slack=0.0))
  _, metrics = jax.jit(strict)(params, batch)
  own = models.forward(model_config, params, batch.tokens, positions=batch.positions,
                       segment_ids=batch.segment_ids).router.indices
  recorded = np.moveaxis(batch.routing, -2, 0)
  differ = sum(1 for index in np.ndindex(recorded.shape[:3]) if batch.routing_mask[index[1:]]
               for e in recorded[index] if e not in np.asarray(own[index]))
  assert float(metrics['replaced_sum']) == differ > 0
