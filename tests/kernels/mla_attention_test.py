"""Attention against float64 NumPy, isolation to the bit, and Hopper's own code interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import testing
from composer_jax.kernels.mla_attention import api
from composer_jax.kernels.mla_attention.cases import CASES, TILED

BACKENDS = [backend.name for backend in api.BACKENDS if backend.obstacle() is None]


def oracle(q, k, v, d_out, segment_ids):
  """Averages and the gradients of q, k and v, document by document in float64."""
  q, k, v, d_out = (np.asarray(a, np.float64) for a in (q, k, v, d_out))
  out, dq, dk, dv = (np.zeros_like(a) for a in (v, q, k, v))
  for row, segments in enumerate(segment_ids):
    for document in set(segments[segments > 0].tolist()):
      at = (row, np.flatnonzero(segments == document))
      a, b, c, g = (np.moveaxis(x[at], 1, 0) for x in (q, k, v, d_out))
      logits = a @ np.swapaxes(b, 1, 2)
      logits[:, np.triu(np.ones(logits.shape[1:], bool), 1)] = -np.inf
      p = np.exp(logits - logits.max(-1, keepdims=True))
      p /= p.sum(-1, keepdims=True)
      o = p @ c
      ds = p * (g @ np.swapaxes(c, 1, 2) - (g * o).sum(-1, keepdims=True))
      for target, value in ((out, o), (dq, ds @ b), (dk, np.swapaxes(ds, 1, 2) @ a),
                            (dv, np.swapaxes(p, 1, 2) @ g)):
        target[at] = np.moveaxis(value, 0, 1)
  return out, dq, dk, dv


def run(arrays, dtype='float32', **options):
  q, k, v, d_out = (jnp.asarray(arrays[n], dtype) for n in ('q', 'k', 'v', 'd_out'))
  d_out = jnp.nan_to_num(d_out)

  @jax.jit
  def both(q, k, v, d_out):
    out, pull = jax.vjp(lambda *a: api.mla_attention(*a, arrays['segment_ids'], **options), q, k, v)
    return out, *pull(d_out)

  return both(q, k, v, d_out)


def check(got, want, tolerance):
  scale = np.abs(want[0]).max()  # a gradient may be zero throughout
  for ours, exact in zip(got, want, strict=True):
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=0,
                               atol=tolerance * max(np.abs(exact).max(), scale))


@pytest.mark.parametrize('chunk_bytes', [2 ** 28, 1])
@pytest.mark.parametrize('impl', BACKENDS)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_values_and_gradients(case, impl, chunk_bytes):
  if impl == 'dense' and chunk_bytes == 1:
    with pytest.raises(ValueError, match='more than 1'):
      run(case.arrays(), impl=impl, chunk_bytes=chunk_bytes)
    return
  arrays = case.arrays()
  check(run(arrays, impl=impl, chunk_bytes=chunk_bytes), oracle(**arrays), 1e-5)


@pytest.mark.parametrize('kind, impl', [('sm90', 'mosaic_sm90'), ('tpu', 'splash_tpu')])
@pytest.mark.parametrize('case', TILED, ids=lambda c: c.name)
def test_kernels(case, kind, impl):
  arrays = case.arrays()
  rounded = {n: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) if n != 'segment_ids' else a
             for n, a in arrays.items()}
  # The TPU kernel is JAX's, whose interpreter takes long to look for races.
  with testing.interpreted(kind, detect_races=kind != 'tpu'):
    got = run(arrays, 'bfloat16', impl=impl)
  assert {g.dtype for g in got} == {jnp.dtype('bfloat16')}
  check(got, oracle(**rounded), 1e-2)


def isolated(arrays, impl, dtype):
  """Changes a document, a row, and the end of a document: nobody else may notice."""
  before = np.asarray(run(arrays, dtype, impl=impl)[0], np.float32)
  first = np.flatnonzero(arrays['segment_ids'][0] == 2)
  changed = {n: a.copy() for n, a in arrays.items()}
  for name in ('q', 'k', 'v'):
    changed[name][0, first[-3:]] *= -1.5
  after = np.asarray(run(changed, dtype, impl=impl)[0], np.float32)
  same = np.ones(before.shape[:2], bool)
  same[0, first[-3:]] = False
  np.testing.assert_array_equal(before[same], after[same])
  assert (before[0, first[-1]] != after[0, first[-1]]).any()


@pytest.mark.parametrize('impl', ['dense', 'xla'])
def test_isolation_to_the_bit(impl):
  isolated(CASES[1].arrays(), impl, 'float32')


def test_isolation_of_the_hopper_kernel_to_the_bit():
  with testing.interpreted('sm90', detect_races=False):
    isolated(TILED[0].arrays(), 'mosaic_sm90', 'bfloat16')


def test_long_rows_hold_few_logits():
  """What the compiled gradient takes beside operands and results grows with a chunk only."""
  struct, shape = jax.ShapeDtypeStruct, (1, 1024, 2, 16)

  def temporaries(impl, chunk_bytes):
    def loss(q, k, v, segment_ids):
      return api.mla_attention(q, k, v, segment_ids, impl=impl, chunk_bytes=chunk_bytes).sum()
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(
        *[struct(shape, jnp.float32)] * 3, struct(shape[:2], jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  logits = 4 * 2 * 1024 ** 2
  assert temporaries('dense', 2 ** 28) > logits > 4 * temporaries('xla', logits // 32)


@pytest.mark.parametrize('change, said', [
    ({'k': jnp.ones((1, 4, 2, 7))}, 'do not fit'),
    ({'v': jnp.ones((1, 4, 2, 8), jnp.bfloat16)}, 'of one floating type'),
    ({'segment_ids': jnp.ones((1, 4))}, 'integers'), ({'impl': 'triton'}, 'unknown impl'),
    ({'impl': 'mosaic_sm90'}, 'Hopper')])
def test_what_does_not_fit_is_refused(change, said):
  arguments = {'q': jnp.ones((1, 4, 2, 8)), 'k': jnp.ones((1, 4, 2, 8)),
               'v': jnp.ones((1, 4, 2, 8)), 'segment_ids': jnp.ones((1, 4), jnp.int32)} | change
  with pytest.raises(ValueError, match=said):
    api.mla_attention(**arguments)
