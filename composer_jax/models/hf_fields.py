"""The fields of a Hugging Face `config.json` of the DeepSeek-V3 family, in both directions.

Each field of the file is taken, checked to have the one value that is implemented, or known to say
nothing about the function that the model computes. Any other field is an error that names it.
"""

from collections.abc import Mapping
from typing import Any

from composer_jax.config import nearest
from composer_jax.errors import UserError

MODEL_TYPES = ('deepseek_v3', 'kimi_k2')
WRAPPER_TYPE = 'kimi_k25'  # multimodal; the text model is its `text_config`

# Same name, same meaning, and no default: class defaults of transformers are the full DeepSeek-V3.
_REQUIRED = (
    'vocab_size', 'hidden_size', 'num_hidden_layers', 'first_k_dense_replace', 'intermediate_size',
    'moe_intermediate_size', 'n_routed_experts', 'num_experts_per_tok', 'n_shared_experts',
    'n_group', 'topk_group', 'norm_topk_prob', 'routed_scaling_factor', 'num_attention_heads',
    'kv_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim', 'rms_norm_eps',
    'max_position_embeddings')
_OPTIONAL = ('initializer_range', 'tie_word_embeddings')
_HANDLED = ('q_lora_rank', 'rope_theta', 'rope_scaling', 'rope_parameters', 'num_mtp_layers',
            'num_nextn_predict_layers')

# What is implemented is one value; the key may be missing.
_FIXED: dict[str, tuple[Any, ...]] = {
    'model_type': MODEL_TYPES, 'hidden_act': ('silu',), 'attention_bias': (False,),
    'attention_dropout': (0, 0.0), 'scoring_func': ('sigmoid',), 'topk_method': ('noaux_tc',),
    'moe_layer_freq': (1,), 'rope_interleave': (True,), 'mtp_hidden_states_first': (False,),
    'pruned_heads': ({},), 'is_encoder_decoder': (False,), 'add_cross_attention': (False,),
    'tie_encoder_decoder': (False,), 'mlp_bias': (False,), 'use_bfloat16': (False,)}

# Nothing of the model's function: provenance, token ids, storage, training and generation settings.
_SILENT = frozenset((
    'architectures', 'auto_map', 'transformers_version', '_name_or_path', 'name_or_path',
    'torch_dtype', 'dtype', 'quantization_config', 'bos_token_id', 'eos_token_id', 'pad_token_id',
    'sep_token_id', 'unk_token_id', 'decoder_start_token_id', 'use_cache', 'aux_loss_alpha',
    'seq_aux', 'ep_size', 'pretraining_tp', 'output_router_logits', 'router_aux_loss_coef',
    'output_attentions', 'output_hidden_states', 'output_scores', 'return_dict',
    'return_dict_in_generate', 'torchscript', 'tf_legacy_loss', 'chunk_size_feed_forward',
    'cross_attention_hidden_size', 'is_decoder', 'finetuning_task', 'id2label', 'label2id',
    'tokenizer_class', 'prefix', 'task_specific_params', 'problem_type', 'attn_implementation',
    '_attn_implementation_autoset', '_attn_implementation', '_experts_implementation',
    'experts_implementation', 'max_length', 'min_length', 'do_sample', 'early_stopping',
    'num_beams', 'num_beam_groups', 'diversity_penalty', 'temperature', 'top_k', 'top_p',
    'typical_p', 'repetition_penalty', 'length_penalty', 'no_repeat_ngram_size',
    'encoder_no_repeat_ngram_size', 'bad_words_ids', 'num_return_sequences',
    'forced_bos_token_id', 'forced_eos_token_id', 'remove_invalid_values',
    'exponential_decay_length_penalty', 'suppress_tokens', 'begin_suppress_tokens'))
