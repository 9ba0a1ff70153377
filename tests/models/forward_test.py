"""The whole forward pass against a float64 NumPy model written from the papers' formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import models
from composer_jax.models import layers, moe, rope

SMALL = models.ModelConfig(
    vocab_size=61, hidden_size=24, num_hidden_layers=3, first_k_dense_replace=1,
    intermediate_size=40, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3,
    n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=1.7,
    num_attention_heads=3, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=10,
    qk_rope_head_dim=6, v_head_dim=9, rope_theta=100.0, max_position_embeddings=64,
    rope_scaling=models.RopeScaling(factor=4.0, original_max_position_embeddings=16),
    num_nextn_predict_layers=1, initializer_range=0.3)
SEGMENTS = np.array([[1] * 7 + [2] * 6 + [0] * 3, [1] * 16], np.int32)
POSITIONS = np.array([[*range(7), *range(6), *range(3)], [*range(16)]], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 16)).astype(np.int32)


@functools.cache
def _params(config=SMALL, seed=0):
  params = models.init(config, jax.random.key(seed))
  rng = np.random.default_rng(1)
  # Scales and biases away from their initial constants, so that none can be left out unnoticed.
  return jax.tree.map_with_path(
      lambda path, v: v + 0.1 * rng.standard_normal(v.shape).astype(np.float32)
      if 'norm' in str(path[-1]) or 'bias' in str(path[-1]) else v, params)


def _norm(x, weight, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _sigmoid(x):
  return 1.0 / (1.0 + np.exp(-x))


def _swiglu(x, gate_up, down):
  half = gate_up.shape[-1] // 2
  gate, up = x @ gate_up[:, :half], x @ gate_up[:, half:]
  return (gate * _sigmoid(gate) * up) @ down


def _rotated(vector, position, c):
  """Interleaved pairs as complex numbers, kept interleaved."""
  width, s = c.qk_rope_head_dim, c.rope_scaling
  rates = []
  for i in range(width // 2):
    rate = c.rope_theta ** (-2 * i / width)
    if s is not None:
      def dim(turns):
        length = s.original_max_position_embeddings
        return width * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(c.rope_theta))
      low = max(np.floor(dim(s.beta_fast)), 0)
      high = min(np.ceil(dim(s.beta_slow)), width - 1)
      ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
      rate = rate / s.factor * ramp + rate * (1 - ramp)
    rates.append(rate)
  turned = (vector[0::2] + 1j * vector[1::2]) * np.exp(1j * position * np.array(rates))
  result = np.empty_like(vector)
  result[0::2], result[1::2] = turned.real, turned.imag
  return result


def _attention(p, x, positions, segments, c):
  n, nope = len(x), c.qk_nope_head_dim
  q = _norm(x @ p['q_a'], p['q_norm'], c.latent_norm_eps) @ p['q_b'].reshape(c.q_lora_rank, -1)
  q = q.reshape(n, c.num_attention_heads, -1)
  compressed = x @ p['kv_a']
  latent = _norm(compressed[:, :c.kv_lora_rank], p['kv_norm'], c.latent_norm_eps)
  shared = np.stack([_rotated(compressed[t, c.kv_lora_rank:], positions[t], c) for t in range(n)])
  scale = (nope + c.qk_rope_head_dim) ** -0.5 * (0.1 * np.log(c.rope_scaling.factor) + 1) ** 2
  out = np.zeros((n, c.hidden_size))
  for h in range(c.num_attention_heads):
    keys = latent @ p['kv_b'][:, h, :nope]
    values = latent @ p['kv_b'][:, h, nope:]
    for t in range(n):
      seen = [u for u in range(t + 1) if segments[u] == segments[t]]
      turned = _rotated(q[t, h, nope:], positions[t], c)
      logits = np.array([q[t, h, :nope] @ keys[u] + turned @ shared[u] for u in seen]) * scale
      weights = np.exp(logits - logits.max())
      out[t] += (weights / weights.sum()) @ values[seen] @ p['o'][h]
  return out


def _choose(scores, bias, c):
  """Group-limited top-k of one token, ties to the lower index."""
  ranking = scores + bias
  groups = ranking.reshape(c.n_group, -1)
  strength = np.sort(groups, axis=1)[:, -2:].sum(1)
  allowed = sorted(range(c.n_group), key=lambda g: (-strength[g], g))[:c.topk_group]
  size = groups.shape[1]
  inside = [e for e in range(len(ranking)) if e // size in allowed]
  return sorted(inside, key=lambda e: (-ranking[e], e))[:c.num_experts_per_tok]


def _moe(p, x, valid, c):
  out = np.zeros_like(x)
  counts = np.zeros(c.n_routed_experts, int)
  chosen = []
  for t, row in enumerate(x):
    scores = _sigmoid(row @ p['router']['weight'])
    experts = _choose(scores, p['router']['selection_bias'], c)
    chosen.append(experts)
    out[t] = _swiglu(row, p['shared']['gate_up'], p['shared']['down'])
    if valid[t]:
      weights = scores[experts] / scores[experts].sum() * c.routed_scaling_factor
      for e, w in zip(experts, weights, strict=True):
        counts[e] += 1
        out[t] += w * _swiglu(row, p['experts_gate_up'][e], p['experts_down'][e])
  return out, counts, chosen


def _block(p, x, positions, segments, valid, c):
  x = x + _attention(p['attention'], _norm(x, p['attention_norm'], c.rms_norm_eps), positions,
                     segments, c)
  normed = _norm(x, p['ffn_norm'], c.rms_norm_eps)
  if 'mlp' in p:
    return x + _swiglu(normed, p['mlp']['gate_up'], p['mlp']['down']), None, None
  out, counts, chosen = _moe(p['moe'], normed, valid, c)
  return x + out, counts, chosen


def _oracle(params, tokens, positions, segments, c):
  """One row in float64: logits, counts per MoE layer, choices, MTP logits, MTP counts."""
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x, counts, chosen = p['embed'][tokens], [], []
  for name in ('dense_layers', 'moe_layers'):
    for i in range(jax.tree.leaves(p[name])[0].shape[0]):
      layer = jax.tree.map(lambda v, i=i: v[i], p[name])
      x, count, choice = _block(layer, x, positions, segments, segments != 0, c)
      if count is not None:
        counts.append(count)
        chosen.append(choice)
  hidden = _norm(x, p['norm'], c.rms_norm_eps)
  m, eps = p['mtp'], c.rms_norm_eps
  following = np.concatenate([tokens[1:], [0]])
  inside = np.concatenate([segments[1:] == segments[:-1], [False]]) & (segments != 0)
  joined = np.concatenate([_norm(p['embed'][following], m['embed_norm'], eps),
                           _norm(hidden, m['hidden_norm'], eps)], axis=1)
  y, mtp_count, _ = _block(m['block'], joined @ m['project'], positions, segments, inside, c)
  return (hidden @ p['head'], counts, chosen, _norm(y, m['norm'], eps) @ p['head'], mtp_count,
          inside)


@pytest.mark.parametrize('impl', ['dense', 'grouped'])
def test_forward_equals_the_float64_model(impl):
  config = dataclasses.replace(SMALL, moe_impl=impl)
  params = _params()
  out = jax.jit(lambda p: models.forward(
      config, p, TOKENS, positions=POSITIONS, segment_ids=SEGMENTS, mtp=True))(params)
  rows = [_oracle(params, TOKENS[b], POSITIONS[b], SEGMENTS[b], config) for b in range(2)]
  real = SEGMENTS != 0
  np.testing.assert_allclose(np.asarray(out.logits)[real],
                             np.stack([r[0] for r in rows])[real], atol=3e-5)
  counts = np.sum([r[1] for r in rows], axis=0)
  np.testing.assert_array_equal(out.router.counts[:-1], counts)
  np.testing.assert_array_equal(out.router.counts[-1], rows[0][4] + rows[1][4])
  chosen = np.stack([r[2] for r in rows], axis=1)
  np.testing.assert_array_equal(np.asarray(out.router.indices)[:, real], chosen[:, real])
  inside = np.stack([r[5] for r in rows])
  np.testing.assert_array_equal(out.mtp_mask, inside)
  np.testing.assert_allclose(np.asarray(out.mtp_logits)[inside],
                             np.stack([r[3] for r in rows])[inside], atol=3e-5)


@pytest.mark.usefixtures('quick_compilation')
def test_dense_and_grouped_have_the_same_gradient():
  layer = jax.tree.map(lambda v: v[0], _params()['moe_layers']['moe'])
  rng = np.random.default_rng(2)
  x, direction = rng.standard_normal((2, 30, SMALL.hidden_size)).astype(np.float32)
  valid = np.arange(30) % 7 != 3

  @functools.partial(jax.jit, static_argnums=2)
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def run(layer, x, impl):
    config = dataclasses.replace(SMALL, moe_impl=impl)
    return jnp.sum(layers.bind(moe.Moe, config, layer)(x, valid)[0] * direction)

  (dense, (d_layer, d_x)), (grouped, (g_layer, g_x)) = (
      run(layer, x, impl) for impl in ('dense', 'grouped'))
  assert float(dense) == pytest.approx(float(grouped), rel=1e-5)
  for a, b in zip(jax.tree.leaves((d_layer, d_x)), jax.tree.leaves((g_layer, g_x)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()))
  assert not np.any(d_layer['router']['selection_bias'])
  assert np.any(d_layer['router']['weight'])


@pytest.mark.usefixtures('quick_compilation')
def test_remat_and_unrolling_change_neither_counts_nor_gradient():
  def run(config):
    def loss(params):
      out = models.forward(config, params, TOKENS, segment_ids=SEGMENTS, mtp=True)
      return (jnp.mean(jnp.square(out.logits)) + jnp.mean(jnp.square(out.mtp_logits)),
              out.router.counts)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(_params())

  (value, counts), grad = run(SMALL)
  (value2, counts2), grad2 = run(dataclasses.replace(SMALL, remat='full', scan_unroll=2))
  np.testing.assert_array_equal(counts, counts2)
  np.testing.assert_allclose(value, value2, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(grad2), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_remat_covers_all_layers(products):
  """Every product but those of the two heads is computed again."""
  for remat, kept in (('none', None), ('full', 2)):  # None: all
    config = dataclasses.replace(SMALL, remat=remat)
    found = products(jax.make_jaxpr(functools.partial(models.forward, config, mtp=True))(
        _params(), TOKENS))
    outside = [equation for equation, inside in found if 'remat2' not in inside]
    assert len(outside) == (len(found) if kept is None else kept)


@pytest.mark.usefixtures('quick_compilation')
def test_tied_head_without_query_bottleneck_or_mtp():
  config = dataclasses.replace(SMALL, q_lora_rank=0, tie_word_embeddings=True, n_shared_experts=0,
                               num_nextn_predict_layers=0, rope_scaling=None)
  params = models.init(config, jax.random.key(0))
  assert 'head' not in params and 'mtp' not in params
  out = models.forward(config, params, TOKENS, output='hidden')
  assert out.logits is None
  np.testing.assert_allclose(models.head(config, params, out.hidden),
                             out.hidden @ params['embed'].T, atol=1e-5)


def test_refused_arguments():
  params = _params()
  with pytest.raises(ValueError, match='output'):
    models.forward(SMALL, params, TOKENS, output='logit')
  with pytest.raises(ValueError, match='num_nextn_predict_layers'):
    models.forward(dataclasses.replace(SMALL, num_nextn_predict_layers=0), params, TOKENS,
                   mtp=True)
  routing = models.Routing(jnp.zeros((3, 2, 16, 3), jnp.uint16), jnp.ones((2, 16), bool))
  with pytest.raises(ValueError, match='MoE layers only'):
    models.forward(SMALL, params, TOKENS, routing=routing)


def test_kimi_scale_and_multiplier():
  """Field values of Kimi K2.5: 192**-0.5 * 1.415888**2, and cos/sin left alone."""
  kimi = models.kimi_k2_5()
  assert rope.softmax_scale(kimi) == pytest.approx(0.144680, abs=5e-7)
  assert rope.frequencies(kimi)[1] == 1.0
  plain = dataclasses.replace(kimi, rope_scaling=None)
  assert rope.softmax_scale(plain) == pytest.approx(0.072169, abs=5e-7)


def test_halves_layout_keeps_query_key_products():
  rng = np.random.default_rng(0)
  q, k = rng.standard_normal((2, 6))
  cos, sin = rope.tables(SMALL, jnp.array([[5, 11]]))
  ours = (rope.rotate(jnp.asarray(q, jnp.float32), cos[0, 0], sin[0, 0])
          @ rope.rotate(jnp.asarray(k, jnp.float32), cos[0, 1], sin[0, 1]))
  assert float(ours) == pytest.approx(_rotated(q, 5, SMALL) @ _rotated(k, 11, SMALL), abs=1e-5)
