"""Runs the trials of a sweep one after the other, resuming what the folder holds."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_jax.errors import InfrastructureError, UserError
from composer_jax.progress import progress
from composer_jax.recipe.workdir import exclusive, foreign_files, write_json
from composer_jax.report import comparison
from composer_jax.sweep.trials import Trial

# (config file, run folder) -> exit code and the last lines of its standard error.
RunTrial = Callable[[Path, Path], tuple[int, str]]
# (config, run folder, folders of sibling trials): copies finished stages with equal fingerprints,
# and returns their names.
Adopt = Callable[[dict[str, Any], Path, list[Path]], list[str]]
ERROR_LINES = 20  # of a failed trial's output, kept in sweep.json
# Exit codes of a trial that was stopped: by the signal itself, or after it had saved its state.
INTERRUPTED = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def run_sweep(trials: list[Trial], workdir: Path, run_trial: RunTrial, adopt: Adopt
              ) -> dict[str, Any]:
  """Runs or resumes the trials and renders the comparison page after each.

  `workdir/trials/ID` is the run folder of a trial, `workdir/trials/ID.json` its config, and
  `workdir/sweep.json` lists all trials with their status and, for a failed one, the end of its
  output. A trial is finished when its run said so and its results.json is there.

  Args:
    trials: as `trials.expand` gives them.
    workdir: the sweep's folder; trials that a former call put there are kept.
    run_trial: runs one trial to its end.
    adopt: takes over stages that a sibling trial has already finished.

  Returns:
    `{"finished": [ids], "failed": [ids], "skipped": [ids]}`; skipped ones were finished before.

  Raises:
    UserError: another sweep is running in the folder, or the folder is that of a run.
    InfrastructureError: trials failed (all the others have run).
  """
  _claim(workdir)
  outcome: dict[str, list[str]] = {'finished': [], 'failed': [], 'skipped': []}
  with exclusive(workdir), progress(len(trials), 'sweep') as bar:
    record = Record(workdir / comparison.SWEEP_FILE, trials)
    for trial in trials:
      outcome[_attempt(trial, record, workdir, run_trial, adopt)].append(trial.id)
      comparison.build(workdir)
      bar.update(failed=len(outcome['failed']))
  if outcome['failed']:
    raise InfrastructureError(
        f'{len(outcome["failed"])} of {len(trials)} trials failed '
        f'({", ".join(outcome["failed"])}); their errors are in {record.path}')
  return outcome


class Record:
  """The sweep's `sweep.json`: every trial it ever had, with its status."""

  def __init__(self, path: Path, trials: list[Trial]):
    self.path = path
    self._trials = {t['id']: t for t in (comparison.read_trials(path) if path.exists() else ())}
    for trial in trials:
      self._trials.setdefault(trial.id, trial.as_json() | {'status': 'planned', 'error': None})
    self._write()

  def status(self, trial_id: str) -> str:
    """Returns `planned`, `finished` or `failed`."""
    return self._trials[trial_id]['status']

  def ids(self) -> list[str]:
    """Returns the trials in the order in which they came."""
    return list(self._trials)

  def set(self, trial_id: str, status: str, error: str | None = None) -> None:
    """Changes a trial's status; a failed one carries its error."""
    self._trials[trial_id] |= {'status': status, 'error': error}
    self._write()

  def _write(self) -> None:
    write_json(self.path, {'trials': list(self._trials.values())})


def run_in_subprocess(config_file: Path, run_folder: Path) -> tuple[int, str]:
  """Runs one trial as `composer-jax run` in a process of its own; its output goes to the screen.

  Returns:
    The exit code and the last lines of standard error.
  """
  return follow([sys.executable, '-m', 'composer_jax', 'run', f'--config={config_file}',
                 f'--workdir={run_folder}'])


def follow(command: list[str]) -> tuple[int, str]:
  """Runs a command, shows its standard error, and passes on a request to stop.

  The command has a session of its own: a Ctrl-C in the terminal reaches this process alone, which
  asks the command once, with SIGTERM, and waits until it has saved and ended. A second one kills.

  Returns:
    The exit code and the last lines of standard error.
  """
  tail: list[str] = []

  def show() -> int:
    for line in process.stderr:
      sys.stderr.write(line)
      tail[:] = [*tail, line][-ERROR_LINES:]
    return process.wait()

  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors='replace',
                        start_new_session=True) as process:
    try:
      return show(), ''.join(tail)
    except BaseException:
      process.terminate()
      try:
        show()
      except BaseException:
        process.kill()
        raise
      raise


def _attempt(trial: Trial, record: Record, workdir: Path, run_trial: RunTrial, adopt: Adopt
             ) -> str:
  """Runs one trial unless it is finished; returns the key of the outcome it belongs to."""
  folder = workdir / 'trials' / trial.id
  if record.status(trial.id) == 'finished' and (folder / 'results.json').exists():
    return 'skipped'
  print(f'trial {trial.id}: {trial.label}', flush=True)
  config_file = folder.with_suffix('.json')
  write_json(config_file, trial.config)
  siblings = [workdir / 'trials' / other for other in record.ids() if other != trial.id]
  adopt(trial.config, folder, [path for path in siblings if path.is_dir()])
  code, tail = run_trial(config_file, folder)
  if code in INTERRUPTED:
    raise KeyboardInterrupt
  if code == 0 and (folder / 'results.json').exists():
    record.set(trial.id, 'finished')
    return 'finished'
  record.set(trial.id, 'failed', f'exit code {code}\n{tail}')
  return 'failed'


def _claim(workdir: Path) -> None:
  """Makes the folder, or checks that it belongs to a sweep.

  Raises:
    UserError: it is the folder of a run, holds other files, or is no folder.
    InfrastructureError: it cannot be made.
  """
  if (workdir / 'config.json').exists():
    raise UserError(f'--workdir={workdir} is the folder of a run; choose another for the sweep')
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / comparison.SWEEP_FILE).exists():
      strangers = [name for name in foreign_files(workdir) if name != 'trials']
      if strangers:
        raise UserError(f'--workdir={workdir} is not empty and holds no sweep '
                        f'({strangers[0]}, ...)')
    (workdir / 'trials').mkdir(exist_ok=True)
  except (FileExistsError, NotADirectoryError) as error:
    raise UserError(f'--workdir={workdir} is not a folder') from error
  except OSError as error:
    raise InfrastructureError(f'cannot create {workdir}: {error.strerror or error}') from error
