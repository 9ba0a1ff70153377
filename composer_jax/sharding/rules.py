"""One table from the logical axes of arrays to the axes of the device mesh."""

import dataclasses
from collections.abc import Mapping

import jax

from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Axes:
  """Logical names of an array's dimensions, None for one that is never split.

  Deliberately not registered with JAX, so that it is a leaf of a pytree of axes.
  """

  names: tuple[str | None, ...]


Rules = Mapping[str, tuple[str, ...]]

# Logical axis -> mesh axes it is split over (an axis absent here is replicated). `fsdp` splits the
# model width of every matrix; experts are split over `expert`, whose devices hold different rows of
# the batch too.
DEFAULT_RULES: Rules = {
    'batch': ('data', 'fsdp', 'expert'),
    'sequence': ('context',),
    'embed': ('fsdp',),
    'expert': ('expert',),
}


def partition_spec(axes: Axes, rules: Rules, mesh_axes: tuple[str, ...]
                   ) -> jax.sharding.PartitionSpec:
  """Returns the PartitionSpec of an array with the given logical axes.

  Args:
    axes: logical name of each dimension.
    rules: logical axis -> mesh axes.
    mesh_axes: the axes that the mesh has; rules for others are skipped.

  Raises:
    UserError: two dimensions of the array would be split over the same mesh axis.
  """
  used: dict[str, str] = {}
  entries = []
  for name in axes.names:
    chosen = tuple(a for a in rules.get(name, ()) if a in mesh_axes) if name else ()
    for axis in chosen:
      if axis in used:
        raise UserError(f'sharding rules: axes {used[axis]!r} and {name!r} of {axes.names} are '
                        f'both mapped to mesh axis {axis!r}')
      used[axis] = name
    entries.append(chosen if len(chosen) > 1 else chosen[0] if chosen else None)
  return jax.sharding.PartitionSpec(*entries)


def shardings(axes_tree, mesh: jax.sharding.Mesh, rules: Rules = DEFAULT_RULES):
  """Returns a pytree of NamedSharding for a pytree of `Axes` (for example a model's).

  Raises:
    UserError: see `partition_spec`.
  """
  return jax.tree.map(
      lambda axes: jax.sharding.NamedSharding(
          mesh, partition_spec(axes, rules, tuple(mesh.axis_names))), axes_tree)
