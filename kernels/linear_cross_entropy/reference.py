"""Definition of the op: all logits at once; any float width, any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from composer_jax.kernels.quantize import api as quantize_api
from composer_jax.kernels.quantize.types import Formats


def obstacle() -> str | None:
  """Runs everywhere."""
  return None


def forward(hidden: Float[Array, 'T D'], w: Float[Array, 'D V'], targets: Int[Array, 'T'],
            formats: Formats, columns: int) -> tuple[Float[Array, 'T'], Float[Array, 'T']]:
  """Returns the logit of each target, 0 for one outside [0, V), and log sum exp of all logits."""
  del columns
  logits = _product(hidden, w, formats.forward, (1, 0))
  hit = jnp.arange(w.shape[1]) == targets[:, None]
  return jnp.where(hit, logits, 0).sum(axis=1), jax.nn.logsumexp(logits, axis=1)


def backward(hidden: Float[Array, 'T D'], w: Float[Array, 'D V'], targets: Int[Array, 'T'],
             lse: Float[Array, 'T'], d_logit: Float[Array, 'T'], d_lse: Float[Array, 'T'],
             formats: Formats, columns: int) -> tuple[Float[Array, 'T D'], Float[Array, 'D V']]:
  """Returns the gradients of `hidden` and `w`."""
  del columns
  probabilities = jnp.exp(_product(hidden, w, formats.forward, (1, 0)) - lse[:, None])
  hit = jnp.arange(w.shape[1]) == targets[:, None]
  gradient = probabilities * d_lse[:, None] + jnp.where(hit, d_logit[:, None], 0)
  return (_product(gradient, w, formats.dgrad, (1, 1)),
          _product(hidden, gradient, formats.wgrad, (0, 0)))


def _product(a, b, format, axes):
  if format != 'float32':
    a, b = (quantize_api.fake_quantize(side, format, axis)
            for side, axis in zip((a, b), axes, strict=True))
  return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())),
                             precision=jax.lax.Precision.HIGHEST,
                             preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
