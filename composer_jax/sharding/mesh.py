"""Makes the device mesh from its configured axis sizes."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each mesh axis; the product must equal the number of devices.

  Attributes:
    data: replicas that split the batch.
    fsdp: devices that split the batch, the parameters and the optimizer state.
    context: devices that split the sequence.
    expert: devices that split the experts (and the batch).
  """

  data: int = 1
  fsdp: int = 1
  context: int = 1
  expert: int = 1


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None
              ) -> jax.sharding.Mesh:
  """Returns a mesh with axes data, fsdp, context and expert, all left to the compiler (Auto).

  Args:
    config: axis sizes.
    devices: devices in mesh order; default all.

  Raises:
    UserError: the sizes do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = dataclasses.asdict(config)
  if math.prod(sizes.values()) != len(devices):
    raise UserError(f'mesh {sizes} needs {math.prod(sizes.values())} devices, '
                    f'there are {len(devices)}')
  return jax.sharding.Mesh(
      np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes),
      axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
