"""Interleaved timing of two or more sides, and ratios of what was timed together.

On a machine with other work a time says little, and the ratio of two times taken one after the
other says much: both met the same conditions. The order is reversed every round, so that a drift
cancels.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

WARM_UPS = 2


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_ups: int = WARM_UPS,
               after_round: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
  """Calls the sides in turn, A B, B A, A B, ...

  Args:
    sides: each does its work once and returns the seconds that it took.
    rounds: how many are kept.
    warm_ups: rounds before, whose times are dropped.
    after_round: called after every round, the dropped ones too.

  Returns:
    The seconds of each side, in the order of the rounds.
  """
  seconds: dict[str, list[float]] = {name: [] for name in sides}
  for index in range(warm_ups + rounds):
    for name in sides if index % 2 == 0 else reversed(sides):
      took = sides[name]()
      if index >= warm_ups:
        seconds[name].append(took)
    after_round()
  return seconds


def summary(seconds: Sequence[float]) -> dict[str, float]:
  """Returns `min_ms` and `median_ms`."""
  return {'min_ms': 1e3 * float(np.min(seconds)), 'median_ms': 1e3 * float(np.median(seconds))}


def ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
  """Returns median and quartiles of the paired ratios ours / peer, and the ratio of the minima."""
  paired = np.asarray(ours) / np.asarray(peer)
  low, middle, high = (float(q) for q in np.quantile(paired, [0.25, 0.5, 0.75]))
  return {'ratio_median': middle, 'ratio_q25': low, 'ratio_q75': high,
          'ratio_iqr': high - low, 'ratio_min': float(np.min(ours) / np.min(peer))}


def text(values: Mapping[str, float]) -> str:
  """Returns what `ratio` found in words."""
  return (f'median {values["ratio_median"]:.3f} (quartiles {values["ratio_q25"]:.3f} to '
          f'{values["ratio_q75"]:.3f}), of the minima {values["ratio_min"]:.3f}')
