"""What is compiled ahead of time: attention at the shapes of Kimi K2.5, 64 heads, 32768 tokens."""

import jax
import jax.numpy as jnp

from composer_jax.kernels import aot
from composer_jax.kernels.mla_attention import api

ROWS, LENGTH, HEADS, KEY, VALUE = 1, 32768, 64, 192, 128


def programs(target: aot.Target) -> list[aot.Program]:
  """Returns the programs of a target."""
  struct = jax.ShapeDtypeStruct
  key, value = ((ROWS, LENGTH, HEADS, width) for width in (KEY, VALUE))
  arguments = (*(struct(s, jnp.bfloat16) for s in (key, key, value)),
               struct((ROWS, LENGTH), jnp.int32))
  if target.kind == 'sm100':
    return []
  if target.kind == 'tpu':
    def gradients(*arguments):
      return jax.grad(lambda *a: api.mla_attention(*a).astype(jnp.float32).sum(), (0, 1, 2))(
          *arguments)
    return [aot.Program('mla_attention with gradients bfloat16', gradients, arguments)]
  return [aot.Program('mla_attention forward bfloat16', api.mla_attention, arguments,
                      (r'wgmma\.mma_async.*bf16', r'cp\.async\.bulk\.tensor'))]
