"""The comparison page of a sweep: one table with intervals, and the trials' curves overlaid."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.files import read_json
from composer_jax.redact import redact
from composer_jax.report import curves, folder, page, svg, tables

SWEEP_FILE = 'sweep.json'

# Metrics that are worth an overlay, by full match.
OVERLAYS = (r'loss', r'eval/(.*bits_per_byte.*)', r'eval/(heldout_loss)', r'(reward)_mean',
            r'(solved)_fraction', r'(sampled)_per_episode', r'entropy')
SMOOTHED = ('reward', 'solved', 'sampled')
# Result of a stage -> column of the table.
RESULTS = {'bits_per_byte': 'bits per byte', 'heldout_loss': 'held-out loss'}
# Metric -> column of the table: its mean over the last rows, since a single one is mostly noise.
# The loss of RL is no measure of anything, so only stages without a reward have that column.
LAST_MEANS = {'reward_mean': 'reward', 'loss': 'loss'}


@dataclasses.dataclass(frozen=True)
class Row:
  """One trial.

  Attributes:
    id: trial id.
    overrides: `section.field` -> value.
    status: `planned`, `finished` or `failed`.
    error: of a failed trial, else None.
    run: its folder, None when it has not started.
    evals: its evaluations.
    numbers: name -> key number of its results.
  """

  id: str
  overrides: dict[str, Any]
  status: str
  error: str | None
  run: folder.Run | None
  evals: list[tables.EvalRow]
  numbers: dict[str, float]


def build(workdir: str | os.PathLike) -> Path:
  """Writes `report.html` of a sweep, as far as its trials have come.

  Raises:
    UserError: the folder holds no sweep, or its list of trials is damaged.
  """
  workdir = Path(workdir)
  if not (workdir / SWEEP_FILE).exists():
    raise UserError(f'--workdir={workdir}: holds no sweep (no {SWEEP_FILE})')
  rows = [_row(workdir, trial) for trial in read_trials(workdir / SWEEP_FILE)]
  keys = list(dict.fromkeys(key for row in rows for key in row.overrides))
  text = page.template('sweep.html.j2').render(
      name=workdir.resolve().name, rows=rows, keys=keys,
      columns=list(dict.fromkeys(name for row in rows for name in row.numbers)),
      eval_names=list(dict.fromkeys(e.name for row in rows for e in row.evals)),
      charts=overlays(rows), forest=forest(rows))
  return page.write(workdir / 'report.html', text)


def read_trials(path: Path) -> list[dict[str, Any]]:
  """Returns the trials of a `sweep.json`.

  Raises:
    UserError: it is damaged.
  """
  trials = read_json(path, 'trials')['trials']
  sound = isinstance(trials, list) and all(
      isinstance(trial, dict) and trial.keys() >= {'id', 'overrides', 'status'} for trial in trials)
  if not sound:
    raise UserError(f'{path} is damaged: no list of trials')
  return trials


def label(row: Row) -> str:
  """Returns a short name of a trial: the last part of each key and the value, equal ones once."""
  pairs = (f'{key.rpartition(".")[2]}={value}' for key, value in row.overrides.items())
  return ' '.join(dict.fromkeys(pairs)) or 'base'


def overlays(rows: list[Row]) -> list[curves.Chart]:
  """Returns, for each stage and metric of `OVERLAYS`, one chart with a line for each trial."""
  started = [row for row in rows if row.run]
  names = dict.fromkeys(stage.name for row in started for stage in row.run.stages if stage.rows)
  charts = []
  for stage_name in names:
    for title, metric in _overlaid(started, stage_name):
      series = []
      for row in started:
        stage = row.run.stage(stage_name)
        points = stage.series(metric) if stage else []
        if points:
          points = curves.running_mean(points) if title in SMOOTHED else points
          series.append(svg.Series(label(row), points, 'line', rows.index(row)))
      note = f'Mean of {curves.MEAN_STEPS} rows.' if title in SMOOTHED else ''
      charts.append(curves.chart(f'{stage_name}: {title}', series, note))
  return charts


def _overlaid(rows: list[Row], stage_name: str) -> list[tuple[str, str]]:
  """Returns (title, metric) of what the trials' stages have of `OVERLAYS`."""
  stages = [row.run.stage(stage_name) for row in rows]
  names = dict.fromkeys(name for stage in stages if stage for name in stage.names())
  return [(match.group(match.lastindex or 0), name) for pattern in OVERLAYS for name in names
          if (match := re.fullmatch(pattern, name))]


def forest(rows: list[Row]) -> curves.Chart | None:
  """Returns pass@1 of every evaluation with its interval, trial by trial."""
  series = []
  for colour, name in enumerate(dict.fromkeys(e.name for row in rows for e in row.evals)):
    points, bars = [], []
    for number, row in enumerate(rows, 1):
      found = next((e for e in row.evals if e.name == name and e.pass_at_1 is not None), None)
      if found:
        points.append((number + 0.12 * colour, found.pass_at_1))
        bars.append(found.interval or (found.pass_at_1, found.pass_at_1))
    if points:
      series.append(svg.Series(name, points, 'marks', colour, bars))
  if not series:
    return None
  return curves.chart('pass@1 of each trial', series, '95% intervals; trials in the order of the '
                      'table.', x_label='trial', x_range=(0.5, len(rows) + 0.5))


def _row(workdir: Path, trial: dict[str, Any]) -> Row:
  path = workdir / 'trials' / trial['id']
  started = (path / 'config.json').exists() or (path / 'stages').is_dir()
  run = folder.read_run(path) if started else None
  numbers: dict[str, float] = {}
  for stage in run.stages if run else []:
    numbers |= {f'{stage.name} {column}': stage.summary[result]
                for result, column in RESULTS.items()
                if isinstance(stage.summary.get(result), (int, float))}
    found = next((metric for metric in LAST_MEANS if stage.series(metric)), None)
    if found:
      last = curves.running_mean(stage.series(found))[-1][1]
      numbers[f'{stage.name} {LAST_MEANS[found]}, mean of {curves.MEAN_STEPS}'] = last
  if run and isinstance(run.results.get('wall_s'), (int, float)):
    numbers['wall s'] = run.results['wall_s']
  return Row(id=trial['id'], overrides=redact(trial['overrides']), status=trial['status'],
             error=redact(trial['error']), run=run, evals=tables.evals(run) if run else [],
             numbers=numbers)
