"""Settings of one supervised stage: continued pretraining, long context, or SFT."""

import dataclasses

from composer_jax.config import INT32_MAX, check_least, check_range
from composer_jax.models.balance import Trainable
from composer_jax.models.config import ModelConfig, RopeScaling
from composer_jax.train.losses import LossConfig
from composer_jax.train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class StageConfig:
  """One run of the training loop. The report gives no sizes or rates: every default is our choice.

  Attributes:
    steps: batches to train on; 0 skips the stage.
    batch_size: B, packed rows of a batch.
    seq_len: S, tokens of a row.
    accumulate: A, micro-batches a batch is divided into.
    optimizer: AdamW and its schedule.
    loss: MTP and z-loss weights, head chunks.
    mixture: source name -> weight of the corpus (continued pretraining only).
    context_weight: loss weight of prompts and tool results in traces, where model tokens have 1
      (SFT only).
    bias_update_rate: step of the routers' selection bias (DeepSeek-V3 uses 0.001).
    rope_factor: YaRN context extension of this stage; 1 keeps the model's own.
    max_bad_steps: updates in a row without a finite gradient before the stage gives up.
    log_every: steps between metric rows, which is how often the host waits for the device.
    eval_every: steps between evaluations; one more before the first step and after the last. 0 does
      none at all.
    eval_max_bytes: held-out bytes of each source used by an evaluation; 0 takes all.
    checkpoint_every: steps between checkpoints; there is always one at the end.
    max_to_keep: checkpoints kept; 2 leaves a good one when the newest is damaged.
    seed: of the order of the data, and of the initial parameters when the stage is the first.
    trainable: "all", or "mtp" to train the MTP layer alone on top of a fixed trunk (Composer 2
      report, section 3.1); everything else then stays as it is, to the bit.
  """

  steps: int = 300
  batch_size: int = 8
  seq_len: int = 128
  accumulate: int = 1
  optimizer: OptimizerConfig = OptimizerConfig()
  loss: LossConfig = LossConfig()
  mixture: dict[str, float] = dataclasses.field(default_factory=dict)
  context_weight: float = 0.1
  bias_update_rate: float = 2e-3
  rope_factor: float = 1.0
  max_bad_steps: int = 5
  log_every: int = 10
  eval_every: int = 100
  eval_max_bytes: int = 50_000
  checkpoint_every: int = 100
  max_to_keep: int = 2
  seed: int = 0
  trainable: Trainable = 'all'

  def __post_init__(self):
    check_least(self, 1, 'batch_size', 'seq_len', 'accumulate', 'log_every', 'checkpoint_every',
                'max_to_keep', 'max_bad_steps')
    check_least(self, 0, 'eval_every', 'eval_max_bytes', 'context_weight', 'bias_update_rate')
    check_range(self, 0, INT32_MAX, 'steps', 'seed')
    if self.batch_size % self.accumulate:
      raise ValueError(f'accumulate {self.accumulate} does not divide batch_size {self.batch_size}')
    check_range(self, 1, 10_000, 'rope_factor')
    if self.trainable == 'mtp' and not self.loss.mtp_weight:
      raise ValueError('trainable "mtp" needs loss.mtp_weight above 0')
    if self.loss.head_chunk and self.seq_len % self.loss.head_chunk:
      raise ValueError(f'loss.head_chunk {self.loss.head_chunk} does not divide seq_len')


def extend_context(model_config: ModelConfig, rope_factor: float) -> ModelConfig:
  """Returns the config with YaRN stretched by a factor (arXiv 2309.00071); 1 changes nothing.

  Parameters keep their shape. A model that is already stretched is stretched further.
  """
  if rope_factor == 1:
    return model_config
  old = model_config.rope_scaling or RopeScaling(
      original_max_position_embeddings=model_config.max_position_embeddings)
  scaling = dataclasses.replace(old, factor=old.factor * rope_factor)
  longest = int(model_config.max_position_embeddings * rope_factor)
  return dataclasses.replace(model_config, rope_scaling=scaling, max_position_embeddings=longest)
