"""Pieces of kernels that are written for Mosaic GPU."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


def padded(x: Array, multiples: dict[int, int]) -> Array:
  """Fills axes with zeros up to multiples, given by axis."""
  fill = [(0, -side % multiples.get(axis, 1)) for axis, side in enumerate(x.shape)]
  return jnp.pad(x, fill) if any(more for _, more in fill) else x


def tile(shape: tuple[int, ...], dtype: Any, stages: int) -> plgpu.SMEM:
  """Returns a ring of tiles in shared memory, as TMA writes and the tensor core reads them."""
  bits = jnp.finfo(dtype).bits
  swizzle = plgpu.find_swizzle(shape[-1] * bits)
  transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
  return plgpu.SMEM((stages, *shape), dtype, transforms=transforms)
