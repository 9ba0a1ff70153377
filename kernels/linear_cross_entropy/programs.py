"""What is compiled ahead of time: loss and gradients of 32768 tokens of Kimi K2.5.

That is a device's share of a row of 262144 tokens that eight devices have in common.
"""

import jax
import jax.numpy as jnp

from composer_jax.kernels import aot
from composer_jax.kernels.linear_cross_entropy import api

TOKENS, WIDTH, CLASSES = 32768, 7168, 163840


def programs(target: aot.Target) -> list[aot.Program]:
  """Returns the programs of a target; they are XLA's own products on every one."""
  del target

  def loss(hidden, w, targets, mask):
    nll, _ = api.linear_cross_entropy(hidden, w, targets, mask, impl='xla')
    return nll.sum()

  struct = jax.ShapeDtypeStruct
  arguments = (struct((TOKENS, WIDTH), jnp.bfloat16), struct((WIDTH, CLASSES), jnp.bfloat16),
               struct((TOKENS,), jnp.int32), struct((TOKENS,), jnp.bool_))
  return [aot.Program('linear_cross_entropy with gradients bfloat16',
                      lambda *a: jax.grad(loss, (0, 1))(*a), arguments)]
