"""Everything that a training step changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from composer_jax import models
from composer_jax.models.balance import Trainable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Parameters and optimizer state; the whole of it goes into a checkpoint.

  Attributes:
    step: optimizer updates applied.
    params: what gradients reach.
    frozen: what they do not: the routers' selection biases, moved by a rule of their own, and
      whatever this stage does not train.
    opt_state: the optimizer's moments and counters.
    bad_steps: updates dropped in a row because no finite gradient was left; 0 after a good one.
  """

  step: Int[Array, '']
  params: Any
  frozen: Any
  opt_state: Any
  bad_steps: Int[Array, '']

  def replace(self, **changes: Any) -> 'TrainState':
    """Returns a copy with the given fields replaced."""
    return dataclasses.replace(self, **changes)

  def full_params(self) -> dict[str, Any]:
    """Returns the parameters with the selection biases, as the model takes them."""
    return models.combine(self.params, self.frozen)


def create(params: dict[str, Any], tx: optax.GradientTransformation,
           trainable: Trainable = 'all') -> TrainState:
  """Returns the state before the first step.

  Args:
    params: full parameters of the model. They are copied: steps donate their state.
    tx: the optimizer.
    trainable: which part of the parameters it trains, see `models.partition`.
  """
  chosen, frozen = models.partition(jax.tree.map(jnp.array, params), trainable)
  state = TrainState(jnp.zeros((), jnp.int32), chosen, frozen, tx.init(chosen),
                     jnp.zeros((), jnp.int32))
  # Restored parameters are committed to a device and fresh arrays are not; a mixture would make the
  # second step, and each resumed one, another program to compile.
  return jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
