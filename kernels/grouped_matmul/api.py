"""`grouped_matmul`: one product per group of consecutive rows, with its gradient.

Rows `[0, sizes[0])` of `x` meet `w[0]`, the next `sizes[1]` rows meet `w[1]`, and so on. Rows past
the sum of the sizes are padding: whatever they hold (NaN included), their output and their gradient
are zero and they add nothing to the weight gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from composer_jax.kernels import dispatch
from composer_jax.kernels.grouped_matmul import (
    low_precision,
    mosaic_sm90,
    mosaic_sm100,
    pallas_tpu,
    ragged_dot,
    reference,
    xla,
)
from composer_jax.kernels.quantize.types import FLOAT32, Formats


def _kernel(name: str, functions: Any, platform: str, *types: str) -> dispatch.Backend:
  """A backend that multiplies some types, and rounded operands in the formats of its `NATIVE`."""
  def refuses(x, w, formats):
    if formats.plain:
      given = {str(x.dtype), str(w.dtype)}.difference(types)
      return f'it multiplies {types[0]}, not {", ".join(sorted(given))}' if given else None
    others = {formats.forward, formats.dgrad, formats.wgrad} - functions.NATIVE
    if others and 'float32' not in types:  # in which other formats are emulated
      return f'it has no products in {", ".join(sorted(others))}'
    return None

  return dispatch.Backend(name, functions, functions.obstacle, (platform,), refuses)


BACKENDS = (
    dispatch.Backend('xla', xla, xla.obstacle, ('cpu',)),
    _kernel('mosaic_sm100', mosaic_sm100, 'gpu', 'bfloat16'),
    _kernel('mosaic_sm90', mosaic_sm90, 'gpu', 'bfloat16'),
    _kernel('pallas_tpu', pallas_tpu, 'tpu', 'bfloat16', 'float32'),
    dispatch.Backend('ragged_dot', ragged_dot, ragged_dot.obstacle, ('gpu', 'tpu')),
    dispatch.Backend('reference', reference, reference.obstacle, ()),
)


def grouped_matmul(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'],
                   *, formats: Formats = FLOAT32, impl: str = 'auto') -> Float[Array, 'M N']:
  """Multiplies each group of rows by its own matrix.

  Args:
    x: rows sorted by group.
    w: one matrix per group.
    group_sizes: rows of each group, zero allowed; their sum is at most M.
    formats: what operands are rounded to, originals in each pass; by default they are multiplied as
      they are.
    impl: "auto", "xla" (batched GEMM and blocked loop, for CPU), "mosaic_sm100" (Blackwell),
      "mosaic_sm90" (Hopper), "pallas_tpu", "ragged_dot" (jax.lax.ragged_dot) or "reference". A
      named one never falls back.

  Returns:
    The products, zeros in rows past the sum of the sizes.

  Raises:
    ValueError: shapes or types that do not fit, sizes (where they are known) that are negative or
      ask for more than M rows, or a backend that cannot run here or cannot take the types.
  """
  if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
    raise ValueError(f'grouped_matmul: x [M, K], w [E, K, N] and group_sizes [E] do not fit: '
                     f'{x.shape}, {w.shape}, {group_sizes.shape}')
  if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype == w.dtype):
    raise ValueError(f'grouped_matmul: x and w have to be of one floating type, not {x.dtype} and '
                     f'{w.dtype}')
  if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
    raise ValueError(f'grouped_matmul: group_sizes have to be integers, not {group_sizes.dtype}')
  if not isinstance(group_sizes, jax.core.Tracer):
    known = np.asarray(group_sizes)
    if (known < 0).any() or known.sum() > x.shape[0]:
      raise ValueError(f'grouped_matmul: group_sizes have to be >= 0 and sum up to at most the '
                       f'{x.shape[0]} rows of x; their least is {known.min()}, their sum '
                       f'{known.sum()}')
  backend = dispatch.choose('grouped_matmul', BACKENDS, impl, x=x, w=w, formats=formats)
  if not formats.plain:
    return low_precision.grouped(backend.functions, formats, x, w, group_sizes)
  return _grouped_matmul(x, w, group_sizes, backend.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x, w, group_sizes, impl):
  return _functions(impl).forward(x, w, group_sizes, transpose=False)


def _forward(x, w, group_sizes, impl):
  return _grouped_matmul(x, w, group_sizes, impl), (x, w, group_sizes)


def _backward(impl, residual, dy):
  x, w, group_sizes = residual
  functions = _functions(impl)
  dx = functions.forward(dy, w, group_sizes, transpose=True)
  dw = functions.weight_gradient(x, dy, group_sizes)
  return dx.astype(x.dtype), dw.astype(w.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _functions(impl):
  return next(b.functions for b in BACKENDS if b.name == impl)
