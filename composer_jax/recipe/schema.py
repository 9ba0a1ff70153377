"""The whole config of a run, section by section."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.config import INT32_MAX, build, check_least, check_range
from composer_jax.data.config import CorpusConfig
from composer_jax.envs.expert import ExpertConfig
from composer_jax.envs.sandbox import SandboxConfig
from composer_jax.envs.taskset import TasksetConfig
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.rl.config import RLConfig
from composer_jax.rollout.engine import EngineConfig
from composer_jax.train.config import StageConfig

STAGES = ('data', 'cpt', 'long_context', 'sft', 'eval_sft', 'rl', 'eval_rl')
SUPERVISED_STAGES = ('cpt', 'long_context', 'sft')
TRAINING_STAGES = (*SUPERVISED_STAGES, 'rl')  # those that leave parameters
# stage -> the one whose result it starts from
STARTS_FROM = {'cpt': 'data', 'long_context': 'cpt', 'sft': 'long_context', 'eval_sft': 'sft',
               'rl': 'sft', 'eval_rl': 'rl'}
FUNCTIONS = 'functions'  # name of the in-domain source in `mixture`


@dataclasses.dataclass(frozen=True)
class FunctionsConfig:
  """Clean functions in the style of the L0 tasks, a source of the corpus called `functions`.

  Attributes:
    train_documents: documents drawn from the train keys; equal ones are dropped.
    heldout_documents: documents drawn from the held-out keys.
  """

  train_documents: int = 12_000
  heldout_documents: int = 1_000

  def __post_init__(self):
    check_least(self, 1, 'train_documents', 'heldout_documents')


@dataclasses.dataclass(frozen=True)
class TracesConfig:
  """Demonstrations for SFT: a scripted expert in the real sandbox and harness.

  Attributes:
    count: traces, one a train task.
    heldout: traces of held-out tasks, which are never trained on, for the held-out loss of SFT;
      without evaluations there (`sft.eval_every` 0) they are not made.
    concurrency: episodes side by side.
    expert: how the expert behaves.
  """

  count: int = 4_000
  heldout: int = 200
  concurrency: int = 8
  expert: ExpertConfig = ExpertConfig()

  def __post_init__(self):
    check_least(self, 1, 'count', 'heldout', 'concurrency')


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on held-out tasks, with the harness, renderer and limits of training.

  Attributes:
    tasks: how many held-out tasks.
    samples_per_task: attempts at each; pass@1 is their mean, best-of-k takes k = this.
    seed: of the tasks and of the sampling; the same tasks before and after RL.
    bootstrap_samples: resamplings of the tasks behind the interval.
    max_invalid: largest share of attempts that the machine may have spoilt (no verdict in several
      tries); with more the stage fails, since the rest is no fair sample.
  """

  tasks: int = 256
  samples_per_task: int = 8
  seed: int = 4242
  bootstrap_samples: int = 2_000
  max_invalid: float = 0.01

  def __post_init__(self):
    if not 0 <= self.max_invalid < 1:
      raise ValueError('max_invalid must be at least 0 and below 1')
    check_range(self, 0, INT32_MAX, 'seed')
    check_least(self, 1, 'tasks', 'samples_per_task', 'bootstrap_samples')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One experiment.

  Attributes:
    model: shape at the first stage; `vocab_size` must equal that of the corpus.
    start: folder of a checkpoint that the first stage starts from, a Hugging Face one or an import
      of one, whose shape `model` must have (an MTP layer may be new); empty for fresh parameters.
      Its tokenizer is for `data.tokenizer` to name.
    stages: which stages run, of `STAGES`, always in that order.
    seed: of the generated documents, tasks and demonstrations. Stages have seeds of their own.
    data: the corpus.
    functions: the in-domain source.
    cpt: continued pretraining.
    long_context: the phase with longer rows.
    sft: supervised finetuning on demonstrations.
    tasks: what the agent works on.
    traces: demonstrations.
    rl: reinforcement learning.
    sampler: shapes of the sampler, for RL and evaluation.
    eval: evaluation.
    sandbox: limits of one sandbox.
    grading_sandboxes: sandboxes that give verdicts, beside the ones that episodes use.
    compilation_cache: keep XLA's compiled programs in `workdir/.xla`, so that a continued run
      starts at once.
  """

  model: ModelConfig
  start: str = ''
  stages: tuple[str, ...] = STAGES
  seed: int = 0
  data: CorpusConfig = dataclasses.field(default_factory=CorpusConfig)
  functions: FunctionsConfig = FunctionsConfig()
  cpt: StageConfig = StageConfig()
  long_context: StageConfig = StageConfig()
  sft: StageConfig = StageConfig()
  tasks: TasksetConfig = dataclasses.field(default_factory=TasksetConfig)
  traces: TracesConfig = TracesConfig()
  rl: RLConfig = dataclasses.field(default_factory=RLConfig)
  sampler: EngineConfig = EngineConfig()
  eval: EvalConfig = EvalConfig()
  sandbox: SandboxConfig = SandboxConfig()
  grading_sandboxes: int = 4
  compilation_cache: bool = True

  def __post_init__(self):
    unknown = [s for s in self.stages if s not in STAGES]
    if unknown:
      raise ValueError(f'stages: {unknown[0]!r} is not one of {", ".join(STAGES)}')
    if not self.stages:
      raise ValueError(f'stages: is empty (there are: {", ".join(STAGES)})')
    for stage in self.stages:
      if STARTS_FROM.get(stage, stage) not in self.stages:
        raise ValueError(f'stages: {stage} starts from {STARTS_FROM[stage]}, which is missing')
    if self.model.vocab_size != self.data.vocab_size:
      raise ValueError(f'model.vocab_size {self.model.vocab_size} differs from data.vocab_size '
                       f'{self.data.vocab_size}')
    check_range(self, 1, 1024, 'grading_sandboxes')
    check_range(self, 0, INT32_MAX, 'seed')


def resolve(config: Mapping[str, Any]) -> Recipe:
  """Returns the frozen recipe of a config.

  Raises:
    UserError: unknown keys, wrong types, values that do not fit together.
  """
  if not hasattr(config, 'items'):
    raise UserError(f'config: expected a mapping of sections, got {type(config).__name__}')
  return build(Recipe, dict(config.items()))
