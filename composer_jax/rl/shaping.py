"""From a verdict to a reward: nonlinear length penalty and the k1 KL term.

Everything that changes behaviour but is not the verdict enters here, as a named part of the reward;
the objective only ever sees the sum.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from composer_jax.envs.rewards import EFFORT_PARTS
from composer_jax.rl.samples import Sample


@dataclasses.dataclass(frozen=True)
class LengthPenaltyConfig:
  """Nonlinear length penalty (Composer 2 report, section 4.2); all values are our choice.

  Attributes:
    weight: factor of the penalty in the reward; 0 switches it off.
    k: curvature scale of C_{k,q}, > 0.
    q: curvature exponent, >= 0; 0 is linear, 1 logarithmic, above 1 it saturates.
    thinking_tokens: effort per token of free text before a call.
    call_tokens: effort per sampled token of a tool call.
    result_tokens: effort per token of a tool's output.
    final_tokens: effort per sampled token of the last turn.
    calls: effort per tool call.
    turns: effort per turn.
    scope: 'correct' charges only rollouts with a positive verdict, so that giving up early never
      pays; 'all' charges every rollout.
  """

  weight: float = 0.005
  k: float = 0.1
  q: float = 0.5
  thinking_tokens: float = 0.02
  call_tokens: float = 0.02
  result_tokens: float = 0.005
  final_tokens: float = 0.02
  calls: float = 1.0
  turns: float = 0.0
  scope: Literal['correct', 'all'] = 'correct'

  def __post_init__(self):
    if self.k <= 0 or self.q < 0 or self.weight < 0:
      raise ValueError('length penalty: k must be > 0, q >= 0 and weight >= 0')


def length_penalty(x: np.ndarray | float, k: float, q: float) -> np.ndarray:
  """Returns C_{k,q}(x) = ((1 + k x)^(1-q) - 1) / (k (1 - q)), elementwise in float64.

  Composer 2 report, section 4.2. Written with expm1 and log1p, so that small x and q near 1 keep
  all digits; q = 1 is the limit log(1 + k x) / k.

  Args:
    x: effort >= 0.
    k: > 0.
    q: >= 0.
  """
  log_growth = np.log1p(k * np.asarray(x, np.float64))
  power = 1.0 - q
  if abs(power) < 1e-12:
    return log_growth / k
  return np.expm1(power * log_growth) / (k * power)


def weighted_effort(counts: Mapping[str, float], config: LengthPenaltyConfig) -> float:
  """Returns x, the weighted sum of the six kinds of effort (Composer 2 report, section 4.2).

  Raises:
    KeyError: a kind of effort was not counted.
  """
  return float(sum(counts[name] * getattr(config, name) for name in EFFORT_PARTS))


def k1(sampler_logprobs: np.ndarray, reference_logprobs: np.ndarray) -> float:
  """Returns the k1 estimate of KL(policy || reference) of one rollout, summed over its tokens.

  k1 = log pi(y) - log pi_ref(y) on the policy's own samples (Composer 2 report, section 4.1; k3
  was rejected there because its variance explodes). It is placed in the reward: as a differentiated
  loss its expected gradient would be zero. The sum over the rollout goes into one scalar reward
  (our choice), so that its policy gradient is the gradient of the sequence KL.
  """
  return float(np.sum(np.asarray(sampler_logprobs, np.float64)
                      - np.asarray(reference_logprobs, np.float64)))


def reward_parts(
    samples: Sequence[Sample], config: LengthPenaltyConfig, behaviour: Mapping[str, float],
    kl_coefficient: float = 0.0, reference_logprobs: Sequence[np.ndarray] | None = None,
) -> dict[str, dict[str, float]]:
  """Returns the named reward parts of every logical rollout; the reward is their sum.

  Args:
    samples: rows with a verdict; rows of one logical rollout are joined by `logical_id`.
    config: length penalty.
    behaviour: weight of each counted behaviour in the reward, by name.
    kl_coefficient: weight of k1; 0 leaves the part out.
    reference_logprobs: per sample, the reference policy's log-probs of the sampled tokens in order;
      needed only when `kl_coefficient` is not 0.

  Returns:
    `{logical_id: {'correct': ..., 'length': ..., 'kl': ..., behaviour...}}`. No part is ever
    divided by a statistic of the group, so all-zero effort or a group without a correct member is
    an ordinary case.
  """
  rows: dict[str, list[int]] = {}
  for i, sample in enumerate(samples):
    rows.setdefault(sample.logical_id, []).append(i)
  parts = {}
  for logical, indices in rows.items():
    indices = sorted(indices, key=lambda i: samples[i].segment)
    outcome = samples[indices[0]].outcome
    if outcome.correct is None:
      raise ValueError(f'rollout {logical} has no verdict and cannot be rewarded')
    part = {'correct': float(outcome.correct)}
    part |= {name: weight * outcome.counts[name] for name, weight in behaviour.items()}
    if config.weight and (config.scope == 'all' or outcome.correct > 0):
      x = weighted_effort(outcome.counts, config)
      part['length'] = -config.weight * float(length_penalty(x, config.k, config.q))
    if kl_coefficient:
      divergence = sum(
          k1(samples[i].rollout.logprobs[samples[i].rollout.sampled], reference_logprobs[i])
          for i in indices)
      part['kl'] = -kl_coefficient * divergence
    parts[logical] = part
  return parts
