"""The configurations that are compared with transformers, their documents, and how to pack them."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
from hf_golden import weights

DATA = pathlib.Path(__file__).parent / 'data'
ROWS, LENGTH = 5, 48  # of a batch, packed or not
TIE = 1e-5  # below this distance of selection scores float32 does not decide who is chosen

_BASE: dict[str, Any] = {
    'architectures': ['DeepseekV3ForCausalLM'], 'model_type': 'deepseek_v3', 'vocab_size': 64,
    'hidden_size': 32, 'intermediate_size': 40, 'moe_intermediate_size': 8, 'num_hidden_layers': 3,
    'first_k_dense_replace': 1, 'n_routed_experts': 8, 'num_experts_per_tok': 3,
    'n_shared_experts': 1, 'n_group': 1, 'topk_group': 1, 'norm_topk_prob': True,
    'routed_scaling_factor': 2.5, 'num_attention_heads': 2, 'num_key_value_heads': 2,
    'q_lora_rank': 12, 'kv_lora_rank': 16, 'qk_nope_head_dim': 8, 'qk_rope_head_dim': 8,
    'v_head_dim': 8, 'rms_norm_eps': 1e-6, 'rope_theta': 10000.0, 'rope_scaling': None,
    'max_position_embeddings': 64, 'num_nextn_predict_layers': 0, 'tie_word_embeddings': False,
    'hidden_act': 'silu', 'attention_bias': False, 'attention_dropout': 0.0,
    'scoring_func': 'sigmoid', 'topk_method': 'noaux_tc', 'moe_layer_freq': 1}


def _yarn(factor: float, original: int, **changes: Any) -> dict[str, Any]:
  return {'type': 'yarn', 'factor': factor, 'original_max_position_embeddings': original,
          'beta_fast': 32, 'beta_slow': 1, 'mscale': 1.0, 'mscale_all_dim': 1.0} | changes


@dataclasses.dataclass(frozen=True)
class Document:
  """One document; the loss is the sum of its logits times `cotangent`, over all documents."""

  tokens: np.ndarray
  positions: np.ndarray
  cotangent: np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
  """One configuration; `changes` are to a small DeepSeek-V3, `jumps` are of positions in tokens."""

  name: str
  changes: dict[str, Any]
  seed: int = 1
  lengths: tuple[int, ...] = (9, 20, 15, 6, 39)
  packing: tuple[tuple[int, ...], ...] = ((0, 1, 2), (3, 4))  # documents of each row
  jumps: tuple[int, ...] = ()  # added to the positions of each further quarter of every document
  wrapped: bool = False  # inside the multimodal wrapper of Kimi K2.5

  @property
  def text(self) -> dict[str, Any]:
    """The `config.json` of the text model."""
    scaling = self.changes.get('rope_scaling') or self.changes.get('rope_parameters')
    if scaling is None:
      return _BASE | self.changes
    context = (scaling['factor'] or 4) * scaling['original_max_position_embeddings']
    return _BASE | {'max_position_embeddings': int(context)} | self.changes

  @property
  def config(self) -> dict[str, Any]:
    """The whole `config.json`."""
    if not self.wrapped:
      return self.text
    return {'architectures': ['KimiK25ForConditionalGeneration'], 'model_type': 'kimi_k25',
            'tie_word_embeddings': False, 'vision_config': {'hidden_size': 24},
            'media_placeholder_token_id': 3, 'text_config': self.text | {'model_type': 'kimi_k2'}}

  def tensors(self) -> dict[str, np.ndarray]:
    """All weights, by Hugging Face name."""
    return weights.tensors(self.seed, self.text)

  def documents(self) -> list[Document]:
    """The documents, of `lengths` tokens."""
    out = []
    for index, length in enumerate(self.lengths):
      positions = np.arange(length, dtype=np.int32)
      for quarter, jump in enumerate(self.jumps, start=1):
        positions[quarter * length // 4:] += jump
      vocab = self.text['vocab_size']
      out.append(Document(weights.integers(self.seed, f'tokens {index}', length, vocab), positions,
                          weights.uniform(self.seed, f'cotangent {index}', (length, vocab))))
    return out

  def batch(self, packed: bool) -> tuple[dict[str, np.ndarray], list[tuple[int, slice]]]:
    """Returns a padded batch `[ROWS, LENGTH]` and where in it each document lies.

    Padding has tokens and positions other than 0, so that it matters if it is not masked.
    """
    documents, vocab = self.documents(), self.text['vocab_size']
    out = {'tokens': np.full((ROWS, LENGTH), vocab - 1, np.int32),
           'positions': np.full((ROWS, LENGTH), 7, np.int32),
           'segment_ids': np.zeros((ROWS, LENGTH), np.int32),
           'cotangent': np.zeros((ROWS, LENGTH, vocab), np.float32)}
    places = {}
    rows = self.packing if packed else [(index,) for index in range(len(documents))]
    for row, members in enumerate(rows):
      start = 0
      for segment, index in enumerate(members, start=1):
        document, end = documents[index], start + self.lengths[index]
        places[index] = (row, slice(start, end))
        for key in ('tokens', 'positions', 'cotangent'):
          out[key][row, start:end] = getattr(document, key)
        out['segment_ids'][row, start:end] = segment
        start = end
    return out, [places[index] for index in range(len(documents))]


# Past the original window of YaRN: documents of 39 tokens, or positions that jump. `past` says in
# the name that they lie past factor times the window as well.
CASES = (
    Case('deepseek_v3_like', {
        'n_routed_experts': 32, 'num_experts_per_tok': 8, 'n_group': 8, 'topk_group': 4,
        'moe_intermediate_size': 6, 'rope_scaling': _yarn(40, 4096)}, jumps=(1500, 2600, 3000)),
    Case('kimi_k2_5_like', {
        'n_routed_experts': 40, 'num_experts_per_tok': 8, 'moe_intermediate_size': 6,
        'routed_scaling_factor': 2.827, 'rms_norm_eps': 1e-5, 'rope_theta': 50000.0,
        'rope_scaling': _yarn(64.0, 4096)},
         jumps=(1500, 2600, 3000), wrapped=True),
    Case('moonlight_like', {
        'n_routed_experts': 16, 'num_experts_per_tok': 6, 'n_shared_experts': 2,
        'q_lora_rank': None, 'routed_scaling_factor': 2.446, 'rms_norm_eps': 1e-5,
        'rope_theta': 50000.0}, seed=2),
    Case('beta_fast_1_past', {
        'rope_scaling': _yarn(2.0, 16, beta_fast=1.0), 'rope_theta': 30.0,
        'qk_rope_head_dim': 16, 'rms_norm_eps': 1e-5, 'routed_scaling_factor': 1.0,
        'num_hidden_layers': 2}),
    Case('mscales_differ_past', {
        'rope_scaling': _yarn(1.5, 20, mscale=0.707, mscale_all_dim=1.3, beta_fast=4),
        'n_routed_experts': 16, 'num_experts_per_tok': 4, 'n_group': 4, 'topk_group': 2,
        'norm_topk_prob': False, 'qk_rope_head_dim': 12, 'rope_theta': 100.0,
        'num_hidden_layers': 2}),
    Case('no_mscale_all_dim_past', {
        'rope_scaling': _yarn(2.5, 12, mscale_all_dim=0.0), 'num_experts_per_tok': 1,
        'norm_topk_prob': False, 'rope_theta': 500.0, 'q_lora_rank': None, 'num_hidden_layers': 2}),
    Case('mscales_absent', {
        'rope_scaling': {'type': 'yarn', 'factor': None, 'original_max_position_embeddings': 16},
        'first_k_dense_replace': 0, 'num_hidden_layers': 2, 'rope_theta': 200.0,
        'qk_rope_head_dim': 16}),
    Case('rope_parameters', {  # as transformers 5 writes it
        'rope_theta': None, 'rope_scaling': None, 'rope_parameters': {
            'rope_type': 'yarn', 'rope_theta': 70.0, 'factor': 3.0, 'beta_fast': 3.0,
            'beta_slow': 0.7, 'original_max_position_embeddings': 24, 'mscale': 0.8,
            'mscale_all_dim': 0.8},
        'num_hidden_layers': 2, 'n_shared_experts': 2, 'qk_rope_head_dim': 16}),
    Case('all_groups', {
        'n_routed_experts': 12, 'n_group': 4, 'topk_group': 4, 'num_hidden_layers': 2,
        'q_lora_rank': None}),
    Case('many_experts_in_groups', {
        'n_routed_experts': 40, 'num_experts_per_tok': 8, 'n_group': 5, 'topk_group': 2,
        'moe_intermediate_size': 6, 'num_hidden_layers': 2, 'norm_topk_prob': False,
        'n_shared_experts': 2}, seed=2),
    Case('one_of_groups', {
        'n_routed_experts': 9, 'num_experts_per_tok': 2, 'n_group': 3, 'topk_group': 1,
        'first_k_dense_replace': 0, 'num_hidden_layers': 2}),
    Case('one_expert', {
        'n_routed_experts': 36, 'num_experts_per_tok': 1, 'norm_topk_prob': False,
        'moe_intermediate_size': 6, 'num_hidden_layers': 2, 'first_k_dense_replace': 1}),
    Case('two_dense', {
        'num_hidden_layers': 4, 'first_k_dense_replace': 2, 'routed_scaling_factor': 0.5}, seed=2),
    Case('all_dense', {'num_hidden_layers': 2, 'first_k_dense_replace': 2, 'q_lora_rank': None}),
    Case('tied', {
        'tie_word_embeddings': True, 'num_hidden_layers': 2, 'vocab_size': 96,
        'rope_scaling': _yarn(8.0, 32)}),
    Case('large_epsilon', {
        'rms_norm_eps': 1e-3, 'rope_theta': 100.0, 'num_hidden_layers': 2, 'hidden_size': 48}),
    Case('wide_values', {
        'num_attention_heads': 3, 'num_key_value_heads': 3, 'v_head_dim': 14,
        'qk_nope_head_dim': 6, 'qk_rope_head_dim': 4, 'num_hidden_layers': 2,
        'n_routed_experts': 10, 'num_experts_per_tok': 4}),
)

# Saved by transformers itself, in shards. More than ten experts: "10" sorts before "2".
CHECKPOINT = Case('checkpoint', {
    'n_routed_experts': 12, 'n_group': 2, 'topk_group': 1, 'num_hidden_layers': 3,
    'rope_scaling': _yarn(4.0, 16)})

# Rotary tables alone: the widths of the public models, and corners of the interpolation.
ROPES: dict[str, dict[str, Any]] = {
    'deepseek_v3': {'qk_rope_head_dim': 64, 'rope_scaling': _yarn(40, 4096)},
    'kimi_k2': {'qk_rope_head_dim': 64, 'rope_theta': 50000.0,
                'rope_scaling': _yarn(32.0, 4096, beta_fast=1.0)},
    'kimi_k2_5': {'qk_rope_head_dim': 64, 'rope_theta': 50000.0, 'rope_scaling': _yarn(64.0, 4096)},
    'moonlight': {'qk_rope_head_dim': 64, 'rope_theta': 50000.0},
    'one_index': {'rope_scaling': _yarn(4.0, 2)},  # the ramp has no length
    'above_all': {'rope_theta': 3.0, 'rope_scaling': _yarn(4.0, 4096)},  # it lies past the indices
    'falling': {'rope_theta': 50.0, 'rope_scaling': _yarn(4.0, 40, beta_fast=0.5, beta_slow=3)},
    'no_growth': {'rope_scaling': _yarn(1.0, 4096, mscale=0.7, mscale_all_dim=0.3)}}
