"""What a step's rollouts looked like, as one flat row of numbers."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.rl.samples import Group, Sample

# Counts of the harness that every row averages over its rollouts.
_COUNTS = ('calls', 'edits', 'test_runs', 'call_errors', 'no_change_edits', 'untested_finish',
           'result_tokens')


def rollout_figures(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Returns figures over all rollouts of a step, those of zero-signal groups included.

  Args:
    groups: the groups that the step took.
    version: of the policy that trains on them; staleness is this minus a token's version.

  Returns:
    `solved_fraction` (mean verdict), `pass_at_k` (share of groups with a correct member),
    `finish_rate`, token and call counts per episode, `staleness_mean` and `staleness_max` over
    sampled tokens, and `success/CLASS` for every task class. Empty without rollouts.
  """
  logical = _logical(groups)
  if not logical:
    return {}
  rows = [s for g in groups for s in g.samples]
  first = [segments[0] for segments in logical.values()]
  versions = np.concatenate([s.rollout.versions[s.rollout.sampled] for s in rows])
  classes = collections.defaultdict(list)
  for sample in first:
    if sample.outcome.label:
      classes[sample.outcome.label].append(sample.outcome.correct)
  figures = {
      'solved_fraction': float(np.mean([s.outcome.correct for s in first])),
      'pass_at_k': float(np.mean([any(s.outcome.correct > 0 for s in g.samples)
                                  for g in groups])),
      'finish_rate': float(np.mean([s.finish_called for s in first])),
      'zero_signal_fraction': float(np.mean([g.zero_signal for g in groups])),
      'rollouts': len(first),
      'tokens_per_episode': float(np.sum([len(s.rollout.tokens) for s in rows]) / len(first)),
      'sampled_per_episode': len(versions) / len(first),
      'sampler_nll': -float(np.mean(np.concatenate(
          [s.rollout.logprobs[s.rollout.sampled] for s in rows]))),
      'staleness_mean': float(np.mean(version - versions)),
      'staleness_max': int(np.max(version - versions)),
  }
  for name in _COUNTS:
    if all(name in s.outcome.counts for s in first):
      figures[f'{name}_per_episode'] = float(np.mean([s.outcome.counts[name] for s in first]))
  for label, values in sorted(classes.items()):
    figures[f'success/{label}'] = float(np.mean(values))
  return figures


def reward_figures(
    parts: Mapping[str, Mapping[str, float]], divergences: Mapping[str, float],
    kl_coefficient: float, advantages: Sequence[float],
) -> dict[str, float]:
  """Returns mean reward, its parts, KL and advantage figures.

  `reward_mean` is over all rollouts and without the KL part, which is known for the trained ones
  only; `reward/kl` is the mean over those.

  Args:
    parts: named reward parts of every rollout of the step by logical id, without the KL part.
    divergences: k1 estimates in nats of the trained rollouts by logical id.
    kl_coefficient: weight of k1 in the reward.
    advantages: of the trained rows.
  """
  figures = {'advantage_abs_mean': float(np.mean(np.abs(advantages))) if len(advantages) else 0.0,
             'advantage_max': float(np.max(np.abs(advantages))) if len(advantages) else 0.0}
  if parts:
    figures['reward_mean'] = float(np.mean([sum(p.values()) for p in parts.values()]))
  for name in sorted({name for part in parts.values() for name in part}):
    figures[f'reward/{name}'] = float(np.mean([p.get(name, 0.0) for p in parts.values()]))
  if divergences:
    figures['kl'] = float(np.mean(list(divergences.values())))
    figures['reward/kl'] = -kl_coefficient * figures['kl']
  return figures


def _logical(groups: Sequence[Group]) -> dict[str, list[Sample]]:
  """Returns the rows of each logical rollout, first segment first."""
  rows: dict[str, list[Sample]] = {}
  for group in groups:
    for sample in sorted(group.samples, key=lambda s: s.segment):
      rows.setdefault(sample.logical_id, []).append(sample)
  return rows
