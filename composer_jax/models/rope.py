"""Rotary position embedding with YaRN, in DeepSeek's interleaved convention.

A rotary vector of width R is R/2 pairs stored next to each other, `[x0, y0, x1, y1, ...]`, and pair
i is turned by `position * frequency[i]`. This is the layout of DeepSeek-V3 and Kimi checkpoints.
`rotate` returns the halves layout `[x0, x1, ..., y0, y1, ...]`: queries and keys go through the
same permutation, so their product is the one of the interleaved layout and no shuffle back is
needed.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from composer_jax.models import config as config_lib


def frequencies(config: config_lib.ModelConfig) -> tuple[np.ndarray, float]:
  """Returns the R/2 angular frequencies (radians per token) and the cos/sin multiplier.

  YaRN (arXiv 2309.00071, section 3.2, with the rounding of DeepSeek-V3's `modeling_deepseek.py`):
  a frequency that turns more than `beta_fast` times over the original length is kept, one that
  turns less than `beta_slow` times is divided by `factor`, linear in the index between.
  """
  width, scaling = config.qk_rope_head_dim, config.rope_scaling
  plain = config.rope_theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
  if scaling is None:
    return plain, 1.0

  def index_of(rotations: float) -> float:
    length = scaling.original_max_position_embeddings
    return (width * math.log(length / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta)))

  low = max(math.floor(index_of(scaling.beta_fast)), 0)
  high = min(math.ceil(index_of(scaling.beta_slow)), width - 1)
  ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
  scaled = plain / scaling.factor * ramp + plain * (1.0 - ramp)
  if not scaling.mscale or not scaling.mscale_all_dim:
    return scaled, _mscale(scaling.factor, 1.0)  # transformers' `_compute_yarn_parameters`
  return scaled, _mscale(scaling.factor, scaling.mscale) / _mscale(
      scaling.factor, scaling.mscale_all_dim)


def softmax_scale(config: config_lib.ModelConfig) -> float:
  """Returns what query-key products are multiplied by: `width**-0.5 * mscale_all**2`.

  With Kimi K2.5's values that is 0.144680 (0.072169 without YaRN).
  """
  scale = config.qk_head_dim ** -0.5
  if config.rope_scaling is not None and config.rope_scaling.mscale_all_dim:
    scale *= _mscale(config.rope_scaling.factor, config.rope_scaling.mscale_all_dim) ** 2
  return scale


def tables(config: config_lib.ModelConfig, positions: Int[Array, 'B S']
           ) -> tuple[Float[Array, 'B S R2'], Float[Array, 'B S R2']]:
  """Returns cos and sin of every position's angles, float32 `[B, S, R/2]`."""
  rates, multiplier = frequencies(config)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rates, jnp.float32)
  return jnp.cos(angles) * multiplier, jnp.sin(angles) * multiplier


def rotate(x: Float[Array, '... R'], cos: Float[Array, '... R2'], sin: Float[Array, '... R2']
           ) -> Float[Array, '... R']:
  """Turns the interleaved pairs of `x`; the result is in the halves layout (module docstring)."""
  first, second = x[..., 0::2], x[..., 1::2]
  turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
  return turned.astype(x.dtype)  # the tables are float32 whatever the model is


def _mscale(factor: float, mscale: float) -> float:
  """YaRN's attention temperature, `0.1 * mscale * ln(factor) + 1`."""
  return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