_WRAPPER_SILENT = _SILENT | frozenset((
    'model_type', 'text_config', 'vision_config', 'tie_word_embeddings',
    'media_placeholder_token_id', 'image_token_id', 'ignore_index', 'use_unified_vision_chunk',
    'video_placeholder', 'encoder_only'))

_YARN = ('factor', 'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'mscale',
         'mscale_all_dim')


def text_config(raw: Mapping[str, Any], where: str = 'config.json') -> Mapping[str, Any]:
  """Returns the part of a `config.json` that describes the text model.

  Raises:
    UserError: another family, or a field of the wrapper that is not known.
  """
  if not isinstance(raw, Mapping):
    raise UserError(f'{where}: is no JSON object')
  kind = raw.get('model_type')
  if kind in MODEL_TYPES:
    return raw
  if kind != WRAPPER_TYPE:
    raise UserError(f'{where}: model_type {kind!r} is another family; implemented: '
                    f'{", ".join((*MODEL_TYPES, WRAPPER_TYPE))}')
  for key in raw:
    if key not in _WRAPPER_SILENT:
      raise UserError(f'{where}: field {key} is not implemented')
  text = raw.get('text_config')
  if not isinstance(text, Mapping):
    raise UserError(f'{where}: {WRAPPER_TYPE} without a text_config')
  if 'tie_word_embeddings' in raw:
    outer, inner = raw['tie_word_embeddings'], text.get('tie_word_embeddings', False)
    if outer != inner:
      raise UserError(f'{where}: tie_word_embeddings is {outer} outside and {inner} in text_config')
  return text


def to_kwargs(raw: Mapping[str, Any], where: str = 'config.json') -> dict[str, Any]:
  """Returns the fields of `ModelConfig` that a `config.json` gives.

  Args:
    raw: the file's object; of Kimi K2.5, the multimodal wrapper.
    where: the file, for messages.

  Raises:
    UserError: another family, a field that is missing, unknown, or has a value that is not
      implemented.
  """
  text = text_config(raw, where)
  _check_fields(text, where)
  fields = {key: text[key] for key in (*_REQUIRED, *_OPTIONAL) if text.get(key) is not None}
  fields['q_lora_rank'] = text.get('q_lora_rank') or 0  # null: no bottleneck
  fields['num_nextn_predict_layers'] = _mtp_layers(text, where)
  theta, scaling = _rope(text, where)
  return fields | {'rope_theta': theta, 'rope_scaling': scaling}


