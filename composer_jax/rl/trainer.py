"""The RL stage: takes groups from the buffer, trains, publishes; resumable at any step."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from composer_jax.batch import Batch
from composer_jax.checkpoint.manager import CheckpointManager
from composer_jax.errors import InfrastructureError, NumericsError, UserError
from composer_jax.metrics import MetricsLog
from composer_jax.models.config import ModelConfig
from composer_jax.progress import progress
from composer_jax.rl import advantage, objective, replay, shaping, telemetry, traces
from composer_jax.rl.buffer import BufferLimits, GroupBuffer
from composer_jax.rl.config import RLConfig
from composer_jax.rl.orchestrator import Environment, RolloutWorker
from composer_jax.rl.samples import Group, Sample
from composer_jax.rl.weight_sync import WeightSync
from composer_jax.rollout.ticks import TickEngine
from composer_jax.stopping import stop_requests
from composer_jax.train import state as state_lib
from composer_jax.train.optimizer import make_optimizer, make_schedule
from composer_jax.train.step import make_train_step

_SHOWN = ('solved_fraction', 'reward_mean', 'entropy', 'gap_max', 'staleness_max', 'wait_share')
_MAX_BAD_STEPS = 5  # updates in a row without a finite gradient after which the stage gives up


@dataclasses.dataclass(frozen=True)
class StageResult:
  """What the stage leaves behind.

  Attributes:
    params: full parameters, selection biases included.
    steps: steps done in all runs of the stage together.
    trained_ordinals: positions in the task order that were trained on, each once.
    dropped: number of dropped groups by reason.
  """

  params: dict[str, Any]
  steps: int
  trained_ordinals: list[int]
  dropped: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Prepared:
  """One step's input: the packed batch and what it was made from."""

  batch: Batch
  layout: replay.Layout
  samples: list[Sample]
  advantages: np.ndarray
  parts: dict[str, dict[str, float]]
  reference_logprobs: list[np.ndarray] | None


