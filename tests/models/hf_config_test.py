"""`config.json` of the DeepSeek-V3 family: what is taken, and what is refused by name."""

import dataclasses
import json

import pytest

from composer_jax import models
from composer_jax.cli import doctor, main
from composer_jax.errors import UserError
from composer_jax.models import ModelConfig, presets, rope

# Values of the public files (DeepSeek-V3, Kimi-K2-Instruct, Moonlight-16B-A3B).
COMMON = {
    'attention_bias': False, 'attention_dropout': 0.0, 'aux_loss_alpha': 0.001, 'ep_size': 1,
    'hidden_act': 'silu', 'initializer_range': 0.02, 'moe_layer_freq': 1, 'norm_topk_prob': True,
    'pretraining_tp': 1, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64, 'v_head_dim': 128,
    'kv_lora_rank': 512, 'scoring_func': 'sigmoid', 'seq_aux': True, 'tie_word_embeddings': False,
    'topk_method': 'noaux_tc', 'torch_dtype': 'bfloat16', 'use_cache': True,
    'transformers_version': '4.33.1', 'bos_token_id': 0, 'eos_token_id': 1}
DEEPSEEK_V3 = COMMON | {
    'architectures': ['DeepseekV3ForCausalLM'], 'auto_map': {'AutoConfig': 'x'},
    'model_type': 'deepseek_v3', 'first_k_dense_replace': 3, 'hidden_size': 7168,
    'intermediate_size': 18432, 'max_position_embeddings': 163840, 'moe_intermediate_size': 2048,
    'n_group': 8, 'n_routed_experts': 256, 'n_shared_experts': 1, 'num_attention_heads': 128,
    'num_experts_per_tok': 8, 'num_hidden_layers': 61, 'num_key_value_heads': 128,
    'num_nextn_predict_layers': 1, 'q_lora_rank': 1536, 'rms_norm_eps': 1e-06,
    'rope_scaling': {'beta_fast': 32, 'beta_slow': 1, 'factor': 40, 'mscale': 1.0,
                     'mscale_all_dim': 1.0, 'original_max_position_embeddings': 4096,
                     'type': 'yarn'},
    'rope_theta': 10000, 'routed_scaling_factor': 2.5, 'topk_group': 4, 'vocab_size': 129280,
    'quantization_config': {'quant_method': 'fp8'}}
KIMI_K2 = DEEPSEEK_V3 | {
    'model_type': 'kimi_k2', 'first_k_dense_replace': 1, 'max_position_embeddings': 131072,
    'n_group': 1, 'topk_group': 1, 'n_routed_experts': 384, 'num_attention_heads': 64,
    'num_key_value_heads': 64, 'num_nextn_predict_layers': 0, 'rms_norm_eps': 1e-05,
    'rope_theta': 50000.0, 'routed_scaling_factor': 2.827, 'vocab_size': 163840,
    'rope_scaling': DEEPSEEK_V3['rope_scaling'] | {'factor': 32.0, 'beta_fast': 1.0}}
KIMI_K2_5 = {
    'architectures': ['KimiK25ForConditionalGeneration'], 'model_type': 'kimi_k25',
    'media_placeholder_token_id': 163605, 'pad_token_id': 163839, 'tie_word_embeddings': False,
    'vision_config': {'hidden_size': 1152}, 'ignore_index': -100, 'torch_dtype': 'bfloat16',
    'text_config': KIMI_K2 | {
        'max_position_embeddings': 262144, 'temperature': 1.0, 'pruned_heads': {},
        'is_encoder_decoder': False, 'id2label': {'0': 'LABEL_0'},
        'rope_scaling': KIMI_K2['rope_scaling'] | {'factor': 64.0, 'beta_fast': 32.0}}}
MOONLIGHT = COMMON | {
    'model_type': 'deepseek_v3', 'first_k_dense_replace': 1, 'hidden_size': 2048,
    'intermediate_size': 11264, 'max_position_embeddings': 8192, 'moe_intermediate_size': 1408,
    'n_group': 1, 'n_routed_experts': 64, 'n_shared_experts': 2, 'num_attention_heads': 16,
    'num_experts_per_tok': 6, 'num_hidden_layers': 27, 'num_key_value_heads': 16,
    'num_nextn_predict_layers': 0, 'q_lora_rank': None, 'rms_norm_eps': 1e-05,
    'rope_scaling': None, 'rope_theta': 50000.0, 'routed_scaling_factor': 2.446, 'topk_group': 1,
    'vocab_size': 163840}
FILES = {'deepseek_v3': DEEPSEEK_V3, 'kimi_k2': KIMI_K2, 'kimi_k2_5': KIMI_K2_5,
         'moonlight_16b_a3b': MOONLIGHT}


@pytest.mark.parametrize('name', FILES)
def test_public_files_give_the_presets(name):
  assert ModelConfig.from_hf(FILES[name], remat='full') == presets.PRESETS[name]()


@pytest.mark.parametrize('name', presets.PRESETS)
def test_round_trip_of_the_presets(name):
  config = presets.PRESETS[name]()
  again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
  ours = {'remat': config.remat, 'scan_unroll': config.scan_unroll}
  assert dataclasses.replace(again, **ours) == config


def test_what_transformers_5_writes():
  raw = {key: value for key, value in DEEPSEEK_V3.items() if key not in
         ('rope_theta', 'rope_scaling', 'num_nextn_predict_layers')}
  raw |= {'num_mtp_layers': 1, 'dtype': 'float32', 'head_dim': 64, 'qk_head_dim': 192,
          'rope_interleave': True, 'output_router_logits': False,
          'rope_parameters': {'rope_theta': 10000, 'rope_type': 'yarn', 'factor': 40.0,
                              'original_max_position_embeddings': 4096, 'mscale': 1.0,
                              'mscale_all_dim': 1.0}}
  assert ModelConfig.from_hf(raw, remat='full') == presets.deepseek_v3()
  plain = raw | {'rope_parameters': {'rope_theta': 10000, 'rope_type': 'default'}}
  assert ModelConfig.from_hf(plain).rope_scaling is None


