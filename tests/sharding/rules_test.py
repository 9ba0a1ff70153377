"""Logical axes to mesh axes."""

import jax
import pytest

from composer_jax import models
from composer_jax.errors import UserError
from composer_jax.sharding import mesh, rules

P = jax.sharding.PartitionSpec


def test_partition_spec():
  table = {'batch': ('data', 'fsdp'), 'embed': ('fsdp',), 'expert': ('expert',)}
  names = ('data', 'fsdp')
  assert rules.partition_spec(rules.Axes(('batch', None)), table, names) == P(
      ('data', 'fsdp'), None)
  assert rules.partition_spec(rules.Axes(('expert', 'embed', 'ffn')), table, names) == P(
      None, 'fsdp', None)


def test_two_dimensions_on_one_mesh_axis():
  with pytest.raises(UserError, match='both mapped to mesh axis .fsdp.'):
    rules.partition_spec(rules.Axes(('batch', 'embed')),
                         {'batch': ('fsdp',), 'embed': ('fsdp',)}, ('fsdp',))


def test_model_on_a_mesh():
  grid = mesh.make_mesh(mesh.MeshConfig())
  assert grid.axis_names == ('data', 'fsdp', 'context', 'expert')
  assert set(grid.axis_types) == {jax.sharding.AxisType.Auto}
  for config in (models.tiny(), models.kimi_k2_5()):
    specs = rules.shardings(models.logical_axes(config), grid)
    assert specs['moe_layers']['moe']['experts_down'].spec == P(None, 'expert', None, 'fsdp')
  with pytest.raises(UserError, match='needs 8 devices'):
    mesh.make_mesh(mesh.MeshConfig(fsdp=8))
