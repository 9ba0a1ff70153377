"""Configuration of the RL stage."""

import dataclasses
from typing import Literal

from composer_jax.config import INT32_MAX, check_least, check_range, nearest
from composer_jax.envs.rewards import BEHAVIOUR_PARTS
from composer_jax.rl.objective import ObjectiveConfig
from composer_jax.rl.shaping import LengthPenaltyConfig
from composer_jax.train.optimizer import OptimizerConfig


def _default_optimizer() -> OptimizerConfig:
  return OptimizerConfig(lr=7e-4, warmup_steps=5, final_fraction=0.2)


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Asynchronous group policy gradient (Composer 2 report, section 4).

  The report gives no sizes, rates or coefficients; every default here is our choice.

  Attributes:
    steps: optimizer steps; 0 skips the stage.
    groups_per_step: task prompts per step.
    group_size: rollouts per task prompt.
    min_group_size: a group that lost members to the infrastructure still trains with this many.
    max_staleness: most versions that the weights may have advanced between the sampling of a token
      and the step that trains on it; 0 is strictly on-policy and leaves no overlap.
    max_extra_groups: how many zero-signal groups a step may replace by further tasks; the rest
      make the step smaller. It bounds dynamic sampling when nearly all tasks are solved.
    zero_signal: which reward decides that a group has no signal and is left out: 'correctness'
      (the verdict alone, so that a length penalty cannot make a group informative) or 'shaped'
      (with length penalty and behaviour rewards, without the KL part).
    group_deadline_s: a group that is not complete after so long goes on without the missing
      members, or is dropped. Long enough for the sampler's compilation on a busy machine.
    optimizer: AdamW (the report trains RL with Adam); linear decay to a fifth by default.
    objective: the policy-gradient loss.
    length_penalty: nonlinear length penalty.
    behaviour: weight of each behaviour that the harness counts (`envs.rewards.BEHAVIOUR_PARTS`) in
      the reward, e.g. `{'call_errors': -0.02}` (report, section 4.2: auxiliary rewards).
    kl_coefficient: weight of the k1 KL to the SFT policy in the reward; 0 switches it off and
      saves the reference policy's forward pass.
    row_len: S, tokens per packed row; at least the sampler's longest sequence.
    rows_per_micro_batch: R, rows of one micro-batch.
    selection_bias_rate: step of the router's selection bias per optimizer step. 0 freezes it: with
      replay the counted load is the sampler's, and a moving bias changes routing behind the
      gradient's back.
    checkpoint_every: steps between checkpoints.
    trace_every: steps between traced rollouts; 0 writes none.
    trace_groups: groups written whenever rollouts are traced (best and worst member each).
  """

  steps: int = 60
  groups_per_step: int = 12
  group_size: int = 8
  min_group_size: int = 4
  max_staleness: int = 1
  max_extra_groups: int = 0
  zero_signal: Literal['correctness', 'shaped'] = 'correctness'
  group_deadline_s: float = 600.0
  optimizer: OptimizerConfig = dataclasses.field(default_factory=_default_optimizer)
  objective: ObjectiveConfig = ObjectiveConfig()
  length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
  behaviour: dict[str, float] = dataclasses.field(default_factory=dict)
  kl_coefficient: float = 0.002
  row_len: int = 256
  rows_per_micro_batch: int = 8
  selection_bias_rate: float = 0.0
  checkpoint_every: int = 20
  trace_every: int = 5
  trace_groups: int = 2

  def __post_init__(self):
    check_least(self, 1, 'groups_per_step', 'row_len', 'rows_per_micro_batch', 'checkpoint_every')
    if not 2 <= self.min_group_size <= self.group_size:
      raise ValueError('need 2 <= min_group_size <= group_size: an advantage compares members')
    check_range(self, 0, INT32_MAX, 'steps', 'max_staleness', 'max_extra_groups', 'trace_every',
                'trace_groups')
    if self.kl_coefficient < 0 or self.selection_bias_rate < 0:
      raise ValueError('kl_coefficient and selection_bias_rate must not be negative')
    unknown = sorted(self.behaviour.keys() - set(BEHAVIOUR_PARTS))
    if unknown:
      raise ValueError(f'behaviour.{unknown[0]}: unknown key{nearest(unknown[0], BEHAVIOUR_PARTS)}')
    chunk = self.objective.head_chunk
    if chunk and self.row_len % min(chunk, self.row_len):
      raise ValueError(f'objective.head_chunk {chunk} does not divide row_len {self.row_len}')
    if self.group_deadline_s <= 0:
      raise ValueError('group_deadline_s must be positive')