def test_yarn_of_kimi_k2_5():
  """Computed by hand: 192**-0.5 * (0.1 * ln 64 + 1)**2."""
  config = presets.kimi_k2_5()
  assert rope.frequencies(config)[1] == 1.0
  assert rope.softmax_scale(config) == pytest.approx(0.144680, abs=5e-7)
  plain = dataclasses.replace(config, rope_scaling=None)
  assert rope.softmax_scale(plain) == pytest.approx(0.072169, abs=5e-7)


def test_missing_yarn_keys_take_the_published_defaults():
  raw = KIMI_K2 | {'rope_scaling': {'type': 'yarn', 'original_max_position_embeddings': 4096}}
  scaling = ModelConfig.from_hf(raw).rope_scaling
  assert scaling == models.RopeScaling(factor=32.0, mscale=1.0, mscale_all_dim=0.0)


BAD = [
    ({'model_type': 'llama'}, "model_type 'llama' is another family"),
    ({'model_type': None}, 'model_type None is another family'),
    ({'index_topk': 64}, 'field index_topk is not implemented'),
    ({'hiden_size': 64}, 'field hiden_size is not implemented .did you mean hidden_size'),
    ({'sliding_window': None}, 'field sliding_window is not implemented'),
    ({'scoring_func': 'softmax'}, "scoring_func 'softmax' is not implemented .only 'sigmoid'"),
    ({'topk_method': 'greedy'}, "topk_method 'greedy'"),
    ({'attention_bias': True}, 'attention_bias True'),
    ({'rope_interleave': False}, 'rope_interleave False'),
    ({'moe_layer_freq': 2}, 'moe_layer_freq 2'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
    ({'num_key_value_heads': 8}, 'num_key_value_heads 8'),
    ({'num_nextn_predict_layers': 2}, 'num_nextn_predict_layers'),
    ({'num_mtp_layers': 0}, 'num_nextn_predict_layers and num_mtp_layers differ'),
    ({'vocab_size': '129280'}, 'config.json.vocab_size: expected int, got str'),
    ({'hidden_size': None}, 'field hidden_size is missing'),
    ({'n_group': 7}, 'n_group must divide'),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, 'type linear is not implemented'),
    ({'rope_scaling': {'factor': 2.0}}, 'rope_scaling has factor and no type'),
    ({'rope_scaling': [1]}, 'rope_scaling is no object'),
    ({'rope_scaling': DEEPSEEK_V3['rope_scaling'] | {'attention_factor': 1.2}},
     'rope_scaling.attention_factor'),
    ({'rope_scaling': DEEPSEEK_V3['rope_scaling'] | {'truncate': False}}, 'truncate false'),
    ({'rope_scaling': DEEPSEEK_V3['rope_scaling'] | {'alpha': 1}}, 'rope_scaling.alpha'),
    ({'rope_scaling': {'type': 'yarn', 'factor': 4}}, 'original_max_position_embeddings is missi'),
    ({'rope_parameters': {'rope_theta': 5.0}}, 'rope_theta is 10000 and 5.0'),
    ({'rope_theta': None}, 'rope_theta is missing'),
]


@pytest.mark.parametrize(('change', 'message'), BAD, ids=[message[:30] for _, message in BAD])
def test_what_is_not_implemented_is_named(change, message):
  with pytest.raises(UserError, match=message):
    ModelConfig.from_hf(DEEPSEEK_V3 | change)


def test_wrapper_is_checked_too():
  with pytest.raises(UserError, match='audio_config is not implemented'):
    ModelConfig.from_hf(KIMI_K2_5 | {'audio_config': {}})
  with pytest.raises(UserError, match='without a text_config'):
    ModelConfig.from_hf({'model_type': 'kimi_k25'})
  with pytest.raises(UserError, match='tie_word_embeddings is True outside and False'):
    ModelConfig.from_hf(KIMI_K2_5 | {'tie_word_embeddings': True})


@pytest.mark.parametrize(('name', 'active'), [
    ('proxy_50m', 50e6), ('proxy_300m', 300e6), ('proxy_1b', 1e9), ('proxy_3b', 3e9)])
def test_proxies_keep_the_ratios(name, active):
  small, full = presets.PRESETS[name](), presets.kimi_k2_5()
  for field in ('vocab_size', 'intermediate_size', 'moe_intermediate_size', 'q_lora_rank',
                'kv_lora_rank', 'num_attention_heads'):
    assert getattr(small, field) * full.hidden_size == getattr(full, field) * small.hidden_size
  depth = small.num_hidden_layers / small.hidden_size * full.hidden_size / full.num_hidden_layers
  assert depth == pytest.approx(1, abs=0.12)
  table = doctor.parameters(name)
  embedding = small.vocab_size * small.hidden_size
  assert table['active'] - embedding == pytest.approx(active, rel=0.06)


def test_doctor_takes_a_file(tmp_path, capsys):
  (tmp_path / 'config.json').write_text(json.dumps(KIMI_K2_5))
  table = doctor.parameters(str(tmp_path))
  assert table == doctor.parameters('kimi_k2_5')
  assert sum(table['parts'].values()) == table['total']
  assert main.main(['doctor', '--model=kimi_k25']) == 2
  assert 'did you mean kimi_k2_5' in capsys.readouterr().err
