"""The one batch type that data, training and RL exchange."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed token rows, with everything a loss needs; leaves are NumPy or JAX arrays.

  Leading axes may be `[B, S]`, or `[A, R, S]` when a step accumulates A micro-batches of R rows.

  Attributes:
    tokens: input ids.
    targets: the id each position has to predict (0 where there is none).
    weights: loss weight of predicting `targets`; 0 at padding, at the last token of a document,
      and wherever the role mask says so.
    positions: position inside the document, restarting at 0 for each packed document.
    segment_ids: 1, 2, ... for the packed documents of a row, 0 for padding.
    denominator: the one global divisor of the summed loss; it travels with the batch so that no
      split into micro-batches or devices can change the gradient.
    advantages: RL only, advantage of the sampled token in `targets`.
    sampler_logprobs: RL only, log-probability the sampler gave to `targets`.
    routing: RL only, expert ids chosen by the sampler for `tokens`, `[..., L_moe, K]` after the
      sequence axis (uint16: Kimi K2.5 has 384 experts).
    routing_mask: RL only, where `routing` holds a record.
  """

  tokens: Int[Array, '*rows S']
  targets: Int[Array, '*rows S']
  weights: Float[Array, '*rows S']
  positions: Int[Array, '*rows S']
  segment_ids: Int[Array, '*rows S']
  denominator: Float[Array, ''] | float
  advantages: Float[Array, '*rows S'] | None = None
  sampler_logprobs: Float[Array, '*rows S'] | None = None
  routing: UInt16[Array, '*rows S L K'] | None = None
  routing_mask: Bool[Array, '*rows S'] | None = None

  def replace(self, **changes: Any) -> 'Batch':
    """Returns a copy with the given fields replaced."""
    return dataclasses.replace(self, **changes)
