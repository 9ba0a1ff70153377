"""Shares of a mixture of data sources."""

from collections.abc import Iterable, Mapping

from composer_jax.config import nearest
from composer_jax.errors import UserError


def shares(weights: Mapping[str, float], available: Iterable[str]) -> dict[str, float]:
  """Returns source -> share of the rows, adding up to 1; sources of weight 0 are left out.

  Args:
    weights: relative weights by source name.
    available: the sources there are.

  Raises:
    UserError: an unknown source (with the nearest name), a negative weight, or nothing left.
  """
  available = list(available)
  for name, weight in weights.items():
    if name not in available:
      raise UserError(f'mixture.{name}: no such data source{nearest(name, available)}')
    if weight < 0:
      raise UserError(f'mixture.{name}: {weight} is negative')
  total = sum(weights.values())
  if not total > 0:
    raise UserError('mixture: no source has a positive weight')
  return {name: weight / total for name, weight in weights.items() if weight > 0}