def run_stage(
    config: RLConfig, *, model_config: ModelConfig, params: dict[str, Any], engine: TickEngine,
    environment: Environment, folder: Path, decode: Callable[[Sequence[int]], str] | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> StageResult:
  """Trains with RL until `config.steps`, continuing what `folder` already holds.

  Args:
    config: the stage.
    model_config: shape of the model.
    params: the SFT policy: where training starts, and the reference of the KL term.
    engine: the sampler; it is used from another thread until this function returns.
    environment: tasks, sessions and verdicts.
    folder: run folder of the stage; gets `checkpoints/`, `metrics.jsonl`, `traces.jsonl`.
    decode: token ids to text, for traced tokens; without it their ids are written.
    on_step: called after every step with the number of steps done and the step's metrics.

  Returns:
    The trained policy and the data cursor.

  Raises:
    UserError: config, engine and tasks do not fit together.
    InfrastructureError: rollouts keep ending without a verdict, so many were dropped that the tasks
      are used up, or the disk is full.
    NumericsError: several updates in a row had no finite gradient.
    Stopped: SIGTERM or SIGINT came; the step was finished and saved with the groups that are ready.
  """
  _check(config, engine, environment)
  folder = Path(folder)
  stage = _Stage(config, model_config, params, environment.num_tasks)
  with CheckpointManager(folder / 'checkpoints') as manager:
    stage.restore(manager)
    done = stage.buffer.version
    worker = RolloutWorker(engine, environment, stage.buffer, stage.weights)
    with (MetricsLog(folder / 'metrics.jsonl', resume_step=done or -1) as log,
          traces.TraceLog(folder / 'traces.jsonl', resume_step=done, decode=decode) as trace_log,
          progress(config.steps, 'rl', initial=done) as bar, stop_requests() as stop):
      try:
        if done < config.steps:
          worker.start()
        while stage.buffer.version < config.steps:
          row = stage.step(worker, trace_log, stop)
          if row is None:
            break
          step = stage.buffer.version
          log.append(step, **row)
          bar.update(1, **{name: row[name] for name in _SHOWN if name in row})
          if step % config.checkpoint_every == 0 and step < config.steps:
            stage.save(manager)
          if on_step is not None:
            on_step(step, row)
        stage.save(manager)  # before the worker stops, which gives up the groups in flight
      finally:
        worker.stop()
      manager.wait()  # a save that fails is worse news than a signal
      if stage.buffer.version < config.steps and not stop():
        raise InfrastructureError(
            f'rl: the tasks are used up after step {stage.buffer.version} of {config.steps}; '
            f'dropped groups by reason: {stage.result().dropped}')
  return stage.result()


class _Stage:
  """Mutable state of a running stage; one instance a call of `run_stage`."""

  def __init__(self, config: RLConfig, model_config: ModelConfig, params: dict[str, Any],
               num_tasks: int):
    self.config = config
    self.routing_shape = (model_config.num_moe_layers, model_config.num_experts_per_tok)
    self.reference = params
    self.buffer = GroupBuffer(buffer_limits(config, num_tasks),
                              functools.partial(zero_signal, config))
    self.weights = WeightSync()
    tx = make_optimizer(config.optimizer, max(config.steps, 1))
    self._schedule = make_schedule(config.optimizer, max(config.steps, 1))
    self.state = state_lib.create(params, tx)
    self._step_fn = make_train_step(objective.make_rl_loss(model_config, config.objective), tx,
                                    bias_rate=config.selection_bias_rate)
    self._score = jax.jit(functools.partial(_score, model_config, config.objective))
    self._checkpoint = 0  # number of the newest one
    self._clock = time.monotonic()
    self._sampled = 0.0

  def restore(self, manager: CheckpointManager) -> None:
    """Reads the newest checkpoint, if there is one, and publishes its policy."""
    restored = manager.restore_latest(self.state)
    if restored is not None:
      self.state, self._checkpoint = restored.state, restored.step
      self.buffer.restore(restored.loader_state)
    self.weights.publish(self.buffer.version, self.state.full_params())

  def save(self, manager: CheckpointManager) -> None:
    """Saves parameters, optimizer, cursor and ready groups as one unit.

    Checkpoints are counted, not named after the step: the same step is saved again when more groups
    have become ready since.
    """
    self._checkpoint += 1
    manager.save(self._checkpoint, self.state, loader_state=self.buffer.snapshot())

  def step(self, worker: RolloutWorker, trace_log: traces.TraceLog, stop: Callable[[], bool]
           ) -> dict[str, float] | None:
    """Does one step and returns its metrics.

    Returns None when there is nothing left to train on, or when `stop` says so while it waits.
    """
    started = time.monotonic()
    groups = self.buffer.take(stop)
    waited = time.monotonic() - started
    if not groups:
      return None
    version = self.buffer.version
    prepared = self.prepare(groups)
    self._trace(trace_log, version, groups, prepared)
    self.state, metrics = self._step_fn(self.state, prepared.batch)
    metrics = jax.device_get(metrics)  # waits, so that nothing below is charged to the next step
    self.weights.publish(version + 1, self.state.full_params())
    self.buffer.advance(version + 1)
    if metrics['bad_steps'] >= min(_MAX_BAD_STEPS, self.config.steps):
      raise NumericsError(f'rl: {int(metrics["bad_steps"])} updates in a row without a finite '
                          'gradient; lower the learning rate')
    return {**telemetry.rollout_figures(groups, version),
            **self._reward_figures(groups, prepared),
            **objective.summarise(metrics), **self.buffer.metrics(),
            'lr': float(self._schedule(max(int(metrics['step']) - 1, 0))),
            'packing': sum(prepared.layout.lengths)
            / max(len(prepared.layout.rows) * self.config.row_len, 1),
            **self._timing(worker, waited)}

  def prepare(self, groups: Sequence[Group]) -> Prepared:
    """Turns groups into a batch: reference scores, rewards, advantages, packing."""
    config = self.config
    samples = [s for g in groups if not g.zero_signal for s in g.samples]
    rows = config.rows_per_micro_batch
    layout = replay.plan([len(s.rollout.tokens) for s in samples], config.row_len, rows,
                         -(-config.groups_per_step * config.group_size // rows))
    batch = replay.build_batch(samples, [0.0] * len(samples), layout, 1.0, self.routing_shape)
    reference = None
    if config.kl_coefficient and samples:
      own_routing = batch.replace(routing_mask=np.zeros_like(batch.routing_mask))
      placed = self._scores(self.reference, own_routing, layout.micro_batches_used)
      reference = [part[replay.predicted(s.rollout.sampled)]
                   for part, s in zip(layout.lift(placed), samples, strict=True)]
    parts = shaping.reward_parts(samples, config.length_penalty, config.behaviour,
                                 config.kl_coefficient, reference)
    advantages = advantage.group_advantages(
        [s.group_id for s in samples], [s.logical_id for s in samples],
        [sum(parts[s.logical_id].values()) for s in samples])
    batch = replay.build_batch(samples, advantages, layout, self._denominator(samples),
                               self.routing_shape)
    return Prepared(batch, layout, samples, advantages, parts, reference)

  def result(self) -> StageResult:
    """Returns what the stage leaves behind."""
    counts = self.buffer.metrics()
    return StageResult(self.state.full_params(), self.buffer.version,
                       self.buffer.trained_ordinals(),
                       {name.removeprefix('dropped/'): int(value) for name, value
                        in counts.items() if name.startswith('dropped/')})

  def _reward_figures(self, groups: Sequence[Group], prepared: Prepared) -> dict[str, float]:
    config = self.config
    everyone = [s for g in groups for s in g.samples]
    divergences = {name: -part['kl'] / config.kl_coefficient
                   for name, part in prepared.parts.items() if 'kl' in part}
    return telemetry.reward_figures(
        shaping.reward_parts(everyone, config.length_penalty, config.behaviour), divergences,
        config.kl_coefficient, prepared.advantages)

  def _denominator(self, samples: Sequence[Sample]) -> float:
    config = self.config
    if config.objective.denominator == 'constant':
      rollouts = config.groups_per_step * config.group_size
      return rollouts * config.objective.tokens_per_rollout
    return max(float(sum(s.rollout.sampled[1:].sum() for s in samples)), 1.0)

  def _scores(self, params: dict[str, Any], batch: Batch, micro_batches: int) -> np.ndarray:
    """Returns log-probs `[A, R, S]` of the targets, computed for the first micro-batches."""
    out = np.zeros(batch.weights.shape, np.float32)
    rows = batch.replace(denominator=None)
    for i in range(micro_batches):
      micro = jax.tree.map(lambda x, i=i: x[i], rows).replace(denominator=batch.denominator)
      out[i] = self._score(params, micro)
    return out

  def _trace(self, trace_log: traces.TraceLog, version: int, groups: Sequence[Group],
             prepared: Prepared) -> None:
    """Writes some rollouts, with the log-probs that the trainer gives them before the update."""
    config = self.config
    if not config.trace_every or version % config.trace_every or not prepared.samples:
      return
    chosen = traces.choose(groups, config.trace_groups)
    picked = [i for i, s in enumerate(prepared.samples) if s.logical_id in chosen]
    samples = [prepared.samples[i] for i in picked]
    layout = replay.plan([len(s.rollout.tokens) for s in samples], config.row_len,
                         config.rows_per_micro_batch, len(samples))
    batch = replay.build_batch(samples, [0.0] * len(samples), layout, 1.0, self.routing_shape)
    placed = self._scores(self.state.full_params(), batch, layout.micro_batches_used)
    for i, sample, scores in zip(picked, samples, layout.lift(placed), strict=True):
      reference = prepared.reference_logprobs
      trace_log.append(
          version + 1, sample, prepared.parts[sample.logical_id],
          advantage=float(prepared.advantages[i]),
          trainer_logprobs=scores[replay.predicted(sample.rollout.sampled)],
          reference_logprobs=None if reference is None else reference[i])

  def _timing(self, worker: RolloutWorker, waited: float) -> dict[str, float]:
    now = time.monotonic()
    wall, self._clock = max(now - self._clock, 1e-9), now
    sampler = worker.metrics()
    sampled, self._sampled = self._sampled, sampler.get('sampled_tokens', 0.0)
    return {'step_s': wall, 'wait_s': waited, 'wait_share': min(waited / wall, 1.0),
            'rollout_tokens_per_s': (self._sampled - sampled) / wall,
            'sampler_occupancy': sampler.get('occupancy', 0.0),
            'sampler_tool_wait_share': sampler.get('wait_share', 0.0)}


def zero_signal(config: RLConfig, samples: Sequence[Sample]) -> bool:
  """Returns whether a group's members are equally good under `config.zero_signal`."""
  if config.zero_signal == 'correctness':
    return len({s.outcome.correct for s in samples}) < 2
  parts = shaping.reward_parts(samples, config.length_penalty, config.behaviour)
  return len({sum(part.values()) for part in parts.values()}) < 2


def buffer_limits(config: RLConfig, num_tasks: int) -> BufferLimits:
  """Returns the buffer's bounds for a stage over `num_tasks` tasks."""
  return BufferLimits(
      steps=config.steps, groups_per_step=config.groups_per_step, group_size=config.group_size,
      min_group_size=config.min_group_size, max_staleness=config.max_staleness,
      max_extra_groups=config.max_extra_groups, group_deadline_s=config.group_deadline_s,
      tasks=num_tasks)


def _check(config: RLConfig, engine: TickEngine, environment: Environment) -> None:
  need = config.steps * config.groups_per_step
  if environment.num_tasks < need:
    raise UserError(f'rl: {config.steps} steps of {config.groups_per_step} groups need {need} '
                    f'tasks, each used once, and there are {environment.num_tasks}')
  if engine.max_len > config.row_len:
    raise UserError(f'rl.row_len: {config.row_len} is shorter than the longest rollout, '
                    f'{engine.max_len} tokens')
  if engine.temperature != config.objective.temperature:
    raise UserError(f'rl.objective.temperature: {config.objective.temperature} but the sampler '
                    f'uses {engine.temperature}')


def _score(model_config: ModelConfig, config: objective.ObjectiveConfig, params: dict[str, Any],
           batch: Batch) -> jax.Array:
  return objective.token_scores(model_config, params, batch, config)[0]['logp']
