"""Unbiased pass@k."""

import math
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
  """Returns the unbiased estimate of P(at least one of k fresh samples is correct).

  1 - C(n - c, k) / C(n, k): the share of the k-subsets of the n drawn samples that hold a correct
  one (Chen et al. 2021, arXiv 2107.03374, eq. 1), computed as a product so that nothing overflows.

  Args:
    samples: n, samples drawn for the task.
    correct: c, how many of them are correct.
    k: subset size, 1 <= k <= n.

  Raises:
    ValueError: k or c out of range: with fewer than k samples there is no unbiased estimate.
  """
  if not 0 <= correct <= samples:
    raise ValueError(f'{correct} correct of {samples} samples')
  if not 1 <= k <= samples:
    raise ValueError(f'pass@{k} needs at least {k} samples a task, got {samples}')
  if samples - correct < k:
    return 1.0
  return 1.0 - math.prod(1.0 - k / n for n in range(samples - correct + 1, samples + 1))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
  """Returns pass@k averaged over tasks.

  Args:
    counts: (samples, correct) of each task; every task counts once, however many samples it has.
    k: subset size.

  Raises:
    ValueError: no tasks, or a task with fewer than k samples.
  """
  if not counts:
    raise ValueError('pass@k of no tasks')
  return sum(pass_at_k(samples, correct, k) for samples, correct in counts) / len(counts)
