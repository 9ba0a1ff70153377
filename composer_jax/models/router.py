"""Which experts a token visits, and with what weight (DeepSeek-V3, arXiv 2412.19437, eq. 12-16).

Everything is float32: near ties between experts decide which ones run, and a sampler that rounds
differently from the trainer would choose others.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import config as config_lib
from composer_jax.models import layers
from composer_jax.sharding import rules

# Up to this many experts a rank is counted with E comparisons per expert instead of sorting, which
# XLA:CPU does slowly; ties go to the lower index in both.
_RANK_BY_COUNTING = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Expert choices recorded by the sampler, to be replayed (Composer 2 report, section 6.2).

  Attributes:
    indices: recorded expert ids of every MoE layer of the trunk, uint16 or wider.
    mask: where a record exists; elsewhere the router chooses for itself.
    slack: the plausibility filter. A recorded expert is kept if its selection score (sigmoid plus
      selection bias) is at least the router's own K-th best minus `slack`; the places of dropped
      ones go to the router's best candidates. +inf replays everything, 0 is the router's own
      choice. The report names no formula: this one is our choice.
  """

  indices: Int[Array, 'L B S K']
  mask: Bool[Array, 'B S']
  slack: Float[Array, ''] | float = float('inf')


LOSSES = ('balance', 'z')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
  """What the routers' losses are averaged over: the documents of a batch.

  DeepSeek-V3 says "sequence-wise"; with several documents packed into a row, each of them is a
  sequence of its own (our choice), and so is each piece of a document that packing has cut.

  Attributes:
    number: row and document of each token, as one index below `count`.
    weights: weight of the token's document; those of all documents together are expected to sum to
      1, so that a loss does not depend on how a batch is divided.
    count: static upper bound of the documents.
  """

  number: Int[Array, 'T']
  weights: Float[Array, 'T']
  count: int = dataclasses.field(metadata={'static': True})

  @classmethod
  def of(cls, segment_ids: Int[Array, 'B S'], weights: Float[Array, 'B S']) -> 'Sequences':
    """Returns the documents of B packed rows, numbered 1 to at most S in each."""
    rows, places = segment_ids.shape[0], segment_ids.shape[1] + 1
    number = jnp.arange(rows, dtype=jnp.int32)[:, None] * places + segment_ids
    return cls(number.reshape(-1), weights.reshape(-1), rows * places)

  def sums(self, values: Float[Array, 'T *rest']) -> Float[Array, 'T *rest']:
    """Returns for each token the sum over its document."""
    total = jax.ops.segment_sum(values, self.number, num_segments=self.count)
    return jnp.take(total, self.number, axis=0, mode='clip')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterOut:
  """What the routers did.

  Attributes:
    indices: chosen experts `[L_moe, B, S, K]` int32, best first (replayed ones by id).
    counts: tokens each expert received, int32 `[L_moe, E]`, padding excluded; one row more, the
      last, when the MTP layer ran.
    replaced: recorded experts that the plausibility filter dropped, int32 `[L_moe]`.
    balance: sequence-wise balance loss of each layer of `counts`, None unless asked for.
    z: z-loss of each layer of `counts`, None unless asked for.
  """

  indices: Int[Array, 'L B S K']
  counts: Int[Array, 'L E']
  replaced: Int[Array, 'L']
  balance: Float[Array, 'L'] | None = None
  z: Float[Array, 'L'] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
  """One layer's routing of T tokens.

  Attributes:
    indices: chosen experts.
    weights: gate weights, 0 for experts not chosen and for padding.
    counts: tokens per expert.
    replaced: recorded experts that were dropped.
    losses: the values named in `LOSSES`, None unless asked for.
  """

  indices: Int[Array, 'T K']
  weights: Float[Array, 'T E']
  counts: Int[Array, 'E']
  replaced: Int[Array, '']
  losses: dict[str, Float[Array, '']] | None = None


