"""What the scheduler asks of an engine in one tick, and what it gets back.

Anything with this interface can stand behind the scheduler: the JAX engine, or a fake in tests.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int32, UInt16


@dataclasses.dataclass(frozen=True)
class SlotRequest:
  """One slot's part of a tick: append `feed`, then sample up to `limit` tokens.

  Attributes:
    slot: which cache row.
    feed: ids to append before sampling; empty when the slot is in the middle of a turn.
    limit: upper bound of sampled tokens, at least 1.  The engine may stop earlier (its decode
      chunk); the scheduler then asks again with an empty `feed`.
    session_id: given with a session's first request only; the slot starts from an empty context
      and samples from this session's random stream.
  """

  slot: int
  feed: Sequence[int]
  limit: int
  session_id: str | None = None


@dataclasses.dataclass(frozen=True)
class SlotOutput:
  """One slot's result of a tick; n sampled tokens, f tokens fed to the model.

  Attributes:
    slot: which cache row.
    tokens: sampled ids, the last of which is the end id when `ended`.
    logprobs: of the sampled ids, full softmax at the sampling temperature.
    routing: expert ids of the tokens fed in this tick, in sequence order.  The engine feeds a
      token only when it needs its successor, so after every tick exactly the last token of the
      slot's sequence has no record yet.
    ended: the last sampled token is the end id.
  """

  slot: int
  tokens: Int32[np.ndarray, 'n']
  logprobs: Float32[np.ndarray, 'n']
  routing: UInt16[np.ndarray, 'f L K']
  ended: bool


class TickEngine(Protocol):
  """A fixed number of slots that generate side by side.

  Attributes:
    slots: number of slots.
    max_len: most tokens a slot's sequence may have, prompt included.
    temperature: of the sampling; 0 is greedy.
    routing_shape: (MoE layers, experts per token).
  """

  slots: int
  max_len: int
  temperature: float
  routing_shape: tuple[int, int]

  def tick(self, params: Any, requests: Sequence[SlotRequest]) -> list[SlotOutput]:
    """Runs one tick with the given weights; outputs come in the order of the requests."""
