"""What each stage of a recipe does, in terms of the packages that do the work."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from composer_jax import metrics
from composer_jax.batch import Batch
from composer_jax.checkpoint import manager
from composer_jax.config import fingerprint
from composer_jax.data import corpus as corpus_lib
from composer_jax.data import loader as loader_lib
from composer_jax.data.chat import Renderer
from composer_jax.envs import expert, taskset, traces
from composer_jax.envs.grading import Grader
from composer_jax.envs.sandbox import SandboxPool
from composer_jax.envs.tasks import functions, validate
from composer_jax.envs.tools import registry
from composer_jax.envs.types import Task
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.evals import perplexity
from composer_jax.evals import runner as eval_runner
from composer_jax.files import read_json
from composer_jax.models.config import ModelConfig
from composer_jax.progress import progress
from composer_jax.recipe import eval_traces, start
from composer_jax.recipe.schema import FUNCTIONS, SUPERVISED_STAGES, Recipe, resolve
from composer_jax.rl import trainer as rl_trainer
from composer_jax.rl.environment import EpisodeEnvironment
from composer_jax.rl.traces import TraceLog
from composer_jax.rollout.engine import Engine
from composer_jax.train import supervised
from composer_jax.train.config import StageConfig, extend_context

SANDBOXED = ('sft', 'eval_sft', 'rl', 'eval_rl')  # stages that run the agent's code
_TOKENIZER_TASKS = 2_000
_SPARE_STEPS = 4
_LAST_STEPS = 10  # of RL, whose means stand for its end


@dataclasses.dataclass(frozen=True)
class Context:
  """What a stage knows: the recipe and where the run lives."""

  recipe: Recipe
  workdir: pathlib.Path

  @property
  def data_dir(self) -> pathlib.Path:
    """The corpus."""
    return self.workdir / 'data'

  def folder(self, stage: str) -> pathlib.Path:
    """The folder of a stage."""
    return self.workdir / 'stages' / stage

  @functools.cached_property
  def corpus(self) -> corpus_lib.Corpus:
    """The corpus, which the data stage has built."""
    return corpus_lib.Corpus(self.data_dir)

  def model(self, stage: str) -> ModelConfig:
    """The model's shape at a stage; see `model_at`."""
    return model_at(self.recipe, stage)

  def params(self, stage: str) -> dict[str, Any]:
    """The final parameters of a finished stage."""
    return manager.load_params(self.folder(stage) / 'params')[0]


def open_run(folder: pathlib.Path) -> Context:
  """Returns what is known of a run that has begun.

  Raises:
    UserError: the folder holds no run.
  """
  path = folder / 'config.json'
  if not path.exists():
    raise UserError(f'{folder}: holds no run')
  return Context(resolve(read_json(path, 'config')['config']), folder)


def model_at(recipe: Recipe, stage: str) -> ModelConfig:
  """Returns the model's shape at a stage: each supervised stage may stretch the context."""
  config = recipe.model
  for name in SUPERVISED_STAGES:
    config = extend_context(config, getattr(recipe, name).rope_factor)
    if name == stage:
      break
  return config


def data(context: Context) -> dict[str, Any]:
  """Builds the corpus and the tokenizer."""
  recipe = context.recipe
  spec = recipe.functions
  seed = recipe.seed
  documents = (functions.documents('train', spec.train_documents, seed),
               functions.documents('heldout', spec.heldout_documents, seed))
  corpus = corpus_lib.build(
    recipe.data, context.data_dir, {FUNCTIONS: documents},
    tokenizer_samples=_tokenizer_samples(recipe),
    extra_fingerprint=fingerprint(_corpus_inputs(recipe)))
  return {'sources': corpus.manifest['sources'], 'vocab_size': corpus.manifest['vocab_size']}


def _corpus_inputs(recipe: Recipe) -> list[Any]:
  """Returns what the corpus depends on, beside `recipe.data`."""
  return [recipe.functions, recipe.tasks, recipe.seed, min(recipe.traces.count, _TOKENIZER_TASKS)]