def from_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a `config.json` object for the fields of a `ModelConfig` (`config.as_dict`).

  The inverse of `to_kwargs`; transformers loads it as `DeepseekV3ForCausalLM`.

  Raises:
    UserError: a field has a value that such a file cannot say.
  """
  if fields['latent_norm_eps'] != 1e-6:
    raise UserError(f'latent_norm_eps {fields["latent_norm_eps"]} cannot be exported: other code '
                    'takes 1e-6')
  out: dict[str, Any] = {'architectures': ['DeepseekV3ForCausalLM'], 'model_type': 'deepseek_v3'}
  out |= {key: fields[key] for key in (*_REQUIRED, *_OPTIONAL)}
  out['q_lora_rank'] = fields['q_lora_rank'] or None
  out['num_key_value_heads'] = fields['num_attention_heads']
  out['num_nextn_predict_layers'] = fields['num_nextn_predict_layers']
  out['rope_theta'] = fields['rope_theta']
  scaling = fields['rope_scaling']
  out['rope_scaling'] = None if scaling is None else {'type': 'yarn', **scaling}
  out |= {'hidden_act': 'silu', 'attention_bias': False, 'attention_dropout': 0.0,
          'scoring_func': 'sigmoid', 'topk_method': 'noaux_tc', 'moe_layer_freq': 1}
  return out


def _check_fields(text: Mapping[str, Any], where: str) -> None:
  known = {*_REQUIRED, *_OPTIONAL, *_HANDLED, *_FIXED, *_SILENT, 'num_key_value_heads',
           'qk_head_dim', 'head_dim', 'num_local_experts'}
  for key, value in text.items():
    if key not in known:
      hint = nearest(key, known)
      raise UserError(f'{where}: field {key} is not implemented'
                      f'{hint if "did you mean" in hint else ""}')
    if key in _FIXED and value is not None and value not in _FIXED[key]:
      raise UserError(f'{where}: {key} {value!r} is not implemented (only '
                      f'{", ".join(map(repr, _FIXED[key]))})')
  for key in _REQUIRED:
    if text.get(key) is None:
      raise UserError(f'{where}: field {key} is missing')
  rope, nope = text['qk_rope_head_dim'], text['qk_nope_head_dim']
  derived = {'num_key_value_heads': (text['num_attention_heads'],),
             'qk_head_dim': (rope + nope,), 'head_dim': (rope, rope + nope),
             'num_local_experts': (text['n_routed_experts'],)}
  for key, allowed in derived.items():
    if text.get(key) is not None and text[key] not in allowed:
      raise UserError(f'{where}: {key} {text[key]!r} is not implemented (here only '
                      f'{" or ".join(map(str, allowed))})')


def _mtp_layers(text: Mapping[str, Any], where: str) -> int:
  """Returns the number of MTP layers, which transformers 5 writes under another name."""
  given = {text[key] for key in ('num_nextn_predict_layers', 'num_mtp_layers')
           if text.get(key) is not None}
  if len(given) > 1:
    raise UserError(f'{where}: num_nextn_predict_layers and num_mtp_layers differ')
  return given.pop() if given else 0


def _rope(text: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any] | None]:
  """Returns rope_theta and the fields of `RopeScaling` (None without scaling).

  transformers 5 writes one object `rope_parameters`; before, it was `rope_theta` and
  `rope_scaling`.
  """
  given: dict[str, Any] = {}
  for key in ('rope_scaling', 'rope_parameters'):
    if not isinstance(text.get(key) or {}, Mapping):
      raise UserError(f'{where}: {key} is no object')
    given |= text.get(key) or {}
  kinds = {str(given.pop(key)) for key in ('type', 'rope_type') if key in given}
  inside, outside = given.pop('rope_theta', None), text.get('rope_theta')
  if None not in (inside, outside) and inside != outside:
    raise UserError(f'{where}: rope_theta is {outside} and {inside} in rope_parameters')
  theta = outside if inside is None else inside
  if theta is None:
    raise UserError(f'{where}: field rope_theta is missing')
  if kinds - {'yarn', 'default'} or len(kinds) > 1:
    raise UserError(f'{where}: rope_scaling of type {", ".join(sorted(kinds))} is not '
                    'implemented (only yarn)')
  if kinds != {'yarn'}:
    if given:
      raise UserError(f'{where}: rope_scaling has {", ".join(sorted(given))} and no type')
    return theta, None
  if given.pop('truncate', True) is not True:
    raise UserError(f'{where}: rope_scaling.truncate false is not implemented')
  if given.pop('attention_factor', None) is not None:
    raise UserError(f'{where}: rope_scaling.attention_factor is not implemented (it follows from '
                    'mscale and mscale_all_dim)')
  for key in given:
    if key not in _YARN:
      raise UserError(f'{where}: rope_scaling.{key} is not implemented')
  if given.get('original_max_position_embeddings') is None:
    raise UserError(f'{where}: rope_scaling.original_max_position_embeddings is missing')
  if given.get('factor') is None:  # as transformers does
    given['factor'] = text['max_position_embeddings'] / given['original_max_position_embeddings']
  # What DeepSeek's and transformers' code take for a key that is missing.
  defaults = {'beta_fast': 32.0, 'beta_slow': 1.0, 'mscale': 1.0, 'mscale_all_dim': 0.0}
  return theta, defaults | {key: value for key, value in given.items() if value is not None}
