"""Weights under their Hugging Face names, made from a seed: the golden data need not hold them.

Only the raw 64-bit output of PCG64 is used, which NumPy promises never to change.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns float32 of mean 0 and variance 1, decided by `seed` and `name` alone."""
  bits = np.random.PCG64([seed, zlib.crc32(name.encode())])
  raw = bits.random_raw(math.prod(shape)) >> np.uint64(40)
  return ((raw.astype(np.float64) + 0.5) * 2.0 ** -23 - 1.0).astype(np.float32).reshape(
      shape) * np.float32(3.0 ** 0.5)


def integers(seed: int, name: str, count: int, below: int) -> np.ndarray:
  """Returns int32 between 0 and `below`."""
  bits = np.random.PCG64([seed, zlib.crc32(name.encode())])
  return ((bits.random_raw(count) >> np.uint64(32)) % np.uint64(below)).astype(np.int32)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns name -> shape of every tensor of a checkpoint with this `config.json` (text model)."""
  c = config
  d, heads, latent = c['hidden_size'], c['num_attention_heads'], c['kv_lora_rank']
  nope, rope, value = c['qk_nope_head_dim'], c['qk_rope_head_dim'], c['v_head_dim']
  out = {'model.embed_tokens.weight': (c['vocab_size'], d), 'model.norm.weight': (d,)}
  if not c['tie_word_embeddings']:
    out['lm_head.weight'] = (c['vocab_size'], d)

  def mlp(prefix: str, width: int) -> None:
    out[f'{prefix}.gate_proj.weight'] = (width, d)
    out[f'{prefix}.up_proj.weight'] = (width, d)
    out[f'{prefix}.down_proj.weight'] = (d, width)

  for layer in range(c['num_hidden_layers']):
    at = f'model.layers.{layer}.'
    out[at + 'input_layernorm.weight'] = out[at + 'post_attention_layernorm.weight'] = (d,)
    if rank := c['q_lora_rank']:
      out[at + 'self_attn.q_a_proj.weight'] = (rank, d)
      out[at + 'self_attn.q_a_layernorm.weight'] = (rank,)
      out[at + 'self_attn.q_b_proj.weight'] = (heads * (nope + rope), rank)
    else:
      out[at + 'self_attn.q_proj.weight'] = (heads * (nope + rope), d)
    out[at + 'self_attn.kv_a_proj_with_mqa.weight'] = (latent + rope, d)
    out[at + 'self_attn.kv_a_layernorm.weight'] = (latent,)
    out[at + 'self_attn.kv_b_proj.weight'] = (heads * (nope + value), latent)
    out[at + 'self_attn.o_proj.weight'] = (d, heads * value)
    if layer < c['first_k_dense_replace']:
      mlp(at + 'mlp', c['intermediate_size'])
      continue
    experts, width = c['n_routed_experts'], c['moe_intermediate_size']
    out[at + 'mlp.gate.weight'] = (experts, d)
    out[at + 'mlp.gate.e_score_correction_bias'] = (experts,)
    for expert in range(experts):
      mlp(f'{at}mlp.experts.{expert}', width)
    mlp(at + 'mlp.shared_experts', c['n_shared_experts'] * width)
  return dict(sorted(out.items()))


def tensor(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns one tensor, scaled so that activations and logits are of order 1.

  The selection bias changes many choices and makes most selection scores negative: whoever masks
  the experts of other groups with 0 instead of -inf chooses them. The embedding is small, so that
  the epsilon of the first norm matters.
  """
  noise = uniform(seed, name, shape)
  if name.endswith('e_score_correction_bias'):
    return np.float32(0.12) * noise - np.float32(1.0)
  if name.endswith('norm.weight'):
    return np.float32(1.0) + np.float32(0.2) * noise
  if name.endswith('embed_tokens.weight'):
    return np.float32(0.1) * noise
  return noise * np.float32(shape[-1] ** -0.5)


def tensors(seed: int, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns every tensor of the checkpoint, by name."""
  return {name: tensor(seed, name, shape) for name, shape in shapes(config).items()}
