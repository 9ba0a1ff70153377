"""Group-relative advantages: reward minus the mean reward of the group, and nothing else.

Composer 2 report, section 4: GRPO without the division by the group's standard deviation and
without the division by the rollout's length (Dr. GRPO, arXiv 2503.20783). When all rollouts of a
group are equally correct, a division by the deviation would blow tiny differences of style up.
"""

from collections.abc import Sequence

import numpy as np


def group_advantages(
    group_ids: Sequence[str], logical_ids: Sequence[str], rewards: Sequence[float]
) -> np.ndarray:
  """Returns reward minus group mean, one value per row.

  Membership is by id, never by order. A logical rollout that was cut into several rows (a chain of
  self-summaries) counts once in its group's mean, and each of its rows gets the same advantage.

  Args:
    group_ids: group of each row, N values.
    logical_ids: logical rollout of each row; unique over the whole batch.
    rewards: total reward of the row's logical rollout.

  Returns:
    Float64 advantages `[N]`.

  Raises:
    ValueError: the rows of one logical rollout differ in group or reward, or a reward is not
      finite.
  """
  if not len(group_ids) == len(logical_ids) == len(rewards):
    raise ValueError('group ids, logical ids and rewards differ in length')
  seen: dict[str, tuple[str, float]] = {}
  for group, logical, reward in zip(group_ids, logical_ids, rewards, strict=True):
    if not np.isfinite(reward):
      raise ValueError(f'rollout {logical}: reward {reward} is not finite')
    if seen.setdefault(logical, (group, reward)) != (group, reward):
      raise ValueError(f'rollout {logical}: its rows disagree about group or reward')
  members: dict[str, list[float]] = {}
  for group, reward in seen.values():
    members.setdefault(group, []).append(reward)
  # Sorted before summing: the mean must not depend on the order in which rollouts arrived.
  means = {group: float(np.mean(np.sort(values))) for group, values in members.items()}
  return np.array([reward - means[group] if len(set(members[group])) > 1 else 0.0
                   for group, reward in zip(group_ids, rewards, strict=True)], dtype=np.float64)
