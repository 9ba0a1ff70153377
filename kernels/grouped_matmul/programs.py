"""What is compiled ahead of time: the grouped matmul at the shapes of Kimi K2.5.

384 experts, D = 7168, F = 2048, 512 rows an expert.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.kernels import aot, tiles
from composer_jax.kernels.grouped_matmul import mosaic_sm100
from composer_jax.kernels.quantize.types import Quantized

EXPERTS, ROWS = 384, 384 * 512
# Name, contraction and output width of the forward product of each matrix of an expert.
MATRICES = (('gate_up', 7168, 4096), ('down', 2048, 7168))


def programs(target: aot.Target) -> list[aot.Program]:
  """Returns the programs of a target."""
  return {'sm100': _sm100}.get(target.kind, list)()


def _sizes() -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)


def _sm100() -> list[aot.Program]:
  tma = r'cp\.async\.bulk\.tensor'
  found = []
  for name, config, matrices in (('1 CTA', mosaic_sm100.Config(), MATRICES[:1]),
                                 ('2 CTA', mosaic_sm100.DEFAULT, MATRICES)):
    group = r'tcgen05\.mma.*cta_group::' + name[0]
    for matrix, k, n in matrices:
      for what, function, arguments, opcode in _passes(k, n, config):
        found.append(aot.Program(f'grouped_matmul {what} {matrix} {name}', function,
                                 (*arguments, _sizes()), (group, opcode, tma)))
  return found


def _passes(k: int, n: int, config: Any
            ) -> list[tuple[str, Callable[..., Any], tuple[Any, ...], str]]:
  """Returns name, function of operands and sizes, operands, and opcode of the products."""
  a, struct = tiles.capacity(ROWS, EXPERTS), jax.ShapeDtypeStruct
  x, dy, w = (struct(s, jnp.bfloat16) for s in ((a, k), (a, n), (EXPERTS, k, n)))
  kernel = mosaic_sm100

  def on_layout(function, **options):
    def call(*arguments):
      *operands, sizes = arguments
      return function(*operands, tiles.layout(sizes, ROWS), config=config, **options)
    return call

  passes = [
      ('forward bfloat16', on_layout(kernel.forward_aligned, transpose=False), (x, w), 'kind::f16'),
      ('dgrad bfloat16', on_layout(kernel.forward_aligned, transpose=True), (dy, w), 'kind::f16'),
      ('wgrad bfloat16', on_layout(kernel.weight_gradient_aligned), (x, dy), 'kind::f16'),
  ]
  scaled = on_layout(kernel.forward_scaled)
  for format, kind in (('mxfp8', 'kind::mxf8f6f4.block_scale'),
                       ('nvfp4', r'kind::mxf4nvf4.block_scale.scale_vec::4X')):
    make = functools.partial(quantized, format)
    passes.append((f'forward {format}', scaled, (make(a, k), make(n, k, EXPERTS)), kind))
    if format == 'mxfp8':
      passes += [
          (f'dgrad {format}', scaled, (make(a, n), make(k, n, EXPERTS)), kind),
          (f'wgrad {format}', on_layout(kernel.weight_gradient_scaled), (make(k, a), make(n, a)),
           kind)]
  return passes


def quantized(format: str, rows: int, columns: int, experts: int | None = None) -> Quantized:
  """Returns the shapes of a quantised matrix, or of one per expert."""
  lead = () if experts is None else (experts,)
  values, scale, block = {'mxfp8': (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32),
                          'nvfp4': (jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16)}[format]
  struct = jax.ShapeDtypeStruct
  return Quantized(
      struct((*lead, rows, columns), values),
      struct((*lead, rows // 128, columns // (4 * block), 32, 16), scale),
      struct((*lead, rows), jnp.float32) if format == 'nvfp4' else None)


