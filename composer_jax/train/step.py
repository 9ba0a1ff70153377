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
from composer_jax.train.losses import LossFn
from composer_jax.train.state import TrainState

StepFn = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def make_train_step(loss_fn: LossFn, tx: optax.GradientTransformation, *,
                    bias_rate: float = 0.0) -> StepFn:
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

  Returns:
    The step. Its metrics are the objective's, `counts` included, and `loss`, `grad_norm` (before
    clipping), `tokens` (trainable), `skipped` (1: no trainable token), `bad_micro` (micro-batches
    dropped), `bad_steps` (updates lost in a row), `load_max` (load of the fullest expert over the
    mean), `step` (updates applied so far).
  """
  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    weight = jnp.sum(batch.weights, dtype=jnp.float32)
    total = _accumulate(loss_fn, state, batch, any_token=weight > 0)
    # exactly 1 unless micro-batches were dropped
    scale = weight / jnp.maximum(weight - total['bad_weight'], jnp.finfo(jnp.float32).tiny)
    grads = jax.tree.map(lambda g: g * scale, total['grads'])
    norm = optax.global_norm(grads)
    good = (total['used'] > 0) & jnp.isfinite(norm)
    bad = ~good & (weight > 0)
    state = jax.lax.cond(good, _apply(tx, bias_rate), _keep, state, grads,
                         total['metrics'].get('counts'), bad)
    metrics = {k: x * scale.astype(x.dtype) if _is_share(k) else x
               for k, x in total['metrics'].items()}
    if 'counts' in metrics:
      metrics['load_max'] = _load_max(metrics['counts'])
    metrics |= {
        'loss': total['loss'] * scale, 'grad_norm': norm, 'tokens': jnp.sum(batch.weights > 0),
        'skipped': (weight <= 0).astype(jnp.int32), 'bad_micro': total['bad'],
        'bad_steps': state.bad_steps, 'step': state.step}
    return state, metrics

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
    fine = jnp.isfinite(loss) & jnp.isfinite(optax.global_norm(grads))
    metrics = {k: jnp.where(fine, x, jnp.zeros_like(x)) for k, x in metrics.items()}
    return {
        'loss': total['loss'] + jnp.where(fine, loss, 0.0),
        'grads': jax.tree.map(lambda t, g: t + jnp.where(fine, g, 0.0), total['grads'], grads),
        'metrics': {k: (jnp.maximum if k.endswith('_max') else jnp.add)(total['metrics'][k], x)
                    for k, x in metrics.items()},
        'bad_weight': total['bad_weight'] + jnp.where(fine, 0.0, weight),
        'bad': total['bad'] + ~fine, 'used': total['used'] + fine}

  shapes = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
  (loss, metrics), grads, _ = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  start = {'loss': loss, 'grads': grads, 'metrics': metrics, 'bad_weight': jnp.float32(0),
           'bad': jnp.int32(0), 'used': jnp.int32(0)}
  return jax.lax.fori_loop(0, count, body, start)


def _apply(tx: optax.GradientTransformation, bias_rate: float) -> Callable[..., TrainState]:
  """Returns the branch that updates."""
  def apply(state: TrainState, grads: Any, counts: Array | None, bad: Array) -> TrainState:
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    frozen = state.frozen
    if bias_rate:
      frozen = models.update_selection_bias(frozen, counts, bias_rate)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), frozen,
                      opt_state, jnp.zeros_like(state.bad_steps))
  return apply


def _keep(state: TrainState, grads: Any, counts: Array | None, bad: Array) -> TrainState:
  """The branch that leaves everything as it is, but for the count of lost updates."""
  return state.replace(bad_steps=state.bad_steps + bad)


def _is_share(name: str) -> bool:
  return name != 'counts' and not name.endswith('_max')


def _load_max(counts: Float[Array, 'L E']) -> Float[Array, '']:
  """Returns the fullest expert's tokens over the mean, of the worst layer; 1 is perfect balance."""
  mean = jnp.maximum(jnp.mean(counts.astype(jnp.float32), axis=-1), 1e-6)
  return jnp.max(jnp.max(counts, axis=-1) / mean)
