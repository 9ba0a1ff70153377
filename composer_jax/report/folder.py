"""Reads a run folder as far as it has come; what cannot be read becomes a warning on the page."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_jax import metrics
from composer_jax.errors import UserError
from composer_jax.files import json_lines, read_json
from composer_jax.report.schema import STAGE_ORDER


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage on disk.

  Attributes:
    name: folder name.
    path: folder.
    rows: metrics rows.
    summary: numbers at its end; {} while it runs.
    eval_rows: one row a task and sample; [] for a stage that is no evaluation.
  """

  name: str
  path: Path
  rows: list[dict[str, Any]]
  summary: dict[str, Any]
  eval_rows: list[dict[str, Any]]

  def names(self) -> list[str]:
    """Returns the names of the numeric metrics, in order of appearance."""
    names = dict.fromkeys(name for row in self.rows for name, value in row.items()
                          if name != 'step' and _is_number(value))
    return list(names)

  def series(self, name: str) -> list[tuple[float, float]]:
    """Returns the (step, value) points of one metric."""
    return [(row['step'], float(row[name])) for row in self.rows
            if _is_number(row.get(name))]


@dataclasses.dataclass(frozen=True)
class Run:
  """A run folder on disk.

  Attributes:
    path: the folder.
    config: the resolved config.
    fingerprint: of the config.
    version: code and library versions.
    results: results.json, {} while there is none.
    manifest: data/manifest.json of the corpus, {} while there is none.
    stages: in the order in which they run.
    warnings: files that could not be read, and why.
  """

  path: Path
  config: dict[str, Any]
  fingerprint: str
  version: dict[str, Any]
  results: dict[str, Any]
  manifest: dict[str, Any]
  stages: list[Stage]
  warnings: list[str]

  def stage(self, name: str) -> Stage | None:
    """Returns a stage by name."""
    return next((s for s in self.stages if s.name == name), None)


def read_run(path: Path) -> Run:
  """Reads a run folder.

  Raises:
    UserError: there is nothing of a run in it.
  """
  warnings: list[str] = []
  head = _object(path / 'config.json', warnings)
  stages_dir = path / 'stages'
  folders = []
  if stages_dir.is_dir():  # a hidden one is a copy that was interrupted
    folders = [p for p in stages_dir.iterdir() if p.is_dir() and not p.name.startswith('.')]
  if not head and not folders:
    raise UserError(f'--workdir={path}: holds no run (no config.json, no stages)')
  stages = [_read_stage(folder, warnings) for folder in sorted(folders, key=_stage_key)]
  return Run(path=path, config=head.get('config', {}), fingerprint=head.get('fingerprint', ''),
             version=head.get('version', {}), results=_object(path / 'results.json', warnings),
             manifest=_object(path / 'data' / 'manifest.json', warnings), stages=stages,
             warnings=warnings)


def _read_stage(folder: Path, warnings: list[str]) -> Stage:
  rows = _guarded(folder / 'metrics.jsonl', metrics.read, [], warnings)
  return Stage(name=folder.name, path=folder, rows=rows,
               summary=_object(folder / 'summary.json', warnings),
               eval_rows=_guarded(folder / 'rows.jsonl', json_lines, [], warnings))


def _object(path: Path, warnings: list[str]) -> dict[str, Any]:
  return _guarded(path, read_json, {}, warnings)


def _guarded(path: Path, read: Callable[[Path], Any], missing: Any, warnings: list[str]) -> Any:
  """Reads a file that may be missing (normal) or damaged (a warning)."""
  if not path.exists():
    return missing
  try:
    return read(path)
  except (OSError, ValueError, UserError) as error:
    warnings.append(f'{path.parent.name}/{path.name}: {error}')
    return missing


def _stage_key(folder: Path) -> tuple[int, str]:
  known = folder.name in STAGE_ORDER
  return (STAGE_ORDER.index(folder.name) if known else len(STAGE_ORDER), folder.name)


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
