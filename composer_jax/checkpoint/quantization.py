"""What `quantization_config` of a `config.json` says, in both directions.

Which tensors are quantised is read from the files; the config says how, and is held against them.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from composer_jax.errors import UserError

_ANY = object()  # values that say nothing about what the bytes mean
# Of each object, the fields that are known, with the values that are implemented.
_FP8 = {'quant_method': ('fp8',), 'fmt': ('e4m3',), 'weight_block_size': ([128, 128],),
        'activation_scheme': ('dynamic',), 'scale_fmt': ('ue8m0', 'float', None),
        'modules_to_not_convert': _ANY, 'dequantize': (False,)}
_COMPRESSED = {'quant_method': ('compressed-tensors',), 'format': ('pack-quantized',),
               'quantization_status': ('compressed', 'frozen', None), 'kv_cache_scheme': (None, {}),
               'sparsity_config': (None, {}), 'transform_config': (None, {}), 'version': _ANY,
               'global_compression_ratio': _ANY, 'ignore': _ANY, 'config_groups': _ANY}
_GROUP = {'targets': _ANY, 'weights': _ANY, 'input_activations': (None,),
          'output_activations': (None,), 'format': ('pack-quantized', None)}
_INT4 = {'num_bits': (4,), 'type': ('int',), 'symmetric': (True,), 'group_size': (32,),
         'strategy': ('group',)}
_INT4_WEIGHTS = _INT4 | {'dynamic': (False,), 'actorder': (None, False), 'block_structure': (None,),
                         'observer': _ANY, 'observer_kwargs': _ANY, 'zp_dtype': _ANY,
                         'scale_dtype': (None, 'bfloat16', 'torch.bfloat16')}
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


@dataclasses.dataclass(frozen=True)
class Quantization:
  """What a config says about the weights of a checkpoint.

  Attributes:
    form: "none", "fp8" or "int4".
    power_of_two: FP8 scales are powers of two, as DeepSeek-V3.1's are (`scale_fmt` "ue8m0").
    targets: rules of the modules that are packed: a class, a name, or `re:` and a pattern.
    ignore: rules of those that stay plain.
  """

  form: str = 'none'
  power_of_two: bool = False
  targets: tuple[str, ...] = ()
  ignore: tuple[str, ...] = ()

  def check_packed(self, key: str, where: str) -> None:
    """Raises UserError when by the rules the weight of this name must not be packed."""
    module = key.removesuffix('.weight')
    for rule in self.ignore:
      if _matches(rule, module):
        raise UserError(f'{where}: {key} is packed, and quantization_config.ignore has {rule!r}')
    if not any(_matches(rule, module) for rule in self.targets):
      raise UserError(f'{where}: {key} is packed, and no targets of quantization_config name it')


def find(raw: Mapping[str, Any]) -> Any:
  """Returns the `quantization_config` of a `config.json`, that of its text part first."""
  text = raw.get('text_config', raw)
  return text.get('quantization_config') or raw.get('quantization_config')


def parse(declared: Any, where: str) -> Quantization:
  """Reads a `quantization_config`, which may be None.

  Raises:
    UserError: names the field that is unknown, or whose value is not implemented.
  """
  if not declared:
    return Quantization()
  where = f'{where}: quantization_config'
  method = _mapping(declared, where).get('quant_method')
  if method == 'fp8':
    _only(declared, _FP8, where, required=('weight_block_size',))
    _rules(declared.get('modules_to_not_convert'), f'{where}.modules_to_not_convert')
    return Quantization('fp8', power_of_two=declared.get('scale_fmt') == 'ue8m0')
  if method != 'compressed-tensors':
    raise UserError(f'{where}.quant_method {method!r} is not implemented (only fp8 and '
                    'compressed-tensors)')
  _only(declared, _COMPRESSED, where, required=('format', 'config_groups'))
  targets: list[str] = []
  for name, group in _mapping(declared['config_groups'], f'{where}.config_groups').items():
    place = f'{where}.config_groups.{name}'
    _only(_mapping(group, place), _GROUP, place, required=('weights', 'targets'))
    _only(_mapping(group['weights'], f'{place}.weights'), _INT4_WEIGHTS, f'{place}.weights',
          required=tuple(_INT4))
    targets += _rules(group['targets'], f'{place}.targets')
  if not targets:
    raise UserError(f'{where}.config_groups is empty')
  return Quantization('int4', targets=tuple(targets),
                      ignore=_rules(declared.get('ignore'), f'{where}.ignore'))


def declare(form: str, power_of_two: bool = False) -> dict[str, Any] | None:
  """Returns the `quantization_config` of an export, None for formats without one."""
  if form == 'fp8':
    return {'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [128, 128],
            'activation_scheme': 'dynamic'} | ({'scale_fmt': 'ue8m0'} if power_of_two else {})
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


def _only(found: Mapping[str, Any], known: Mapping[str, Any], where: str,
          required: tuple[str, ...] = ()) -> None:
  for key in required:
    if key not in found:
      raise UserError(f'{where}.{key} is missing')
  for key, value in found.items():
    if key not in known:
      raise UserError(f'{where}.{key} is not implemented')
    if known[key] is not _ANY and value not in known[key]:
      raise UserError(f'{where}.{key} {value!r} is not implemented (only '
                      f'{", ".join(map(repr, known[key]))})')


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
  if not isinstance(value, Mapping):
    raise UserError(f'{where} is {value!r}, must be an object')
  return value


def _rules(value: Any, where: str) -> tuple[str, ...]:
  """Returns a list of module rules, checked."""
  rules = [] if value is None else value
  if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
    raise UserError(f'{where} is {value!r}, must be a list of names')
  for rule in rules:
    try:
      re.compile(rule.removeprefix('re:') if rule.startswith('re:') else '')
    except re.error as error:
      raise UserError(f'{where}: {rule!r} is no pattern ({error})') from error
  return tuple(rules)


def _matches(rule: str, module: str) -> bool:
  """Returns whether a rule of compressed-tensors covers a linear map."""
  if rule.startswith('re:'):
    return re.match(rule[3:], module) is not None
  return rule in ('Linear', module)
