"""The Hopper kernel's own code, interpreted with race detection, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import testing, tiles
from composer_jax.kernels.grouped_matmul import mosaic_sm90, reference
from composer_jax.kernels.grouped_matmul.cases import TILED

CONFIG = mosaic_sm90.Config(columns=128, stages=2)
cases = pytest.mark.parametrize('case', TILED, ids=lambda c: c.name)


def arrays(case):
  x, w, sizes, dy = case.arrays()
  return *(jnp.asarray(a, jnp.bfloat16) for a in (x, w)), sizes, jnp.asarray(dy, jnp.bfloat16)


def wide(x):
  return jnp.asarray(x, jnp.float32)


def check(got, want, tolerance):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  assert got.shape == want.shape
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30))


@cases
@pytest.mark.parametrize('transpose', [False, True])
def test_product(case, transpose):
  x, w, sizes, dy = arrays(case)
  rows = dy if transpose else x
  with testing.interpreted('sm90'):
    got = jax.jit(lambda *a: mosaic_sm90.forward(*a, transpose=transpose, config=CONFIG))(
        rows, w, sizes)
  assert got.dtype == jnp.bfloat16
  check(got, reference.forward(wide(rows), wide(w), sizes, transpose=transpose), 1e-2)
  assert not np.asarray(got, np.float32)[sum(case.sizes):].any()


@cases
def test_weight_gradient(case):
  x, _, sizes, dy = arrays(case)
  with testing.interpreted('sm90'):
    got = jax.jit(lambda *a: mosaic_sm90.weight_gradient(*a, config=CONFIG))(x, dy, sizes)
  assert got.dtype == jnp.float32
  check(got, reference.weight_gradient(wide(x), wide(dy), sizes), 1e-5)


@cases
def test_fp8_product(case):
  x, w, sizes, _ = case.arrays()
  rng = np.random.default_rng(1)
  x = jnp.clip(jnp.nan_to_num(x), -448, 448).astype(jnp.float8_e4m3fn)
  w = jnp.swapaxes(jnp.asarray(w), 1, 2).astype(jnp.float8_e4m3fn)
  x_scale, w_scale = (jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32)
                      for s in (x.shape[:1], w.shape[:2]))

  @jax.jit
  def kernel(x, w):
    where = tiles.layout(sizes, x.shape[0])
    y = mosaic_sm90.forward_fp8(
        tiles.spread(x, where), w, tiles.spread(x_scale[:, None], where)[:, 0], w_scale, where,
        dtype=jnp.float32, config=mosaic_sm90.Config(columns=128, k=128, stages=2))
    return tiles.gather(y, where)

  with testing.interpreted('sm90'):
    got = kernel(x, w)
  matrices = jnp.swapaxes(wide(w) * w_scale[:, :, None], 1, 2)
  check(got, reference.forward(wide(x) * x_scale[:, None], matrices, sizes, transpose=False), 1e-5)


def test_obstacle_names_the_device():
  assert 'Hopper' in mosaic_sm90.obstacle()
