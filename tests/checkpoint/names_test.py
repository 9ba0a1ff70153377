"""The table between our leaves and the tensors of a checkpoint."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax import models
from composer_jax.checkpoint import leaves, names
from composer_jax.errors import UserError

CONFIG = models.ModelConfig(
    vocab_size=40, hidden_size=8, num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=6,
    intermediate_size=12, moe_intermediate_size=4, n_routed_experts=12, n_shared_experts=2,
    num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5,
    num_nextn_predict_layers=1)


def numbered(config):
  """Parameters that are all different numbers."""
  flat = {}
  for number, (name, leaf) in enumerate(names.shapes(config).items()):
    flat[name] = np.random.default_rng(number).permutation(leaf.size).astype(np.float32).reshape(
        leaf.shape)
  return leaves.nest(flat)


@pytest.mark.parametrize('changes', [
    {}, {'q_lora_rank': 0}, {'tie_word_embeddings': True}, {'num_nextn_predict_layers': 0},
    {'first_k_dense_replace': 0}, {'first_k_dense_replace': 3, 'num_nextn_predict_layers': 0},
    {'n_shared_experts': 0}])
def test_round_trip(changes):
  config = dataclasses.replace(CONFIG, **changes)
  params = numbered(config)
  tensors = names.to_hf(config, params)
  assert sum(np.size(x) for x in jax.tree.leaves(params)) == sum(
      value.size for entry, value in zip(names.table(config), tensors.values(), strict=True)
      if not entry.copy)
  back = names.from_hf(config, tensors)
  jax.tree.map(np.testing.assert_array_equal, back, params)


def test_shapes_and_names_by_hand():
  tensors = names.to_hf(CONFIG, numbered(CONFIG))
  shapes = {key: value.shape for key, value in tensors.items()}
  assert shapes['model.layers.0.mlp.gate_proj.weight'] == (12, 8)
  assert shapes['model.layers.1.mlp.gate.weight'] == (12, 8)
  assert shapes['model.layers.1.mlp.gate.e_score_correction_bias'] == (12,)
  assert shapes['model.layers.2.mlp.experts.11.down_proj.weight'] == (8, 4)
  assert shapes['model.layers.2.mlp.shared_experts.up_proj.weight'] == (8, 8)
  assert shapes['model.layers.1.self_attn.q_b_proj.weight'] == (10, 6)
  assert shapes['model.layers.1.self_attn.kv_a_proj_with_mqa.weight'] == (6, 8)
  assert shapes['model.layers.1.self_attn.kv_b_proj.weight'] == (16, 4)
  assert shapes['model.layers.1.self_attn.o_proj.weight'] == (8, 10)
  assert shapes['model.layers.3.eh_proj.weight'] == (8, 16)
  for name in ('enorm.weight', 'hnorm.weight', 'shared_head.norm.weight', 'embed_tokens.weight',
               'shared_head.head.weight', 'mlp.experts.0.up_proj.weight'):
    assert f'model.layers.3.{name}' in shapes


def test_384_experts_stay_in_numeric_order():
  config = dataclasses.replace(CONFIG, n_routed_experts=384, num_nextn_predict_layers=0)
  tensors = names.to_hf(config, numbered(config))
  for entry in names.table(config):
    if '.experts.' in entry.key:
      tensors[entry.key] = np.full(entry.shape, int(entry.key.split('.')[5]), np.float32)
  experts = names.from_hf(config, tensors)['moe_layers']['moe']
  for leaf in (experts['experts_gate_up'], experts['experts_down']):
    assert (leaf == np.arange(384)[None, :, None, None]).all()


def test_kv_b_is_split_head_by_head():
  params = numbered(CONFIG)
  joint = names.to_hf(CONFIG, params)['model.layers.1.self_attn.kv_b_proj.weight']
  ours = params['moe_layers']['attention']['kv_b'][0]  # [C, H, P + V]
  for head in range(2):
    np.testing.assert_array_equal(joint[head * 8:(head + 1) * 8].T, ours[:, head])


def test_what_does_not_fit_is_named():
  tensors = names.to_hf(CONFIG, numbered(CONFIG))
  key = 'model.layers.2.mlp.experts.10.up_proj.weight'
  with pytest.raises(UserError, match=f'1 tensors are missing: {key}'):
    names.from_hf(CONFIG, {k: v for k, v in tensors.items() if k != key})
  with pytest.raises(UserError, match='1 tensors belong to nothing in this model: model.bias'):
    names.from_hf(CONFIG, tensors | {'model.bias': np.zeros(3)})
  with pytest.raises(UserError, match=f'{key}: has shape .8, 4., the config needs .4, 8.'):
    names.from_hf(CONFIG, tensors | {key: tensors[key].T})
  copy = 'model.layers.3.shared_head.head.weight'
  with pytest.raises(UserError, match=f'{copy}: differs from the main'):
    names.from_hf(CONFIG, tensors | {copy: tensors[copy] + 1})
  with pytest.raises(UserError, match='leaf extra is not known'):
    names.to_hf(CONFIG, numbered(CONFIG) | {'extra': np.zeros(2)})
