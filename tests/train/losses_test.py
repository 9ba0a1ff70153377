import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import models
from composer_jax.train import losses


def log_softmax64(x):
  x = np.asarray(x, np.float64)
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def lse64(x):
  x = np.asarray(x, np.float64)
  return np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)


def test_cross_entropy_against_float64():
  rng = np.random.default_rng(0)
  logits = (10 * rng.normal(size=(3, 7, 50))).astype(np.float32)
  targets = rng.integers(0, 50, (3, 7))
  mask = rng.random((3, 7)) < 0.7
  nll, lse = losses.cross_entropy(logits, targets, mask)
  want = -np.take_along_axis(log_softmax64(logits), targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(nll[mask], want[mask], rtol=2e-6, atol=2e-6)
  np.testing.assert_allclose(lse[mask], lse64(logits)[mask], rtol=1e-6)

  grad = jax.grad(lambda x: jnp.sum(losses.cross_entropy(x, targets, mask)[0]))(logits)
  want = (np.exp(log_softmax64(logits)) - np.eye(50)[targets]) * mask[..., None]
  np.testing.assert_allclose(grad, want, atol=1e-6)


def test_self_distillation_against_float64():
  rng = np.random.default_rng(1)
  student, teacher = (3 * rng.normal(size=(2, 5, 40))).astype(np.float32), rng.normal(
      size=(2, 5, 40)).astype(np.float32)
  mask = np.ones((2, 5), bool)
  p, q = log_softmax64(teacher), log_softmax64(student)
  kl = losses.self_distillation(student, teacher, mask)
  np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-5)
  np.testing.assert_allclose(losses.self_distillation(teacher, teacher, mask), 0, atol=1e-6)
  total = lambda s, t: jnp.sum(losses.self_distillation(s, t, mask))  # noqa: E731
  to_student, to_teacher = jax.grad(total, (0, 1))(student, teacher)
  np.testing.assert_allclose(to_student, np.exp(q) - np.exp(p), atol=1e-6)
  assert not np.any(to_teacher)


@pytest.mark.parametrize('poison', [np.nan, np.inf, -np.inf])
def test_poison_at_masked_positions_is_harmless(poison):
  rng = np.random.default_rng(2)
  mask = np.array([[True, False, True, False]])
  weights = mask * np.float32(0.5)
  logits = rng.normal(size=(1, 4, 9)).astype(np.float32)
  bad = np.where(mask[..., None], logits, poison)
  targets = np.array([[1, 99, 2, -5]])  # ids out of range where there is no target

  def total(student, teacher):
    nll, lse = losses.cross_entropy(student, targets, mask)
    kl = losses.self_distillation(student, teacher, mask)
    return losses.weighted_mean(jnp.where(mask, nll + lse ** 2 + kl, poison), weights, 2.0)

  for fn in (total, jax.grad(total, (0, 1))):
    for got, want in zip(jax.tree.leaves(fn(bad, bad)), jax.tree.leaves(fn(logits, logits)),
                         strict=True):
      np.testing.assert_array_equal(got, want)


def test_mtp_weights_by_hand():
  segments = np.array([[1, 1, 1, 1, 2, 2, 3, 4, 4, 4, 0, 0]])
  weights = np.array([[1, 1, 1, 0, 1, 0, 0, .5, .1, 0, 0, 0]], np.float32)
  # position t gets the weight of t + 1 within a document: nothing at the last two of each
  want = [[1, 1, 0, 0, 0, 0, 0, .1, 0, 0, 0, 0]]
  np.testing.assert_array_equal(losses.mtp_weights(weights, segments), np.float32(want))


def test_mtp_weights_end_with_the_documents(make_batch):
  batch = make_batch(6, 32, seed=5)
  ones = np.ones_like(batch.weights)
  last = np.diff(batch.segment_ids, axis=1, append=0) != 0
  main = np.where(last | (batch.segment_ids == 0), 0, ones)
  got = np.asarray(losses.mtp_weights(main, batch.segment_ids))
  before_last = np.roll(last, -1, axis=1)
  assert not got[last | before_last | (batch.segment_ids == 0)].any()
  assert got.sum() == sum(max(n - 2, 0) for row in batch.segment_ids
                          for n in np.bincount(row)[1:])


