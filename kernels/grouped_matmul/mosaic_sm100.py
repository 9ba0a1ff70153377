"""Grouped matmul for Blackwell: the passes and formats that `sm100_kernel` computes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform, tiles
from composer_jax.kernels.grouped_matmul import schedule
from composer_jax.kernels.grouped_matmul.sm100_config import Config, Operands
from composer_jax.kernels.grouped_matmul.sm100_kernel import run
from composer_jax.kernels.mosaic import padded
from composer_jax.kernels.quantize.types import Quantized

NATIVE = frozenset({'bfloat16', 'mxfp8', 'nvfp4'})
_ROWS = tiles.ROWS
_BF16_K = 64  # 128 bytes


def obstacle() -> str | None:
  """Says what is missing, None on a Blackwell GPU."""
  return platform.obstacle('sm100')


PAIRS = Config(columns=256, collective=True)


def _default() -> Config:
  return PAIRS if platform.current().pairs else Config()


def forward(x: Float[Array, 'M K'], w: Float[Array, 'E K N'], group_sizes: Int[Array, 'E'], *,
            transpose: bool, dtype: Any = jnp.bfloat16, config: Config | None = None
            ) -> Float[Array, 'M N']:
  """Returns the grouped product in `dtype`, with the last axes of `w` swapped when `transpose`."""
  where = tiles.layout(group_sizes, x.shape[0])
  y = forward_aligned(tiles.spread(x, where), w, where, transpose=transpose, dtype=dtype,
                      config=config)
  return tiles.gather(y, where)


def weight_gradient(x: Float[Array, 'M K'], dy: Float[Array, 'M N'], group_sizes: Int[Array, 'E'],
                    *, config: Config | None = None) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32."""
  where = tiles.layout(group_sizes, x.shape[0])
  return weight_gradient_aligned(tiles.spread(x, where), tiles.spread(dy, where), where,
                                 config=config)


def forward_aligned(x: Float[Array, 'A K'], w: Float[Array, 'E K N'], where: tiles.Layout, *,
                    transpose: bool, dtype: Any = jnp.bfloat16, config: Config | None = None
                    ) -> Float[Array, 'A N']:
  """Returns the grouped product of bfloat16 operands in the aligned layout, in `dtype`.

  Rows of tiles past the last group are not written.
  """
  contracted, kept = (2, 1) if transpose else (1, 2)
  n = w.shape[kept]
  config = _fitting(config or _default(), n)
  x = padded(x, {1: _BF16_K})
  w = padded(w, {contracted: _BF16_K, kept: config.columns})
  operands = Operands(x, w, a_k_minor=True, b_k_minor=transpose, k=_BF16_K)
  tasks = schedule.forward(where, w.shape[kept] // config.columns, x.shape[1] // _BF16_K,
                           rows_per_tile=config.height, band=config.band)
  out = jax.ShapeDtypeStruct((x.shape[0], w.shape[kept]), dtype)
  return run(tasks, operands, out, config)[:, :n]


def weight_gradient_aligned(x: Float[Array, 'A K'], dy: Float[Array, 'A N'], where: tiles.Layout, *,
                            config: Config | None = None) -> Float[Array, 'E K N']:
  """Returns each group's `x.T @ dy` in float32; both are in the aligned layout, in bfloat16."""
  k, n = x.shape[1], dy.shape[1]
  config = _fitting(config or _default(), n)
  x, dy = padded(x, {1: _ROWS * config.height}), padded(dy, {1: config.columns})
  operands = Operands(x, dy, a_k_minor=False, b_k_minor=False, k=_BF16_K)
  tasks = schedule.weight_gradient(
      where, x.shape[1] // _ROWS, dy.shape[1] // config.columns, _BF16_K,
      rows_per_tile=config.height, band=config.band)
  out = jax.ShapeDtypeStruct((where.sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
  return run(tasks, operands, out, config)[:, :k, :n]


def forward_scaled(x: Quantized, w: Quantized, where: tiles.Layout, *, dtype: Any = jnp.bfloat16,
                   config: Config | None = None) -> Float[Array, "A N'"]:
  """Returns the grouped product of MXFP8 or NVFP4 operands.

  Args:
    x: `[A, K]` in the aligned layout.
    w: `[E, N, K]`; for the gradient of rows `[E, K, N]`, quantised along N.
    where: the layout of the rows of `x`.
    dtype: of the result; products are accumulated in float32.
    config: how the problem is cut.

  Returns:
    All columns, those that fill N up to N' are zero. Rows of tiles past the last group are not
    written.
  """
  config = _fitting(config or _default(), w.values.shape[1])
  operands = _scaled(x, w)
  tasks = schedule.forward(where, w.values.shape[1] // config.columns,
                           x.values.shape[1] // operands.k, rows_per_tile=config.height,
                           band=config.band)
  out = jax.ShapeDtypeStruct((x.values.shape[0], w.values.shape[1]), dtype)
  return run(tasks, operands, out, config)


def weight_gradient_scaled(x: Quantized, dy: Quantized, where: tiles.Layout, *,
                           config: Config | None = None) -> Float[Array, "E K' N'"]:
  """Returns each group's `x.T @ dy` in float32, of MXFP8 operands `[K, A]` and `[N, A]`."""
  config = _fitting(config or _default(), dy.values.shape[0])
  if x.values.shape[0] % (_ROWS * config.height):
    config = dataclasses.replace(config, collective=False, columns=_ROWS)
  operands = dataclasses.replace(_scaled(x, dy), k=_ROWS)
  tasks = schedule.weight_gradient(
      where, x.values.shape[0] // _ROWS, dy.values.shape[0] // config.columns, operands.k,
      rows_per_tile=config.height, band=config.band)
  out = jax.ShapeDtypeStruct(
      (where.sizes.shape[0], x.values.shape[0], dy.values.shape[0]), jnp.float32)
  return run(tasks, operands, out, config)


def _scaled(a: Quantized, b: Quantized) -> Operands:
  """Takes 128 bytes of a row at a time, half of that for NVFP4 rows that are no multiple of it."""
  k = 256 if a.token_scale is not None and a.values.shape[1] % 256 == 0 else 128
  return Operands(a.values, b.values, True, True, k, a.scales, b.scales, a.token_scale,
                   b.token_scale)


def _fitting(config: Config, columns: int) -> Config:
  """Takes narrow tiles where wide ones would have columns filled up."""
  narrow = columns % config.columns and columns % _ROWS == 0
  return dataclasses.replace(config, columns=_ROWS) if narrow else config
