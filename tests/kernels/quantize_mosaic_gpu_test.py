"""The GPU kernel, interpreted, bit for bit against the definition in jnp."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import aot, testing, tiles
from composer_jax.kernels.quantize import api, cases, mosaic_arithmetic, reference

FORMATS = ('mxfp8', 'nvfp4')


def _equal(got, want, rows=None):
  """Values count where blocks are finite: elsewhere the scale alone says NaN."""
  np.testing.assert_array_equal(*(api.dequantize(q)[:rows] for q in (got, want)))
  scales = [reference.unpack_scales(q.scales).astype(jnp.float32)[:rows] for q in (got, want)]
  if want.token_scale is not None:
    np.testing.assert_array_equal(got.token_scale[:rows], want.token_scale[:rows])
    finite = np.isfinite(np.asarray(want.token_scale))[:rows]
    scales = [np.asarray(scale)[finite] for scale in scales]
  np.testing.assert_array_equal(*scales)


@pytest.mark.parametrize('kind, format, dtype', [
    ('sm90', 'mxfp8', 'bfloat16'), ('sm100', 'mxfp8', 'float32'), ('sm100', 'nvfp4', 'float32'),
    ('sm100', 'nvfp4', 'bfloat16')])
def test_shared_cases(kind, format, dtype):
  x = jnp.asarray(cases.rows(160 if dtype == 'float32' else 120), dtype)
  want = api.quantize(x, format, impl='reference')
  with testing.interpreted(kind):
    _equal(api.quantize(x, format, impl='mosaic_gpu'), want)


@pytest.mark.parametrize('format', FORMATS)
def test_experts(format):
  """Four tasks on at most three programs, so that one has two."""
  x = np.random.default_rng(0).standard_normal((2, 40, 130)).astype(np.float32)
  with testing.interpreted('sm100', cores=1):
    got = api.quantize(x, format, 1, impl='mosaic_gpu')
  want = api.quantize(x, format, 1, impl='reference')
  assert got.values.shape == want.values.shape and got.scales.shape == want.scales.shape
  for name in ('values', 'scales', 'token_scale'):
    if getattr(want, name) is not None:
      np.testing.assert_array_equal(*(np.asarray(getattr(q, name)) for q in (got, want)))


@pytest.mark.parametrize('kind, format', [('sm90', 'mxfp8'), ('sm100', 'nvfp4')])
def test_both_ways(kind, format):
  """Empty groups and a ragged tail; the tiles of rows past the last group stay as they are."""
  special = cases.rows()
  x = jnp.asarray(np.concatenate([special[:40], special[:3], special[42:]]), jnp.bfloat16)
  where = tiles.layout(jnp.array([0, 40, 0, 25]), x.shape[0])
  aligned = tiles.spread(x, where)
  assert aligned.shape[0] > 256 == int(where.tiles[0]) * 128
  want = reference.quantize_both(aligned, where.tiles, format)
  with testing.interpreted(kind):
    rowwise, columnwise = api.quantize_both(aligned, format, where, impl='mosaic_gpu')
  _equal(rowwise, want[0], 256)
  np.testing.assert_array_equal(*(np.asarray(api.dequantize(q))[:, :256]
                                  for q in (columnwise, want[1])))
  np.testing.assert_array_equal(
      *(np.asarray(q.scales[:, :2]).view(np.uint8) for q in (columnwise, want[1])))


def test_both_ways_of_float32():
  x = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
  where = tiles.layout(jnp.array([128]), 128)
  aligned = tiles.spread(jnp.asarray(x), where)
  with testing.interpreted('sm100'):
    got = api.quantize_both(aligned, 'mxfp8', where, impl='mosaic_gpu')
  for side, want in zip(got, reference.quantize_both(aligned, where.tiles, 'mxfp8'),
                        strict=True):
    _equal(side, want)


@pytest.mark.parametrize('kind, format', [('sm90', 'mxfp8'), ('sm100', 'nvfp4')])
def test_swiglu(kind, format):
  gate_up = np.random.default_rng(0).standard_normal((40, 2 * 130)).astype(np.float32) * 4
  gate_up[0], gate_up[1, :130], gate_up[2, 0] = 0, -1e4, np.nan
  x = jnp.asarray(gate_up, jnp.bfloat16)
  want = np.asarray(api.dequantize(api.swiglu_quantize(x, format)))
  with testing.interpreted(kind):
    got = np.asarray(api.dequantize(api.swiglu_quantize(x, format, impl='mosaic_gpu')))
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
  with np.errstate(invalid='ignore'):
    assert np.nanmax(np.abs(got - want)) <= 0.26 * np.nanmax(np.abs(want))
    assert np.mean(np.isclose(got, want, rtol=1e-5, atol=0, equal_nan=True)) > 0.98


def test_quotients_are_those_of_ieee():
  """Random ones, exact ones, and those right beside the middle between two numbers."""
  rng = np.random.default_rng(0)
  y = np.exp2(rng.uniform(-40, 40, 100_000)).astype(np.float32)
  x = np.exp2(rng.uniform(-40, 40, 100_000)).astype(np.float32)
  x[:20_000] = y[:20_000] * rng.choice(np.arange(1, 4096), 20_000).astype(np.float32)
  beside = y[20_000:60_000] * (1 + 2.0 ** -23 * rng.integers(-8, 8, 40_000))
  x[20_000:60_000] = beside.astype(np.float32)
  x[60_000:60_100], x[60_100:60_200] = 0, -x[60_100:60_200]
  got = np.asarray(jax.jit(mosaic_arithmetic.quotient)(x, y))
  want = (x.astype(np.float64) / y).astype(np.float32)
  tiny = np.abs(want) < 2.0 ** -100
  np.testing.assert_array_equal(got[~tiny], want[~tiny])
  assert (np.abs(got[tiny]) < np.maximum(2.0 ** -125 / y[tiny], 2.0 ** -99)).all()


def test_no_digit_is_decided_by_an_approximate_division():
  if (reason := aot.obstacle('b200')) is not None:
    pytest.skip(reason)
  with contextlib.closing(aot.compile_ops('b200', ['quantize'])) as results:
    first = next(results)
  assert first.program == 'quantize tokens nvfp4' and first.error is None
  assert not [opcode for opcode in first.opcodes if opcode.startswith('div')]