def test_lm_loss_against_float64(model_config, params, make_batch):
  batch = make_batch(3, 16)
  batch = batch.replace(denominator=np.float32(11.0))
  config = losses.LossConfig(mtp_weight=0.3, z_weight=1e-2)
  loss, metrics = jax.jit(losses.make_lm_loss(model_config, config))(params, batch)
  out = models.forward(model_config, params, batch.tokens, positions=batch.positions,
                       segment_ids=batch.segment_ids, mtp=True)
  logp = log_softmax64(out.logits)
  w = batch.weights.astype(np.float64)
  nll = -np.take_along_axis(logp, batch.targets[..., None], -1)[..., 0]
  kl = np.zeros_like(w)  # by a loop over pairs of neighbours in one document
  student = log_softmax64(out.mtp_logits)
  for r, t in np.ndindex(3, 15):
    if batch.segment_ids[r, t] and batch.segment_ids[r, t] == batch.segment_ids[r, t + 1]:
      p = logp[r, t + 1]
      kl[r, t] = w[r, t + 1] * (np.exp(p) * (p - student[r, t])).sum()
  ce, z = (w * nll).sum() / 11, (w * lse64(out.logits) ** 2).sum() / 11
  np.testing.assert_allclose(metrics['cross_entropy'], ce, rtol=1e-5)
  np.testing.assert_allclose(metrics['z'], z, rtol=1e-5)
  np.testing.assert_allclose(metrics['mtp_kl'], kl.sum() / 11, rtol=1e-5)
  np.testing.assert_allclose(loss, ce + 0.01 * z + 0.3 * kl.sum() / 11, rtol=1e-5)
  assert metrics['counts'].shape == (2, 4)


def test_mtp_weight_zero_leaves_main_gradients_identical(model_config, params, make_batch):
  batch = make_batch(3, 16)
  plain_config = dataclasses.replace(model_config, num_nextn_predict_layers=0)
  main = {name: leaf for name, leaf in params.items() if name != 'mtp'}

  def grads(config, tree):
    loss_fn = losses.make_lm_loss(config, losses.LossConfig())
    return jax.jit(jax.grad(lambda p: loss_fn(p, batch)[0]))(tree)

  with_layer, without = grads(model_config, params), grads(plain_config, main)
  assert not any(np.any(g) for g in jax.tree.leaves(with_layer.pop('mtp')))
  jax.tree.map(np.testing.assert_array_equal, with_layer, without)


@pytest.mark.parametrize('mtp_weight', [0.0, 0.3])
def test_head_chunk_changes_neither_loss_nor_gradient(model_config, params, make_batch, mtp_weight):
  batch = make_batch(3, 16)

  def run(head_chunk):
    loss_fn = losses.make_lm_loss(model_config, losses.LossConfig(
        mtp_weight=mtp_weight, z_weight=1e-2, head_chunk=head_chunk))
    return jax.jit(jax.value_and_grad(lambda p: loss_fn(p, batch)[0]))(params)

  (loss, gradient), (whole_loss, whole) = run(4), run(0)
  np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-6)), gradient, whole)


@pytest.mark.parametrize('chunk', [1, 4, 8])
def test_chunks_change_nothing(chunk):
  rng = np.random.default_rng(3)
  head, hidden = rng.normal(size=(6, 11)), rng.normal(size=(2, 8, 6))
  scale = rng.normal(size=(2, 8))

  def total(head, hidden, scale, size):
    def fn(a):  # each position sees the one after it, as the MTP teacher does
      logits = jnp.tanh(a['hidden'] @ head)
      return {'x': a['scale'] * jnp.sum(logits[:, :-1] * logits[:, 1:] ** 2, -1)}
    out = losses.over_chunks(fn, {'scale': scale}, {'hidden': hidden}, size)['x']
    return jnp.sum(out * jnp.arange(16.).reshape(2, 8)), out

  value = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
  (_, got), got_grad = value(head, hidden, scale, chunk)
  (_, want), want_grad = value(head, hidden, scale, 0)
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
               got_grad, want_grad)


def test_chunk_has_to_divide_the_length():
  with pytest.raises(ValueError, match='does not divide'):
    losses.over_chunks(lambda a: a, {'x': jnp.zeros((1, 8))}, {}, 3)


def test_chunks_bound_the_memory():
  """The [B, S, V] logits must not exist at once, neither forwards nor backwards."""
  hidden, head = jax.ShapeDtypeStruct((1, 512, 8), jnp.float32), jax.ShapeDtypeStruct(
      (8, 8192), jnp.float32)
  targets = jax.ShapeDtypeStruct((1, 512), jnp.int32)

  def temporary(chunk):
    def total(hidden, head, targets):
      def fn(a):
        return losses.cross_entropy((a['hidden'] @ head)[:, :-1], a['targets'], a['targets'] > 0)
      return jnp.sum(losses.over_chunks(fn, {'targets': targets}, {'hidden': hidden}, chunk)[0])
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head, targets).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  logits = 512 * 8192 * 4
  assert temporary(0) > logits
  assert temporary(32) < logits / 4


def test_no_trainable_token_gives_zero(make_batch):
  values = jnp.full((2, 3), jnp.nan)
  assert losses.weighted_mean(values, jnp.zeros((2, 3)), 0.0) == 0
