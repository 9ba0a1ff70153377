"""Permutation and weighted sums against loops in float64, gradients, determinism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels.moe_permute import api

BACKENDS = [backend.name for backend in api.BACKENDS]
T, K, E, D = 23, 3, 7, 10


def problem(case='mixed'):
  rng = np.random.default_rng(0)
  experts = np.stack([rng.permutation(E)[:K] for _ in range(T)])
  if case == 'one expert':
    experts[:] = np.array([2, 0, 5])
  valid = np.zeros(T, bool) if case == 'all padding' else rng.random(T) < 0.8
  x, weights = rng.standard_normal((T, D)), rng.random((T, K))
  d_rows, dy = rng.standard_normal((T * K, D)), rng.standard_normal((T, D))
  x[~valid], weights[~valid] = np.nan, 0.5
  return experts, valid, *(a.astype(np.float32) for a in (x, weights, d_rows, dy))


cases = pytest.mark.parametrize('case', ['mixed', 'one expert', 'all padding'])
backends = pytest.mark.parametrize('impl', BACKENDS)


@cases
def test_plan(case):
  experts, valid, *_ = problem(case)
  plan = jax.jit(api.make_plan, static_argnums=2)(experts, valid, E)
  expected = [t * K + k for e in range(E) for t in range(T) for k in range(K)
              if valid[t] and experts[t, k] == e]
  source = np.asarray(plan.source)
  assert source[:len(expected)].tolist() == expected and (source[len(expected):] == -1).all()
  assert np.asarray(plan.group_sizes).tolist() == [
      int(((experts == e) & valid[:, None]).sum()) for e in range(E)]
  for t in range(T):
    for k in range(K):
      place = int(plan.place[t, k])
      assert source[place] == t * K + k if valid[t] else place == T * K


@cases
@backends
def test_there_and_back(case, impl):
  experts, valid, x, weights, d_rows, dy = problem(case)
  if impl == 'reference':  # its matrices multiply what they do not pick
    x = np.nan_to_num(x)
  plan = api.make_plan(jnp.asarray(experts), jnp.asarray(valid), E)
  source = np.asarray(plan.source)
  rows, pull = jax.vjp(jax.jit(lambda x: api.permute(x, plan, impl=impl)), x)
  expected = np.where(source[:, None] >= 0, x[source // K], 0)
  np.testing.assert_array_equal(rows, expected)
  want = np.zeros((T, D))
  for row, s in enumerate(source):
    if s >= 0:
      want[s // K] += d_rows[row].astype(np.float64)
  np.testing.assert_allclose(pull(jnp.asarray(d_rows))[0], want, rtol=1e-5, atol=1e-6)

  y, pull = jax.vjp(jax.jit(lambda r, w: api.combine(r, plan, w, impl=impl)), d_rows, weights)
  got_rows, got_weights = pull(jnp.asarray(dy))
  want_y, want_rows, want_weights = np.zeros((T, D)), np.zeros((T * K, D)), np.zeros((T, K))
  for row, s in enumerate(source):
    if s >= 0:
      t, k = divmod(s, K)
      want_y[t] += weights[t, k] * d_rows[row].astype(np.float64)
      want_rows[row] = weights[t, k] * dy[t]
      want_weights[t, k] = d_rows[row].astype(np.float64) @ dy[t]
  for got, exact in ((y, want_y), (got_rows, want_rows), (got_weights, want_weights)):
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_poison_in_padding_stays_there():
  experts, valid, x, weights, *_ = problem()
  plan = api.make_plan(jnp.asarray(experts), jnp.asarray(valid), E)
  rows = np.asarray(api.permute(jnp.asarray(x), plan))
  assert np.isfinite(rows).all() and not rows[int(plan.group_sizes.sum()):].any()
  poisoned = np.where(np.asarray(plan.source)[:, None] >= 0, rows, np.nan)
  y = np.asarray(api.combine(jnp.asarray(poisoned), plan, jnp.asarray(weights)))
  assert np.isfinite(y).all() and not y[~valid].any()


def test_a_token_does_not_depend_on_the_others():
  experts, valid, x, weights, *_ = problem()
  valid[:], x[:] = True, np.nan_to_num(x)
  plan = api.make_plan(jnp.asarray(experts), jnp.asarray(valid), E)
  through = jax.jit(lambda x: api.combine(api.permute(x, plan), plan, jnp.asarray(weights)))
  before = np.asarray(through(x))
  x[5] *= 3
  after = np.asarray(through(x))
  np.testing.assert_array_equal(np.delete(before, 5, 0), np.delete(after, 5, 0))


@pytest.mark.parametrize('call, said', [
    (lambda p: api.make_plan(jnp.zeros(T, int), jnp.ones(T, bool), E), 'do not fit'),
    (lambda p: api.make_plan(jnp.zeros((T, K)), jnp.ones(T, bool), E), 'integers'),
    (lambda p: api.permute(jnp.ones((T + 1, D)), p), 'plan of 23 tokens'),
    (lambda p: api.combine(jnp.ones((T, D)), p, jnp.ones((T, K))), 'plan of 69 rows'),
    (lambda p: api.permute(jnp.ones((T, D)), p, impl='triton'), 'unknown impl')])
def test_what_does_not_fit_is_refused(call, said):
  plan = api.make_plan(jnp.zeros((T, K), int), jnp.ones(T, bool), E)
  with pytest.raises(ValueError, match=said):
    call(plan)
