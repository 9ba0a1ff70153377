"""Which accelerator kernels are for: the one that is here, or one that is pretended.

Interpretation and ahead-of-time compilation pretend.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

import jax

Kind = Literal['sm90', 'sm100', 'tpu']
_NAMES = {'sm90': 'a Hopper GPU (compute capability 9.0)',
          'sm100': 'a data-centre Blackwell GPU (compute capability 10.0 or 10.3)', 'tpu': 'a TPU'}


@dataclasses.dataclass(frozen=True)
class Device:
  """What a kernel is specialised for.

  Attributes:
    kind: family of kernels that it can run, or None when there is none here.
    cores: streaming multiprocessors of a GPU, TensorCores of a TPU chip; 1 without either.
    name: as the vendor calls it.
    pairs: two multiprocessors may work as one (Blackwell); interpreters cannot show that.
  """

  kind: Kind | None
  cores: int
  name: str
  pairs: bool = True


_pretended: list[Device] = []


def current() -> Device:
  """Returns the device that kernels are written for now: the pretended one, or the default."""
  if _pretended:
    return _pretended[-1]
  device = jax.devices()[0]
  name = getattr(device, 'device_kind', device.platform)
  if device.platform == 'tpu':
    return Device('tpu', getattr(device, 'num_cores', 1), name)
  if device.platform == 'gpu':
    capability = str(getattr(device, 'compute_capability', ''))
    kind = {'9.0': 'sm90', '10.0': 'sm100', '10.3': 'sm100'}.get(capability)
    return Device(kind, getattr(device, 'core_count', 1), name)
  return Device(None, 1, name)


def family() -> str:
  """Returns "cpu", "gpu" or "tpu", whichever the current device is."""
  if _pretended:
    return 'tpu' if _pretended[-1].kind == 'tpu' else 'gpu'
  return jax.default_backend()


def obstacle(kind: Kind) -> str | None:
  """Returns why kernels of a kind cannot run on the current device, or None when they can."""
  device = current()
  if device.kind == kind:
    return None
  return f'needs {_NAMES[kind]}, this is {re.sub("[^ -~]", "?", device.name)}'


@contextlib.contextmanager
def pretending(kind: Kind, cores: int = 1, name: str = '', pairs: bool = True) -> Iterator[None]:
  """Makes `current` answer with a device that is not here.

  For tracing kernels that an interpreter executes or that are only compiled: running one outside
  of an interpreter fails in JAX.
  """
  _pretended.append(Device(kind, cores, name or kind, pairs))
  try:
    yield
  finally:
    _pretended.pop()
