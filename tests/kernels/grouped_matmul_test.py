"""Every backend of grouped_matmul on every case, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import platform, testing
from composer_jax.kernels.grouped_matmul import api, xla
from composer_jax.kernels.grouped_matmul.cases import CASES, Case
from composer_jax.kernels.quantize.types import Formats

# Those of accelerators have tests of their own.
BACKENDS = [backend.name for backend in api.BACKENDS if backend.obstacle() is None]


def _oracle(x, w, sizes, dy):
  """Products, gradient of x and gradient of w, group by group in float64."""
  y = np.zeros((len(x), w.shape[2]))
  dx, dw, start = np.zeros(x.shape), np.zeros(w.shape), 0
  for group, size in enumerate(sizes):
    rows = slice(start, start + size)
    y[rows] = x[rows].astype(np.float64) @ w[group]
    dx[rows] = dy[rows].astype(np.float64) @ w[group].T
    dw[group] = x[rows].astype(np.float64).T @ dy[rows]
    start += size
  return y, dx, dw


@pytest.mark.parametrize('impl', BACKENDS)
@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_value_and_gradients(case, impl):
  x, w, sizes, dy = case.arrays()

  @jax.jit
  def run(x, w, sizes, dy):
    y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, impl=impl), x, w)
    return y, *pull(dy)

  for got, want in zip(run(x, w, sizes, dy), _oracle(x, w, sizes, dy), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize('impl', BACKENDS)
def test_float32_is_not_left_to_the_default_precision(impl, products):
  x, w, sizes, dy = CASES[-1].arrays()

  def run(x, w):
    y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, impl=impl), x, w)
    return y, *pull(dy)

  highest = jax.lax.Precision.HIGHEST
  found = [equation.params['precision'] for equation, _ in products(jax.make_jaxpr(run)(x, w))]
  assert len(found) >= 3
  for precision in found:
    assert precision in (highest, (highest, highest))


@pytest.mark.parametrize('impl', BACKENDS)
@pytest.mark.parametrize('capacity', [0, 1024])
def test_the_weight_gradient_is_rounded_once(monkeypatch, impl, capacity):
  """Thousands of bfloat16 rows: summed in float32, and in the type of the weights at the end."""
  monkeypatch.setattr(xla, 'capacity', lambda rows, groups: capacity)
  sizes = np.array([4096, 1000], np.int32)
  rng = np.random.default_rng(0)
  x, dy = (jnp.asarray(rng.uniform(0.5, 1.5, (5096, width)), jnp.bfloat16) for width in (6, 5))
  w = jnp.zeros((2, 6, 5), jnp.bfloat16)

  functions = next(backend.functions for backend in api.BACKENDS if backend.name == impl)

  @jax.jit
  def gradients(w):
    _, pull = jax.vjp(lambda w: api.grouped_matmul(x, w, sizes, impl=impl), w)
    return functions.weight_gradient(x, dy, sizes), *pull(dy)

  wide, rounded = gradients(w)
  assert (wide.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
  want = _oracle(*(np.asarray(a, np.float64) for a in (x, w)), sizes, np.asarray(dy, np.float64))[2]
  np.testing.assert_allclose(wide, want, rtol=1e-5)
  np.testing.assert_allclose(rounded.astype(jnp.float32), want, rtol=1.01 * 2 ** -8)


@pytest.mark.parametrize('capacity', [0, 8, 136, 264])
def test_rows_may_go_either_way(monkeypatch, capacity):
  """All rows in the loop, most, some, none: equal, under remat in a scan over layers too."""
  case = next(c for c in CASES if c.name == 'many rows, some groups overflow')
  x, w, sizes, dy = case.arrays()
  monkeypatch.setattr(xla, 'capacity', lambda rows, groups: capacity)

  @jax.jit
  def run(x, w, dy):
    def layer(x, w):
      return x, api.grouped_matmul(x, w, sizes, impl='xla')

    def stack(x, w):
      return jax.lax.scan(jax.checkpoint(layer), x, jnp.stack([w, -2 * w]))[1]

    y, pull = jax.vjp(stack, x, w)
    return y, *pull(jnp.stack([dy, dy]))

  y, dx, dw = _oracle(x, w, sizes, dy)
  got_y, got_dx, got_dw = run(x, w, dy)
  np.testing.assert_allclose(got_y, [y, -2 * y], rtol=1e-5, atol=4e-5)
  np.testing.assert_allclose(got_dx, -dx, rtol=1e-5, atol=4e-5)
  np.testing.assert_allclose(got_dw, -dw, rtol=1e-5, atol=8e-5)


def test_capacity():
  assert xla.capacity(2048, 16) == 144 and xla.capacity(2048, 64) == 40
  assert xla.capacity(4096, 128) == 40
  assert xla.capacity(511, 4) == 0 and xla.capacity(1024, 384) == 0  # few rows, small groups


def test_auto_takes_the_cpu_backend_and_a_name_never_falls_back(monkeypatch):
  x, w, sizes, _ = CASES[1].arrays()
  np.testing.assert_array_equal(api.grouped_matmul(x, w, sizes),
                                api.grouped_matmul(x, w, sizes, impl='xla'))
  with pytest.raises(ValueError, match='unknown impl .pallas.'):
    api.grouped_matmul(x, w, sizes, impl='pallas')
  broken = [api.dispatch.Backend('xla', None, lambda: 'no such unit', ('cpu',)),
            next(b for b in api.BACKENDS if b.name == 'ragged_dot')]
  monkeypatch.setattr(api, 'BACKENDS', broken)
  with pytest.raises(ValueError, match='cannot run here: no such unit'):
    api.grouped_matmul(x, w, sizes, impl='xla')
  with pytest.raises(ValueError, match='no usable backend .xla: no such unit; ragged_dot: not'):
    api.grouped_matmul(x, w, sizes)


@pytest.mark.parametrize('x, w, sizes, said', [
    (jnp.ones((4, 3)), jnp.ones((2, 5, 6)), [2, 2], 'do not fit'),
    (jnp.ones((4, 3)), jnp.ones((2, 3, 6), jnp.bfloat16), [2, 2], 'float32 and bfloat16'),
    (jnp.ones((4, 3), int), jnp.ones((2, 3, 6), int), [2, 2], 'int32'),
    (jnp.ones((4, 3)), jnp.ones((2, 3, 6)), [2.0, 2.0], 'integers'),
    (jnp.ones((4, 3)), jnp.ones((2, 3, 6)), [3, 2], 'the 4 rows of x.*their sum 5'),
    (jnp.ones((4, 3)), jnp.ones((2, 3, 6)), [-1, 2], 'their least is -1')])
def test_what_does_not_fit_is_refused(x, w, sizes, said):
  with pytest.raises(ValueError, match=said):
    api.grouped_matmul(x, w, jnp.array(sizes))


@pytest.mark.parametrize('kind, impl', [('sm90', 'mosaic_sm90'), ('sm100', 'mosaic_sm100')])
def test_kernels_say_what_they_do_not_take(kind, impl):
  x, w, sizes = jnp.ones((4, 3)), jnp.ones((2, 3, 6)), jnp.array([2, 2])
  with pytest.raises(ValueError, match='needs a'):
    api.grouped_matmul(x, w, sizes, impl=impl)
  with platform.pretending(kind):
    with pytest.raises(ValueError, match='multiplies bfloat16, not float32'):
      api.grouped_matmul(x, w, sizes, impl=impl)
    with pytest.raises(ValueError, match='no products in float32'):
      api.grouped_matmul(x, w, sizes, impl=impl, formats=Formats('bfloat16'))


@pytest.mark.parametrize('kind, impl, formats', [
    ('sm90', 'mosaic_sm90', Formats('bfloat16', 'bfloat16', 'bfloat16')),
    ('sm100', 'mosaic_sm100', Formats('nvfp4', 'mxfp8', 'mxfp8'))])
def test_rounded_formats_on_a_kernel_are_those_of_the_emulation(kind, impl, formats):
  x, w, sizes, dy = Case('', (33, 0, 130), padding=9, k=40, n=24, poison=True).arrays()

  def passes(impl):
    def run(x, w, dy):
      y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, formats=formats, impl=impl),
                        x, w)
      return y, *pull(dy)
    return jax.jit(run)(x, w, dy)

  want = passes('xla')
  with testing.interpreted(kind):
    got = passes(impl)
  for ours, emulated in zip(got, want, strict=True):
    assert ours.dtype == emulated.dtype
    np.testing.assert_allclose(ours, emulated, rtol=0, atol=1e-5 * np.abs(emulated).max())
