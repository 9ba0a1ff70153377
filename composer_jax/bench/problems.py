"""What `bench.ops` measures: shapes of Kimi K2.5 on an accelerator, small ones on a CPU."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.kernels.grouped_matmul import api as grouped_matmul
from composer_jax.kernels.linear_cross_entropy import api as linear_cross_entropy
from composer_jax.kernels.mla_attention import api as mla_attention
from composer_jax.kernels.moe_permute import api as moe_permute
from composer_jax.kernels.quantize import api as quantize


@dataclasses.dataclass(frozen=True)
class Problem:
  """One thing to time.

  Attributes:
    op: folder of `kernels/`.
    name: pass, shape and type.
    dtype: of the operands, as `ops.NAMEPLATE` calls it.
    flops: useful floating-point operations; 0 for what only moves memory.
    bytes: read and written at least.
    tolerance: largest difference from `expected`, of its largest value.
    backends: which to try.
    peer: the backend to compare with.
    arrays: seed -> inputs.
    function: backend -> function of the inputs.
    expected: function of the inputs that is right.
  """

  op: str
  name: str
  dtype: str
  flops: float
  bytes: float
  tolerance: float
  backends: tuple[str, ...]
  peer: str
  arrays: Callable[[int], tuple[jax.Array, ...]]
  function: Callable[[str], Callable[..., Any]]
  expected: Callable[..., Any]


def problems(small: bool) -> list[Problem]:
  """Returns all problems, in the order of the table."""
  dtype = jnp.float32 if small else jnp.bfloat16
  experts, d, f, tokens = (16, 256, 256, 512) if small else (48, 7168, 2048, 3072)
  heads, length, classes = (4, 256, 4096) if small else (64, 8192, 163840)
  found = []
  for name, k, n in (('gate_up', d, 2 * f), ('down', f, d)):
    found += _grouped_matmul(name, dtype, experts, k, n, tokens * 8)
  found += _mla_attention(dtype, heads, length)
  found.append(_linear_cross_entropy(dtype, tokens, d, classes))
  found.append(_moe_permute(dtype, tokens, experts, d))
  if not small:
    found.append(_quantize(tokens * 8, d))
  return found


def _normal(seed: int, *shapes: tuple[int, ...], dtype: Any) -> list[jax.Array]:
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _size(dtype: Any, *shapes: tuple[int, ...]) -> float:
  return float(sum(jnp.dtype(dtype).itemsize * functools.reduce(lambda a, b: a * b, s, 1)
                   for s in shapes))


def _with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
  """Returns a function of inputs, whose first `count` have gradients, and an output gradient."""
  def both(*arguments):
    *inputs, dy = arguments
    y, pull = jax.vjp(lambda *first: function(*first, *inputs[count:]), *inputs[:count])
    return y, *pull(dy)
  return both


def _grouped_matmul(name, dtype, experts, k, n, rows):
  def arrays(seed):
    x, w, dy = _normal(seed, (rows, k), (experts, k, n), (rows, n), dtype=dtype)
    draw = jax.random.randint(jax.random.key(seed), (rows,), 0, experts)
    sizes = (draw[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    return x, w / k ** 0.5, sizes, dy

  def forward(impl):
    return lambda x, w, sizes, dy: grouped_matmul.grouped_matmul(x, w, sizes, impl=impl)

  def backward(impl):
    def both(x, w, sizes, dy):
      y, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, impl=impl), x, w)
      return y, *pull(dy)
    return both

  shape = f'{name} {experts}x{k}x{n}, {rows} rows'
  return [Problem('grouped_matmul', f'{what} {shape}', _named(dtype), times * 2 * rows * k * n,
                  times * _size(dtype, (rows, k), (experts, k, n), (rows, n)), 2e-2,
                  tuple(b.name for b in grouped_matmul.BACKENDS if b.name != 'reference'),
                  'ragged_dot', arrays, function, function('ragged_dot'))
          for what, times, function in (('forward', 1, forward), ('with gradients', 3, backward))]


def _mla_attention(dtype, heads, length):
  key, value = (1, length, heads, 192), (1, length, heads, 128)

  def arrays(seed):
    q, k, v, dy = _normal(seed, key, key, value, value, dtype=dtype)
    return q / 192 ** 0.5, k, v, jnp.ones((1, length), jnp.int32), dy

  def forward(impl):
    return lambda q, k, v, ids, dy: mla_attention.mla_attention(q, k, v, ids, impl=impl)

  def backward(impl):
    return _with_gradients(
        lambda q, k, v, ids: mla_attention.mla_attention(q, k, v, ids, impl=impl), 3)

  flops = heads * length ** 2 * (192 + 128)  # causal: half of the pairs
  memory = _size(dtype, key, key, value, value)
  return [Problem('mla_attention', f'{what} {heads} heads x {length}', _named(dtype), times * flops,
                  times * memory, 2e-2,
                  tuple(b.name for b in mla_attention.BACKENDS if b.name != 'reference'), 'xla',
                  arrays, function, function('xla'))
          for what, times, function in (('forward', 1, forward), ('with gradients', 3.5, backward))]


def _linear_cross_entropy(dtype, tokens, d, classes):
  def arrays(seed):
    hidden, w = _normal(seed, (tokens, d), (d, classes), dtype=dtype)
    targets = jax.random.randint(jax.random.key(seed), (tokens,), 0, classes)
    return hidden, w / d ** 0.5, targets, jnp.ones(tokens, bool)

  def function(impl):
    def loss(hidden, w, targets, mask):
      nll, _ = linear_cross_entropy.linear_cross_entropy(hidden, w, targets, mask, impl=impl)
      return nll.mean()
    return jax.value_and_grad(loss, (0, 1))

  return Problem('linear_cross_entropy', f'with gradients {tokens} x {d} x {classes}',
                 _named(dtype), 6 * tokens * d * classes,
                 2 * _size(dtype, (tokens, d), (d, classes)), 2e-2,
                 tuple(b.name for b in linear_cross_entropy.BACKENDS), 'reference', arrays,
                 function, function('reference'))


def _moe_permute(dtype, tokens, experts, d):
  def arrays(seed):
    (x,) = _normal(seed, (tokens, d), dtype=dtype)
    scores = jax.random.uniform(jax.random.key(seed), (tokens, experts))
    weights, chosen = jax.lax.top_k(scores, 8)
    return x, chosen, weights

  def function(impl):
    def there_and_back(x, chosen, weights):
      plan = moe_permute.make_plan(chosen, jnp.ones(tokens, bool), experts)
      rows = moe_permute.permute(x, plan, impl=impl)
      return moe_permute.combine(rows, plan, weights, impl=impl)
    return there_and_back

  return Problem('moe_permute', f'there and back {tokens} x 8 of {experts} x {d}', _named(dtype), 0,
                 2 * _size(dtype, (tokens, d)) + 2 * _size(dtype, (tokens * 8, d)), 2e-2, ('xla',),
                 'xla', arrays, function, function('xla'))


def _quantize(rows, columns):
  def arrays(seed):
    return tuple(_normal(seed, (rows, columns), dtype=jnp.bfloat16))

  def function(impl):
    def stands_for(x):
      q = quantize.quantize(x, 'mxfp8', impl=impl)
      return q.values, jax.lax.bitcast_convert_type(q.scales, jnp.uint8)
    return stands_for

  return Problem('quantize', f'mxfp8 rows {rows} x {columns}', 'bfloat16', 0,
                 rows * columns * (2 + 1 + 1 / 32), 0.0,
                 tuple(b.name for b in quantize.BACKENDS), 'reference', arrays, function,
                 function('reference'))


def _named(dtype: Any) -> str:
  return jnp.dtype(dtype).name
