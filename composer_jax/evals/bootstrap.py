"""Bootstrap confidence intervals."""

import numpy as np
from jaxtyping import Float


def mean_interval(
    values: Float[np.ndarray, 'tasks'],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
  """Returns a percentile bootstrap interval of the mean over tasks.

  Tasks are the resampled unit, not samples: the samples of one task share its difficulty, and
  treating them as independent would make the interval too narrow.

  Args:
    values: one number per task, e.g. its mean reward over the samples.
    level: coverage.
    resamples: number of bootstrap draws.
    seed: of the draws; the same values and seed give the same interval.

  Raises:
    ValueError: no values, or a level outside (0, 1).
  """
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or not len(values):
    raise ValueError('the bootstrap needs one value per task, and at least one task')
  if not 0 < level < 1:
    raise ValueError(f'level must be between 0 and 1, got {level}')
  rng = np.random.default_rng(seed)
  means = np.empty(resamples)
  step = max(1, 2_000_000 // len(values))  # bounds the index array to some 16 MB
  for start in range(0, resamples, step):
    stop = min(start + step, resamples)
    draws = rng.integers(0, len(values), (stop - start, len(values)))
    means[start:stop] = values[draws].mean(axis=1)
  tail = (1 - level) / 2
  low, high = np.quantile(means, [tail, 1 - tail])
  return float(low), float(high)
