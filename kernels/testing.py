"""Runs the code of kernels on a CPU, for tests: the one file that touches private parts of JAX.

The Mosaic GPU interpreter of JAX 0.12 lacks the block-scaled matrix product of Blackwell and, on
Hopper, products whose left side is in registers; `_extended` adds them. Not interpreted: pairs of
CTAs (`collective_axis`), gathers by TMA, other devices.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
  reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from composer_jax.kernels import platform


@contextlib.contextmanager
def interpreted(kind: platform.Kind, *, detect_races: bool = True, cores: int = 2
                ) -> Iterator[None]:
  """Traces Pallas kernels so that an interpreter executes them, on a device that is pretended.

  Args:
    kind: family of kernels; `platform.current` answers accordingly.
    detect_races: raise RuntimeError when two accesses to memory are not ordered.
    cores: streaming multiprocessors that persistent kernels see.
  """
  if kind == 'tpu':
    mode = pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(detect_races=detect_races, dma_execution_mode='eager'))
    with platform.pretending(kind, cores), mode:
      yield
    return
  parameters = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu='ignore')
  with (platform.pretending(kind, cores, pairs=False),
        plgpu.force_gpu_interpret_mode(parameters), _extended()):
    try:
      yield
    except BaseException:
      reset_gpu_interpret_mode_state()
      raise


def unpack_scales(packed: np.ndarray) -> np.ndarray:
  """Returns scales `[rows, blocks]` out of the tcgen05 layout `[rows/128, blocks/4, 32, 16]`."""
  tiles, quads = packed.shape[:2]
  return packed.reshape(tiles, quads, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(
      tiles * 128, quads * 4)


@contextlib.contextmanager
def _extended() -> Iterator[None]:
  """Adds `async_copy_scales_to_tmem`, scales of `tcgen05_mma` and registers of `wgmma`."""
  interpret = jaxpr_interpret.JaxprInterpreter.interpret
  memory_of = gpu_callbacks._get_shared_memory
  own = threading.local()  # the kernel's threads are threads here
  copy, product = gpu_callbacks.TcGen05Copy.__call__, gpu_callbacks.TcGen05Mma.__call__
  wgmma = gpu_callbacks.wgmma

  def interpret_scales(self, jaxpr, token, *arguments):
    scales = primitives.async_copy_scales_to_tmem_p
    if any(equation.primitive is scales for equation in jaxpr.eqns):
      jaxpr = jaxpr.replace(eqns=[
          equation.replace(primitive=primitives.async_copy_smem_to_tmem_p)
          if equation.primitive is scales else equation for equation in jaxpr.eqns])
    return interpret(self, jaxpr, token, *arguments)

  @contextlib.contextmanager
  def changed(**changes):
    own.memory = _Changed(memory_of(), **changes)
    try:
      yield
    finally:
      own.memory = None

  def memory_or_changed():
    return getattr(own, 'memory', None) or memory_of()

  def copy_scales(self, clock, thread):
    def unpacked(_, value):
      return unpack_scales(np.asarray(value)) if value.shape[-2:] == (32, 16) else value
    with changed(store=unpacked):
      return copy(self, clock, thread)

  def scaled_product(self, clock, thread):
    if self.a_scale_key is None:
      return product(self, clock, thread)
    memory = memory_of()
    log = shared_memory.GPULoggingInfo(self.mesh_location, self.thread, self.source_info)

    def read(key, transforms):
      content, *_ = memory.get_buffer_content(key, memory.access(key, transforms), self.thread,
                                              logging_info=log)
      return np.asarray(content).astype(np.float32)

    a_scale = read(self.a_scale_key, self.a_scale_transforms)
    b_scale = read(self.b_scale_key, self.b_scale_transforms)

    def dequantized(key, value):
      if key not in (self.a_key, self.b_key):
        return value
      value = np.asarray(value).astype(np.float32)
      if key == self.a_key:
        return value * np.repeat(a_scale, value.shape[1] // a_scale.shape[1], axis=1)
      columns = b_scale[:value.shape[1]]
      return value * np.repeat(columns, value.shape[0] // columns.shape[1], axis=1).T

    bare = dataclasses.replace(self, a_scale_key=None, b_scale_key=None)
    with changed(load=dequantized):
      return product(bare, clock, thread)

  def wgmma_of_registers(**arguments):
    left = np.asarray(arguments['a_allocation_key_as_array'])
    if left.ndim < 2:  # the key of a buffer
      return wgmma(**arguments)
    waiting = [left]  # for the first read, which is that of the left side
    accumulator = {'a_allocation_key_as_array': arguments['acc_allocation_key_as_array'],
                   'a_transforms': arguments['acc_transforms']}
    with changed(load=lambda _, value: waiting.pop() if waiting else value):
      return wgmma(**(arguments | accumulator))

  with (mock.patch.object(gpu_callbacks, 'wgmma', wgmma_of_registers),
        mock.patch.object(jaxpr_interpret.JaxprInterpreter, 'interpret', interpret_scales),
        mock.patch.object(gpu_callbacks, '_get_shared_memory', memory_or_changed),
        mock.patch.object(gpu_callbacks.TcGen05Copy, '__call__', copy_scales),
        mock.patch.object(gpu_callbacks.TcGen05Mma, '__call__', scaled_product)):
    yield


class _Changed:
  """The interpreter's memory with values changed on their way out of or into it."""

  def __init__(self, memory: Any, load: Callable[[Any, Any], Any] | None = None,
               store: Callable[[Any, Any], Any] | None = None):
    self._memory, self._load, self._store = memory, load, store

  def __getattr__(self, name):
    return getattr(self._memory, name)

  def get_buffer_content(self, key, *arguments, **options):
    value, *rest = self._memory.get_buffer_content(key, *arguments, **options)
    return (self._load(key, value) if self._load else value, *rest)

  def store_buffer_content(self, key, access, value, *arguments, **options):
    value = self._store(key, value) if self._store else value
    return self._memory.store_buffer_content(key, access, value, *arguments, **options)
