"""The precision policy: products against NumPy, causality, independence of rows, training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax import models
from composer_jax.batch import Batch
from composer_jax.config import as_dict, build
from composer_jax.errors import UserError
from composer_jax.kernels.quantize import api as quantize
from composer_jax.models import precision
from composer_jax.models.precision import Formats
from composer_jax.train import losses, state, step

CONFIG = models.ModelConfig(
    vocab_size=40, hidden_size=40, num_hidden_layers=2, first_k_dense_replace=1,
    intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
    num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    initializer_range=0.2)
RNG = np.random.default_rng(0)
MIXED = Formats('nvfp4', 'mxfp8', 'bfloat16')
# One program a shape; operation by operation it would be thirty.
_ROUND = jax.jit(quantize.fake_quantize, static_argnums=(1, 2))


def _q(x, format, axis):
  """Rounded operand in float64 (the formats themselves are tested on their own)."""
  return np.asarray(_ROUND(jnp.asarray(x, jnp.float32), format, axis), np.float64)


def test_matmul_rounds_each_product_along_its_own_contraction():
  x, w, dy = (RNG.standard_normal(s).astype(np.float32) for s in ((70, 40), (40, 24), (70, 24)))
  y, pull = jax.vjp(jax.jit(functools.partial(precision.matmul, MIXED)), x, w)
  dx, dw = pull(dy)
  f, d, g = MIXED.forward, MIXED.dgrad, MIXED.wgrad
  np.testing.assert_allclose(y, _q(x, f, 1) @ _q(w, f, 0), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, _q(dy, d, 1) @ _q(w, d, 1).T, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dw, _q(x, g, 0).T @ _q(dy, g, 0), rtol=1e-5, atol=1e-5)
  assert {y.dtype, dx.dtype, dw.dtype} == {jnp.dtype('float32')}
  assert np.abs(y - x @ w).max() > 0.05  # and it does round


def test_grouped_starts_blocks_with_each_group():
  formats, sizes = Formats('nvfp4', 'mxfp8', 'mxfp8'), np.array([33, 0, 5, 40], np.int32)
  x, w = RNG.standard_normal((90, 40)).astype(np.float32), RNG.standard_normal((4, 40, 24))
  dy = RNG.standard_normal((90, 24)).astype(np.float32)
  x[78:], dy[78:] = np.nan, np.nan  # padding
  w = w.astype(np.float32)
  y, pull = jax.vjp(jax.jit(lambda x, w: precision.grouped(formats, x, w, sizes)), x, w)
  dx, dw = pull(dy)
  start = 0
  for e, size in enumerate(sizes):
    rows = slice(start, start + size)
    start += size
    want = (_q(x[rows], 'nvfp4', 1) @ _q(w[e], 'nvfp4', 0),
            _q(dy[rows], 'mxfp8', 1) @ _q(w[e], 'mxfp8', 1).T,
            _q(x[rows], 'mxfp8', 0).T @ _q(dy[rows], 'mxfp8', 0) if size else 0 * w[e])
    for got, value in zip((y[rows], dx[rows], dw[e]), want, strict=True):
      np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
  assert not np.any(y[78:]) and not np.any(dx[78:])


def test_nothing_rounded_is_the_plain_program():
  x, w = jnp.ones((3, 4)), jnp.ones((4, 5))
  ours = jax.make_jaxpr(functools.partial(precision.matmul, precision.FLOAT32))(x, w)
  assert str(ours) == str(jax.make_jaxpr(
      functools.partial(jnp.matmul, precision='highest'))(x, w))
  text = str(jax.make_jaxpr(lambda p: models.forward(
      CONFIG, p, np.zeros((1, 4), np.int32)).logits)(models.init(CONFIG, jax.random.key(0))))
  assert 'reduce_precision' not in text and 'bitcast' not in text


@pytest.mark.parametrize(('moe_impl', 'attention'),
                         [('dense', 'expanded'), ('grouped', 'absorbed')])
def test_float32_products_are_not_left_to_the_default_precision(moe_impl, attention, products):
  """Forward and backward: a TPU's default is bfloat16, a GPU's TF32."""
  config = dataclasses.replace(models.tiny(64), moe_impl=moe_impl, attention=attention)
  loss = losses.make_lm_loss(config, losses.LossConfig(
      mtp_weight=1.0, z_weight=1.0, router_balance_weight=1.0, head_chunk=8))
  params = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
  ints, floats = (jax.ShapeDtypeStruct((2, 16), d) for d in (jnp.int32, jnp.float32))
  batch = Batch(ints, ints, floats, ints, ints, jax.ShapeDtypeStruct((), jnp.float32))
  found = [equation for equation, _ in products(
      jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, batch))]
  forward = products(jax.make_jaxpr(loss)(params, batch))
  assert len(found) > 2 * len(forward) > 20
  assert {v.aval.dtype for e in found for v in e.invars[:2]} == {jnp.dtype('float32')}
  highest = jax.lax.Precision.HIGHEST
  assert [e for e in found if e.params['precision'] != (highest, highest)] == []


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens):
  return models.forward(config, params, tokens).logits


@pytest.mark.parametrize('name', ['bfloat16', 'mxfp8_cpt', 'nvfp4_rl'])
def test_a_token_changes_nothing_before_it_and_in_no_other_row(name):
  config = dataclasses.replace(CONFIG, precision=models.POLICIES[name])
  params = models.init(CONFIG, jax.random.key(0))
  tokens = np.random.default_rng(1).integers(0, 40, (2, 12)).astype(np.int32)
  changed = tokens.copy()
  changed[0, 7] = (changed[0, 7] + 1) % 40
  before, after = _logits(config, params, tokens), _logits(config, params, changed)
  np.testing.assert_array_equal(before[0, :7], after[0, :7])
  np.testing.assert_array_equal(before[1], after[1])
  assert np.any(before[0, 7:] != after[0, 7:])
  assert 1e-4 < np.abs(before - _plain_logits(tokens)).max() < 1.0


@functools.cache
def _plain_logits_of(tokens):
  return np.asarray(_logits(CONFIG, models.init(CONFIG, jax.random.key(0)),
                            np.array(tokens, np.int32)))


def _plain_logits(tokens):
  return _plain_logits_of(tuple(map(tuple, tokens.tolist())))


@pytest.mark.usefixtures('quick_compilation')
@pytest.mark.parametrize('name', ['bfloat16', 'mxfp8_cpt'])
def test_a_step_lowers_the_loss_and_keeps_float32_masters(name):
  config = dataclasses.replace(CONFIG, precision=models.POLICIES[name], num_hidden_layers=1,
                               first_k_dense_replace=0)
  tx = optax.adam(1e-2)
  run = step.make_train_step(losses.make_lm_loss(config, losses.LossConfig()), tx, bias_rate=1e-3)
  tokens = RNG.integers(0, 40, (2, 16)).astype(np.int32)
  ones = np.ones((2, 16), np.float32)
  batch = step.micro_batches(Batch(tokens, np.roll(tokens, -1, 1), ones,
                                   np.tile(np.arange(16, dtype=np.int32), (2, 1)),
                                   ones.astype(np.int32), np.float32(32)))
  now, seen = state.create(models.init(config, jax.random.key(1)), tx), []
  for _ in range(8):
    now, metrics = run(now, batch)
    seen.append(float(metrics['loss']))
  assert seen[-1] < seen[0] - 0.3 and metrics['bad_micro'] == 0
  assert {x.dtype for x in jax.tree.leaves(now.params)} == {jnp.dtype('float32')}


def test_policies_as_data():
  policy = models.POLICIES['nvfp4_rl']
  assert policy.routed_experts == Formats('nvfp4', 'mxfp8', 'mxfp8') and policy.router.plain
  assert models.ModelConfig().precision == models.POLICIES['float32']
  config = dataclasses.replace(CONFIG, precision=policy)
  assert build(models.ModelConfig, as_dict(config)) == config
  both = dataclasses.replace(policy, attention=Formats('mxfp8', 'float32', 'mxfp8'))
  assert both.kv_b == Formats('bfloat16', 'float32', 'bfloat16')


@pytest.mark.parametrize(('change', 'message'), [
    ({'precision': {'router': {'forward': 'bfloat16'}}}, 'router must be float32'),
    ({'precision': {'embeddings': {'forward': 'mxfp8'}}}, 'float32 or bfloat16'),
    ({'precision': {'head': {'wgrad': 'nvfp4'}}}, 'one scale per token'),
    ({'precision': {'head': {'forward': 'fp8'}}}, "'fp8' is not one of"),
    ({'moe_impl': 'dense', 'precision': {'routed_experts': {'forward': 'mxfp8'}}}, 'share scales')])
def test_refused_policies(change, message):
  with pytest.raises(UserError, match=message):
    build(models.ModelConfig, change)


def test_a_config_may_name_a_policy():
  named, spelled = (build(models.ModelConfig, as_dict(CONFIG) | {'precision': precision})
                    for precision in ('nvfp4_rl', as_dict(models.POLICIES['nvfp4_rl'])))
  assert named == spelled
  with pytest.raises(UserError, match="precision: there is no 'fp8'.*mxfp8_cpt"):
    build(models.ModelConfig, as_dict(CONFIG) | {'precision': 'fp8'})
