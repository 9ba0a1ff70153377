"""What the levels' configs share."""

import dataclasses

from composer_jax.envs.types import Limits


@dataclasses.dataclass(frozen=True)
class LevelConfig:
  """What a task of any level has; each level sets defaults of its own (our choice).

  Attributes:
    visible_cases: cases that `run_tests` runs.
    hidden_cases: cases that decide, none of them among the visible ones.
    limits: bounds of an episode.
  """

  visible_cases: int = 3
  hidden_cases: int = 8
  limits: Limits = Limits()

  def __post_init__(self):
    if min(self.visible_cases, self.hidden_cases) < 1:
      raise ValueError('visible_cases and hidden_cases must be at least 1')
