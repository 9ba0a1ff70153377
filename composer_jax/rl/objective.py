"""The policy-gradient loss and what is measured along with it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from composer_jax import models
from composer_jax.batch import Batch
from composer_jax.models.config import ModelConfig
from composer_jax.train import losses

# Upper edges of the log-prob gap histogram: eight bins a decade from 1e-8 to 1e2.
GAP_EDGES = tuple(10.0 ** (-8 + i / 8) for i in range(81))


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """What the loss is divided by, and how stale tokens are weighed.

  Attributes:
    denominator: 'constant' divides the summed loss by a fixed token budget (Dr. GRPO, arXiv
      2503.20783, section 3.2), 'tokens' by the number of trained tokens of the step. Neither is a
      per-rollout length. Our choice: constant, so that a step with few informative groups moves
      the weights less.
    tokens_per_rollout: the budget of one rollout, for 'constant': the divisor is this times all
      rollouts of a full step (our choice: near the mean number of sampled tokens).
    importance_cap: each token's term is weighed by min(pi(y) / pi_sampler(y), cap), a constant
      for the gradient. 0 leaves the weight out. The report mentions no correction; with tokens one
      or two versions old the uncorrected gradient belongs to the older policy, and the weight is
      exactly 1 on-policy, so on with a cap of 2 is our choice.
    temperature: sampling temperature whose full softmax the log-probs refer to.
    head_chunk: positions whose logits are held at once, 0 for all; see `train.losses.LossConfig`.
    replay_slack: plausibility filter of router replay (report, section 6.2): a recorded expert is
      kept while its selection score is at most this far below the trainer's own K-th best. 0 is
      the trainer's own routing, very large is pure replay. Our choice.
  """

  denominator: Literal['constant', 'tokens'] = 'constant'
  tokens_per_rollout: float = 32.0
  importance_cap: float = 2.0
  temperature: float = 1.0
  head_chunk: int = 0
  replay_slack: float = 0.1

  def __post_init__(self):
    if self.temperature <= 0:
      raise ValueError('temperature must be positive: greedy tokens are no samples of the policy')
    if self.tokens_per_rollout <= 0:
      raise ValueError('tokens_per_rollout must be positive')
    if min(self.importance_cap, self.replay_slack, self.head_chunk) < 0:
      raise ValueError('importance_cap, replay_slack and head_chunk must not be negative')


def policy_loss(
    logp: Float[Array, '*rows S'], sampler_logp: Float[Array, '*rows S'],
    advantages: Float[Array, '*rows S'], weights: Float[Array, '*rows S'],
    denominator: Float[Array, ''] | float, importance_cap: float,
) -> tuple[Float[Array, ''], Float[Array, '*rows S']]:
  """Returns -(1/N) sum_t w_t rho_t A_t log pi(y_t), and rho.

  Composer 2 report, section 4 (group policy gradient without length or deviation normalisers). N is
  one global scalar; rho = min(pi / pi_sampler, cap) is a weight, not differentiated. Positions
  of weight 0 are replaced before any arithmetic, so that NaN in padding cannot reach a gradient.

  Args:
    logp: trainer log-probs of the sampled tokens, natural log.
    sampler_logp: the sampler's.
    advantages: A_t.
    weights: 1 on trained tokens, 0 elsewhere.
    denominator: N.
    importance_cap: 0 means rho = 1.
  """
  mask = weights > 0
  logp = jnp.where(mask, logp, 0.0)
  advantages = jnp.where(mask, advantages, 0.0)
  ratio = jnp.ones_like(logp)
  if importance_cap:
    sampler_logp = jnp.where(mask, sampler_logp, 0.0)
    log_ratio = jnp.minimum(jax.lax.stop_gradient(logp) - sampler_logp, jnp.log(importance_cap))
    ratio = jnp.where(mask, jnp.exp(log_ratio), 1.0)
  weights = jnp.where(mask, weights, 0.0)
  return -jnp.sum(weights * ratio * advantages * logp) / denominator, ratio


def token_scores(
    model_config: ModelConfig, params: Any, batch: Batch, config: ObjectiveConfig
) -> tuple[dict[str, Float[Array, 'R S']], models.RouterOut]:
  """Scores a micro-batch `[R, S]` with the recorded routing replayed.

  Returns:
    `logp` of `batch.targets` and `entropy`, both of the full softmax at the sampling temperature
    and 0 where the weight is 0; and the router's output.
  """
  routing = models.Routing(jnp.moveaxis(batch.routing, -2, 0), batch.routing_mask,
                           config.replay_slack)
  out = models.forward(model_config, params, batch.tokens, positions=batch.positions,
                       segment_ids=batch.segment_ids, routing=routing, output='hidden')

  def score(a: dict[str, Array]) -> dict[str, Array]:
    logits = models.head(model_config, params, a['hidden']) / config.temperature
    nll, lse = losses.cross_entropy(logits, a['targets'], a['mask'])
    frozen = jax.lax.stop_gradient(jnp.where(a['mask'][..., None], logits, 0.0))
    mean = jnp.sum(jax.nn.softmax(frozen, axis=-1) * frozen, axis=-1)
    entropy = jax.lax.stop_gradient(lse) - mean
    return {'logp': jnp.where(a['mask'], -nll, 0.0),
            'entropy': jnp.where(a['mask'], entropy, 0.0)}

  arrays = {'hidden': out.hidden, 'targets': batch.targets, 'mask': batch.weights > 0}
  return losses.over_chunks(score, arrays, {}, config.head_chunk), out.router


def make_rl_loss(model_config: ModelConfig, config: ObjectiveConfig) -> losses.LossFn:
  """Returns the RL objective for `train.step.make_train_step`.

  Its metrics are sums over trained tokens (names in `_sum`, divide by `tokens`), maxima (`_max`)
  and the histogram of |trainer - sampler log-prob|; `summarise` turns them into figures.
  """
  def loss_fn(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
    scores, router = token_scores(model_config, params, batch, config)
    loss, ratio = policy_loss(scores['logp'], batch.sampler_logprobs, batch.advantages,
                              batch.weights, batch.denominator, config.importance_cap)
    mask = batch.weights > 0
    logp = jax.lax.stop_gradient(scores['logp'])
    log_ratio = jnp.where(mask, logp - jnp.where(mask, batch.sampler_logprobs, 0.0), 0.0)
    gap = jnp.abs(log_ratio)
    bins = jnp.searchsorted(jnp.asarray(GAP_EDGES, jnp.float32), gap)
    recorded = jnp.sum(batch.routing_mask & (batch.segment_ids > 0))
    metrics = {
        'entropy_sum': jnp.sum(scores['entropy']),
        'ratio_sum': jnp.sum(jnp.where(mask, ratio, 0.0)),
        'capped_sum': jnp.sum(mask & (log_ratio > jnp.log(config.importance_cap or jnp.inf)),
                              dtype=jnp.float32),
        'gap_sum': jnp.sum(gap), 'gap_max': jnp.max(gap),
        'gap_histogram': jnp.sum(jnp.where(mask[..., None], bins[..., None] == jnp.arange(
            len(GAP_EDGES) + 1), False), axis=(0, 1), dtype=jnp.float32),
        'replaced_sum': jnp.sum(router.replaced, dtype=jnp.float32),
        'recorded_sum': (recorded * router.indices.shape[0]
                         * router.indices.shape[-1]).astype(jnp.float32),
        'counts': router.counts}
    return loss, metrics

  return loss_fn


def summarise(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns the step's figures: means over trained tokens, and the gap's p99 from its histogram.

  `gap_p99` is the upper edge of the histogram bin (an eighth of a decade wide), at most `gap_max`.
  """
  m = {k: np.asarray(v, np.float64) for k, v in metrics.items()}
  tokens = max(float(m['tokens']), 1.0)
  edges = np.append(GAP_EDGES, np.inf)
  histogram = m['gap_histogram']
  reached = np.cumsum(histogram) >= 0.99 * max(histogram.sum(), 1.0)
  p99 = float(edges[np.argmax(reached)]) if histogram.sum() else 0.0
  return {
      'loss': float(m['loss']), 'grad_norm': float(m['grad_norm']),
      'entropy': float(m['entropy_sum']) / tokens,
      'gap_mean': float(m['gap_sum']) / tokens, 'gap_max': float(m['gap_max']),
      'gap_p99': min(p99, float(m['gap_max'])),
      'importance_mean': float(m['ratio_sum']) / tokens,
      'importance_capped_fraction': float(m['capped_sum']) / tokens,
      'replay_override_fraction': float(m['replaced_sum']) / max(float(m['recorded_sum']), 1.0),
      'load_max': float(m['load_max']), 'tokens_trained': int(m['tokens']),
      'skipped': int(m['skipped']), 'bad_micro_batches': int(m['bad_micro']),
      'updates': int(m['step'])}
