"""Runs tasks through the training harness: same engine, renderer, limits and grader as RL."""

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from composer_jax.config import as_dict
from composer_jax.data.chat import Renderer
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.envs.harness import Episode, GraderLike
from composer_jax.envs.sandbox import SandboxPool
from composer_jax.envs.types import Task, Trace
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.evals.rows import Row, RowFile
from composer_jax.evals.summary import summarize
from composer_jax.models.config import ModelConfig
from composer_jax.progress import progress
from composer_jax.rollout.engine import Engine, EngineConfig
from composer_jax.rollout.scheduler import Scheduler
from composer_jax.rollout.session import Session
from composer_jax.rollout.ticks import TickEngine
from composer_jax.rollout.types import Rollout

ATTEMPTS = 3  # of a sample whose sandbox or grader breaks, before it is reported without a verdict


@dataclasses.dataclass(frozen=True)
class EvalResult:
  """All rows, in the order of tasks and samples, and their summary (`summary.summarize`)."""

  rows: list[Row]
  summary: dict[str, Any]


def evaluate(
    model_config: ModelConfig,
    params: dict,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    samples_per_task: int,
    engine_config: EngineConfig,
    *,
    pool: SandboxPool,
    grader: GraderLike,
    seed: int = 0,
    bootstrap_samples: int = 10_000,
    folder: str | pathlib.Path | None = None,
    description: str = 'eval',
    on_trace: Callable[[Trace, Rollout], None] | None = None,
) -> EvalResult:
  """Samples every task `samples_per_task` times, each exactly once, and scores the attempts.

  Args:
    model_config: the model.
    params: its parameters.
    tokenizer: the run's tokenizer.
    tasks: with distinct ids.
    samples_per_task: attempts per task; also the k of best-of-k.
    engine_config: slots, lengths, temperature (0 is greedy); its own seed is replaced by `seed`.
    pool: sandboxes for the episodes; as many episodes run as it has sandboxes and slots.
    grader: decides on the hidden tests.
    seed: of sampling and bootstrap; the same seed gives the same attempts, up to rounding.
    bootstrap_samples: resamplings of the tasks behind the intervals.
    folder: takes `rows.jsonl`; a restarted evaluation keeps the finished rows and goes on.
    description: of the progress bar.
    on_trace: sees every finished episode that has a verdict; after a kill, perhaps one twice.

  Raises:
    InfrastructureError: sandboxes stayed in use elsewhere, so attempts were left over.
    UserError: no or repeated tasks, or `folder` holds another evaluation.
  """
  if not tasks or samples_per_task < 1:
    raise UserError(f'nothing to evaluate: {len(tasks)} tasks, {samples_per_task} samples each')
  engine_config = dataclasses.replace(engine_config, seed=seed)
  renderer = Renderer(tokenizer)
  engine = Engine(model_config, engine_config, renderer.end_id)
  params = jax.device_put(params)

  def open_episode(task: Task, sample: int) -> Episode | None:
    if not pool.available:
      return None
    return Episode(task, pool.acquire(), grader, renderer, group_id=task.id,
                   sample_index=sample, release=pool.release)

  file = RowFile(folder, {
      'model': as_dict(model_config), 'engine': as_dict(engine_config), 'seed': seed,
      'tasks': [task.id for task in tasks], 'samples': samples_per_task,
      'weights': _digest(params)})
  run_rows(engine, params, tasks, samples_per_task, open_episode, file,
           description=description, on_trace=on_trace)
  order = {task.id: i for i, task in enumerate(tasks)}
  rows = sorted(file.rows, key=lambda row: (order[row['task_id']], row['sample']))
  return EvalResult(rows, summarize(rows, samples_per_task, seed, bootstrap_samples))


