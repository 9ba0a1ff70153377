"""The grouped matmul with rounded operands.

A backend that multiplies a format as it is says so in its `NATIVE`, and gets such operands; for
any other the operands are rounded and handed over in float32, which gives the same products with
float32 accumulation. Every pass rounds the originals, along its own contraction axis.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels import tiles
from composer_jax.kernels.quantize import api as quantize_api
from composer_jax.kernels.quantize.types import Format, Formats


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped(functions: Any, formats: Formats, x: Float[Array, 'M K'], w: Float[Array, 'E K N'],
            group_sizes: Int[Array, 'E']) -> Float[Array, 'M N']:
  """Returns the grouped product in the given formats, in the type of `x`.

  Args:
    functions: the backend's module.
    formats: of the three passes.
    x: rows sorted by group.
    w: one matrix per group.
    group_sizes: rows of each group.
  """
  return _product(functions, formats.forward, x, w, group_sizes, axis=1)


def _grouped_forward(functions, formats, x, w, group_sizes):
  return grouped(functions, formats, x, w, group_sizes), (x, w, group_sizes)


def _grouped_backward(functions, formats, residual, dy):
  x, w, group_sizes = residual
  dx = _product(functions, formats.dgrad, dy, w, group_sizes, axis=2)
  dw = _weight_gradient(functions, formats.wgrad, x, dy, group_sizes)
  return dx, dw.astype(w.dtype), None


grouped.defvjp(_grouped_forward, _grouped_backward)


def _native(functions: Any, format: Format) -> bool:
  return format in getattr(functions, 'NATIVE', ())


def _product(functions: Any, format: Format, x: Float[Array, 'M A'], w: Array,
             group_sizes: Int[Array, 'E'], axis: int) -> Float[Array, 'M B']:
  """Contracts the columns of `x` with an axis of `w`, 1 or 2; the result has the type of `x`."""
  transpose, dtype = axis == 2, x.dtype
  if not _native(functions, format):
    x, w = (quantize_api.fake_quantize(x, format, 1), quantize_api.fake_quantize(w, format, axis))
    return functions.forward(x, w, group_sizes, transpose=transpose).astype(dtype)
  if format == 'bfloat16':
    return functions.forward(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), group_sizes,
                             transpose=transpose, dtype=dtype)
  where = tiles.layout(group_sizes, x.shape[0])
  y = functions.forward_scaled(quantize_api.quantize(tiles.spread(x, where), format),
                               quantize_api.quantize(w, format, axis), where, dtype=dtype)
  return tiles.gather(y, where)[:, :w.shape[3 - axis]]


def _weight_gradient(functions: Any, format: Format, x: Float[Array, 'M K'],
                     dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E']
                     ) -> Float[Array, 'E K N']:
  if not _native(functions, format):
    x, dy = (_round_rows(side, format, group_sizes) for side in (x, dy))
    return functions.weight_gradient(x, dy, group_sizes)
  if format == 'bfloat16':
    return functions.weight_gradient(x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), group_sizes)
  where = tiles.layout(group_sizes, x.shape[0])
  dw = functions.weight_gradient_scaled(
      *(quantize_api.quantize(tiles.spread(side, where), format, axis=0) for side in (x, dy)),
      where)
  return dw[:, :x.shape[1], :dy.shape[1]]


def _round_rows(x: Float[Array, 'M K'], format: Format, group_sizes: Int[Array, 'E']
                ) -> Float[Array, 'M K']:
  """Rounds along the rows, block by block inside each group; padding rows become zeros."""
  where = tiles.layout(group_sizes, x.shape[0], quantize_api.BLOCK.get(format, 1))
  rounded = quantize_api.fake_quantize(tiles.spread(x.astype(jnp.float32), where), format, 0)
  return tiles.gather(rounded, where)
