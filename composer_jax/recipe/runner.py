"""Runs the stages of a recipe in one folder: what is finished stays, the rest continues."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax import report
from composer_jax.config import as_dict
from composer_jax.envs.sandbox import support
from composer_jax.errors import UserError
from composer_jax.files import read_json
from composer_jax.recipe import checks, golden, schema, stages, versions, workdir
from composer_jax.recipe.monitor import Monitor


def run(config: Mapping[str, Any], folder: str | pathlib.Path, *,
        only: Sequence[str] | None = None, dry_run: bool = False) -> dict[str, Any]:
  """Runs a config's stages in order, continuing what the folder already holds.

  Args:
    config: nested mapping, see `schema.Recipe`.
    folder: the run folder; made when missing.
    only: run just these of the config's stages; what they build on must be finished.
    dry_run: change nothing, and return what would be done.

  Returns:
    The contents of `results.json`; for a dry run, stage -> "done", "continue" or "run".

  Raises:
    UserError, InfrastructureError, NumericsError: with one clear line.
  """
  recipe = schema.resolve(config)
  checks.check(recipe)
  folder = pathlib.Path(os.path.realpath(folder))
  chosen = _choose(recipe, only)
  prints = stages.fingerprints(recipe)
  _require_starts(folder, chosen, prints)
  if dry_run:
    return {stage: _state(folder / 'stages' / stage, prints[stage]) for stage in chosen}
  workdir.claim(folder, recipe, versions.of_run())
  with workdir.exclusive(folder):
    context = stages.Context(recipe, folder)
    unfinished = [stage for stage in chosen
                  if workdir.finished(context.folder(stage), prints[stage]) is None]
    clocks = [context.folder(stage) / 'clock.json' for stage in schema.STAGES]
    monitor = Monitor(folder / 'usage.json', clocks)
    if unfinished:
      with monitor:
        _run_stages(context, unfinished, prints, monitor)
    results = write_results(context, monitor)
    report.build(folder)
  return results


def _run_stages(context: stages.Context, unfinished: Sequence[str], prints: Mapping[str, str],
                monitor: Monitor) -> None:
  """Runs stages in order, after what can be checked before the first has been checked."""
  if context.recipe.compilation_cache:
    _keep_compiled_programs(context.workdir / '.xla')
  if any(stage in stages.SANDBOXED for stage in unfinished):
    support.require()  # now, and not after the stages before it
  golden.require(context)
  for stage in unfinished:
    _run_stage(context, stage, prints[stage])
    golden.keep(context)
    write_results(context, monitor)


def evaluate(folder: str | pathlib.Path, stage: str, *, dry_run: bool = False) -> dict[str, Any]:
  """Evaluates a finished stage of a run; see `stages.evaluate`.

  Args:
    folder: the run folder.
    stage: `sft` or `rl`.
    dry_run: change nothing, and return what would be done.

  Returns:
    The summary of the evaluation; for a dry run as in `run`.
  """
  name = f'eval_{stage}'
  if name not in stages.RUN:
    raise UserError(f'--stage={stage}: can be sft or rl')
  path = pathlib.Path(folder) / 'config.json'
  if not path.exists():
    raise UserError(f'--workdir={folder}: holds no run')
  config = dict(read_json(path, 'config')['config'])
  config['stages'] = [*config.get('stages', ()), name]
  results = run(config, folder, only=[name], dry_run=dry_run)
  return results if dry_run else results['eval'][stage]


def reuse(config: Mapping[str, Any], folder: str | pathlib.Path, source: str | pathlib.Path, *,
          only: Sequence[str] | None = None) -> list[str]:
  """Copies the stages that another run has finished under equal settings; see `adopt_stages`.

  Args:
    config: of the run that is to come.
    folder: its folder; made when missing.
    source: the folder of the other run.
    only: copy at most these stages.

  Returns:
    The names of the copied stages; none when all were there before.

  Raises:
    UserError: `source` holds no run, is `folder` itself, or has nothing that fits.
    InfrastructureError: the disk is full, or a file cannot be read.
  """
  folder, source = (pathlib.Path(os.path.realpath(path)) for path in (folder, source))
  if folder == source:
    raise UserError(f'--reuse={source} is the --workdir itself')
  if not (source / 'config.json').exists():
    raise UserError(f'--reuse={source}: holds no run')
  recipe = schema.resolve(config)
  checks.check(recipe)
  chosen = _choose(recipe, only)
  copied = adopt_stages(config, folder, [source], only=only)
  if not any((folder / 'stages' / stage / 'summary.json').exists() for stage in chosen):
    key, old, new = workdir.first_difference(
        read_json(source / 'config.json', 'config')['config'], as_dict(recipe)) or ('', '', '')
    where = f' ({key} is {old!r} there and {new!r} here)' if key else ''
    raise UserError(f'--reuse={source}: has no finished stage with the settings of this run{where}')
  return copied


def adopt_stages(config: Mapping[str, Any], folder: pathlib.Path,
                 siblings: Sequence[pathlib.Path], *, only: Sequence[str] | None = None
                 ) -> list[str]:
  """Copies finished stages that sibling runs have done under equal settings; returns their names.

  Two trials of a sweep that differ in RL only thus pretrain once. A stage is taken only where the
  stage that it starts from is the same artefact here and there: equal settings alone would mix the
  tokenizer of one run with the parameters of another.
  """
  recipe = schema.resolve(config)
  prints = stages.fingerprints(recipe)
  chosen = _choose(recipe, only)
  workdir.claim(folder, recipe, versions.of_run())
  adopted = []
  with workdir.exclusive(folder):
    for stage in chosen:
      target = folder / 'stages' / stage
      if (target / 'summary.json').exists():
        continue
      for sibling in siblings:
        summary = sibling / 'stages' / stage / 'summary.json'
        if sibling == folder or not summary.exists() or not _same_start(stage, folder, sibling):
          continue
        if read_json(summary, 'fingerprint')['fingerprint'] != prints[stage]:
          continue
        if stage == 'data':
          workdir.adopt(sibling / 'data', folder / 'data')
        workdir.adopt(summary.parent, target)
        golden.adopt(sibling, folder, stage)
        adopted.append(stage)
        break
  return adopted


def _same_start(stage: str, folder: pathlib.Path, sibling: pathlib.Path) -> bool:
  """Returns whether the stage before is the same in both: its summary holds times and losses."""
  before = schema.STARTS_FROM.get(stage)
  if before is None:
    return True
  mine, theirs = (run / 'stages' / before / 'summary.json' for run in (folder, sibling))
  return mine.exists() and theirs.exists() and mine.read_bytes() == theirs.read_bytes()


def write_results(context: stages.Context, monitor: Monitor) -> dict[str, Any]:
  """Writes `results.json` from the summaries of all finished stages, and returns it."""
  results: dict[str, Any] = {'stages': {}, 'eval': {}}
  for stage in schema.STAGES:
    path = context.folder(stage) / 'summary.json'
    if not path.exists():
      continue
    summary = read_json(path, 'fingerprint')
    summary.pop('fingerprint')
    if stage.startswith('eval_'):
      results['eval'][stage.removeprefix('eval_')] = summary
    else:
      results['stages'][stage] = summary
  results |= {'wall_s': round(monitor.wall_s, 2), 'peak_rss_gb': round(monitor.peak_rss_gb, 4)}
  workdir.write_json(context.workdir / 'results.json', results)
  return results


def _choose(recipe: schema.Recipe, only: Sequence[str] | None) -> list[str]:
  if only is not None and not only:
    raise UserError(f'--stages: names no stage (there are: {", ".join(recipe.stages)})')
  for stage in only or ():
    if stage not in recipe.stages:
      raise UserError(f'--stages: {stage!r} is not a stage of this config '
                      f'(there are: {", ".join(recipe.stages)})')
  return [s for s in schema.STAGES if s in recipe.stages and (only is None or s in only)]


def _require_starts(folder: pathlib.Path, chosen: Sequence[str], prints: Mapping[str, str]) -> None:
  """Raises UserError for a chosen stage whose start is neither chosen nor finished."""
  for stage in chosen:
    before = schema.STARTS_FROM.get(stage)
    if before and before not in chosen and workdir.finished(
        folder / 'stages' / before, prints[before]) is None:
      raise UserError(f'{stage} starts from {before}, which is not finished in {folder}')


def _state(folder: pathlib.Path, fingerprint: str) -> str:
  if workdir.finished(folder, fingerprint) is not None:
    return 'done'
  return 'continue' if folder.exists() else 'run'


def _run_stage(context: stages.Context, stage: str, fingerprint: str) -> None:
  folder = context.folder(stage)
  with Monitor(folder / 'clock.json') as monitor:
    summary = stages.RUN[stage](context)
  workdir.write_json(folder / 'summary.json',
                     {'fingerprint': fingerprint, 'wall_s': round(monitor.wall_s, 2), **summary})


def _keep_compiled_programs(folder: pathlib.Path) -> None:
  """Lets XLA keep its programs on disk; a damaged entry is compiled anew."""
  import jax
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
