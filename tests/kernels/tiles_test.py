import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import tiles
from composer_jax.kernels.grouped_matmul import cases


@pytest.mark.parametrize('case', cases.CASES, ids=lambda c: c.name)
def test_rows_go_to_aligned_places_and_back(case):
  x, _, sizes, _ = case.arrays()
  where = jax.jit(tiles.layout, static_argnums=(1, 2))(sizes, x.shape[0], 8)
  aligned = np.asarray(tiles.spread(x, where))
  assert aligned.shape[0] == tiles.capacity(x.shape[0], len(sizes), 8)
  row = 0
  expected = np.zeros_like(aligned)
  for group, size in enumerate(sizes):
    start = int(where.starts[group])
    assert start % 8 == 0
    expected[start:start + size] = x[row:row + size]
    assert (np.asarray(where.tile_group)[start // 8:-(-(start + size) // 8)] == group).all()
    row += size
  np.testing.assert_array_equal(aligned, expected)
  assert int(where.tiles[0]) == sum(-(-s // 8) for s in sizes)
  back = np.asarray(tiles.gather(jnp.asarray(aligned), where))
  np.testing.assert_array_equal(back[:row], x[:row])
  assert not back[row:].any()


def test_capacity_is_enough_for_the_worst_sizes():
  for rows, groups in ((0, 3), (1, 5), (4, 384), (1000, 3), (8, 8)):
    ones = min(groups, rows)
    worst = [1] * ones + [0] * (groups - ones)
    if ones:
      worst[0] += rows - ones
    assert tiles.capacity(rows, groups, 128) >= sum(-(-s // 128) * 128 for s in worst)
  assert tiles.capacity(0, 1, 128) == 128  # no kernel with an empty grid


def test_gradient_of_spread_is_gather():
  sizes = jnp.array([3, 0, 9])
  x = jnp.arange(30.0).reshape(15, 2)
  where = tiles.layout(sizes, 15, 8)
  dy = np.random.default_rng(0).standard_normal(
      tiles.spread(x, where).shape).astype(np.float32)
  _, pull = jax.vjp(lambda x: tiles.spread(x, where), x)
  np.testing.assert_array_equal(pull(dy)[0][:12], tiles.gather(jnp.asarray(dy), where)[:12])
