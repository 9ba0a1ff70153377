"""Partition of parameters and the rule that moves the selection biases."""

import jax
import numpy as np
import pytest

from composer_jax import models

CONFIG = models.tiny(64)


@pytest.fixture(scope='module')
def params():
  return models.init(CONFIG, jax.random.key(0))


def test_partition_and_combine(params):
  trainable, frozen = models.partition(params)
  assert len(jax.tree.leaves(frozen)) == 2
  assert not any('selection_bias' in jax.tree_util.keystr(path)
                 for path, _ in jax.tree.leaves_with_path(trainable))
  again = models.combine(trainable, frozen)
  assert jax.tree.structure(again) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, again, params)


def test_biases_move_against_the_load_in_every_layer(params):
  _, frozen = models.partition(params)
  counts = np.array([[10, 0, 5, 5, 5, 5, 5, 5], [0, 8, 0, 8, 0, 8, 0, 8],
                     [5, 5, 5, 5, 5, 5, 5, 6]], np.int32)
  moved = models.update_selection_bias(frozen, counts, 0.01)
  trunk = moved['moe_layers']['moe']['router']['selection_bias']
  mtp = moved['mtp']['block']['moe']['router']['selection_bias']
  np.testing.assert_allclose(trunk[0], [-.01, .01, 0, 0, 0, 0, 0, 0])
  np.testing.assert_allclose(trunk[1], [.01, -.01] * 4)
  np.testing.assert_allclose(mtp, [.01] * 7 + [-.01])
  without = models.update_selection_bias(frozen, counts[:2], 0.01)
  assert not np.any(without['mtp']['block']['moe']['router']['selection_bias'])
  assert jax.tree.structure(without) == jax.tree.structure(frozen)


def test_counts_that_do_not_fit(params):
  _, frozen = models.partition(params)
  with pytest.raises(ValueError, match='1 rows for 2 MoE layers'):
    models.update_selection_bias(frozen, np.zeros((1, 8), np.int32), 0.01)