class Router(nnx.Module):
  """Sigmoid gate with a selection bias that decides who is chosen but not with what weight."""

  def __init__(self, config: config_lib.ModelConfig):
    self.config = config
    self.weight = layers.matrix(config, (config.hidden_size, config.n_routed_experts),
                                ('embed', None))
    self.selection_bias = layers.SelectionBias(
        jnp.zeros((config.n_routed_experts,), jnp.float32), axes=rules.Axes((None,)), start=0.0)

  def __call__(self, x: Float[Array, 'T D'], valid: Bool[Array, 'T'],
               recorded: Int[Array, 'T K'] | None = None, mask: Bool[Array, 'T'] | None = None,
               slack: Float[Array, ''] | float = float('inf'),
               sequences: Sequences | None = None) -> Choice:
    """Routes T tokens.

    Args:
      x: normalised residual stream.
      valid: False for padding, which gets no expert and is not counted.
      recorded: expert ids to replay, with `mask` and `slack` as in `Routing`.
      mask: which tokens have a record.
      slack: plausibility slack.
      sequences: also return the losses, over these documents.

    Returns:
      The choice; gradients flow through its weights into `weight`, never into the bias.
    """
    c = self.config
    logits = jnp.matmul(x.astype(jnp.float32), self.weight[...].astype(jnp.float32),
                        precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    ranking = jax.lax.stop_gradient(scores) + jax.lax.stop_gradient(self.selection_bias[...])
    ranking = _limit_groups(c, ranking)
    chosen, indices = _top_k(ranking, c.num_experts_per_tok)
    replaced = jnp.zeros((), jnp.int32)
    if recorded is not None:
      chosen, indices, dropped = _replay(ranking, chosen, indices, recorded, mask & valid, slack)
      replaced = dropped.sum(dtype=jnp.int32)
    chosen &= valid[:, None]
    weights = jnp.where(chosen, scores, 0.0)
    if c.norm_topk_prob:
      weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    losses = None
    if sequences is not None:
      losses = _losses(c, logits, scores, chosen, valid, sequences)
    return Choice(indices, weights * c.routed_scaling_factor, chosen.sum(axis=0, dtype=jnp.int32),
                  replaced, losses)


def _losses(config: config_lib.ModelConfig, logits: Float[Array, 'T E'],
            scores: Float[Array, 'T E'], chosen: Bool[Array, 'T E'], valid: Bool[Array, 'T'],
            sequences: Sequences) -> dict[str, Float[Array, '']]:
  """Returns the sequence-wise balance loss and the z-loss, weighted means over documents.

  Balance (DeepSeek-V3, arXiv 2412.19437, eq. 17-20): `sum_i f_i P_i` of a document of T tokens,
  f_i = E / (K T) * tokens that chose expert i, P_i = mean of s_i / sum_j s_j. Gradients pass
  through P only. 1 is perfect balance. z (ST-MoE, arXiv 2202.08906, eq. 5): mean of
  (log sum_i exp(logit_i))^2.
  """
  logits = jnp.where(valid[:, None], logits, 0.0)  # before the arithmetic: padding may hold NaN
  scores = jnp.where(valid[:, None], scores, 1.0)
  length = jnp.maximum(sequences.sums(valid.astype(jnp.float32)), 1)
  share = jnp.where(valid, sequences.weights / length, 0.0)
  loads = jax.lax.stop_gradient(sequences.sums(chosen.astype(jnp.float32)))
  loads *= config.n_routed_experts / config.num_experts_per_tok / length[:, None]
  balance = (loads * scores).sum(axis=-1) / scores.sum(axis=-1)
  z = jax.nn.logsumexp(logits, axis=-1) ** 2
  return {'balance': jnp.sum(share * balance), 'z': jnp.sum(share * z)}


def _limit_groups(config: config_lib.ModelConfig, ranking: Float[Array, 'T E']
                  ) -> Float[Array, 'T E']:
  """Removes (to -inf) experts outside the token's best groups, by the sum of a group's best two."""
  if config.topk_group == config.n_group:
    return ranking
  grouped = ranking.reshape(ranking.shape[0], config.n_group, -1)
  best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
  allowed, _ = _top_k(best, config.topk_group)
  return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(ranking.shape)


def _top_k(values: Float[Array, 'T E'], k: int) -> tuple[Bool[Array, 'T E'], Int[Array, 'T K']]:
  """Returns the k largest as a mask and as indices, best first, ties to the lower index."""
  experts = values.shape[-1]
  column = jnp.arange(experts, dtype=jnp.int32)
  if experts > _RANK_BY_COUNTING:
    indices = jax.lax.top_k(values, k)[1]
    return (indices[:, :, None] == column).any(axis=1), indices
  mine, other = values[:, :, None], values[:, None, :]
  ahead = (other > mine) | ((other == mine) & (column[None, :] < column[:, None]))
  rank = ahead.sum(axis=-1, dtype=jnp.int32)
  place = rank[:, None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
  return rank < k, jnp.where(place, column, 0).sum(axis=-1)


def _replay(ranking, chosen, indices, recorded, mask, slack):
  """Merges the record into the router's choice; returns (chosen, indices, dropped per token)."""
  experts, k = ranking.shape[-1], indices.shape[-1]
  column = jnp.arange(experts, dtype=jnp.int32)
  record = (recorded.astype(jnp.int32)[:, :, None] == column).any(axis=1)
  worst_chosen = jnp.min(jnp.where(chosen, ranking, jnp.inf), axis=-1, keepdims=True)
  keep = record & (ranking >= worst_chosen - slack)
  merged, merged_indices = _top_k(jnp.where(keep, jnp.inf, ranking), k)
  dropped = jnp.where(mask, k - keep.sum(axis=-1, dtype=jnp.int32), 0)
  return (jnp.where(mask[:, None], merged, chosen),
          jnp.where(mask[:, None], merged_indices, indices), dropped)
