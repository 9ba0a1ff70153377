"""What a finished session leaves behind for training and evaluation. No JAX here."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt16


@dataclasses.dataclass(frozen=True)
class SessionFailure:
  """An exception raised by a session; the other sessions go on.

  Attributes:
    where: the method that raised, e.g. `poll`.
    kind: class name of the exception, e.g. `InfrastructureError`.
    message: its text.
  """

  where: str
  kind: str
  message: str


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The append-only token record of one session; T tokens, L MoE layers, K experts per token.

  The last token of a rollout has been sampled (or appended) but never fed to the model, so it has
  no routing record: `routing_mask[-1]` is False and `routing[-1]` is 0.  All other positions,
  prompt and tool results included, have one.  In training this costs nothing: position T-1
  predicts no token of the rollout.  (A session aborted or failed between `next_tokens` and the
  next tick leaves appended tokens that were never fed; they have no record either.)

  Attributes:
    session_id, group_id: copied from the session.
    tokens: every id in order: prompt, sampled turns, tool results.
    sampled: True where the policy sampled the token (the loss mask's only source).
    logprobs: log-probability of the sampled token under the full softmax at `temperature`
      (natural log, float32); 0 where not sampled.
    versions: version of the weights that sampled the token; -1 where not sampled.  Never
      decreasing over the sampled tokens.
    routing: expert ids each MoE layer chose when the token was fed (uint16: Kimi K2.5 has 384).
      Layer axis counts MoE layers only, in order.
    routing_mask: where `routing` holds a record.
    temperature: sampling temperature; 0 is greedy (evaluation only), and then `logprobs` are those
      of the untempered softmax.
    aborted: why the scheduler stopped the session (`AbortReason` value), None for a session that
      reported DONE by itself.
    failure: the exception when `aborted == 'error'`.
    turns: number of generated turns.
    started_s, finished_s: `time.monotonic` when the session took its slot and when it was done.
    waiting_s: seconds of that spent on tools and grading.
  """

  session_id: str
  group_id: str
  tokens: Int32[np.ndarray, 'T']
  sampled: Bool[np.ndarray, 'T']
  logprobs: Float32[np.ndarray, 'T']
  versions: Int32[np.ndarray, 'T']
  routing: UInt16[np.ndarray, 'T L K']
  routing_mask: Bool[np.ndarray, 'T']
  temperature: float = 1.0
  aborted: str | None = None
  failure: SessionFailure | None = None
  turns: int = 0
  started_s: float = 0.0
  finished_s: float = 0.0
  waiting_s: float = 0.0

  def __len__(self) -> int:
    return len(self.tokens)

  @property
  def num_sampled(self) -> int:
    """Number of tokens the policy sampled."""
    return int(self.sampled.sum())
