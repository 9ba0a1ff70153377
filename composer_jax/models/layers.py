"""Parameter declaration shared by all modules, RMSNorm, linear maps and SwiGLU.

Modules are Flax NNX classes that only declare parameters and wire sub-modules. `initial`, `bind`
and `axes` are the bridge to the functional outside: parameters live in nested dicts of arrays, and
a module exists only while a function of `models` is being traced.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from composer_jax.models import config as config_lib
from composer_jax.models import precision
from composer_jax.sharding import rules


class SelectionBias(nnx.Variable):
  """A variable that the optimizer never sees (updated by `balance.update_selection_bias`)."""


def matrix(config: config_lib.ModelConfig, shape: tuple[int, ...],
           names: tuple[str | None, ...]) -> nnx.Param:
  """Declares a normally distributed weight with the logical names of its dimensions."""
  return nnx.Param(jnp.zeros(shape, jnp.float32), axes=rules.Axes(names),
                   deviation=config.initializer_range)


def scale(width: int) -> nnx.Param:
  """Declares an RMSNorm scale, initially ones."""
  return nnx.Param(jnp.zeros((width,), jnp.float32), axes=rules.Axes((None,)), start=1.0)


def rms_norm(x: Float[Array, '... D'], weight: Float[Array, 'D'], eps: float
             ) -> Float[Array, '... D']:
  """Returns `x / sqrt(mean(x**2) + eps) * weight` over the last axis, computed in float32."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * inverse * weight).astype(x.dtype)


def swiglu(gate_up: Float[Array, '... F2'], weight: Float[Array, '... 1'] | None = None
           ) -> Float[Array, '... F']:
  """Returns `silu(gate) * up`, gate and up being the halves of the last axis, times `weight`.

  The gradient is written out to recompute the sigmoid instead of keeping it: on CPU the time goes
  into reading and writing arrays of this size.
  """
  if weight is None:
    weight = jnp.ones((1,) * gate_up.ndim, gate_up.dtype)
  return _swiglu(gate_up, weight)


@jax.custom_vjp
def _swiglu(gate_up, weight):
  # Without the barrier whatever made the weight is fused in and recomputed for every element.
  weight = jax.lax.optimization_barrier(weight)
  gate, up = jnp.split(gate_up, 2, axis=-1)
  return gate * jax.nn.sigmoid(gate) * up * weight


def _swiglu_forward(gate_up, weight):
  return _swiglu(gate_up, weight), (gate_up, weight)


def _swiglu_backward(residual, gradient):
  # Without the barrier the compiler would keep the forward pass's intermediate values after all.
  gate_up, weight, gradient = jax.lax.optimization_barrier((*residual, gradient))
  gate, up = jnp.split(gate_up, 2, axis=-1)
  sigmoid = jax.nn.sigmoid(gate)
  silu, scaled = gate * sigmoid, gradient * weight
  d_gate = scaled * up * (sigmoid + silu * (1 - sigmoid))
  summed = [i for i, size in enumerate(weight.shape) if size == 1]
  d_weight = (gradient * silu * up).sum(axis=summed, keepdims=True)
  return jnp.concatenate([d_gate, scaled * silu], axis=-1), d_weight


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def linear(x: Float[Array, '... D'], weight: Float[Array, 'D *out'],
           formats: precision.Formats = precision.FLOAT32) -> Float[Array, '...']:
  """Returns `x @ weight` for a weight with any number of output axes, in the given formats.

  Both sides become matrices first: with leading batch axes XLA:CPU transposes them for the
  gradient, which then costs twice as much.
  """
  flat = precision.matmul(formats, x.reshape(-1, x.shape[-1]),
                          weight.reshape(weight.shape[0], -1))
  return flat.reshape(*x.shape[:-1], *weight.shape[1:])


class Mlp(nnx.Module):
  """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

  def __init__(self, config: config_lib.ModelConfig, width: int, formats: precision.Formats):
    self.formats = formats
    self.gate_up = matrix(config, (config.hidden_size, 2 * width), ('embed', 'ffn'))
    self.down = matrix(config, (width, config.hidden_size), ('ffn', 'embed'))

  def __call__(self, x: Float[Array, '... D']) -> Float[Array, '... D']:
    hidden = swiglu(linear(x, self.gate_up[...], self.formats))
    return linear(hidden, self.down[...], self.formats)


def initial(cls: type[nnx.Module], config: config_lib.ModelConfig, key: jax.Array,
            count: int | None = None) -> dict:
  """Returns the initial parameters of module `cls(config)` as a nested dict of arrays.

  All its normal values come from one draw, because compiling one generator per array takes XLA:CPU
  longer than everything else at start-up.

  Args:
    cls: the module's class.
    config: the model's shape.
    key: a JAX random key.
    count: layers to stack on a leading axis of every array, None for no such axis.
  """
  _, state = _structure(cls, config)
  variables = nnx.to_flat_state(state)
  lead = () if count is None else (count,)
  drawn = sum(math.prod(v.shape) for _, v in variables if hasattr(v, 'deviation'))
  normal, offset, flat = jax.random.normal(key, (*lead, drawn), jnp.float32), 0, {}
  for path, variable in variables:
    shape = (*lead, *variable.shape)
    if not hasattr(variable, 'deviation'):
      flat[path] = jnp.full(shape, variable.start, jnp.float32)
      continue
    size = math.prod(variable.shape)
    values = jax.lax.slice_in_dim(normal, offset, offset + size, axis=-1)
    flat[path] = values.reshape(shape) * variable.deviation
    offset += size
  return nnx.traversals.unflatten_mapping(flat)


def bind(cls: type[nnx.Module], config: config_lib.ModelConfig, params: dict) -> Any:
  """Returns module `cls` holding `params`, for the duration of a trace."""
  graphdef, _ = _structure(cls, config)
  return nnx.merge(graphdef, params)


def axes(cls: type[nnx.Module], config: config_lib.ModelConfig, lead: tuple[str | None, ...] = ()
         ) -> dict:
  """Returns the logical axes of the parameters of `cls`, those of a stack axis in front."""
  _, state = _structure(cls, config)
  flat = {path: rules.Axes(lead + variable.axes.names)
          for path, variable in nnx.to_flat_state(state)}
  return nnx.traversals.unflatten_mapping(flat)


@functools.cache
def _structure(cls: type[nnx.Module], config: config_lib.ModelConfig):
  return nnx.split(nnx.eval_shape(lambda: cls(config)))
