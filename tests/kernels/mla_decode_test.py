"""Decoding over a paged cache against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.mla_decode import api

B, H, C, R, PAGE, PAGES, MOST = 5, 3, 16, 4, 8, 30, 5
BACKENDS = [backend.name for backend in api.BACKENDS]


def problem(lengths=(0, 1, 8, 21, 40)):
  rng = np.random.default_rng(0)
  pages = rng.standard_normal((PAGES, PAGE, C + R)).astype(np.float32)
  table = rng.permutation(PAGES)[:B * MOST].reshape(B, MOST).astype(np.int32)
  lengths = np.array(lengths, np.int32)
  free = np.ones((PAGES, PAGE), bool)
  for row, length in zip(table, lengths, strict=True):
    for i in range(length):
      free[row[i // PAGE], i % PAGE] = False
    row[-(-length // PAGE):] = rng.choice([-1, PAGES + 3, 0])  # entries that nobody reads
  pages[free] = np.nan
  q = rng.standard_normal((B, H, C + R)).astype(np.float32)
  return {'q_latent': q[..., :C], 'q_rope': q[..., C:], 'pages': pages, 'page_table': table,
          'lengths': lengths}


def oracle(q_latent, q_rope, pages, page_table, lengths):
  out = np.zeros(q_latent.shape)
  for b, length in enumerate(lengths):
    if not length:
      continue
    entries = np.array([pages[page_table[b, i // PAGE], i % PAGE] for i in range(length)],
                       np.float64)
    logits = np.concatenate([q_latent[b], q_rope[b]], -1) @ entries.T
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out[b] = weights / weights.sum(-1, keepdims=True) @ entries[:, :C]
  return out


@pytest.mark.parametrize('impl', BACKENDS)
@pytest.mark.parametrize('chunk', [1, 2, 16])
@pytest.mark.parametrize('lengths', [(0, 1, 8, 21, 40), (0,) * B, (40,) * B], ids=str)
def test_averages(impl, chunk, lengths):
  arrays = problem(lengths)
  got = jax.jit(lambda **a: api.mla_decode(**a, impl=impl, chunk=chunk))(**arrays)
  want = oracle(**arrays)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_bfloat16_cache():
  arrays = problem()
  narrow = {n: jnp.asarray(a, jnp.bfloat16) if a.dtype == np.float32 else jnp.asarray(a)
            for n, a in arrays.items()}
  got = api.mla_decode(**narrow)
  assert got.dtype == jnp.bfloat16
  want = oracle(**{n: np.asarray(a, np.float32) if a.dtype == jnp.bfloat16 else np.asarray(a)
                   for n, a in narrow.items()})
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0,
                             atol=1e-2 * np.abs(want).max())


def test_rows_do_not_influence_each_other():
  arrays = problem()
  before = np.asarray(api.mla_decode(**arrays))
  arrays['q_latent'] = arrays['q_latent'].copy()
  arrays['q_latent'][3] *= 9
  arrays['lengths'] = np.array([0, 1, 8, 21, 33], np.int32)
  after = np.asarray(api.mla_decode(**arrays))
  np.testing.assert_array_equal(before[:3], after[:3])
  assert (before[3:] != after[3:]).any(axis=(1, 2)).all()


@pytest.mark.parametrize('change, said', [
    ({'q_rope': jnp.ones((B, H, R + 1))}, 'do not fit'),
    ({'lengths': jnp.ones(B)}, 'integers'), ({'lengths': jnp.full(B, 41)}, 'room for 40'),
    ({'lengths': jnp.full(B, 40), 'page_table': jnp.full((B, MOST), PAGES)}, 'of 30'),
    ({'impl': 'triton'}, 'unknown impl')])
def test_what_does_not_fit_is_refused(change, said):
  with pytest.raises(ValueError, match=said):
    api.mla_decode(**(problem() | change))
