"""The policy-gradient loss and what is measured along with it."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from composer_jax.batch import Batch
from composer_jax.models import transformer
from composer_jax.models.config import ModelConfig

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
    replay_slack: plausibility filter of router replay (report, section 6.2): a recorded expert is
      kept while its selection score is at most this far below the trainer's own K-th best. 0 is
      the trainer's own routing, very large is pure replay. Our choice.
  """

  denominator: Literal['constant', 'tokens'] = 'constant'
  tokens_per_rollout: float = 32.0
  importance_cap: float = 2.0
  temperature: float = 1.0
  replay_slack: float = 0.1

  def __post_init__(self):
    if self.temperature <= 0:
      raise ValueError('temperature must be positive: greedy tokens are no samples of the policy')
    if self.tokens_per_rollout <= 0 or self.importance_cap < 0 or self.replay_slack < 0:
      raise ValueError('tokens_per_rollout must be positive; importance_cap and replay_slack '
                       'must not be negative')


def token_logprobs(
    logits: Float[Array, 'R S V'], targets: Array, temperature: float
) -> tuple[Float[Array, 'R S'], Float[Array, 'R S']]:
  """Returns the log-prob of each target and the entropy, of the full softmax at `temperature`."""
  logp = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
  chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
  frozen = jax.lax.stop_gradient(logp)
  return chosen, -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)


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


def forward_logprobs(
    model_config: ModelConfig, params: Any, batch: Batch, config: ObjectiveConfig
) -> tuple[Float[Array, 'R S'], Float[Array, 'R S'], Any]:
  """Runs the model on a micro-batch `[R, S]` with the sampler's routing replayed.

  Returns:
    Log-probs of `batch.targets`, entropies, and the router's output.
  """
  routing = None
  if batch.routing is not None:
    routing = transformer.Routing(
        jnp.moveaxis(batch.routing, -2, 0), batch.routing_mask, config.replay_slack)
  out = transformer.forward(model_config, params, batch.tokens, positions=batch.positions,
                            segment_ids=batch.segment_ids, routing=routing)
  logp, entropy = token_logprobs(out.logits, batch.targets, config.temperature)
  return logp, entropy, out.router
