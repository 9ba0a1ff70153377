"""From a verdict to a reward: nonlinear length penalty and the k1 KL term.

Everything that changes behaviour but is not the verdict enters here, as a named part of the reward;
the objective only ever sees the sum.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from composer_jax.rl.samples import Sample
from composer_jax.rollout.types import Rollout


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


@dataclasses.dataclass(frozen=True)
class Effort:
  """The six kinds of effort that the report weighs against each other (section 4.2)."""

  thinking_tokens: int = 0
  call_tokens: int = 0
  result_tokens: int = 0
  final_tokens: int = 0
  calls: int = 0
  turns: int = 0


def length_penalty(x: np.ndarray | float, k: float, q: float) -> np.ndarray:
  """Returns C_{k,q}(x) = ((1 + k x)^(1-q) - 1) / (k (1 - q)), elementwise in float64.

  Composer 2 report, section 4.2. Written with expm1 and log1p, so that small x and q near 1 keep all
  digits; q = 1 is the limit log(1 + k x) / k.

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


def effort(rollouts: Sequence[Rollout]) -> Effort:
  """Counts the effort of one logical rollout from the tokens of its segments.

  A turn is a maximal run of sampled tokens; the tokens before the first turn are the prompt and cost
  nothing, the other tokens that were not sampled are tool output. This harness lets the model speak
  in calls only, so there are no thinking tokens and each turn is one call.
  """
  runs: list[int] = []
  results = 0
  for rollout in rollouts:
    sampled = np.asarray(rollout.sampled, bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    runs += (ends - starts).tolist()
    if len(starts):
      results += int(np.sum(~sampled[starts[0]:]))
  final = runs[-1] if runs else 0
  return Effort(call_tokens=sum(runs) - final, result_tokens=results, final_tokens=final,
                calls=len(runs), turns=len(runs))


def weighted_effort(counts: Effort, config: LengthPenaltyConfig) -> float:
  """Returns x, the weighted sum of the six counts."""
  return float(sum(value * getattr(config, name)
                   for name, value in dataclasses.asdict(counts).items()))


def k1(sampler_logprobs: np.ndarray, reference_logprobs: np.ndarray) -> float:
  """Returns the k1 estimate of KL(policy || reference) of one rollout, summed over its tokens.

  k1 = log pi(y) - log pi_ref(y) on the policy's own samples (Composer 2 report, section 4.1; k3 was
  rejected there because its variance explodes). It is placed in the reward: as a differentiated loss
  its expected gradient would be zero. The sum over the rollout goes into one scalar reward (our
  choice), so that its policy gradient is the gradient of the sequence KL.
  """
  return float(np.sum(np.asarray(sampler_logprobs, np.float64)
                      - np.asarray(reference_logprobs, np.float64)))


def reward_parts(
    samples: Sequence[Sample], config: LengthPenaltyConfig, kl_coefficient: float,
    reference_logprobs: Sequence[np.ndarray] | None,
) -> dict[str, Mapping[str, float]]:
  """Returns the named reward parts of every logical rollout; the reward is their sum.

  Args:
    samples: rows with a verdict; rows of one logical rollout are joined by `logical_id`.
    config: length penalty.
    kl_coefficient: weight of k1; 0 leaves the part out.
    reference_logprobs: per sample, the reference policy's log-probs of the sampled tokens in order;
      needed only when `kl_coefficient` is not 0.

  Returns:
    `{logical_id: {'correct': ..., 'length': ..., 'kl': ..., behaviour names...}}`. No part is ever
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
    part = {'correct': float(outcome.correct), **outcome.behaviour}
    if config.weight and (config.scope == 'all' or outcome.correct > 0):
      x = weighted_effort(effort([samples[i].rollout for i in indices]), config)
      part['length'] = -config.weight * float(length_penalty(x, config.k, config.q))
    if kl_coefficient:
      divergence = sum(
          k1(samples[i].rollout.logprobs[samples[i].rollout.sampled], reference_logprobs[i])
          for i in indices)
      part['kl'] = -kl_coefficient * divergence
    parts[logical] = part
  return parts