def _tokenizer_samples(recipe: Recipe) -> Iterator[str]:
  """Yields the texts of demonstrations on train tasks, in the words of the harness.

  The tokenizer has to exist before the harness can run, so results are spelled from the tasks.
  """
  count = min(_TOKENIZER_TASKS, recipe.traces.count)
  for task in taskset.load(recipe.tasks, 'train', count, recipe.seed):
    yield task.instruction
    yield '\n'.join(f'{number}|{line}' for number, line
                    in enumerate(task.files[task.entry].splitlines(), 1))
    yield from expert.repairs(task, task.files)
    yield '\n'.join(('read_file', 'run_tests', 'finish', 'ok', registry.PASS, 'no change'))
    yield '\n'.join(f'fail {case.shown} got {case.expected_repr} want {case.expected_repr}'
                    for case in task.visible)


def cpt(context: Context) -> dict[str, Any]:
  """Continued pretraining from a checkpoint, or from fresh parameters."""
  return _pretrain(context, 'cpt', start.params(context.recipe))


def long_context(context: Context) -> dict[str, Any]:
  """Continued pretraining on longer rows, with YaRN."""
  return _pretrain(context, 'long_context', context.params('cpt'))


def _pretrain(context: Context, name: str, params: dict[str, Any] | None) -> dict[str, Any]:
  stage: StageConfig = getattr(context.recipe, name)
  model = context.model(name)
  loader = loader_lib.cpt_loader(stage.mixture, context.data_dir, stage.batch_size, stage.seq_len,
                                 stage.seed)
  heldout = _heldout(context, stage)
  _, summary = supervised.train(
    stage, model, context.folder(name), loader=loader, params=params,
    evaluate=functools.partial(_evaluate_bits, model, heldout), description=name)
  return {**_supervised_summary(summary), **_bits(context, stage, summary['eval'])}


def _heldout(context: Context, stage: StageConfig) -> dict[str, tuple[list, int]]:
  return {source: loader_lib.heldout_batches(
            context.data_dir, source, stage.seq_len, stage.batch_size,
            stage.eval_max_bytes or None)
          for source in context.corpus.sources}


def _evaluate_bits(model: ModelConfig, heldout: dict[str, tuple[list, int]],
                   params: dict[str, Any]) -> dict[str, float]:
  return {f'bits_per_byte/{source}': perplexity.bits_per_byte(model, params, batches, size)
          for source, (batches, size) in heldout.items()}


def _bits(context: Context, stage: StageConfig, results: dict[str, float]) -> dict[str, Any]:
  """Returns bits per byte of each source beside the compressors', and their mean over the bytes."""
  rows = {}
  for source in context.corpus.sources:
    base = context.corpus.baselines(source, stage.eval_max_bytes or None)
    rows[source] = {'bytes': base.bytes,
                    'gzip_bits_per_byte': base.gzip_bits_per_byte,
                    'xz_bits_per_byte': base.xz_bits_per_byte}
    if f'bits_per_byte/{source}' in results:
      rows[source]['bits_per_byte'] = results[f'bits_per_byte/{source}']
  total = sum(row['bytes'] for row in rows.values())
  means = {name: sum(row[name] * row['bytes'] for row in rows.values()) / total
           for name in ('bits_per_byte', 'gzip_bits_per_byte', 'xz_bits_per_byte')
           if all(name in row for row in rows.values())}
  return {**means, 'sources': rows}


def _supervised_summary(summary: dict[str, Any]) -> dict[str, Any]:
  return {name: summary[name] for name in ('steps', 'tokens', 'loss')}


