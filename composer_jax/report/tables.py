"""The numbers of a run as rows for the page: headline, stages, evaluations, mutation classes."""

import collections
import dataclasses
import math
from typing import Any

from composer_jax.report.folder import Run, Stage

EVAL_PREFIX = 'eval_'


@dataclasses.dataclass(frozen=True)
class EvalRow:
  """One evaluation.

  Attributes:
    name: `sft`, `rl`, ...
    pass_at_1: mean reward over tasks; None when unknown.
    interval: 95% interval, or None.
    best_of: (K, unbiased best-of-K), or None.
    best_of_interval: its 95% interval, or None.
    tasks: number of tasks.
    samples: episodes that have a verdict.
    without_verdict: episodes lost to infrastructure; they count nowhere.
    tokens: mean sampled tokens an episode, or None.
    calls: mean tool calls an episode, or None.
    stops: stop reason -> share of the episodes.
    by_class: mutation class -> (mean reward, episodes).
    by_task: task -> mean reward.
  """

  name: str
  pass_at_1: float | None
  interval: tuple[float, float] | None
  best_of: tuple[int, float] | None
  best_of_interval: tuple[float, float] | None
  tasks: int
  samples: int
  without_verdict: int
  tokens: float | None
  calls: float | None
  stops: dict[str, float]
  by_class: dict[str, tuple[float, int]]
  by_task: dict[str, float]


def evals(run: Run) -> list[EvalRow]:
  """Returns a row for each evaluation in the results or on disk, in the order of the stages."""
  names = [s.name.removeprefix(EVAL_PREFIX) for s in run.stages if s.name.startswith(EVAL_PREFIX)]
  published = run.results.get('eval', {})
  return [eval_row(name, published.get(name, {}), run.stage(EVAL_PREFIX + name))
          for name in dict.fromkeys([*names, *published])]


def eval_row(name: str, published: dict[str, Any], stage: Stage | None) -> EvalRow:
  """Builds one row: published numbers where there are some, else means of the episodes' rows."""
  rows = stage.eval_rows if stage else []
  published = (stage.summary if stage else {}) | published
  scored = [r for r in rows if isinstance(r.get('reward'), (int, float))]
  tasks = _grouped(scored, 'task_id')
  classes = _grouped(scored, 'mutation')
  interval, best_interval = published.get('ci95'), published.get('best_of_ci95')
  best = [(int(key.removeprefix('best_of_')), value) for key, value in published.items()
          if key.startswith('best_of_') and key.removeprefix('best_of_').isdigit()]
  stops = collections.Counter(str(r.get('stop_reason')) for r in rows)
  by_task = {task: _mean(found, 'reward') for task, found in tasks.items()}
  mean = sum(by_task.values()) / len(by_task) if by_task else None
  return EvalRow(
      name=name, pass_at_1=published.get('pass_at_1', mean),
      interval=tuple(interval) if interval else None, best_of=max(best, default=None),
      best_of_interval=tuple(best_interval) if best_interval else None,
      tasks=published.get('tasks', len(tasks)), samples=len(scored),
      without_verdict=len(rows) - len(scored), tokens=_mean(scored, 'tokens'),
      calls=_mean(scored, 'calls'),
      stops={reason: count / len(rows) for reason, count in stops.most_common()},
      by_class={str(key): (_mean(found, 'reward'), len(found))
                for key, found in sorted(classes.items(), key=lambda item: str(item[0]))},
      by_task=by_task)


def movement(before: EvalRow, after: EvalRow) -> dict[str, int]:
  """Returns how many common tasks are solved more often, equally often, and less often."""
  common = before.by_task.keys() & after.by_task.keys()
  change = [after.by_task[t] - before.by_task[t] for t in common]
  return {'more': sum(c > 0 for c in change), 'same': sum(c == 0 for c in change),
          'less': sum(c < 0 for c in change)}


def stage_rows(run: Run) -> list[dict[str, Any]]:
  """Returns name, state, wall seconds, last step and other numbers of every stage."""
  rows = []
  for stage in run.stages:
    summary = run.results.get('stages', {}).get(stage.name, {}) | stage.summary
    numbers = {key: value for key, value in summary.items()
               if isinstance(value, (int, float)) and not isinstance(value, bool)
               and key not in ('wall_s', 'steps', 'step')}
    last = stage.rows[-1]['step'] if stage.rows else None
    rows.append({'name': stage.name, 'done': bool(stage.summary), 'wall_s': summary.get('wall_s'),
                 'step': last, 'numbers': numbers})
  return rows


def unfinished(run: Run) -> list[str]:
  """Returns the stages that the config asks for and that have not ended."""
  wanted = run.config.get('stages')
  done = {stage.name for stage in run.stages if stage.summary}
  names = wanted if isinstance(wanted, list) else [stage.name for stage in run.stages]
  return [str(name) for name in names if name not in done]


def compression(run: Run, stage: Stage) -> dict[tuple[str, str], float]:
  """Returns (source, tool) -> bits per byte of gzip and xz on the held-out files of a stage.

  They come from the stage's own results when it has finished, else from the corpus manifest.
  """
  found: dict[tuple[str, str], float] = {}
  _collect_compression(run.results.get('stages', {}).get(stage.name, {}) | stage.summary, '', found)
  if not found:
    _collect_compression(run.manifest, '', found)
  of_sources = {key: value for key, value in found.items() if key[0]}
  return of_sources or found


def _collect_compression(value: dict[str, Any], source: str,
                         found: dict[tuple[str, str], float]) -> None:
  """Looks for `TOOL_bits_per_byte`, directly or one level per source down."""
  for key, item in value.items():
    tool = next((t for t in ('gzip', 'xz') if key == f'{t}_bits_per_byte'), None)
    if tool and isinstance(item, (int, float)) and math.isfinite(item):
      found[source, tool] = item
    elif isinstance(item, dict):
      _collect_compression(item, source if key == 'sources' else key, found)


def _grouped(rows: list[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
  groups = collections.defaultdict(list)
  for row in rows:
    if row.get(key) is not None:
      groups[str(row[key])].append(row)
  return groups


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
  values = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
  return sum(values) / len(values) if values else None
