"""Packs samples into the rows of a `Batch`, routing records included.

Every per-token array of a sample goes through the same `data.packing.place` with the same
assignment: tokens, masks, log-probs and routing cannot get out of step, because none of them is
moved by anything else. What a position *predicts* (target, weight, advantage, sampler log-prob) is
shifted by one before placing; what it *is* (token, position, routing) is not.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.batch import Batch
from composer_jax.data import packing
from composer_jax.rl.samples import Sample


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where each of N documents lies in `A` micro-batches of `R` rows of `S` tokens.

  Attributes:
    shape: (A, R, S).
    rows: for each used row the indices of its documents, in order; used rows come first.
    lengths: tokens of each document.
  """

  shape: tuple[int, int, int]
  rows: packing.Rows
  lengths: tuple[int, ...]

  @property
  def micro_batches_used(self) -> int:
    """Number of leading micro-batches that hold anything."""
    return -(-len(self.rows) // self.shape[1])

  def place(self, values: Sequence[np.ndarray]) -> np.ndarray:
    """Puts one per-token array of each document, `[T_i, ...]`, into `[A, R, S, ...]`; rest is 0."""
    for i, (value, length) in enumerate(zip(values, self.lengths, strict=True)):
      if len(value) != length:
        raise ValueError(f'document {i}: {len(value)} values for {length} tokens')
    micro, rows, row_len = self.shape
    placed = packing.place(values, self.rows, row_len, n_rows=micro * rows)
    return placed.reshape(micro, rows, *placed.shape[1:])

  def lift(self, placed: np.ndarray) -> list[np.ndarray]:
    """Inverse of `place`: the documents' parts of `[A, R, S, ...]`."""
    flat = placed.reshape(-1, *placed.shape[2:])
    parts = [flat[:0, 0]] * len(self.lengths)
    for number, documents in enumerate(self.rows):
      start = 0
      for document in documents:
        parts[document] = flat[number, start:start + self.lengths[document]]
        start += self.lengths[document]
    return parts


def plan(lengths: Sequence[int], row_len: int, rows_per_micro_batch: int,
         micro_batches: int) -> Layout:
  """Assigns documents to rows, first fit by decreasing length.

  Raises:
    ValueError: a document is longer than a row, or the rows do not suffice.
  """
  rows = packing.pack(lengths, row_len, decreasing=True)
  capacity = micro_batches * rows_per_micro_batch
  if len(rows) > capacity:
    raise ValueError(f'{len(rows)} rows are needed and the step has {capacity}')
  return Layout((micro_batches, rows_per_micro_batch, row_len), rows, tuple(lengths))


def predicted(values: np.ndarray) -> np.ndarray:
  """Shifts a per-token array `[T, ...]` to the position that predicts it; the last becomes 0."""
  return np.concatenate([values[1:], np.zeros_like(values[:1])])


def build_batch(samples: Sequence[Sample], advantages: Sequence[float], layout: Layout,
                denominator: float, routing_shape: tuple[int, int]) -> Batch:
  """Returns the `[A, R, S]` batch of one optimizer step.

  Args:
    samples: the rows that train, N of them; none gives a batch without a trainable token.
    advantages: advantage of each row, N values.
    layout: where they go, from `plan` on their lengths.
    denominator: the one divisor of the step's loss.
    routing_shape: (MoE layers, experts per token) of the trainer's model.

  Raises:
    ValueError: a routing record is not uint16 or has another number of layers or experts than the
      model (dense first layers must not be counted).
  """
  for sample in samples:
    routing = sample.rollout.routing
    if routing.dtype != np.uint16 or routing.shape[1:] != tuple(routing_shape):
      raise ValueError(f'rollout {sample.logical_id}: routing {routing.dtype}{routing.shape[1:]} '
                       f'for a model of uint16{tuple(routing_shape)}')
  if not samples:
    return _empty(layout.shape, denominator, routing_shape)
  micro, rows, row_len = layout.shape
  segment_ids, positions = packing.layout(layout.lengths, layout.rows, row_len, micro * rows)
  rollouts = [s.rollout for s in samples]
  weights = [predicted(r.sampled.astype(np.float32)) for r in rollouts]
  return Batch(
      tokens=layout.place([r.tokens for r in rollouts]),
      targets=layout.place([predicted(r.tokens) for r in rollouts]),
      weights=layout.place(weights),
      positions=positions.reshape(layout.shape),
      segment_ids=segment_ids.reshape(layout.shape),
      denominator=np.float32(denominator),
      advantages=layout.place([w * np.float32(a)
                               for w, a in zip(weights, advantages, strict=True)]),
      sampler_logprobs=layout.place([predicted(r.logprobs) for r in rollouts]),
      routing=layout.place([r.routing for r in rollouts]),
      routing_mask=layout.place([r.routing_mask for r in rollouts]))


def _empty(shape: tuple[int, int, int], denominator: float,
           routing_shape: tuple[int, int]) -> Batch:
  ints, floats = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
  return Batch(tokens=ints, targets=ints, weights=floats, positions=ints, segment_ids=ints,
               denominator=np.float32(denominator), advantages=floats, sampler_logprobs=floats,
               routing=np.zeros((*shape, *routing_shape), np.uint16),
               routing_mask=np.zeros(shape, bool))
