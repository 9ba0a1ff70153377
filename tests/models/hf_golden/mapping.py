"""From tensors under Hugging Face names to our parameter tree and back, in memory."""

from typing import Any

import jax
import numpy as np

from composer_jax import models


def to_hf(config: models.ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
  """Returns every tensor, `[out, in]`, by Hugging Face name."""
  out = {'model.embed_tokens.weight': np.asarray(params['embed']),
         'model.norm.weight': np.asarray(params['norm'])}
  if not config.tie_word_embeddings:
    out['lm_head.weight'] = np.asarray(params['head']).T
  for layer in range(config.num_hidden_layers):
    dense = config.first_k_dense_replace
    stack, index = ('dense_layers', layer) if layer < dense else ('moe_layers', layer - dense)
    block = jax.tree.map(lambda leaf, index=index: np.asarray(leaf[index]), params[stack])
    at = f'model.layers.{layer}.'
    out[at + 'input_layernorm.weight'] = block['attention_norm']
    out[at + 'post_attention_layernorm.weight'] = block['ffn_norm']
    out |= _attention(at + 'self_attn.', block['attention'])
    out |= _mlp(at + 'mlp.', block['mlp']) if 'mlp' in block else _moe(at + 'mlp.', block['moe'])
  return {name: np.ascontiguousarray(value) for name, value in out.items()}


def from_hf(config: models.ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
  """Returns the parameter tree: `to_hf` of the numbers of its elements says where each comes from.

  Raises:
    KeyError: a tensor is missing.
    ValueError: a tensor is left over.
  """
  shapes = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
  leaves, tree = jax.tree.flatten(shapes)
  ends = np.cumsum([leaf.size for leaf in leaves])
  numbers = [np.arange(end - leaf.size, end).reshape(leaf.shape)
             for leaf, end in zip(leaves, ends, strict=True)]
  flat = np.full(ends[-1], np.nan, np.float32)
  places = to_hf(config, jax.tree.unflatten(tree, numbers))
  if left := set(tensors) - set(places):
    raise ValueError(f'not read: {sorted(left)}')
  for name, place in places.items():
    assert tensors[name].shape == place.shape, name
    flat[place] = tensors[name]
  return jax.tree.unflatten(tree, [flat[number] for number in numbers])


def _attention(at, p):
  def matrix(weight):
    return weight.reshape(weight.shape[0], -1).T

  out = {'kv_a_proj_with_mqa': p['kv_a'].T, 'kv_a_layernorm': p['kv_norm'],
         'kv_b_proj': matrix(p['kv_b']), 'o_proj': p['o'].reshape(-1, p['o'].shape[-1]).T}
  if 'q' in p:
    out['q_proj'] = matrix(p['q'])
  else:
    out |= {'q_a_proj': p['q_a'].T, 'q_a_layernorm': p['q_norm'], 'q_b_proj': matrix(p['q_b'])}
  return {f'{at}{name}.weight': value for name, value in out.items()}


def _mlp(at, p):
  gate, up = np.split(p['gate_up'], 2, axis=-1)
  return {at + 'gate_proj.weight': gate.T, at + 'up_proj.weight': up.T,
          at + 'down_proj.weight': p['down'].T}


def _moe(at, p):
  out = {at + 'gate.weight': p['router']['weight'].T,
         at + 'gate.e_score_correction_bias': p['router']['selection_bias']}
  for number, (gate_up, down) in enumerate(zip(p['experts_gate_up'], p['experts_down'],
                                               strict=True)):
    out |= _mlp(f'{at}experts.{number}.', {'gate_up': gate_up, 'down': down})
  return out | _mlp(at + 'shared_experts.', p['shared'])
