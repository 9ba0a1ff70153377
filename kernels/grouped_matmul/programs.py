"""What is compiled ahead of time: the grouped matmul at the shapes of Kimi K2.5.

384 experts, D = 7168, F = 2048, 512 rows an expert; on TPUs the 48 experts that a device has when
eight share them, as the memory of a v6e holds no more.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.kernels import aot, tiles
from composer_jax.kernels.grouped_matmul import mosaic_sm90, mosaic_sm100, pallas_tpu
from composer_jax.kernels.quantize.types import Quantized

EXPERTS, ROWS = 384, 384 * 512
# Name, contraction and output width of the forward product of each matrix of an expert.
MATRICES = (('gate_up', 7168, 4096), ('down', 2048, 7168))


def programs(target: aot.Target) -> list[aot.Program]:
  """Returns the programs of a target."""
  return {'sm90': _sm90, 'sm100': _sm100, 'tpu': _tpu}.get(target.kind, list)()


def _sizes() -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)


def _sm100() -> list[aot.Program]:
  tma = r'cp\.async\.bulk\.tensor'
  found = []
  for name, config, matrices in (('2 CTA', mosaic_sm100.PAIRS, MATRICES[:1]),
                                 ('1 CTA', mosaic_sm100.Config(), MATRICES[:1]),
                                 ('2 CTA', mosaic_sm100.PAIRS, MATRICES[1:])):
    group = r'tcgen05\.mma.*cta_group::' + name[0]
    for matrix, k, n in matrices:
      for what, function, arguments, opcode in _passes(k, n, config):
        found.append(aot.Program(f'grouped_matmul {what} {matrix} {name}', function,
                                 (*arguments, _sizes()), (group, opcode, tma)))
  return found


def _sm90() -> list[aot.Program]:
  found, struct, a = [], jax.ShapeDtypeStruct, tiles.capacity(ROWS, EXPERTS)
  for matrix, k, n in MATRICES:
    for what, function, arguments, _ in _bfloat16(k, n, mosaic_sm90, mosaic_sm90.DEFAULT):
      found.append((f'grouped_matmul {what} {matrix}', function, arguments))
    fp8 = tuple(struct(s, jnp.float8_e4m3fn) for s in ((a, k), (EXPERTS, n, k)))
    scales = tuple(struct(s, jnp.float32) for s in ((a,), (EXPERTS, n)))
    found.append((f'grouped_matmul forward fp8 {matrix}', _on_layout(mosaic_sm90.forward_fp8),
                  (*fp8, *scales)))
  return [aot.Program(name, function, (*arguments, _sizes()),
                      (r'wgmma\.mma_async.*e4m3' if 'fp8' in name else r'wgmma\.mma_async.*bf16',
                       r'cp\.async\.bulk\.tensor'))
          for name, function, arguments in found]


def _tpu() -> list[aot.Program]:
  found, struct, experts, rows = [], jax.ShapeDtypeStruct, EXPERTS // 8, ROWS // 8
  sizes = struct((experts,), jnp.int32)
  for matrix, k, n in MATRICES:
    x, dy, w = (struct(s, jnp.bfloat16) for s in ((rows, k), (rows, n), (experts, k, n)))
    forward = functools.partial(functools.partial, pallas_tpu.forward)
    found += [
        aot.Program(f'grouped_matmul forward bfloat16 {matrix}', forward(transpose=False),
                    (x, w, sizes)),
        aot.Program(f'grouped_matmul dgrad bfloat16 {matrix}', forward(transpose=True),
                    (dy, w, sizes)),
        aot.Program(f'grouped_matmul wgrad bfloat16 {matrix}', pallas_tpu.weight_gradient,
                    (x, dy, sizes))]
  return found


def _on_layout(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
  """Returns a function of operands and group sizes, for one of operands and the layout."""
  def call(*arguments):
    *operands, sizes = arguments
    return function(*operands, tiles.layout(sizes, ROWS), **options)
  return call


def _bfloat16(k: int, n: int, kernel: Any, config: Any
              ) -> list[tuple[str, Callable[..., Any], tuple[Any, ...], str]]:
  a, struct = tiles.capacity(ROWS, EXPERTS), jax.ShapeDtypeStruct
  x, dy, w = (struct(s, jnp.bfloat16) for s in ((a, k), (a, n), (EXPERTS, k, n)))
  forward = functools.partial(_on_layout, kernel.forward_aligned, config=config)
  return [
      ('forward bfloat16', forward(transpose=False), (x, w), 'kind::f16'),
      ('dgrad bfloat16', forward(transpose=True), (dy, w), 'kind::f16'),
      ('wgrad bfloat16', _on_layout(kernel.weight_gradient_aligned, config=config), (x, dy),
       'kind::f16'),
  ]


def _passes(k: int, n: int, config: Any
            ) -> list[tuple[str, Callable[..., Any], tuple[Any, ...], str]]:
  """Returns name, function of operands and sizes, operands, and opcode of the products."""
  passes, a = _bfloat16(k, n, mosaic_sm100, config), tiles.capacity(ROWS, EXPERTS)
  scaled = _on_layout(mosaic_sm100.forward_scaled, config=config)
  for format, kind in (('mxfp8', 'kind::mxf8f6f4.block_scale'),
                       ('nvfp4', r'kind::mxf4nvf4.block_scale.scale_vec::4X')):
    make = functools.partial(quantized, format)
    passes.append((f'forward {format}', scaled, (make(a, k), make(n, k, EXPERTS)), kind))
    if format == 'mxfp8':
      passes += [
          (f'dgrad {format}', scaled, (make(a, n), make(k, n, EXPERTS)), kind),
          (f'wgrad {format}', _on_layout(mosaic_sm100.weight_gradient_scaled, config=config),
           (make(k, a), make(n, a)), kind)]
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


