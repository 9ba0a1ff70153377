"""Bits per byte: a loss that does not depend on the tokenizer."""

import math
from collections.abc import Iterable

import numpy as np

from composer_jax.batch import Batch
from composer_jax.models.config import ModelConfig
from composer_jax.rollout import scoring


def bits_per_byte(
    model_config: ModelConfig, params: dict, batches: Iterable[Batch], num_bytes: int
) -> float:
  """Returns the summed cost of all weighted targets in bits, divided by the bytes they stand for.

  With `data.loader.heldout_batches` every token of every document is a target once, the first one
  predicted from `<|doc|>`; the end of a document is not.  The same number for gzip or xz is 8 *
  compressed size / original size.

  Args:
    model_config: the model.
    params: its parameters.
    batches: held-out rows `[B, S]`; targets with weight 0 do not count, others count once.
    num_bytes: UTF-8 bytes of the documents in `batches`.

  Raises:
    ValueError: no bytes or no weighted target.
  """
  nats, targets = 0.0, 0
  for batch in batches:
    # float64 on the host: the sum runs over far more tokens than float32 can add exactly
    logprobs = np.asarray(scoring.score(model_config, params, batch), np.float64)
    counted = np.asarray(batch.weights) > 0
    nats -= logprobs[counted].sum()
    targets += int(counted.sum())
  if num_bytes < 1 or not targets:
    raise ValueError(f'bits per byte of {targets} targets and {num_bytes} bytes')
  return float(nats) / math.log(2) / num_bytes
