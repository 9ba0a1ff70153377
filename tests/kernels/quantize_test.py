"""Formats against a NumPy definition that looks values up in the list of what is representable."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from composer_jax.kernels.quantize import api

RNG = np.random.default_rng(0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E4M3 = np.array(sorted({(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7)
                        for e in range(16) for m in range(8)} - {480.0}))


def _nearest(x, table):
  """Nearest table value of |x|, ties to the even index (the even fraction), saturating."""
  size = np.abs(x.astype(np.float64))
  above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
  low, high = table[above - 1], table[above]
  up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
  return np.copysign(np.where(up, high, low), x).astype(np.float32)


def _mxfp8(row):
  out = np.zeros_like(row)
  for i in range(0, len(row), 32):
    block = row[i:i + 32]
    largest = float(np.abs(block).max())
    scale = 2.0 ** -127
    while scale * 448 < largest:
      scale *= 2
    values = np.abs(E4M3 * scale) <= np.finfo(np.float32).max
    out[i:i + 32] = (_nearest(block / scale, E4M3[values]) * scale).astype(np.float32)
  return out


def _nvfp4(row):
  out, f = np.zeros_like(row), np.float32
  largest = np.abs(row).max()
  if largest < 2.0 ** -116 * 2688:
    return out
  token = f(largest) / f(2688)
  for i in range(0, len(row), 16):
    block = row[i:i + 16]
    scale = _nearest(np.abs(block).max() / (f(6) * token), E4M3)
    if scale:
      values = _nearest(block / (scale * token), E2M1)
      out[i:i + 16] = values * scale * token
  return out


@functools.partial(jax.jit, static_argnums=(1, 2))
def _ours(x, format, axis):
  return api.fake_quantize(x, format, axis)


def _inputs():
  x = RNG.standard_normal((40, 72)).astype(np.float32)
  x[:8] *= np.exp(3 * RNG.standard_normal((8, 72)))  # outliers
  x[8:12] *= 1e-30
  x[12:16] *= 1e30
  x[16] = 0
  x[17, 16:48] = 0
  x[18] = RNG.choice(np.concatenate([E2M1, -E2M1, [2.5, 1.75, 5, 0.25, 0.75]]), 72)  # ties
  x[19] = 448 * 2.0 ** RNG.integers(-9, 9, 72) * RNG.choice([1, 1 + 2.0 ** -23], 72)
  x[20, 3] = np.finfo(np.float32).max
  x[21] = np.finfo(np.float32).max
  x[22] = 1e-34
  x[23, 1] = 1e-7  # lost beside the rest
  return x


@pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])
@pytest.mark.parametrize('axis', [0, 1])
def test_bit_equal_to_numpy(format, axis):
  """72 and 40 are multiples of neither block; axis 0 is the same along the other way."""
  x = _inputs()
  if axis == 0:
    x = x[:, :10].copy()
  define = {'mxfp8': _mxfp8, 'nvfp4': _nvfp4}[format]
  with np.errstate(all='raise', under='ignore'):
    want = np.apply_along_axis(define, axis, x)
  got = np.asarray(_ours(x, format, axis))
  assert got.dtype == np.float32 and np.isfinite(got).all()
  np.testing.assert_array_equal(got, want)


def test_all_scales_are_divided_by_exactly():
  """A row's float32 scale is an IEEE quotient; a reciprocal would differ in one row of five."""
  x = np.zeros((4096, 16), np.float32)
  x[:, 0] = np.exp(RNG.uniform(-9, 9, 4096))
  np.testing.assert_array_equal(_ours(x, 'nvfp4', 1), np.apply_along_axis(_nvfp4, 1, x))


def test_numpy_tables_are_those_of_ml_dtypes():
  for table, dtype in ((E4M3, ml_dtypes.float8_e4m3fn), (E2M1, ml_dtypes.float4_e2m1fn)):
    bits = np.arange(len(table), dtype=np.uint8)
    np.testing.assert_array_equal(bits.view(dtype).astype(np.float64), table)


def test_bfloat16():
  x = _inputs()
  np.testing.assert_array_equal(_ours(x, 'bfloat16', 1),
                                x.astype(ml_dtypes.bfloat16).astype(np.float32))
  np.testing.assert_array_equal(_ours(x, 'float32', 1), x)


@pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])
def test_extreme_blocks(format):
  """Zeros come back, denormals do no harm, and what is not finite does not pass unnoticed."""
  x = np.ones((6, 64), np.float32)
  x[0] = 0
  x[1, :32] = 0
  x[2] = 1e-45
  x[3, :32] = 1e-42
  x[4, 40], x[5, 40] = np.inf, np.nan
  got = np.asarray(_ours(x, format, 1))
  assert not got[0].any() and not got[1, :32].any() and np.isfinite(got[:4]).all()
  np.testing.assert_allclose(got[1, 32:], 1, rtol=0.07)
  assert np.abs(got[2]).max() <= 1e-44
  assert np.isnan(got[4:, 32:]).all()
  assert np.isnan(got[4:, :32]).all() == (format == 'nvfp4')


def test_refused_arguments():
  with pytest.raises(ValueError, match='unknown format'):
    api.fake_quantize(jnp.ones(4), 'fp8')
  with pytest.raises(ValueError, match='unknown impl'):
    api.fake_quantize(jnp.ones(4), 'mxfp8', impl='pallas')


@pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])
@pytest.mark.parametrize('axis', [1, 2])
def test_quantized_matrices_stand_for_the_same_numbers(format, axis):
  x = np.stack([_inputs(), RNG.standard_normal((40, 72)).astype(np.float32)])
  x[1, 3, 70], x[1, 9, 0] = np.nan, np.inf
  q = jax.jit(api.quantize, static_argnums=(1, 2))(x, format, axis)
  rows, columns = (40, 72) if axis == 2 else (72, 40)
  assert q.values.shape == (2, 128, 128)
  assert q.scales.shape == (2, 1, 128 // (4 * api.BLOCK[format]), 32, 16)
  got = jax.jit(api.dequantize, static_argnums=1)(q, (2, rows, columns))
  want = jnp.moveaxis(_ours(x, format, axis), axis, -1)
  np.testing.assert_array_equal(got, want)
  padding = np.asarray(api.dequantize(q))[:, rows:]
  assert not padding.any()


def test_scales_lie_where_tcgen05_reads_them():
  x = np.ones((256, 256), np.float32)
  for r, c, power in ((0, 0, 5), (37, 1, 3), (200, 7, -4)):
    x[r, 32 * c] = 448 * 2.0 ** power
  scales = np.asarray(api.quantize(x, 'mxfp8').scales).astype(np.float64)
  for r, c, power in ((0, 0, 5), (37, 1, 3), (200, 7, -4)):
    assert scales[r // 128, c // 4, r % 32, r % 128 // 32 * 4 + c % 4] == 2.0 ** max(power, -8)


@pytest.mark.parametrize('arguments, said', [(('bfloat16', 1), 'has no blocks'),
                                             (('mxfp8', 0), 'axis 0')])
def test_what_cannot_be_quantized_is_refused(arguments, said):
  with pytest.raises(ValueError, match=said):
    api.quantize(jnp.ones((2, 3, 4)), *arguments)
