"""Which tasks there are: a lazy, reproducible sequence for each level and split."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

from composer_jax.envs.tasks import l0, l1, l2
from composer_jax.envs.tasks.l0 import L0Config
from composer_jax.envs.tasks.l1 import L1Config
from composer_jax.envs.tasks.l2 import L2Config
from composer_jax.envs.types import Limits, Task
from composer_jax.errors import UserError

SPLITS = ('train', 'heldout')


@dataclasses.dataclass(frozen=True)
class TasksetConfig:
  """Where tasks come from.

  Attributes:
    level: `l0` templated functions, `l1` mutated library functions, `l2` deleted features.
    l0: settings of level l0.
    l1: settings of level l1.
    l2: settings of level l2.
  """

  level: Literal['l0', 'l1', 'l2'] = 'l0'
  l0: L0Config = dataclasses.field(default_factory=L0Config)
  l1: L1Config = dataclasses.field(default_factory=L1Config)
  l2: L2Config = dataclasses.field(default_factory=L2Config)

  @property
  def limits(self) -> Limits:
    """Bounds of an episode at this level."""
    return getattr(self, self.level).limits


class Taskset(Sequence[Task]):
  """Tasks 0 .. count-1 of a split, generated when asked for; equal arguments give equal tasks."""

  def __init__(self, config: TasksetConfig, split: str, count: int, seed: int):
    """See `load`."""
    self.config, self.split, self.seed = config, split, seed
    self._count = count

  def __len__(self) -> int:
    return self._count

  @overload
  def __getitem__(self, index: int) -> Task: ...
  @overload
  def __getitem__(self, index: slice) -> list[Task]: ...
  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(self._count))]
    if not -self._count <= index < self._count:
      raise IndexError(index)
    index %= self._count
    level = {'l0': l0, 'l1': l1, 'l2': l2}[self.config.level]
    return level.generate(getattr(self.config, self.config.level), self.split, self.seed, index)


def available(config: TasksetConfig, split: str) -> int | None:
  """Returns how many tasks of the config's level a split has, None where there is no end."""
  most = {'l0': None, 'l1': l1.available, 'l2': l2.available}[config.level]
  return most(split) if most else None


def load(config: TasksetConfig, split: str, count: int, seed: int) -> Taskset:
  """Returns `count` tasks of a split.

  L0 tasks are right by construction; put L1 and L2 tasks through `tasks.validate` before use.

  Args:
    config: level and its settings.
    split: `train` or `heldout`; the two share no key (L0), no function (L1), no feature (L2).
    count: number of tasks; L0 has no upper end.
    seed: generator seed; it changes names, inputs and mutations, never the split.

  Raises:
    UserError: an unknown split, a count below 1, or more L1 or L2 tasks than there are.
  """
  if split not in SPLITS:
    raise UserError(f'split: {split!r} is not one of {", ".join(SPLITS)}')
  limit = available(config, split)
  if count < 1 or (limit is not None and count > limit):
    there = f'; there are {limit} {config.level} tasks in {split}' if limit is not None else ''
    raise UserError(f'count: {count}{there}')
  return Taskset(config, split, count, seed)


def everything(config: TasksetConfig, split: str, seed: int) -> Taskset:
  """Returns all tasks of a split of level `l1` or `l2`.

  Raises:
    UserError: an unknown split, or level `l0`, which has no end.
  """
  limit = available(config, split) if split in SPLITS else None
  if limit is None:
    raise UserError(f'level {config.level}, split {split}: has no end, or does not exist')
  return load(config, split, limit, seed)
