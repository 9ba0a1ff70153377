"""Arrays put together on devices from pieces that are read one at a time."""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

SLAB_BYTES = 2**30

Index = tuple[slice, ...]


def assemble(read: Callable[[Index], np.ndarray], stored: Any,
             sharding: jax.sharding.Sharding, dtype: np.dtype) -> jax.Array:
  """Returns an array of this sharding and dtype.

  Host memory holds one slab of at most `SLAB_BYTES` (a row of the last axis at least);
  `jax.make_array_from_callback` would hold the pieces of all local devices at once.

  Args:
    read: returns the part at an index of slices with start and stop.
    stored: has the `shape` and `dtype` of what `read` reads.
    sharding: where each part goes; parts that several devices hold are read once.
    dtype: parts are cast to it on the host.
  """
  shape = tuple(stored.shape)
  holders = collections.defaultdict(list)
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    holders[bounds].append(device)
  itemsize = max(dtype.itemsize, stored.dtype.itemsize)
  pieces = []
  for bounds, devices in holders.items():
    first = _piece(read, bounds, itemsize, devices[0], dtype)
    pieces += [first, *(jax.device_put(first, device) for device in devices[1:])]
  return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _piece(read: Callable[[Index], np.ndarray], bounds: tuple[tuple[int, int], ...],
           itemsize: int, device: jax.Device, dtype: np.dtype) -> jax.Array:
  shape = tuple(stop - start for start, stop in bounds)
  slabs = list(_slabs(shape, itemsize))
  piece = None if len(slabs) == 1 else jax.numpy.zeros(shape, dtype, device=device)
  for slab in slabs:
    index = tuple(slice(start + part.start, start + part.stop)
                  for (start, _), part in zip(bounds, slab, strict=True))
    data = jax.device_put(read(index).astype(dtype, copy=False), device)
    piece = data if piece is None else _insert(piece, data, [part.start for part in slab])
    piece.block_until_ready()  # the slab's host memory is free again
  return piece


def _slabs(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
  """Gives indices that divide an array into slabs of `SLAB_BYTES` at most."""
  block = list(shape)
  for axis in range(len(shape)):
    row_bytes = max(math.prod(block[axis + 1:]) * itemsize, 1)
    block[axis] = min(block[axis], max(SLAB_BYTES // row_bytes, 1))
    if block[axis] > 1:
      break
  steps = [range(0, size, step) if size else (0,) for size, step in zip(shape, block, strict=True)]
  for start in itertools.product(*steps):
    yield tuple(slice(i, min(i + step, size))
                for i, step, size in zip(start, block, shape, strict=True))


@functools.partial(jax.jit, donate_argnums=0)
def _insert(piece: jax.Array, slab: jax.Array, start: list[int]) -> jax.Array:
  return jax.lax.dynamic_update_slice(piece, slab, start)
