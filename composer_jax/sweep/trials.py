"""From a base config and override dicts to trials that are told apart by content."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from composer_jax.config import fingerprint
from composer_jax.errors import UserError

Resolve = Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Trial:
  """One run of a sweep.

  Attributes:
    id: 12 hex digits, the hash of the resolved config: also the folder's name.
    overrides: `section.field` -> value.
    config: the resolved config, base and overrides together.
  """

  id: str
  overrides: dict[str, Any]
  config: dict[str, Any]

  @property
  def label(self) -> str:
    """The overrides in one line."""
    pairs = (f'{key}={json.dumps(value)}' for key, value in self.overrides.items())
    return ' '.join(pairs) or '(base config)'

  def as_json(self) -> dict[str, Any]:
    """Returns what is kept in the sweep's folder."""
    return {'id': self.id, 'overrides': self.overrides, 'label': self.label}


def expand(base: dict[str, Any], sweep: Iterable[Mapping[str, Any]], resolve: Resolve
           ) -> list[Trial]:
  """Returns the trials in order.

  Args:
    base: the base config.
    sweep: one mapping of overrides a trial.
    resolve: (base, overrides) -> complete config with defaults filled in; raises UserError for a
      key or a value that is wrong, so that this is known before the first trial starts.

  Raises:
    UserError: no trial, a wrong override, or two trials with the same resolved config.
  """
  trials: list[Trial] = []
  seen: dict[str, Trial] = {}
  for number, overrides in enumerate(sweep, 1):
    try:
      config = resolve(base, overrides)
    except UserError as error:
      raise UserError(f'trial {number}: {error}') from error
    trial = Trial(fingerprint(config), dict(overrides), config)
    if trial.id in seen:
      first = seen[trial.id]
      raise UserError(f'trials {trials.index(first) + 1} and {number} are equal: '
                      f'{first.label} and {trial.label}')
    seen[trial.id] = trial
    trials.append(trial)
  if not trials:
    raise UserError('the sweep has no trials')
  return trials
