"""The supervised objective: next-token cross entropy, MTP self-distillation, z-loss.

An objective is a function `(params, batch) -> (loss, metrics)` of one micro-batch `[R, S]`, where
the loss is a sum over tokens divided by the batch's one global denominator, so that the losses (and
gradients) of the micro-batches of a step simply add up. Metrics follow the same rule: each is the
micro-batch's share of the step's figure, except that a name that ends in `_max` is combined by
maximum (of figures >= 0), and `counts` holds the router's tokens per expert `[L, E]`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from composer_jax.batch import Batch
from composer_jax.config import check_least
from composer_jax.kernels.linear_cross_entropy.api import linear_cross_entropy
from composer_jax.models import transformer
from composer_jax.models.config import ModelConfig
from composer_jax.models.router import Sequences

LossFn = Callable[[Any, Batch], tuple[Float[Array, ''], dict[str, Array]]]


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """What is added to the cross entropy. Weights are not in the report; ours.

  Attributes:
    mtp_weight: weight of the MTP self-distillation loss; 0 leaves the MTP layer out altogether.
    z_weight: weight of the squared log-partition (PaLM, arXiv 2204.02311, section 5); 0 is off.
    router_balance_weight: weight of the sequence-wise balance loss of the routers (DeepSeek-V3,
      arXiv 2412.19437, eq. 17, which uses 1e-4); 0 is off.
    router_z_weight: weight of the routers' z-loss (ST-MoE, arXiv 2202.08906, which uses 1e-3); 0 is
      off.
    head_chunk: logits that are held at once, in sequence positions (each chunk's are computed again
      in the backward pass; without MTP a chunk has all positions and some of the classes); 0 holds
      all. `[B, S, V]` in float32 is 172 GB for Kimi K2.5 at 262144.
  """

  mtp_weight: float = 0.0
  z_weight: float = 0.0
  head_chunk: int = 0
  router_balance_weight: float = 0.0
  router_z_weight: float = 0.0

  def __post_init__(self):
    check_least(self, 0, 'mtp_weight', 'z_weight', 'head_chunk', 'router_balance_weight',
                'router_z_weight')


def make_lm_loss(model_config: ModelConfig, config: LossConfig) -> LossFn:
  """Returns the objective of continued pretraining and SFT.

  Its metrics: `cross_entropy` in nats per unit of weight; with MTP, `mtp_kl`, the divergence of the
  MTP layer from the main head (same denominator, so slightly less than a mean); `z` if switched on;
  `router_balance` and `router_z`, summed over MoE layers (with MTP its layer too) and averaged over
  documents by their share of the batch's trainable weight, if either is switched on (a document of
  one token has no position in the MTP layer and adds nothing there).

  Raises:
    ValueError: MTP loss for a model without an MTP layer.
  """
  if config.mtp_weight and not model_config.num_nextn_predict_layers:
    raise ValueError('mtp_weight needs a model with num_nextn_predict_layers = 1')

  def loss_fn(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
    with_mtp, documents = config.mtp_weight > 0, None
    if config.router_balance_weight or config.router_z_weight:
      documents = document_weights(batch)
    out = transformer.forward(model_config, params, batch.tokens, positions=batch.positions,
                              segment_ids=batch.segment_ids, document_weights=documents,
                              output='hidden', mtp=with_mtp)
    arrays = {'targets': batch.targets, 'mask': batch.weights > 0}
    ahead = {'hidden': out.hidden}
    if with_mtp:
      arrays |= {'mtp_hidden': out.mtp_hidden}
      weights = mtp_weights(batch.weights, batch.segment_ids)
      arrays |= {'mtp_mask': weights > 0}
    if config.head_chunk and not with_mtp:
      costs = _fused_costs(model_config, params, ahead['hidden'], arrays, config.head_chunk)
    else:
      costs = over_chunks(lambda a: _token_costs(model_config, params, a), arrays, ahead,
                          config.head_chunk)
    metrics = {'cross_entropy': weighted_mean(costs['nll'], batch.weights, batch.denominator)}
    loss = metrics['cross_entropy']
    if config.z_weight:
      metrics['z'] = weighted_mean(costs['lse'] ** 2, batch.weights, batch.denominator)
      loss += config.z_weight * metrics['z']
    if with_mtp:
      metrics['mtp_kl'] = weighted_mean(costs['kl'], weights, batch.denominator)
      loss += config.mtp_weight * metrics['mtp_kl']
    if documents is not None:
      metrics['router_balance'], metrics['router_z'] = out.router.balance.sum(), out.router.z.sum()
      loss += (config.router_balance_weight * metrics['router_balance']
               + config.router_z_weight * metrics['router_z'])
    return loss, metrics | {'counts': out.router.counts}

  return loss_fn


def _token_costs(model_config: ModelConfig, params: Any, a: dict[str, Array]) -> dict[str, Array]:
  """Returns the per-token terms of one chunk of C positions; `hidden` has the C+1st as well."""
  logits = transformer.head(model_config, params, a['hidden'])
  nll, lse = cross_entropy(logits[:, :-1], a['targets'], a['mask'])
  costs = {'nll': nll, 'lse': lse}
  if 'mtp_hidden' in a:
    student = transformer.head(model_config, params, a['mtp_hidden'])
    costs['kl'] = self_distillation(student, logits[:, 1:], a['mtp_mask'])
  return costs


def _fused_costs(model_config: ModelConfig, params: Any, hidden: Float[Array, 'R S D'],
                 arrays: dict[str, Array], chunk: int) -> dict[str, Array]:
  """The terms of the main head, with as many logits at once as a chunk of positions has."""
  weight = transformer.head_weight(model_config, params)
  nll, lse = linear_cross_entropy(
      hidden.reshape(-1, hidden.shape[-1]), weight, arrays['targets'].reshape(-1),
      arrays['mask'].reshape(-1), formats=model_config.precision.head,
      chunk_bytes=4 * hidden.shape[0] * chunk * weight.shape[1])
  return {'nll': nll.reshape(hidden.shape[:2]), 'lse': lse.reshape(hidden.shape[:2])}


def cross_entropy(
    logits: Float[Array, '*rows V'], targets: Int[Array, '*rows'], mask: Bool[Array, '*rows']
) -> tuple[Float[Array, '*rows'], Float[Array, '*rows']]:
  """Returns -log softmax(logits)[target] and log sum exp(logits), in nats, float32.

  Where the mask is False both are constants and no gradient flows: logits are replaced before the
  operation, so that NaN there can reach neither value nor gradient.
  """
  logits = jnp.where(mask[..., None], logits, 0.0).astype(jnp.float32)
  lse = jax.nn.logsumexp(logits, axis=-1)
  # a comparison and a sum, whose gradient is a select: on CPU a gather's is a slow scatter
  hit = jnp.arange(logits.shape[-1]) == targets[..., None]
  return lse - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1), lse


def self_distillation(
    student: Float[Array, '*rows V'], teacher: Float[Array, '*rows V'], mask: Bool[Array, '*rows']
) -> Float[Array, '*rows']:
  """Returns KL(teacher || student) per token in nats; no gradient reaches the teacher.

  Composer 2 report, section 3.1: the MTP layers match the exact distribution of the main head at
  each position instead of the ground-truth token. The direction of the divergence is our choice;
  its gradient is that of the cross entropy of the full distribution.
  """
  teacher = jax.lax.stop_gradient(jnp.where(mask[..., None], teacher, 0.0)).astype(jnp.float32)
  student = jnp.where(mask[..., None], student, 0.0).astype(jnp.float32)
  teacher = jax.nn.log_softmax(teacher, axis=-1)
  return jnp.sum(jnp.exp(teacher) * (teacher - jax.nn.log_softmax(student, axis=-1)), axis=-1)


def mtp_weights(
    weights: Float[Array, 'R S'], segment_ids: Int[Array, 'R S']
) -> Float[Array, 'R S']:
  """Returns the weight of the MTP prediction made at each position.

  The MTP layer at t reads token t+1 and predicts t+2, as the main head does at t+1: it gets that
  position's weight if t+1 lies in the same document. A document's last position has no weight for
  the main head, so its last two have none here.
  """
  same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
  return jnp.pad(jnp.where(same, weights[:, 1:], 0.0), ((0, 0), (0, 1)))


def document_weights(batch: Batch) -> Float[Array, 'R S']:
  """Returns for each token its document's trainable weight over the batch's denominator.

  Those of all documents of a step sum to 1, however its rows are divided into micro-batches.
  """
  documents = Sequences.of(batch.segment_ids, batch.weights)
  weights = documents.sums(documents.weights).reshape(batch.weights.shape)
  return weights / jnp.where(batch.denominator == 0, 1.0, batch.denominator)


def weighted_mean(
    values: Float[Array, '*rows'], weights: Float[Array, '*rows'],
    denominator: Float[Array, ''] | float,
) -> Float[Array, '']:
  """Returns sum(weights * values) / denominator; values of weight 0 may be anything, even NaN.

  A denominator of 0 belongs to a batch without trainable tokens: the result is then 0.
  """
  total = jnp.sum(weights * jnp.where(weights > 0, values, 0.0))
  return total / jnp.where(denominator == 0, 1.0, denominator)


def over_chunks(
    fn: Callable[[dict[str, Array]], Any], arrays: dict[str, Array], ahead: dict[str, Array],
    chunk: int,
) -> Any:
  """Applies a per-token function to pieces of the sequence, recomputing it in the backward pass.

  Args:
    fn: takes the arrays of C consecutive positions, those of `ahead` with one more position (zeros
      after the last), returns a tree of arrays `[B, C, ...]`.
    arrays: `[B, S, ...]`.
    ahead: `[B, S, ...]`.
    chunk: C; 0 takes the whole sequence at once.

  Returns:
    What `fn` returns for the whole sequence.

  Raises:
    ValueError: C does not divide S.
  """
  length = next(iter(arrays.values())).shape[1]
  chunk = min(chunk, length) or length
  if length % chunk:
    raise ValueError(f'head_chunk {chunk} does not divide the sequence length {length}')
  padded = {k: jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2)) for k, x in ahead.items()}
  if chunk == length:
    return fn(arrays | padded)

  def split(x: Array) -> Array:
    return jnp.moveaxis(x.reshape(x.shape[0], length // chunk, chunk, *x.shape[2:]), 1, 0)

  pieces = {k: split(x) for k, x in arrays.items()}
  for name, x in padded.items():
    following = jnp.moveaxis(x[:, chunk::chunk], 1, 0)[:, :, None]
    pieces[name] = jnp.concatenate([split(x[:, :-1]), following], axis=2)
  _, out = jax.lax.scan(lambda carry, piece: (carry, jax.checkpoint(fn)(piece)), None, pieces)
  return jax.tree.map(
      lambda y: jnp.moveaxis(y, 0, 1).reshape(y.shape[1], length, *y.shape[3:]), out)
