"""Log-probabilities of given tokens: the teacher-forced counterpart of the sampler."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from composer_jax.batch import Batch
from composer_jax.models import transformer
from composer_jax.models.config import ModelConfig
from composer_jax.models.router import Routing
from composer_jax.rollout import sampling


@functools.partial(jax.jit, static_argnames='model_config')
def score(
    model_config: ModelConfig,
    params: dict,
    batch: Batch,
    *,
    temperature: float = 1.0,
    routing: Routing | None = None,
) -> Float[Array, 'B S']:
  """Returns the log-probability of `batch.targets` at every position, float32.

  The distribution is the sampler's: full softmax at `temperature`.  Values at padding are finite
  and mean nothing.

  Args:
    model_config: the model.
    params: its parameters.
    batch: rows `[B, S]`; tokens, targets, positions and segment ids are read.
    temperature: divides the logits, above 0.
    routing: expert ids to replay instead of the router's choice.
  """
  out = transformer.forward(
      model_config, params, batch.tokens, positions=batch.positions,
      segment_ids=batch.segment_ids, routing=routing)
  logprobs = sampling.log_softmax(out.logits, temperature)
  return jnp.take_along_axis(logprobs, batch.targets[..., None], axis=-1)[..., 0]