def sft(context: Context) -> dict[str, Any]:
  """Writes demonstrations in the real sandbox, then trains on those of train tasks.

  Those of held-out tasks are for the held-out loss, in nats per token that the model has to write.
  """
  recipe, stage = context.recipe, context.recipe.sft
  folder, model = context.folder('sft'), context.model('sft')
  path, unseen = folder / 'demonstrations.jsonl', folder / 'heldout_demonstrations.jsonl'
  evaluate = None
  with sandboxes(recipe, recipe.traces.concurrency) as (pool, grader):
    stats = demonstrate(context, pool, grader, 'train', recipe.traces.count, path)
    if stage.eval_every:
      demonstrate(context, pool, grader, 'heldout', recipe.traces.heldout, unseen)
      batches = loader_lib.trace_batches(unseen, stage.batch_size, stage.seq_len)
      evaluate = functools.partial(_evaluate_traces, model, batches)
  loader = loader_lib.trace_loader(path, stage.batch_size, stage.seq_len, stage.seed,
                                   context_weight=stage.context_weight)
  _, summary = supervised.train(stage, model, folder, loader=loader,
                                params=context.params('long_context'), evaluate=evaluate,
                                description='sft')
  return {**_supervised_summary(summary), **summary['eval'], 'demonstrations': stats,
          'wrong_edit_rate': recipe.traces.expert.wrong_edit_rate}


def _evaluate_traces(model: ModelConfig, batches: list[Batch], params: dict[str, Any]
                     ) -> dict[str, float]:
  return {'heldout_loss': perplexity.nats_per_token(model, params, batches)}


def demonstrate(context: Context, pool: SandboxPool, grader: Grader, split: str, count: int,
                path: pathlib.Path) -> traces.TraceStats:
  """Writes `count` episodes of the expert to `path`, continuing what an earlier call began."""
  recipe, spec = context.recipe, context.recipe.traces
  tasks = admitted(recipe, split, count, recipe.seed, grader)
  with progress(count, path.stem, initial=traces.rows_kept(path)) as bar:

    def on_progress(rows: int) -> None:
      bar.update(rows - bar.done)

    return traces.write_traces(
      path, tasks, pool, grader, Renderer(context.corpus.tokenizer), seed=recipe.seed,
      count=count, concurrency=spec.concurrency, config=spec.expert, on_progress=on_progress)


def rl(context: Context) -> dict[str, Any]:
  """Asynchronous reinforcement learning from the SFT policy.

  The summary's means are over the last `_LAST_STEPS` rows that have the figure.
  """
  recipe = context.recipe
  config, tokenizer = recipe.rl, context.corpus.tokenizer
  model = context.model('rl')
  folder = context.folder('rl')
  with sandboxes(recipe, recipe.sampler.slots) as (pool, grader):
    environment = EpisodeEnvironment(rl_tasks(recipe, grader), pool, grader, Renderer(tokenizer))
    result = rl_trainer.run_stage(
      config, model_config=model, params=context.params('sft'),
      engine=Engine(model, recipe.sampler, tokenizer.end_id), environment=environment,
      folder=folder, decode=tokenizer.decode)
  manager.save_params(folder / 'params', result.params, {'stage': 'rl'})
  last = metrics.read(folder / 'metrics.jsonl')[-_LAST_STEPS:]
  means = {f'{name}_last_{_LAST_STEPS}': float(np.mean(known))
           for name in ('reward_mean', 'solved_fraction', 'kl', 'gap_max')
           if (known := [row[name] for row in last if name in row])}
  return {'steps': result.steps, 'groups_trained': len(result.trained_ordinals),
          'dropped': result.dropped, **means}


