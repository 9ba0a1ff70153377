"""Copies in both directions, SwiGLU, and decoders, in jnp."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from composer_jax.kernels import tiles
from composer_jax.kernels.quantize import api, cases

RNG = np.random.default_rng(0)


@functools.partial(jax.jit, static_argnums=2)
def _both_ways(x, sizes, format):
  where = tiles.layout(sizes, x.shape[0])
  aligned = tiles.spread(x, where)
  rowwise, columnwise = api.quantize_both(aligned, format, where)
  return (aligned, where.starts, api.dequantize(rowwise), api.dequantize(columnwise),
          api.fake_quantize(aligned, format), api.fake_quantize(aligned, 'mxfp8', 0).T)


@pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])
def test_both_ways(format):
  for sizes in ((3, 0, 130, 20), (0, 150, 0, 0), (0, 0, 0, 0)):
    x = RNG.standard_normal((160, 96)).astype(np.float32)
    x[sum(sizes):] = np.nan  # padding
    aligned, starts, rows, columns, want_rows, want_columns = map(
        np.asarray, _both_ways(x, np.array(sizes, np.int32), format))
    assert not (starts % 128).any() and np.isfinite(rows).all()
    assert (aligned != 0).any(axis=1).sum() == sum(sizes)
    np.testing.assert_array_equal(rows[:, :96], want_rows)
    np.testing.assert_array_equal(columns[:96], want_columns)
    assert not rows[:, 96:].any() and not columns[96:].any()


@functools.partial(jax.jit, static_argnums=1)
def _swiglu(gate_up, format):
  return api.dequantize(api.swiglu_quantize(gate_up, format), (30, 70))


@pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])
def test_swiglu(format):
  gate_up = RNG.standard_normal((30, 2 * 70)).astype(np.float32) * 4
  gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
  exact = gate / (1 + np.exp(-gate)) * up
  got = np.asarray(_swiglu(gate_up, format))
  want = np.asarray(_rounded(exact.astype(np.float32), format))
  assert np.mean(np.isclose(got, want, rtol=1e-5, atol=0)) > 0.98  # the rest: a neighbour


@functools.partial(jax.jit, static_argnums=1)
def _rounded(x, format):
  return api.fake_quantize(x, format)


@functools.partial(jax.jit, static_argnums=1)
def _there_and_back(x, format):
  return api.dequantize(api.quantize(x, format), x.shape)


@pytest.mark.parametrize('format', ['mxfp8', 'nvfp4'])
def test_shared_cases_come_back_as_their_rounded_numbers(format):
  x = cases.rows()
  got = _there_and_back(x, format)
  np.testing.assert_array_equal(got, _rounded(x, format))
  bad = np.isnan(got).any(axis=1)
  assert bad[40] and bad[41] and bad.sum() == 2


def test_int4():
  codes = RNG.integers(0, 16, (2, 5, 64))
  scale = RNG.standard_normal((2, 5, 2)).astype(ml_dtypes.bfloat16)
  packed = np.zeros((2, 5, 8), np.uint32)
  for i in range(64):
    packed[..., i // 8] |= (codes[..., i] << (4 * (i % 8))).astype(np.uint32)
  want = (codes - 8) * np.repeat(scale.astype(np.float64), 32, axis=-1)
  np.testing.assert_array_equal(
      api.dequantize_int4(jnp.asarray(packed.view(np.int32)), jnp.asarray(scale)), want)


def test_block_fp8():
  values = RNG.standard_normal((2, 200, 300)).astype(ml_dtypes.float8_e4m3fn)
  scale = RNG.uniform(0.5, 2, (2, 2, 3)).astype(np.float32)
  want = np.zeros(values.shape, np.float32)
  for e, r, c in np.ndindex(*want.shape):
    want[e, r, c] = np.float32(values[e, r, c]) * scale[e, r // 128, c // 128]
  np.testing.assert_array_equal(
      api.dequantize_block_fp8(jnp.asarray(values), jnp.asarray(scale)), want)


def _layout():
  return tiles.layout(jnp.array([3]), 3)


@pytest.mark.parametrize('call, said', [
    (lambda: api.quantize_both(jnp.ones((3, 4)), 'mxfp8', _layout()), 'no rows of a layout'),
    (lambda: api.quantize_both(jnp.ones((128, 4)), 'float32', _layout()), 'has no blocks'),
    (lambda: api.swiglu_quantize(jnp.ones((3, 5)), 'mxfp8'), r'must be \[rows, 2 F\]'),
    (lambda: api.swiglu_quantize(jnp.ones((3, 4)), 'mxfp8', _layout()), '128 rows'),
    (lambda: api.quantize(jnp.ones((3, 4)), 'mxfp8', impl='mosaic_gpu'), 'cannot run here'),
    (lambda: api.dequantize_int4(jnp.ones((3, 4), jnp.int32), jnp.ones((3, 2))), 'four a scale'),
    (lambda: api.dequantize_block_fp8(jnp.ones((3, 4)), jnp.ones((1, 1))), 'float8_e4m3fn'),
])
def test_what_does_not_fit_is_refused(call, said):
  with pytest.raises(ValueError, match=said):
    call()
