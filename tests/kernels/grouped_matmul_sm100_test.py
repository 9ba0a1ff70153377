"""The Blackwell kernel's own code, interpreted with race detection, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import testing, tiles
from composer_jax.kernels.grouped_matmul import mosaic_sm100, reference, schedule, sm100_config
from composer_jax.kernels.grouped_matmul.cases import TILED
from composer_jax.kernels.quantize import api as quantize

CONFIG = mosaic_sm100.Config(columns=128, stages=2)  # pairs of CTAs are not interpreted
layout = jax.jit(tiles.layout, static_argnums=1)
forward = jax.jit(reference.forward, static_argnames='transpose')
weight_gradient = jax.jit(reference.weight_gradient)
cases = pytest.mark.parametrize('case', TILED, ids=lambda c: c.name)
formats = pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])


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
def test_bfloat16_product(case, transpose):
  x, w, sizes, dy = arrays(case)
  rows = dy if transpose else x
  with testing.interpreted('sm100'):
    got = jax.jit(lambda *a: mosaic_sm100.forward(*a, transpose=transpose, config=CONFIG))(
        rows, w, sizes)
  assert got.dtype == jnp.bfloat16
  check(got, forward(wide(rows), wide(w), sizes, transpose=transpose), 1e-2)
  assert not np.asarray(got, np.float32)[sum(case.sizes):].any()


@cases
def test_bfloat16_weight_gradient(case):
  x, _, sizes, dy = arrays(case)
  with testing.interpreted('sm100'):
    got = jax.jit(lambda *a: mosaic_sm100.weight_gradient(*a, config=CONFIG))(x, dy, sizes)
  assert got.dtype == jnp.float32
  check(got, weight_gradient(wide(x), wide(dy), sizes), 1e-5)


def scaled_product(x, w, axis, sizes, format, where, config=CONFIG):
  """The kernel's result and that of the dequantised operands; `axis` of `w` is contracted."""
  @jax.jit
  def operands(x, w):
    return quantize.quantize(tiles.spread(x, where), format), quantize.quantize(w, format, axis)

  @jax.jit
  def kernel(xq, wq):
    got = mosaic_sm100.forward_scaled(xq, wq, where, dtype=jnp.float32, config=config)
    return tiles.gather(got, where)[:, :w.shape[3 - axis]]

  @jax.jit
  def expected(xq, wq):
    rows = tiles.gather(quantize.dequantize(xq)[:, :x.shape[1]], where)
    matrices = quantize.dequantize(wq, (w.shape[0], w.shape[3 - axis], w.shape[axis]))
    return reference.forward(rows, jnp.swapaxes(matrices, 1, 2), sizes, transpose=False)

  both = operands(x, w)
  with testing.interpreted('sm100'):
    got = kernel(*both)
  return got, expected(*both)


@cases
@formats
def test_scaled_product(case, format):
  x, w, sizes, _ = arrays(case)
  check(*scaled_product(x, w, 1, sizes, format, layout(sizes, x.shape[0])), 1e-5)


@formats
def test_scaled_gradient_of_rows(format):
  x, w, sizes, dy = arrays(TILED[0])
  check(*scaled_product(dy, w, 2, sizes, format, layout(sizes, x.shape[0])), 1e-5)


@cases
def test_scaled_weight_gradient(case):
  x, _, sizes, dy = arrays(case)
  where = layout(sizes, x.shape[0])
  operand = jax.jit(lambda side: quantize.quantize(tiles.spread(side, where), 'mxfp8', 0))
  xq, dyq = operand(x), operand(dy)
  with testing.interpreted('sm100'):
    got = jax.jit(lambda *a: mosaic_sm100.weight_gradient_scaled(*a, where, config=CONFIG))(
        xq, dyq)
  rows = [jax.jit(lambda q: tiles.gather(quantize.dequantize(q).T, where))(q)[:, :side.shape[1]]
          for q, side in ((xq, x), (dyq, dy))]
  check(got[:, :x.shape[1], :dy.shape[1]], weight_gradient(*rows, sizes), 1e-5)


@formats
def test_extreme_blocks(format):
  """Zeros, denormals and saturation, each in rows of their own."""
  rng = np.random.default_rng(1)
  x = rng.standard_normal((128, 128)).astype(np.float32)
  x[0], x[1], x[2, :32], x[3] = 0, 1e-42, 0, 3e38 * np.sign(x[3])
  w = rng.standard_normal((1, 128, 128)).astype(np.float32)
  sizes = np.array([128], np.int32)
  got, want = scaled_product(x, w, 1, sizes, format, layout(sizes, 128))
  for some in (slice(0, 3), slice(4, None)):
    check(got[some], want[some], 1e-5)
  assert not np.asarray(got[0]).any() and not np.asarray(got[1]).any()


