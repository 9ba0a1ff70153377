"""AdamW and its learning-rate schedules."""

import dataclasses
from typing import Any, Literal

import jax
import optax

_NOT_DECAYED = ('norm', 'scale', 'bias')  # gains and offsets have no reason to shrink


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW (the report names it for continued pretraining, section 3.1; every value is our choice).

  Attributes:
    lr: peak learning rate.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled decay of matrices; norm gains are left alone.
    clip_norm: largest global gradient norm.
    schedule: shape after warm-up: "constant", "linear" and "cosine" fall over `decay_steps`, "wsd"
      (warm-up, stable, decay) stays at the peak and falls linearly in the last `decay_steps`.
    warmup_steps: linear rise from 0.
    decay_steps: length of the fall; 0 takes all steps after warm-up ("wsd": the last fifth).
    final_fraction: rate at the end as a fraction of `lr`.
  """

  lr: float = 3e-3
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  schedule: Literal['constant', 'linear', 'cosine', 'wsd'] = 'linear'
  warmup_steps: int = 30
  decay_steps: int = 0
  final_fraction: float = 0.1

  def __post_init__(self):
    if self.lr < 0 or self.clip_norm <= 0:
      raise ValueError('lr must be at least 0 and clip_norm above 0')
    if not 0 <= self.final_fraction <= 1:
      raise ValueError('final_fraction must be between 0 and 1')
    if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1) or self.eps <= 0 or self.weight_decay < 0:
      raise ValueError('need b1 and b2 in [0, 1), eps above 0 and weight_decay at least 0')
    if self.warmup_steps < 0 or self.decay_steps < 0:
      raise ValueError('warmup_steps and decay_steps must be at least 0')


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
  """Returns learning rate as a function of the number of updates done before."""
  end = config.lr * config.final_fraction
  warmup = min(config.warmup_steps, total_steps)
  rest = max(total_steps - warmup, 1)
  decay = min(config.decay_steps or (rest if config.schedule != 'wsd' else rest // 5), rest)
  decay = max(decay, 1)
  if config.schedule == 'constant':
    after = optax.constant_schedule(config.lr)
  elif config.schedule == 'linear':
    after = optax.linear_schedule(config.lr, end, decay)
  elif config.schedule == 'cosine':
    after = optax.cosine_decay_schedule(config.lr, decay, config.final_fraction or 0.0)
  else:
    after = optax.linear_schedule(config.lr, end, decay, transition_begin=rest - decay)
  if warmup == 0:
    return after
  # the first update already moves: it would be wasted at a rate of exactly 0
  rise = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
  return optax.join_schedules([rise, after], [warmup])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
  """Returns clipping by global norm followed by AdamW on the schedule."""
  return optax.chain(
      optax.clip_by_global_norm(config.clip_norm),
      optax.adamw(make_schedule(config, total_steps), b1=config.b1, b2=config.b2, eps=config.eps,
                  weight_decay=config.weight_decay, mask=_decayed))


def _decayed(params: Any) -> Any:
  """Returns True at the leaves that weight decay applies to."""
  def one(path, unused_leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/').lower()
    return not any(word in part for part in name.split('/') for word in _NOT_DECAYED)
  return jax.tree_util.tree_map_with_path(one, params)
