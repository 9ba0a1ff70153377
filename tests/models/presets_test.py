"""Shapes and parameter counts of the presets, and what a config refuses."""

import dataclasses
import math

import jax
import pytest

from composer_jax import models
from composer_jax.config import build
from composer_jax.errors import UserError
from composer_jax.models import moe


def _shapes(config):
  return jax.eval_shape(lambda: models.init(config, jax.random.key(0)))


def _size(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def test_kimi_k2_5_parameter_counts():
  """Composer 2 report, section 3, and the tensor list of the public checkpoint."""
  params = _shapes(models.kimi_k2_5())
  layer = params['moe_layers']
  attention = (7168 * 1536 + 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 + 512 * 64 * 256
               + 64 * 128 * 7168)
  assert _size(layer['attention']) == 60 * attention
  assert attention == pytest.approx(101.12e6, rel=1e-4)
  expert = 3 * 7168 * 2048
  routed = _size([layer['moe']['experts_gate_up'], layer['moe']['experts_down']])
  assert routed == 60 * 384 * expert and routed == pytest.approx(1.0147e12, rel=1e-4)
  total = _size(params)
  ends = 2 * 163840 * 7168 + 7168
  dense = attention + 2 * 7168 + 3 * 7168 * 18432
  moe = attention + 2 * 7168 + 7168 * 384 + 384 + 385 * expert
  assert total == ends + dense + 60 * moe
  assert total == pytest.approx(1.0264e12, rel=5e-5)
  active = total - 60 * 376 * expert
  assert active == pytest.approx(32.86e9, rel=1e-3)


@pytest.mark.parametrize('config', [models.tiny(), models.kimi_k2_5()], ids=['tiny', 'kimi'])
def test_logical_axes_match_the_parameters(config):
  params, axes = _shapes(config), models.logical_axes(config)
  assert jax.tree.structure(params) == jax.tree.structure(axes)
  for leaf, names in zip(jax.tree.leaves(params), jax.tree.leaves(axes), strict=True):
    assert leaf.ndim == len(names.names)


def test_tiny_initial_statistics():
  config = models.tiny()
  params = models.init(config, jax.random.key(3))
  assert _size(params) < 0.85e6
  for name, leaf in (('gate_up', params['moe_layers']['moe']['experts_gate_up']),
                     ('embed', params['embed'])):
    assert float(leaf.std()) == pytest.approx(config.initializer_range, rel=0.02), name
    assert abs(float(leaf.mean())) < 0.002
  assert float(params['moe_layers']['attention_norm'].min()) == 1
  first, second = params['moe_layers']['moe']['experts_down']
  assert abs(float((first * second).mean())) < 1e-4  # layers start different


@pytest.mark.parametrize('changes, message', [
    ({'num_experts_per_tok': 9}, 'num_experts_per_tok'),
    ({'n_group': 3}, 'n_group'),
    ({'n_group': 4, 'topk_group': 1, 'num_experts_per_tok': 3}, 'num_experts_per_tok'),
    ({'qk_rope_head_dim': 5}, 'even'),
    ({'first_k_dense_replace': 4}, 'first_k_dense_replace'),
    ({'num_nextn_predict_layers': 2}, 'num_nextn_predict_layers'),
    ({'hidden_size': 0}, 'hidden_size'),
    ({'moe_impl': 'fast'}, 'moe_impl'),
    ({'rope_scaling': {'factor': 0.5}}, 'factor'),
    ({'hiden_size': 8}, 'did you mean hidden_size'),
])
def test_a_config_says_what_is_wrong(changes, message):
  with pytest.raises(UserError, match=message):
    build(models.ModelConfig, changes, 'model')


@pytest.mark.parametrize('experts, chosen, tokens, want', [
    (8, 2, 1024, 'grouped'), (8, 2, 96, 'dense'), (4, 2, 1024, 'dense'), (384, 8, 1, 'grouped')])
def test_auto_chooses_by_experts_and_tokens(experts, chosen, tokens, want):
  config = models.ModelConfig(n_routed_experts=experts, num_experts_per_tok=chosen)
  assert moe.choose_impl(config, tokens) == want
  assert moe.choose_impl(dataclasses.replace(config, moe_impl='dense'), tokens) == 'dense'


@pytest.mark.parametrize('dense', [0, 3])
def test_layer_stacks(dense):
  config = dataclasses.replace(models.tiny(), first_k_dense_replace=dense)
  params = _shapes(config)
  assert ('dense_layers' in params) == (dense > 0) and ('moe_layers' in params) == (dense < 3)
  tokens = jax.ShapeDtypeStruct((2, 4), 'int32')
  out = jax.eval_shape(lambda p, t: models.forward(config, p, t, mtp=True), params, tokens)
  assert out.router.indices.shape == (3 - dense, 2, 4, 2)
  assert out.router.counts.shape == (4 - dense, 8)
