"""Puts a run folder on one self-contained page."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from composer_jax.files import replacing
from composer_jax.redact import redact
from composer_jax.report import curves, folder, rollout_viewer, tables


def build(workdir: str | os.PathLike) -> Path:
  """Writes `report.html` of a run, as far as the run has come.

  Args:
    workdir: the run folder; see `schema` for the files that are read.

  Returns:
    The path of the page: one file, below 5 MB, that loads nothing.

  Raises:
    UserError: the folder holds no run.
  """
  run = folder.read_run(Path(workdir))
  evals = tables.evals(run)
  traces, totals, bad = rollout_viewer.collect(rollout_viewer.sources(
      [(stage.name, stage.path) for stage in run.stages], run.path / 'data' / 'tokenizer.json'))
  warnings = list(run.warnings)
  if bad:
    warnings.append(f'{bad} lines that should be rollouts')
  text = template('page.html.j2').render(
      run=run, name=run.path.resolve().name, unfinished=tables.unfinished(run),
      tiles=tiles(run, evals), evals=evals,
      movement=tables.movement(evals[0], evals[-1]) if len(evals) > 1 else None,
      classes=sorted({c for row in evals for c in row.by_class}),
      stages=tables.stage_rows(run),
      charts=[(stage.name, *curves.charts(stage, tables.compression(run, stage)))
              for stage in run.stages if stage.rows],
      config=json.dumps(redact(run.config), indent=2), version=redact(run.version),
      traces=Markup(rollout_viewer.as_script(redact(traces))), totals=totals,
      shown=len(traces), warnings=warnings)
  return write(run.path / 'report.html', text)


def tiles(run: folder.Run, evals: list[tables.EvalRow]) -> list[tuple[str, str, str]]:
  """Returns the headline numbers as (label, value, remark)."""
  found = []
  for name, stage in run.results.get('stages', {}).items():
    # source by source: the mean over a mixture hides which of them a compressor does better
    sources = stage.get('sources') if isinstance(stage, dict) else None
    for source, row in sources.items() if isinstance(sources, dict) else ():
      if isinstance(row, dict) and isinstance(row.get('bits_per_byte'), (int, float)):
        beside = ' · '.join(f'{tool} {row[f"{tool}_bits_per_byte"]:.2f}' for tool in ('gzip', 'xz')
                            if isinstance(row.get(f'{tool}_bits_per_byte'), (int, float)))
        found.append((f'{name}: bits per byte, {source}', f'{row["bits_per_byte"]:.3f}', beside))
  for row in evals:
    if row.pass_at_1 is not None:
      remark = f'95% {row.interval[0]:.3f} – {row.interval[1]:.3f}' if row.interval else ''
      found.append((f'pass@1 after {row.name}', f'{row.pass_at_1:.3f}', remark))
  if 'wall_s' in run.results:
    found.append(('wall time', duration(run.results['wall_s']), ''))
  if 'peak_rss_gb' in run.results:
    found.append(('peak memory', f'{run.results["peak_rss_gb"]:.2f} GB', ''))
  return found


@functools.cache
def _environment() -> jinja2.Environment:
  environment = jinja2.Environment(
      loader=jinja2.PackageLoader('composer_jax.report', 'templates'), autoescape=True,
      undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
  environment.filters |= {'duration': duration, 'figure': figure, 'share': share}
  environment.globals['include_raw'] = _include_raw
  return environment


def template(name: str) -> jinja2.Template:
  """Returns a page template; values are escaped, style sheet and scripts are put in as they are."""
  return _environment().get_template(name)


def write(path: Path, text: str) -> Path:
  """Replaces the page in one step."""
  with replacing(path, 'wb') as file:
    file.write(text.encode('utf-8', errors='replace'))
  return path


def _include_raw(name: str) -> Markup:
  source, _, _ = _environment().loader.get_source(_environment(), name)
  return Markup(source)


def duration(seconds: Any) -> str:
  """Formats seconds as `45 s`, `3 min 20 s` or `2 h 05 min`."""
  if not isinstance(seconds, (int, float)):
    return '–'
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 1:
    return f'{seconds:.1f} s'
  if minutes < 60:
    return f'{minutes} min {rest:02d} s'
  return f'{minutes // 60} h {minutes % 60:02d} min'


def figure(value: Any) -> str:
  """Formats a number of a table; a dash where there is none."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return '–'
  return f'{value:,}' if isinstance(value, int) else f'{value:.4g}'


def share(value: Any) -> str:
  """Formats a rate with three decimals; a dash where there is none."""
  return f'{value:.3f}' if isinstance(value, (int, float)) else '–'
