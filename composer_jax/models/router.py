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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterOut:
  """What the routers did.

  Attributes:
    indices: chosen experts `[L_moe, B, S, K]` int32, best first (replayed ones by id).
    counts: tokens each expert received, int32 `[L_moe, E]`, padding excluded; one row more, the
      last, when the MTP layer ran.
    replaced: recorded experts that the plausibility filter dropped, int32 `[L_moe]`.
  """

  indices: Int[Array, 'L B S K']
  counts: Int[Array, 'L E']
  replaced: Int[Array, 'L']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
  """One layer's routing of T tokens.

  Attributes:
    indices: chosen experts.
    weights: gate weights, 0 for experts not chosen and for padding.
    counts: tokens per expert.
    replaced: recorded experts that were dropped.
  """

  indices: Int[Array, 'T K']
  weights: Float[Array, 'T E']
  counts: Int[Array, 'E']
  replaced: Int[Array, '']


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
               slack: Float[Array, ''] | float = float('inf')) -> Choice:
    """Routes T tokens.

    Args:
      x: normalised residual stream.
      valid: False for padding, which gets no expert and is not counted.
      recorded: expert ids to replay, with `mask` and `slack` as in `Routing`.
      mask: which tokens have a record.
      slack: plausibility slack.

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
    return Choice(indices, weights * c.routed_scaling_factor, chosen.sum(axis=0, dtype=jnp.int32),
                  replaced)


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