def rl_task_count(recipe: Recipe) -> int:
  """How many RL tasks there have to be: none is used twice.

  Dropped groups (stale, late, broken) are not tried again; the margin keeps the last steps full.
  """
  config = recipe.rl
  step = config.groups_per_step + config.max_extra_groups
  return (config.steps + max(_SPARE_STEPS, config.steps // 4)) * step


def rl_tasks(recipe: Recipe, grader: Grader) -> Sequence[Task]:
  """The RL tasks: train split, a generator seed that the demonstrations did not use."""
  return admitted(recipe, 'train', rl_task_count(recipe), recipe.seed + 1_000_003, grader)


def admitted(recipe: Recipe, split: str, count: int, seed: int, grader: Grader
             ) -> Sequence[Task]:
  """Returns `count` tasks whose gold repair passes and whose starting point does not.

  L0 tasks are right by construction; the candidates of the other levels are tried in the sandbox.

  Raises:
    UserError: there are not so many.
  """
  if recipe.tasks.level == 'l0':
    return taskset.load(recipe.tasks, split, count, seed)
  candidates = taskset.everything(recipe.tasks, split, seed)
  found: list[Task] = []
  for verdict in validate.validate(candidates, grader, wait=functools.partial(time.sleep, 0.002)):
    if verdict.admitted:
      found.append(verdict.task)
    if len(found) == count:
      return found
  raise UserError(f'config.tasks.level: {count} {recipe.tasks.level} tasks are asked for, and '
                  f'{len(found)} of {len(candidates)} candidates in {split} are admitted')


def evaluate(context: Context, stage: str) -> dict[str, Any]:
  """Evaluates the final parameters of a stage on held-out tasks."""
  recipe, name = context.recipe, f'eval_{stage}'
  spec, tokenizer = recipe.eval, context.corpus.tokenizer
  shown = context.folder(name) / 'traces.jsonl'
  with (sandboxes(recipe, recipe.sampler.slots) as (pool, grader),
        TraceLog(shown, resume_step=0, decode=tokenizer.decode) as log):
    tasks = admitted(recipe, 'heldout', spec.tasks, spec.seed, grader)
    result = eval_runner.evaluate(
      context.model(stage), context.params(stage), tokenizer, tasks,
      samples_per_task=spec.samples_per_task, engine_config=recipe.sampler, pool=pool,
      grader=grader, seed=spec.seed, bootstrap_samples=spec.bootstrap_samples,
      folder=context.folder(name), description=name,
      on_trace=eval_traces.writer(log, name, tasks))
  eval_traces.thin(shown)
  lost, samples = result.summary['invalid'], result.summary['samples']
  if lost > spec.max_invalid * samples:
    errors = (row['error'] for row in result.rows if not row['valid'])
    raise InfrastructureError(f'{name}: {lost} of {samples} attempts ended without a verdict '
                              f'({next(errors)}); the next start tries them again')
  return result.summary


@contextlib.contextmanager
def sandboxes(recipe: Recipe, size: int) -> Iterator[tuple[SandboxPool, Grader]]:
  """Yields sandboxes for episodes, and a grader that has its own."""
  with (SandboxPool(size, recipe.sandbox) as pool,
        SandboxPool(recipe.grading_sandboxes, recipe.sandbox) as verdicts):
    yield pool, Grader(verdicts)


def fingerprints(recipe: Recipe) -> dict[str, str]:
  """Returns, for each stage, a fingerprint of everything its result depends on."""
  r = recipe
  data_print = fingerprint(['data', r.data, *_corpus_inputs(r)])
  cpt_print = fingerprint(['cpt', data_print, r.model, r.cpt, *start.identity(r)])
  long_print = fingerprint(['long_context', cpt_print, r.long_context])
  sft_print = fingerprint(['sft', long_print, r.sft, r.traces, r.sandbox])
  rl_print = fingerprint(['rl', sft_print, r.rl, r.sampler])
  return {'data': data_print, 'cpt': cpt_print, 'long_context': long_print, 'sft': sft_print,
          'rl': rl_print, 'eval_sft': fingerprint(['eval', sft_print, r.eval, r.sampler]),
          'eval_rl': fingerprint(['eval', rl_print, r.eval, r.sampler])}


RUN = {'data': data, 'cpt': cpt, 'long_context': long_context, 'sft': sft, 'rl': rl,
       'eval_sft': functools.partial(evaluate, stage='sft'),
       'eval_rl': functools.partial(evaluate, stage='rl')}
