"""The loop that every supervised stage runs: resumable at any step, bit for bit."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from composer_jax.batch import Batch
from composer_jax.checkpoint.disk import disk_errors
from composer_jax.checkpoint.manager import CheckpointManager
from composer_jax.errors import NumericsError, UserError
from composer_jax.metrics import MetricsLog
from composer_jax.progress import progress
from composer_jax.stopping import stop_requests
from composer_jax.train.config import StageConfig
from composer_jax.train.optimizer import make_schedule
from composer_jax.train.state import TrainState
from composer_jax.train.step import StepFn, micro_batches

Evaluate = Callable[[dict[str, Any]], dict[str, float]]


class Loader(Protocol):
  """An endless iterator of batches `[B, S]` whose place can be saved."""

  def __next__(self) -> Batch:
    """Returns the next batch, NumPy leaves."""

  def get_state(self) -> Any:
    """Returns the place after the last batch handed out: JSON values, bytes or arrays."""

  def set_state(self, state: Any) -> None:
    """Goes back to a place."""


@dataclasses.dataclass
class Cursor:
  """How far the stage is; saved with every checkpoint.

  Attributes:
    step: batches trained on (or skipped by the step itself).
    tokens: trainable tokens so far.
    wall_s: seconds spent in the loop so far, over all its calls.
    evaluated: step of the newest evaluation, -1 before the first.
    results: what that evaluation gave.
    loss: mean loss of the newest metrics row.
  """

  step: int = 0
  tokens: int = 0
  wall_s: float = 0.0
  evaluated: int = -1
  results: dict[str, float] = dataclasses.field(default_factory=dict)
  loss: float | None = None


def run_loop(stage: StageConfig, folder: str | Path, *, state: TrainState, step_fn: StepFn,
             loader: Loader, evaluate: Evaluate | None = None, description: str = 'train'
             ) -> tuple[TrainState, dict[str, Any]]:
  """Trains for `stage.steps` batches, continuing what the folder holds.

  Checkpoints (parameters, optimizer, selection biases, data cursor, metrics cursor, evaluations
  done) are written while training goes on; the last one is complete when this returns.

  Args:
    stage: the settings.
    folder: `checkpoints/` and `metrics.jsonl` are kept in it.
    state: the state before the first step; it is donated.
    step_fn: from `make_train_step`.
    loader: the batches.
    evaluate: takes the full parameters, returns named figures; see `StageConfig.eval_every`.
    description: shown beside the progress bar.

  Returns:
    The state after the last step, and a summary: `steps`, `tokens`, `wall_s`, `loss`, `eval`.

  Raises:
    NumericsError: `stage.max_bad_steps` updates in a row, or all, had no finite gradient.
    InfrastructureError: the disk is full; the newest complete checkpoint stays.
    UserError: the loader ran dry.
    Stopped: SIGTERM or SIGINT came; the step was finished and saved.
  """
  folder = Path(folder)
  with contextlib.ExitStack() as stack:
    manager = stack.enter_context(
        CheckpointManager(folder / 'checkpoints', max_to_keep=stage.max_to_keep))
    cursor = Cursor()
    restored = manager.restore_latest(state)
    if restored:
      state, cursor = restored.state, Cursor(**restored.extra)
      loader.set_state(restored.loader_state)
    with disk_errors(f'{folder / "metrics.jsonl"}'):
      metrics = stack.enter_context(
          MetricsLog(folder / 'metrics.jsonl', resume_step=cursor.step if restored else -1))
    bar = stack.enter_context(progress(stage.steps, description, initial=cursor.step))
    run = _Run(stage, step_fn, loader, evaluate, manager, metrics, bar, cursor, state)
    run.until_done(stack.enter_context(stop_requests()))
    return run.state, {'steps': cursor.step, 'tokens': cursor.tokens, 'wall_s': cursor.wall_s,
                       'loss': cursor.loss, 'eval': cursor.results}


class _Run:
  """One call of the loop."""

  def __init__(self, stage: StageConfig, step_fn: StepFn, loader: Loader,
               evaluate: Evaluate | None, manager: CheckpointManager, metrics: MetricsLog,
               bar: Any, cursor: Cursor, state: TrainState):
    self.stage, self.step_fn, self.loader, self.evaluate = stage, step_fn, loader, evaluate
    self.manager, self.metrics, self.bar = manager, metrics, bar
    self.cursor, self.state = cursor, state
    self.schedule = make_schedule(stage.optimizer, stage.steps)
    self.window: list[dict[str, jax.Array]] = []  # metrics of the steps since the last row
    self.untimed = 0  # how many of them the clock leaves out
    self.compiled = False
    self.started = time.monotonic() - cursor.wall_s
    self.window_started = time.monotonic()

  def until_done(self, stop: Callable[[], bool]) -> None:
    """Trains to the end of the stage, or until `stop` says so."""
    self._evaluate_if_due()
    stopping = False
    while self.cursor.step < self.stage.steps and not stopping:
      self._train_one()
      step, stopping = self.cursor.step, stop()
      saves = step % self.stage.checkpoint_every == 0 or step == self.stage.steps or stopping
      if step % self.stage.log_every == 0 or saves:
        self._log()  # also before a checkpoint: what is saved has been found healthy
      self._evaluate_if_due()
      if saves:
        self._save()
    self.manager.wait()

  def _train_one(self) -> None:
    try:
      batch = next(self.loader)
    except StopIteration as error:
      raise UserError(f'the data ended after {self.cursor.step} of {self.stage.steps} steps'
                      ) from error
    self.state, metrics = self.step_fn(self.state, micro_batches(batch, self.stage.accumulate))
    metrics.pop('counts', None)
    self.window.append(metrics)
    self.cursor.step += 1
    if not self.compiled:  # compilation is no part of the speed
      jax.block_until_ready(metrics)
      self.compiled, self.untimed, self.window_started = True, 1, time.monotonic()

  def _log(self) -> None:
    """Waits for the steps since the last row, checks them and writes their mean."""
    if not self.window:
      return
    rows = jax.device_get(self.window)
    seconds = time.monotonic() - self.window_started
    worst = max(int(row['bad_steps']) for row in rows)
    if worst >= min(self.stage.max_bad_steps, self.stage.steps):
      raise NumericsError(f'no finite gradient in {worst} steps in a row (step {self.cursor.step});'
                          ' lower the learning rate, or look at the data')
    tokens = sum(int(row['tokens']) for row in rows)
    values = summarize(rows)
    values['lr'] = float(self.schedule(max(int(rows[-1]['step']) - 1, 0)))
    timed = sum(int(row['tokens']) for row in rows[self.untimed:])
    if timed:
      values['tokens_per_s'] = timed / max(seconds, 1e-9)
    self.cursor.tokens += tokens
    self.cursor.loss = values.get('loss', self.cursor.loss)
    self._write(**values, tokens=self.cursor.tokens)
    shown = {name: values[name] for name in ('loss', 'tokens_per_s') if name in values}
    self.bar.update(len(rows), **shown)
    self.window, self.untimed = [], 0
    self.window_started = time.monotonic()

  def _evaluate_if_due(self) -> None:
    step, every = self.cursor.step, self.stage.eval_every
    due = every and (step % every == 0 or step == self.stage.steps)
    if self.evaluate is None or not due or self.cursor.evaluated >= step:
      return
    self._log()
    results = {k: float(v) for k, v in self.evaluate(self.state.full_params()).items()}
    self._write(**{f'eval/{name}': value for name, value in results.items()})
    self.cursor.evaluated, self.cursor.results = step, results
    self.bar.update(0, **results)
    self.window_started = time.monotonic()

  def _write(self, **values: Any) -> None:
    with disk_errors(f'{self.metrics.path}', 'the checkpoints are intact'):
      self.metrics.append(self.cursor.step, **values)

  def _save(self) -> None:
    self.cursor.wall_s = time.monotonic() - self.started
    self.manager.save(self.cursor.step, self.state, loader_state=self.loader.get_state(),
                      extra=dataclasses.asdict(self.cursor))


def summarize(rows: list[dict[str, np.ndarray]]) -> dict[str, float]:
  """Returns one metrics row for several steps.

  Figures are means over the steps that applied an update, `_max` ones maxima; `skipped` (no token),
  `bad_micro` and `lost` (no finite gradient) are counted over all.
  """
  out = {'skipped': sum(int(row['skipped']) for row in rows),
         'bad_micro': sum(int(row['bad_micro']) for row in rows)}
  fine = [row for row in rows if not row['skipped'] and not row['bad_steps']]
  out['lost'] = len(rows) - len(fine) - out['skipped']
  counted = {'skipped', 'bad_micro', 'bad_steps', 'tokens', 'step', 'counts'}
  for name in (fine[0].keys() - counted if fine else ()):
    combine = np.max if name.endswith('_max') else np.mean
    out[name] = float(combine([np.float64(row[name]) for row in fine]))
  return out
