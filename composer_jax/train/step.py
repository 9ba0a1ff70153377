"""One optimizer step as a pure function of state and batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from composer_jax import models
from composer_jax.batch import Batch
from composer_jax.models.balance import Trainable
from composer_jax.train.losses import LossFn
from composer_jax.train.state import TrainState

StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def make_train_step(loss_fn: LossFn, tx: optax.GradientTransformation, *,
                    bias_rate: float = 0.0, trainable: Trainable = 'all') -> StepFn:
  """Returns the jitted step `(state, batch) -> (state, metrics)`; the state is donated.

  The batch has leaves `[A, R, S]` (see `micro_batches`): A micro-batches whose gradients are summed
  in float32. Micro-batches of padding only are not computed: their number may differ from batch to
  batch without a new compilation.

  - No trainable token in the whole batch: the state comes back bit-identical.
  - A micro-batch whose loss or gradient is not finite is dropped, its tokens leave the divisor.
  - None left: the update is skipped and `state.bad_steps` grows.
  - Selection biases move once, by the expert counts of all micro-batches (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2).

  Args:
    loss_fn: the objective, see `losses`.
    tx: the optimizer; it clips.
    bias_rate: step of the selection-bias rule; 0 leaves the biases alone.
    trainable: what the state was made with, see `state.create`.

  Returns:
    The step. Its metrics are the objective's, `counts` included, and `loss`, `grad_norm` (before
    clipping), `tokens` (trainable), `skipped` (1: no trainable token), `bad_micro` (micro-batches
    dropped), `bad_steps` (updates lost in a row), `load_max` (load of the fullest expert over the
    mean), `step` (updates applied so far).
  """
  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    weight = jnp.sum(batch.weights, dtype=jnp.float32)
    total = _accumulate(loss_fn, state, batch, any_token=weight > 0)
    scale = _rest_scale(weight, total['bad_weight']) if len(batch.tokens) > 1 else 1.0
    grads = jax.tree.map(lambda g: g * scale, total['grads'])
    norm = optax.tree.norm(grads)
    good = (total['used'] > 0) & jnp.isfinite(norm)
    bad = ~good & (weight > 0)
    counts = total['metrics'].get('counts')
    after = _apply(tx, bias_rate, trainable, state, grads, counts)
    # selects melt into the update, a branch would be a second copy of the state
    after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, state)
    after = after.replace(bad_steps=jnp.where(good, 0, state.bad_steps + bad))
    metrics = {k: x * scale if _is_share(k) else x for k, x in total['metrics'].items()}
    if counts is not None:
      metrics['load_max'] = _load_max(counts)
    metrics |= {
        'loss': total['loss'] * scale, 'grad_norm': jnp.where(weight > 0, norm, 0.0),
        'tokens': jnp.sum(batch.weights > 0), 'skipped': (weight <= 0).astype(jnp.int32),
        'bad_micro': total['bad'], 'bad_steps': after.bad_steps, 'step': after.step}
    return after, metrics

  return jax.jit(step, donate_argnums=0)


def micro_batches(batch: Batch, accumulate: int = 1) -> Batch:
  """Returns `[B, S]` rows as `[A, B / A, S]` micro-batches, with the denominator as float32.

  Raises:
    ValueError: A does not divide B.
  """
  rows = len(batch.tokens)
  if rows % accumulate:
    raise ValueError(f'{rows} rows do not divide into {accumulate} micro-batches')
  denominator = np.float32(batch.denominator)
  split = jax.tree.map(lambda x: x.reshape(accumulate, rows // accumulate, *x.shape[1:]),
                       batch.replace(denominator=None))
  return split.replace(denominator=denominator)


def _accumulate(loss_fn: LossFn, state: TrainState, batch: Batch,
                any_token: Bool[Array, '']) -> dict[str, Any]:
  """Sums loss, gradients and metrics over the micro-batches that hold tokens."""
  rows = batch.replace(denominator=None)
  filled = jnp.any(batch.segment_ids > 0, axis=(1, 2))
  order = jnp.argsort(~filled, stable=True)
  count = jnp.where(any_token, jnp.sum(filled), 0)

  def one(index: Array) -> tuple[Any, Any, Float[Array, '']]:
    micro = jax.tree.map(lambda x: x[index], rows).replace(denominator=batch.denominator)

    def objective(params: Any) -> tuple[Array, dict[str, Array]]:
      return loss_fn(models.combine(params, state.frozen), micro)

    (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    return (loss, metrics), grads, jnp.sum(micro.weights, dtype=jnp.float32)

  def body(i: Array, total: dict[str, Any]) -> dict[str, Any]:
    (loss, metrics), grads, weight = one(order[i])
    fine = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
    metrics = {k: jnp.where(fine, x, jnp.zeros_like(x)) for k, x in metrics.items()}
    return {
        'loss': total['loss'] + jnp.where(fine, loss, 0.0),
        'grads': jax.tree.map(lambda t, g: t + jnp.where(fine, g, 0.0), total['grads'], grads),
        'metrics': {k: (jnp.maximum if k.endswith('_max') else jnp.add)(total['metrics'][k], x)
                    for k, x in metrics.items()},
        'bad_weight': total['bad_weight'] + jnp.where(fine, 0.0, weight),
        'bad': total['bad'] + ~fine, 'used': total['used'] + fine}

  if len(batch.tokens) == 1:  # half the work for the compiler
    return _alone(*one(jnp.int32(0)), count)
  shapes = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
  (loss, metrics), grads, _ = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  start = {'loss': loss, 'grads': grads, 'metrics': metrics, 'bad_weight': jnp.float32(0),
           'bad': jnp.int32(0), 'used': jnp.int32(0)}
  return jax.lax.fori_loop(0, count, body, start)


def _alone(values: Any, grads: Any, unused_weight: Array, count: Array) -> dict[str, Any]:
  """Returns the sums of a step with a single micro-batch; the caller drops them if it is bad."""
  loss, metrics = values
  fine = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
  used = fine & (count > 0)
  metrics = {k: jnp.where(used, x, jnp.zeros_like(x)) for k, x in metrics.items()}
  return {'loss': jnp.where(used, loss, 0.0), 'grads': grads, 'metrics': metrics,
          'bad': (~fine & (count > 0)).astype(jnp.int32),
          'used': used.astype(jnp.int32)}


def _apply(tx: optax.GradientTransformation, bias_rate: float, trainable: Trainable,
           state: TrainState, grads: Any, counts: Array | None) -> TrainState:
  """Returns the state after the update."""
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  frozen = state.frozen
  if bias_rate:
    frozen = models.update_selection_bias(frozen, counts, bias_rate, trainable)
  return TrainState(state.step + 1, optax.apply_updates(state.params, updates), frozen, opt_state,
                    state.bad_steps)


def _rest_scale(weight: Array, bad_weight: Array) -> Array:
  """Returns what turns a share of all tokens into one of the good ones; exactly 1 if all are."""
  return weight / jnp.maximum(weight - bad_weight, jnp.finfo(jnp.float32).tiny)


def _is_share(name: str) -> bool:
  return name != 'counts' and not name.endswith('_max')


def _load_max(counts: Float[Array, 'L E']) -> Float[Array, '']:
  """Returns the fullest expert's tokens over the mean, of the worst layer; 1 is perfect balance."""
  mean = jnp.maximum(jnp.mean(counts.astype(jnp.float32), axis=-1), 1e-6)
  return jnp.max(jnp.max(counts, axis=-1) / mean)
