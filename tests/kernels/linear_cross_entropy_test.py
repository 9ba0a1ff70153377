"""Loss, log-partition and gradients against float64 NumPy, for every backend and chunking."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.linear_cross_entropy import api
from composer_jax.kernels.quantize.types import Formats

T, D, V = 37, 24, 500
BACKENDS = [backend.name for backend in api.BACKENDS]
# Bytes of logits at once: one chunk, three of 128 and a rest, and the least.
CHUNKS = (2 ** 28, 4 * T * 128, 1)


def problem(seed=0):
  rng = np.random.default_rng(seed)
  hidden, w = rng.standard_normal((T, D)), rng.standard_normal((D, V))
  targets, mask = rng.integers(0, V, T), rng.random(T) < 0.7
  targets[:3], mask[:3] = (0, V - 1, 127), True
  hidden[~mask] = np.nan
  targets[~mask] = V + 5
  return (jnp.asarray(hidden, jnp.float32), jnp.asarray(w, jnp.float32), jnp.asarray(targets),
          jnp.asarray(mask), *(jnp.asarray(rng.standard_normal(T), jnp.float32) for _ in range(2)))


def oracle(hidden, w, targets, mask, d_nll, d_lse):
  """In float64: nll, lse and the gradients of their weighted sum."""
  real = np.asarray(mask)
  x, w = np.asarray(hidden, np.float64)[real], np.asarray(w, np.float64)
  target = np.asarray(targets)[real]
  logits = x @ w
  lse = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
  p = np.exp(logits - lse[:, None])
  a, b = (np.asarray(g, np.float64)[real] for g in (d_nll, d_lse))
  gradient = p * (a + b)[:, None]
  gradient[np.arange(len(x)), target] -= a
  out = [np.full(len(real), np.log(w.shape[1])) for _ in range(2)]
  out[0][real], out[1][real] = lse - logits[np.arange(len(x)), target], lse
  dx = np.zeros((len(real), w.shape[0]))
  dx[real] = gradient @ w.T
  return *out, dx, x.T @ gradient


def run(hidden, w, targets, mask, d_nll, d_lse, **options):
  def loss(hidden, w):
    return api.linear_cross_entropy(hidden, w, targets, mask, **options)
  out, pull = jax.vjp(jax.jit(loss), hidden, w)
  return *out, *pull((d_nll, d_lse))


@pytest.mark.parametrize('impl', BACKENDS)
@pytest.mark.parametrize('chunk_bytes', CHUNKS)
def test_values_and_gradients(impl, chunk_bytes):
  arguments = problem()
  for got, want in zip(run(*arguments, impl=impl, chunk_bytes=chunk_bytes), oracle(*arguments),
                       strict=True):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_bfloat16_operands():
  hidden, w, *rest = problem()
  hidden, w = hidden.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
  got = run(hidden, w, *rest, chunk_bytes=4 * T * 128)
  want = oracle(hidden.astype(jnp.float32), w.astype(jnp.float32), *rest)
  for ours, exact, limit in zip(got, want, (1e-5, 1e-5, 1e-2, 1e-2), strict=True):
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=0,
                               atol=limit * np.abs(exact).max())
  assert got[2].dtype == got[3].dtype == jnp.bfloat16


@pytest.mark.parametrize('formats', [Formats('bfloat16', 'bfloat16', 'bfloat16'),
                                     Formats('nvfp4', 'mxfp8', 'mxfp8')], ids=str)
def test_chunks_round_to_the_same_numbers(formats):
  arguments = problem()
  whole = run(*arguments, formats=formats, impl='reference')
  for chunk_bytes in CHUNKS:
    chunked = run(*arguments, formats=formats, chunk_bytes=chunk_bytes)
    # A log-partition that differs in its last bit may move a gradient to the next number.
    for got, want, limit in zip(chunked, whole, (1e-5, 1e-5, 1e-3, 1e-3), strict=True):
      np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


def test_logits_are_never_all_there():
  """What the compiled backward pass takes beside operands and results grows with a chunk only."""
  tokens, width, classes = 256, 64, 16384
  struct = jax.ShapeDtypeStruct

  def temporaries(chunk_bytes):
    def loss(hidden, w, targets, mask):
      nll, _ = api.linear_cross_entropy(hidden, w, targets, mask, chunk_bytes=chunk_bytes)
      return nll.sum()
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(
        struct((tokens, width), jnp.float32), struct((width, classes), jnp.float32),
        struct((tokens,), jnp.int32), struct((tokens,), jnp.bool_)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  all_logits, operands = 4 * tokens * classes, 4 * width * classes
  assert temporaries(2 ** 30) > all_logits
  assert temporaries(4 * tokens * 512) < all_logits / 3 + operands


@pytest.mark.parametrize('change, said', [
    ({'w': jnp.ones((D + 1, V))}, 'do not fit'), ({'targets': jnp.ones(T)}, 'targets cannot be'),
    ({'mask': jnp.ones(T)}, 'mask cannot be'), ({'targets': jnp.full(T, V)}, 'targets from 500'),
    ({'formats': Formats(dgrad='nvfp4')}, 'spans all classes'), ({'impl': 'triton'}, 'unknown')])
def test_what_does_not_fit_is_refused(change, said):
  hidden, w, targets, mask, *_ = problem()
  arguments = {'hidden': hidden, 'w': w, 'targets': targets, 'mask': mask} | change
  with pytest.raises(ValueError, match=said):
    api.linear_cross_entropy(**arguments)


def test_an_unknown_class_is_loud():
  hidden, w, targets, mask, *_ = problem()
  targets = targets.at[0].set(V)
  nll, lse = jax.jit(api.linear_cross_entropy)(hidden, w, targets, mask)
  assert np.isnan(nll[0]) and np.isfinite(nll[1:]).all() and np.isfinite(lse).all()
