"""From rows to the figures of the report: pass@k, intervals, costs, tables."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from composer_jax.evals import bootstrap, pass_at_k
from composer_jax.evals.rows import Row


def summarize(rows: Sequence[Row], samples_per_task: int, seed: int = 0,
              resamples: int = 10_000) -> dict[str, Any]:
  """Returns the summary of an evaluation.

  Rows without a verdict (`valid` False: infrastructure) are counted in `invalid` and left out of
  every average; a task without any valid row is counted in `tasks_without_verdict`.

  Args:
    rows: one per (task, sample).
    samples_per_task: the K of `best_of_K`; tasks with fewer valid rows have no unbiased best-of-K
      and are left out of it (`best_of_tasks` says how many are in).
    seed: of the bootstrap.
    resamples: of the bootstrap.

  Returns:
    `tasks, samples, invalid, tasks_without_verdict, pass_at_1, ci95 [lo, hi], best_of_K (say
    `best_of_8`), best_of_ci95 [lo, hi], best_of_tasks, pass_at {k: x}`; means per attempt
    `tokens_per_task` (sampled), `total_tokens_per_task`, `calls_per_task`; `stop_reasons
    {reason: n}`; and `by_mutation`, a table {mutation class: {scored_tasks, pass_at_1, ci95,
    best_of_K, ...}}.  Figures of no data are None.
  """
  valid = [row for row in rows if row['valid']]
  summary = {
      'tasks': len({row['task_id'] for row in rows}),
      'samples': len(rows),
      'invalid': len(rows) - len(valid),
      **_solved(valid, samples_per_task, seed, resamples),
      'tokens_per_task': _mean(valid, 'tokens'),
      'total_tokens_per_task': _mean(valid, 'total_tokens'),
      'calls_per_task': _mean(valid, 'calls'),
      'stop_reasons': dict(collections.Counter(row['stop_reason'] for row in rows)),
      'by_mutation': {
          name: _solved(group, samples_per_task, seed, resamples)
          for name, group in sorted(_by(valid, lambda row: row['mutation']).items())
      },
  }
  summary['tasks_without_verdict'] = summary['tasks'] - len({row['task_id'] for row in valid})
  return summary


def _solved(valid: Sequence[Row], samples_per_task: int, seed: int, resamples: int
            ) -> dict[str, Any]:
  """Returns pass@1 and best-of-k with intervals over tasks, and pass@k for powers of two to k."""
  tasks = _by(valid, lambda row: row['task_id'])
  counts = [(len(group), sum(row['reward'] == 1 for row in group)) for group in tasks.values()]
  rates = np.asarray([correct / samples for samples, correct in counts])
  full = [entry for entry in counts if entry[0] >= samples_per_task]
  powers = [2**i for i in range(samples_per_task.bit_length()) if 2**i < samples_per_task]
  curve = {str(k): pass_at_k.mean_pass_at_k(full, k) if full else None
           for k in [*powers, samples_per_task]}
  best = np.asarray([pass_at_k.pass_at_k(*entry, samples_per_task) for entry in full])

  def interval(values: np.ndarray) -> list[float] | None:
    if not len(values):
      return None
    return list(bootstrap.mean_interval(values, seed=seed, resamples=resamples))

  return {
      'scored_tasks': len(counts),
      'pass_at_1': float(rates.mean()) if len(rates) else None,
      'ci95': interval(rates),
      f'best_of_{samples_per_task}': curve[str(samples_per_task)],
      'best_of_ci95': interval(best),
      'best_of_tasks': len(full),
      'pass_at': curve,
  }


def _by(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
  groups = collections.defaultdict(list)
  for row in rows:
    groups[key(row)].append(row)
  return groups


def _mean(rows: Sequence[Row], name: str) -> float | None:
  return float(np.mean([row[name] for row in rows])) if rows else None