@formats
def test_a_row_depends_on_no_other_row(format):
  """No leak between tokens of a batch, to the bit."""
  rng = np.random.default_rng(2)
  x, w = rng.standard_normal((140, 128)), rng.standard_normal((2, 128, 128))
  sizes = np.array([70, 70], np.int32)
  where = layout(sizes, 140)
  got, _ = scaled_product(jnp.float32(x), jnp.float32(w), 1, sizes, format, where)
  x[[33, 100]] *= 1e4
  changed, _ = scaled_product(jnp.float32(x), jnp.float32(w), 1, sizes, format, where)
  same = np.delete(np.arange(140), [33, 100])
  np.testing.assert_array_equal(np.asarray(got)[same], np.asarray(changed)[same])
  assert (np.asarray(got)[33] != np.asarray(changed)[33]).any()


@pytest.mark.parametrize('rows_per_tile', [1, 2])
def test_every_tile_is_computed_once(rows_per_tile):
  sizes, columns = np.array([130, 0, 700, 128, 1], np.int32), 5
  where = layout(sizes, 1000)
  tasks, count = jax.jit(lambda where: schedule.forward(
      where, columns, 3, rows_per_tile=rows_per_tile, band=2))(where)
  real = np.asarray(tasks)[:int(count[0])]
  written = [(row + i, column, group) for row, column, group, _, _, height in real
             for i in range(height)]
  starts = np.asarray(where.starts) // 128
  expected = {(start + i, column, group) for group, (start, size) in enumerate(
      zip(starts, sizes, strict=True)) for i in range(-(-size // 128)) for column in range(columns)}
  assert len(written) == len(expected) and set(written) == expected
  gradient, count = jax.jit(lambda where: schedule.weight_gradient(
      where, 4, columns, 64, rows_per_tile=rows_per_tile))(where)
  assert len({tuple(t[:3]) for t in np.asarray(gradient)}) == int(count[0])
  assert {(t[2], t[3], t[4]) for t in np.asarray(gradient).tolist()} == {
      (g, starts[g] * 2, -(-size // 64)) for g, size in enumerate(sizes)}


def test_bands_read_less_than_rows():
  """Tiles of operands that 16 programs at a time read, over a group of 32 x 32 tiles."""
  where = layout(np.array([32 * 128], np.int32), 32 * 128)

  def read(band):
    tasks = np.asarray(jax.jit(lambda where: schedule.forward(where, 32, 1, band=band)[0])(where))
    waves = tasks.reshape(-1, 16, 6)
    return sum(len(set(wave[:, schedule.ROW])) + len(set(wave[:, schedule.COLUMN]))
               for wave in waves)

  assert read(4) < 0.5 * read(1)


def test_narrow_tiles_instead_of_copies_of_weights():
  pairs = mosaic_sm100.PAIRS
  narrow = mosaic_sm100.Config(columns=128, collective=True)
  assert [mosaic_sm100._fitting(pairs, n) for n in (4096, 384, 200)] == [pairs, narrow, pairs]


def test_obstacle_names_the_device():
  assert 'Blackwell' in mosaic_sm100.obstacle()
  assert jax.default_backend() == 'cpu'


@pytest.mark.parametrize(('format', 'stages', 'shared'), [('mxfp8', 2, 32), ('nvfp4', 4, 192)])
def test_accumulators_that_overlap(format, stages, shared):
  """Tiles of 256 columns, several for each program: a product starts before all is stored."""
  rng = np.random.default_rng(3)
  sizes, k = np.array([130, 0, 128], np.int32), 256
  x, w = rng.standard_normal((258, k)), rng.standard_normal((3, k, 512))
  config = mosaic_sm100.Config(columns=256, stages=stages)
  got, want = scaled_product(jnp.float32(x), jnp.float32(w), 1, sizes, format,
                             layout(sizes, 258), config)
  check(got, want, 1e-5)
  operands = mosaic_sm100._scaled(*(quantize.quantize(jnp.float32(a), format) for a in (x, x)))
  assert sm100_config.accumulators_of(operands, config, 32).shared == shared
