"""Losses on held-out rows: bits per byte, which no tokenizer changes, and nats per token."""

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
  nats, targets = _summed_nats(model_config, params, batches)
  if num_bytes < 1 or not targets:
    raise ValueError(f'bits per byte of {targets} targets and {num_bytes} bytes')
  return nats / math.log(2) / num_bytes


def nats_per_token(model_config: ModelConfig, params: dict, batches: Iterable[Batch]) -> float:
  """Returns the mean negative log-likelihood of all weighted targets in nats: the cross entropy.

  Args:
    model_config: the model.
    params: its parameters.
    batches: held-out rows `[B, S]`; targets with weight 0 do not count, others count once.

  Raises:
    ValueError: no weighted target.
  """
  nats, targets = _summed_nats(model_config, params, batches)
  if not targets:
    raise ValueError('nats per token of no target')
  return nats / targets


def _summed_nats(
    model_config: ModelConfig, params: dict, batches: Iterable[Batch]
) -> tuple[float, int]:
  """Returns the summed cost of the weighted targets in nats, and how many there are."""
  nats, targets = 0.0, 0
  for batch in batches:
    # float64 on the host: the sum runs over far more tokens than float32 can add exactly
    logprobs = np.asarray(scoring.score(model_config, params, batch), np.float64)
    counted = np.asarray(batch.weights) > 0
    nats -= float(logprobs[counted].sum())
    targets += int(counted.sum())
  return nats, targets
