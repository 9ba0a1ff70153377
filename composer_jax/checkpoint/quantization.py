"""What `quantization_config` of a `config.json` says, in both directions."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from composer_jax.errors import UserError

_FP8 = {'fmt': ('e4m3',), 'weight_block_size': ([128, 128],), 'activation_scheme': ('dynamic',),
        'scale_fmt': ('ue8m0', 'float', None)}
_INT4 = {'num_bits': (4,), 'type': ('int',), 'symmetric': (True,), 'group_size': (32,),
         'strategy': ('group',)}
# Kimi K2.5's list of what stays bfloat16.
_INT4_IGNORE = ['lm_head', 're:.*self_attn.*', 're:.*shared_experts.*',
                're:.*mlp\\.(gate|up|gate_up|down)_proj.*', 're:.*eh_proj.*', 're:.*shared_head.*']


class Int4Names(NamedTuple):
  """The tensors that stand for one packed weight."""

  packed: str
  scale: str
  shape: str


def int4_names(key: str) -> Int4Names:
  """Returns the names of compressed-tensors for a weight's plain name."""
  return Int4Names(*(f'{key}{suffix}' for suffix in ('_packed', '_scale', '_shape')))


def parse(declared: Mapping[str, Any] | None, where: str) -> str:
  """Returns "none", "fp8" or "int4".

  Raises:
    UserError: names the field whose value is not implemented.
  """
  if not declared:
    return 'none'
  method = declared.get('quant_method')
  if method == 'fp8':
    _only(declared, _FP8, where, required=('weight_block_size',))
    return 'fp8'
  if method != 'compressed-tensors':
    raise UserError(f'{where}: quantization_config.quant_method {method!r} is not implemented '
                    '(only fp8 and compressed-tensors)')
  _only(declared, {'format': ('pack-quantized',)}, where, required=('format',))
  if declared.get('kv_cache_scheme'):
    raise UserError(f'{where}: quantization_config.kv_cache_scheme is not implemented')
  groups = declared.get('config_groups') or {}
  if not groups:
    raise UserError(f'{where}: quantization_config.config_groups is missing')
  for name, group in groups.items():
    for key in ('input_activations', 'output_activations'):
      if group.get(key):
        raise UserError(f'{where}: quantization_config.config_groups.{name}.{key} is not '
                        'implemented')
    _only(group.get('weights') or {}, _INT4, f'{where}: config_groups.{name}.weights',
          required=tuple(_INT4))
  return 'int4'


def declare(form: str) -> dict[str, Any] | None:
  """Returns the `quantization_config` of an export, None for formats without one."""
  if form == 'fp8':
    return {'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [128, 128],
            'activation_scheme': 'dynamic'}
  if form == 'int4':
    weights = {name: allowed[0] for name, allowed in _INT4.items()}
    weights |= {'dynamic': False, 'observer': 'minmax', 'observer_kwargs': {}, 'actorder': None,
                'block_structure': None}
    return {'quant_method': 'compressed-tensors', 'format': 'pack-quantized',
            'quantization_status': 'compressed', 'kv_cache_scheme': None, 'ignore': _INT4_IGNORE,
            'config_groups': {'group_0': {
                'targets': ['Linear'], 'weights': weights, 'input_activations': None,
                'output_activations': None}}}
  return None


def is_quantized(key: str, form: str) -> bool:
  """Returns whether an export in this format stores the tensor of this name quantised.

  FP8 takes the linear maps of attention and feed-forwards, as DeepSeek-V3's files do; INT4 the
  routed experts only, as Kimi K2.5's.
  """
  if form == 'int4':
    return '.mlp.experts.' in key
  linear = key.endswith(('_proj.weight', 'kv_a_proj_with_mqa.weight'))
  return form == 'fp8' and linear and not key.endswith('eh_proj.weight')


def _only(found: Mapping[str, Any], allowed: Mapping[str, tuple], where: str,
          required: tuple[str, ...] = ()) -> None:
  for key, values in allowed.items():
    if key in required and key not in found:
      raise UserError(f'{where}: quantization_config.{key} is missing')
    if key in found and found[key] not in values:
      raise UserError(f'{where}: quantization_config.{key} {found[key]!r} is not implemented (only '
                      f'{", ".join(map(repr, values))})')
