"""What is compiled ahead of time: quantisation at the shapes of Kimi K2.5.

Tokens times D = 7168 or F = 2048, and weights of experts `[E, R, K]`.
"""

import functools

import jax
import jax.numpy as jnp

from composer_jax.kernels import aot
from composer_jax.kernels.quantize import mosaic_gpu

_ROWS, _WIDTH, _EXPERT = 384 * 640, 7168, 2048


def programs(target: aot.Target) -> list[aot.Program]:
  """Returns the programs of a target."""
  if target.kind == 'tpu':
    return []
  return [program for format in (('mxfp8',) if target.kind == 'sm90' else ('nvfp4', 'mxfp8'))
          for program in _of_format(format)]


def _of_format(format: str) -> list[aot.Program]:
  struct, bf16, tiles = jax.ShapeDtypeStruct, jnp.bfloat16, jax.ShapeDtypeStruct((1,), jnp.int32)
  opcode = {'mxfp8': r'cvt\.rn\.satfinite\.e4m3x2', 'nvfp4': r'cvt\.rn\.satfinite\.e2m1x2'}[format]
  return [
      aot.Program(f'{name} {format}', functools.partial(function, format=format), arguments,
                  (opcode, r'cp\.async\.bulk\.tensor'))
      for name, function, arguments in (
          ('quantize tokens', mosaic_gpu.quantize, (struct((_ROWS, _WIDTH), bf16),)),
          ('quantize float32 experts', mosaic_gpu.quantize,
           (struct((48, 2 * _EXPERT, _WIDTH), jnp.float32),)),
          ('quantize both ways', mosaic_gpu.quantize_both, (struct((_ROWS, _WIDTH), bf16), tiles)),
          ('quantize swiglu', mosaic_gpu.swiglu_quantize,
           (struct((_ROWS, 2 * _EXPERT), bf16), tiles)))]