def run_rows(
    engine: TickEngine,
    params: Any,
    tasks: Sequence[Task],
    samples_per_task: int,
    open_episode: Callable[[Task, int], Session | None],
    file: RowFile,
    *,
    description: str = 'eval',
    on_trace: Callable[[Trace, Rollout], None] | None = None,
) -> None:
  """Fills `file` with one row for every (task, sample) that it does not hold yet.

  Args:
    engine: the sampler.
    params: its weights.
    tasks: with distinct ids.
    samples_per_task: attempts per task.
    open_episode: starts an attempt, or returns None while it has no sandbox to spare; an
      InfrastructureError costs the sample one of its `ATTEMPTS`.
    file: takes the rows.
    description: of the progress bar.
    on_trace: sees every finished episode that has a verdict.

  Raises:
    InfrastructureError: attempts were left over that `open_episode` would not start.
    UserError: two tasks with the same id.
  """
  by_id = {task.id: task for task in tasks}
  if len(by_id) < len(tasks):
    raise UserError('two tasks have the same id')
  finished = {(row['task_id'], row['sample']) for row in file.rows}
  queue = collections.deque(
      item for task in tasks for sample in range(samples_per_task)
      if (item := (task.id, sample)) not in finished)
  failures: collections.Counter[tuple[str, int]] = collections.Counter()

  with progress(len(tasks) * samples_per_task, description, initial=len(finished)) as bar:
    right = sum(row['reward'] == 1 for row in file.rows)
    scored = sum(row['valid'] for row in file.rows)

    def settle(item: tuple[str, int], row: Row) -> None:
      nonlocal right, scored
      if not row['valid']:
        failures[item] += 1
        if failures[item] < ATTEMPTS:
          queue.append(item)
          return
      row['attempts'] = failures[item] + row['valid']
      file.append(row)
      right, scored = right + (row['reward'] == 1), scored + row['valid']
      bar.update(1, pass_at_1=right / max(scored, 1),
                 tokens_per_s=scheduler.metrics()['sampled_tokens_per_s'])

    def source() -> Session | None:
      while queue:
        item = queue.popleft()
        try:
          episode = open_episode(by_id[item[0]], item[1])
        except InfrastructureError as error:
          settle(item, _row(by_id[item[0]], item[1], None, None, str(error)))
          continue
        if episode is None:
          queue.appendleft(item)
        return episode
      return None

    def done(episode: Episode, rollout: Rollout) -> None:
      item = (episode.task.id, episode.sample_index)
      trace = episode.trace()
      error = trace.error if rollout.failure is None else (
          f'{rollout.failure.kind} in {rollout.failure.where}: {rollout.failure.message}')
      if trace.valid and on_trace is not None:
        on_trace(trace, rollout)  # first: with its row in the file an attempt is over for good
      settle(item, _row(episode.task, item[1], trace, rollout, error))

    scheduler = Scheduler(engine, lambda: (0, params), source, done, training=False)
    scheduler.run()
  if queue:
    raise InfrastructureError(f'{len(queue)} attempts were not started: no sandbox became free')


def _digest(params: Any) -> str:
  """Returns a hash of the weights' bytes."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(jax.tree_util.keystr(path).encode())
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return digest.hexdigest()[:16]


def _row(task: Task, sample: int, trace: Trace | None, rollout: Rollout | None,
         error: str) -> Row:
  """Returns the row of an attempt; without a trace nothing ran."""
  valid = trace is not None and trace.valid
  return {
      'task_id': task.id,
      'sample': sample,
      'level': task.level,
      'mutation': str(task.meta.get('mutation', '')),
      'valid': valid,
      'reward': trace.reward if valid else None,
      'stop_reason': str(trace.stop_reason) if trace else 'infrastructure',
      'failure': str(trace.failure) if trace and trace.failure else None,
      'tokens': rollout.num_sampled if rollout else 0,
      'total_tokens': len(rollout) if rollout else 0,
      'calls': sum(turn.call is not None for turn in trace.turns) if trace else 0,
      'wall_s': trace.wall_s if trace else 0.0,
      'error': error,
  }
