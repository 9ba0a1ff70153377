"""Parameter declaration shared by all modules, RMSNorm, SwiGLU and the embedding table.

Modules are Flax NNX classes that only declare parameters and wire sub-modules. `initial`, `bind` and
`axes` are the bridge to the functional outside: parameters live in nested dicts of arrays, and a
module exists only while a function of `models` is being traced.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from composer_jax.models import config as config_lib
from composer_jax.sharding import rules

# Largest vocabulary for which the embedding's gradient is a one-hot GEMM; a scatter-add is slower
# below it on CPU (our choice, measured at V = 512).
_ONE_HOT_VOCABULARY = 2048


class SelectionBias(nnx.Variable):
  """A variable that the optimizer never sees (updated by `balance.update_selection_bias`)."""


def matrix(config: config_lib.ModelConfig, rngs: nnx.Rngs, shape: tuple[int, ...],
           names: tuple[str | None, ...]) -> nnx.Param:
  """Declares a normal-initialised weight with the logical names of its dimensions."""
  value = jax.random.normal(rngs.params(), shape, jnp.float32) * config.initializer_range
  return nnx.Param(value, axes=rules.Axes(names))


def scale(width: int, name: str | None) -> nnx.Param:
  """Declares an RMSNorm scale, ones."""
  return nnx.Param(jnp.ones((width,), jnp.float32), axes=rules.Axes((name,)))


def rms_norm(x: Float[Array, '... D'], weight: Float[Array, 'D'], eps: float
             ) -> Float[Array, '... D']:
  """Returns `x / sqrt(mean(x**2) + eps) * weight` over the last axis, computed in float32."""
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * inverse * weight).astype(x.dtype)


def swiglu(gate_up: Float[Array, '... F2']) -> Float[Array, '... F']:
  """Returns `silu(gate) * up`, the two being the halves of the last axis."""
  gate, up = jnp.split(gate_up, 2, axis=-1)
  return jax.nn.silu(gate) * up


class Mlp(nnx.Module):
  """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

  def __init__(self, config: config_lib.ModelConfig, width: int, rngs: nnx.Rngs):
    self.gate_up = matrix(config, rngs, (config.hidden_size, 2 * width), ('embed', 'ffn'))
    self.down = matrix(config, rngs, (width, config.hidden_size), ('ffn', 'embed'))

  def __call__(self, x: Float[Array, '... D']) -> Float[Array, '... D']:
    return swiglu(x @ self.gate_up[...]) @ self.down[...]


def embed(table: Float[Array, 'V D'], tokens: Int[Array, 'B S']) -> Float[Array, 'B S D']:
  """Looks tokens up; a small table's gradient is a GEMM with the one-hot matrix."""
  if table.shape[0] <= _ONE_HOT_VOCABULARY:
    return _embed_small(table, tokens)
  return jnp.take(table, tokens, axis=0, mode='clip')


@jax.custom_vjp
def _embed_small(table: jax.Array, tokens: jax.Array) -> jax.Array:
  return jnp.take(table, tokens, axis=0, mode='clip')


def _embed_small_forward(table, tokens):
  return _embed_small(table, tokens), (tokens, table.shape[0])


def _embed_small_backward(residual, gradient):
  tokens, vocabulary = residual
  one_hot = jax.nn.one_hot(tokens.reshape(-1), vocabulary, dtype=gradient.dtype)
  flat = gradient.reshape(-1, gradient.shape[-1])
  return jax.lax.dot_general(one_hot, flat, (((0,), (0,)), ((), ()))), None


_embed_small.defvjp(_embed_small_forward, _embed_small_backward)


def initial(cls: type[nnx.Module], config: config_lib.ModelConfig, key: jax.Array) -> dict:
  """Returns the initial parameters of module `cls(config, rngs)` as a nested dict of arrays."""
  return nnx.to_pure_dict(nnx.state(cls(config, nnx.Rngs(params=key))))


def bind(cls: type[nnx.Module], config: config_lib.ModelConfig, params: dict) -> Any:
  """Returns module `cls` holding `params`, for the duration of a trace."""
  graphdef, _ = _structure(cls, config)
  return nnx.merge(graphdef, params)


def axes(cls: type[nnx.Module], config: config_lib.ModelConfig, lead: tuple[str | None, ...] = ()
         ) -> dict:
  """Returns the logical axes of the parameters of `cls`, a leading stack axis included."""
  _, state = _structure(cls, config)
  named = nnx.to_flat_state(state)
  flat = {path: rules.Axes(lead + variable.axes.names) for path, variable in named}
  return nnx.traversals.unflatten_mapping(flat)


@functools.cache
def _structure(cls: type[nnx.Module], config: config_lib.ModelConfig):
  return nnx.split(nnx.eval_shape(lambda: cls(config, nnx.Rngs(params=0))))
