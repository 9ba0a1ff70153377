"""Hand-written gradients against finite differences of float64 NumPy functions."""

import jax
import numpy as np
import pytest

from composer_jax.models import attend, layers

RNG = np.random.default_rng(0)


def _attention(q, k, v, mask):
  logits = np.where(mask[:, None], np.einsum('bshd,bthd->bhst', q, k), -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  return np.einsum('bhst,bthv->bshv', weights / weights.sum(-1, keepdims=True), v)


def _swiglu(x, w):
  gate, up = np.split(x, 2, axis=-1)
  return gate / (1 + np.exp(-gate)) * up * w


def _slope(f, args, direction, along):
  plus = [a + 1e-6 * d for a, d in zip(args, along, strict=True)]
  minus = [a - 1e-6 * d for a, d in zip(args, along, strict=True)]
  return ((f(*plus) - f(*minus)) * direction).sum() / 2e-6


def _check(ours, numpy_f, args, extra=()):
  out, pull = jax.vjp(lambda *a: ours(*a, *extra), *[a.astype(np.float32) for a in args])
  np.testing.assert_allclose(out, numpy_f(*args, *extra), atol=1e-5)
  direction = RNG.standard_normal(out.shape)
  grads = pull(direction.astype(np.float32))
  for i, grad in enumerate(grads):
    along = [RNG.standard_normal(a.shape) if j == i else np.zeros_like(a)
             for j, a in enumerate(args)]
    want = _slope(lambda *a: numpy_f(*a, *extra), args, direction, along)
    assert float((grad * along[i]).sum()) == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_attend():
  q, k = RNG.standard_normal((2, 2, 7, 3, 5))
  v = RNG.standard_normal((2, 7, 3, 4))
  segments = np.array([[1, 1, 1, 2, 2, 0, 0], [1] * 7])
  mask = np.tril(np.ones((7, 7), bool)) & (segments[:, :, None] == segments[:, None, :])
  _check(attend.attend, _attention, (q, k, v), (mask,))


def test_swiglu_with_and_without_weights():
  x, w = RNG.standard_normal((5, 3, 8)), RNG.standard_normal((5, 3, 1))
  _check(layers.swiglu, _swiglu, (x, w))
  _check(layers.swiglu, lambda x: _swiglu(x, 1.0), (x,))


def test_attend_survives_large_logits():
  q = np.full((1, 3, 1, 2), 300.0, np.float32)
  mask = np.tril(np.ones((1, 3, 3), bool))
  out, pull = jax.vjp(lambda q: attend.attend(q, q, q, mask), q)
  np.testing.assert_allclose(out, q, rtol=1e-6)
  assert np.all(np.isfinite(pull(out)[0]))
