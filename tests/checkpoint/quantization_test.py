"""What a config declares: everything known is held against the files, everything else refused."""

import copy

import pytest

from composer_jax.checkpoint import quantization
from composer_jax.errors import UserError

INT4 = quantization.declare('int4')
FP8 = quantization.declare('fp8')


@pytest.mark.parametrize(('base', 'path', 'value', 'message'), [
    (INT4, '', ['int4'], "quantization_config is ['int4'], must be an object"),
    (INT4, 'config_groups', [1], 'config_groups is [1], must be an object'),
    (INT4, 'config_groups', {}, 'config_groups is empty'),
    (INT4, 'config_groups.group_0', 'x', "group_0 is 'x', must be an object"),
    (INT4, 'config_groups.group_0.weights', 4, 'weights is 4, must be an object'),
    (INT4, 'config_groups.group_0.weights.group_size', 64, 'weights.group_size 64 is not'),
    (INT4, 'config_groups.group_0.weights.actorder', 'group', "actorder 'group' is not"),
    (INT4, 'config_groups.group_0.weights.dynamic', True, 'dynamic True is not implemented'),
    (INT4, 'config_groups.group_0.weights.codebook', 1, 'weights.codebook is not implemented'),
    (INT4, 'config_groups.group_0.targets', 'Linear', "targets is 'Linear', must be a list"),
    (INT4, 'config_groups.group_0.input_activations', {'num_bits': 8}, 'input_activations'),
    (INT4, 'ignore', ['re:('], "'re:(' is no pattern"),
    (INT4, 'ignore', [1], 'ignore is [1], must be a list of names'),
    (INT4, 'transform_config', {'config_groups': {'R1': {}}}, 'transform_config'),
    (INT4, 'sparsity_config', {'format': 'sparse-24-bitmask'}, 'sparsity_config'),
    (INT4, 'kv_cache_scheme', {'num_bits': 8}, 'kv_cache_scheme'),
    (INT4, 'hadamard', True, 'quantization_config.hadamard is not implemented'),
    (FP8, 'weight_block_size', None, 'weight_block_size None is not implemented'),
    (FP8, 'modules_to_not_convert', 'lm_head', 'must be a list of names'),
    (FP8, 'activation_scheme', 'static', "activation_scheme 'static' is not implemented"),
])
def test_what_is_not_implemented_is_named(base, path, value, message):
  declared = {'root': copy.deepcopy(base)}
  *folders, last = ['root', *filter(None, path.split('.'))]
  node = declared
  for folder in folders:
    node = node[folder]
  node[last] = value
  with pytest.raises(UserError) as error:
    quantization.parse(declared['root'], 'config.json')
  assert message in str(error.value) and str(error.value).startswith('config.json: ')


def test_our_own_declarations_are_read():
  assert quantization.parse(None, '').form == 'none'
  assert quantization.parse(FP8, '') == quantization.Quantization('fp8')
  assert quantization.parse(quantization.declare('fp8', power_of_two=True), '').power_of_two
  assert quantization.parse(INT4, '').form == 'int4'


def test_rules_are_held_against_what_is_packed():
  expert = 'model.layers.1.mlp.experts.0.up_proj.weight'
  quantization.parse(INT4, '').check_packed(expert, 'config.json')
  with pytest.raises(UserError, match=r"o_proj.weight is packed, .*ignore has 're:.\*self_attn"):
    quantization.parse(INT4, '').check_packed('model.layers.1.self_attn.o_proj.weight', '')
  groups = copy.deepcopy(INT4['config_groups'])
  groups['group_0']['targets'] = ['re:.*down_proj']
  with pytest.raises(UserError, match='up_proj.weight is packed, and no targets'):
    quantization.parse(INT4 | {'config_groups': groups}, '').check_packed(expert, '')
