"""From a config file's nested mapping to frozen dataclasses, strictly.

A typo is an error that names the nearest key, a value of the wrong type is an error that names both
types, and nothing is ignored: each field of a config section is a field of some dataclass.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from composer_jax.errors import UserError

T = TypeVar('T')
INT32_MAX = 2**31 - 1  # what counters and seeds hold on a device
_LARGEST_INT = 2**63 - 1


def check_least(config: Any, least: float, *names: str) -> None:
  """Checks fields of a dataclass, for its `__post_init__`.

  Raises:
    ValueError: names the field that is below `least`.
  """
  for name in names:
    if getattr(config, name) < least:
      raise ValueError(f'{name} must be at least {least}, got {getattr(config, name)}')


def check_range(config: Any, least: int, most: int, *names: str) -> None:
  """Checks fields of a dataclass on both sides; see `check_least`.

  Raises:
    ValueError: names the field that is outside `least` .. `most`.
  """
  for name in names:
    if not least <= getattr(config, name) <= most:
      raise ValueError(f'{name} must be between {least} and {most}, got {getattr(config, name)}')


def build(cls: type[T], mapping: Mapping[str, Any], path: str = 'config') -> T:
  """Builds the frozen dataclass `cls` from a mapping (a dict or a ConfigDict).

  Args:
    cls: dataclass type; nested dataclasses, `X | None`, lists, tuples and dicts are followed. A
      nested one with a class method `named` (name -> instance) may be given by name.
    mapping: the values; fields left out take the dataclass default. Mappings inside are put in
      the order of their keys.
    path: where the mapping sits, for messages.

  Raises:
    UserError: an unknown key (with the nearest known one), a missing key, or a wrong type.
  """
  hints = typing.get_type_hints(cls)
  fields = [f for f in dataclasses.fields(cls) if f.init]
  names = [f.name for f in fields]
  for key in mapping:
    if key not in names:
      raise UserError(f'{path}.{key}: unknown key{nearest(key, names)}')
  values = {}
  for field in fields:
    where = f'{path}.{field.name}'
    value = mapping[field.name] if field.name in mapping else _default(field, where)
    values[field.name] = _convert(hints[field.name], value, where)
  try:
    return cls(**values)
  except ValueError as error:
    raise UserError(f'{path}: {error}') from error


def nearest(word: str, known: typing.Iterable[str]) -> str:
  """Returns ` (did you mean X?)` for the closest known word, or the list of what there is."""
  known = sorted(known)
  close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
  return f' (did you mean {close[0]}?)' if close else f' (there are: {", ".join(known)})'


def as_dict(value: Any) -> Any:
  """Returns dataclasses, mappings and sequences as plain JSON-able dicts and lists."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {f.name: as_dict(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
  if isinstance(value, Mapping):
    return {str(k): as_dict(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [as_dict(v) for v in value]
  return value


def fingerprint(value: Any) -> str:
  """Returns 12 hex digits of the SHA-256 of the value's canonical JSON."""
  text = json.dumps(as_dict(value), sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def _default(field: dataclasses.Field, where: str) -> Any:
  """Returns a field's default as it would be written in a config."""
  if field.default_factory is not dataclasses.MISSING:
    return as_dict(field.default_factory())
  if field.default is dataclasses.MISSING:
    raise UserError(f'{where}: missing, and it has no default')
  return as_dict(field.default)


def _convert(hint: Any, value: Any, where: str) -> Any:
  """Converts one value to its annotated type; see `build`."""
  origin = typing.get_origin(hint)
  if hint is Any:
    return as_dict(value)
  if origin in (typing.Union, types.UnionType):
    return _convert_union(hint, value, where)
  if origin is typing.Literal:
    if value not in typing.get_args(hint):
      options = ', '.join(map(repr, typing.get_args(hint)))
      raise UserError(f'{where}: {value!r} is not one of {options}')
    return value
  if dataclasses.is_dataclass(hint):
    if isinstance(value, str) and hasattr(hint, 'named'):
      known = hint.named()
      if value not in known:
        raise UserError(f'{where}: there is no {value!r} (there are: {", ".join(known)})')
      return known[value]
    if isinstance(value, hint):
      return value
    if not hasattr(value, 'items'):
      raise _wrong_type(where, 'a section', value)
    return build(hint, dict(value.items()), where)
  if origin in (list, tuple) or hint in (list, tuple):
    return _convert_sequence(hint, value, where)
  if origin is dict or hint is dict:
    if not hasattr(value, 'items'):
      raise _wrong_type(where, 'a mapping', value)
    item = typing.get_args(hint)[1] if typing.get_args(hint) else Any
    # Equal configs must draw equal numbers, and a draw may walk through a mapping: the order in
    # which someone wrote it down, or a JSON file kept it, is not part of a config.
    return {str(k): _convert(item, v, f'{where}.{k}') for k, v in sorted(value.items())}
  return _convert_scalar(hint, value, where)


def _convert_union(hint: Any, value: Any, where: str) -> Any:
  options = typing.get_args(hint)
  if value is None and type(None) in options:
    return None
  rest = [o for o in options if o is not type(None)]
  for option in rest[:-1]:
    try:
      return _convert(option, value, where)
    except UserError:
      continue  # the next member of the union may fit; the last one's error is the one shown
  return _convert(rest[-1], value, where)


def _convert_sequence(hint: Any, value: Any, where: str) -> Any:
  if isinstance(value, str) and (',' in value or str in typing.get_args(hint)):
    value = [part.strip() for part in value.split(',')]  # as on the command line: `a,b`
  if not isinstance(value, (list, tuple)):
    raise _wrong_type(where, 'a list', value)
  container = typing.get_origin(hint) or hint
  args = [a for a in typing.get_args(hint) if a is not Ellipsis] or [Any]
  fixed = container is tuple and len(args) > 1
  if fixed and len(args) != len(value):
    raise UserError(f'{where}: expected {len(args)} values, got {len(value)}')
  kinds = args if fixed else args[:1] * len(value)
  return container(_convert(k, v, f'{where}[{i}]')
                   for i, (k, v) in enumerate(zip(kinds, value, strict=True)))


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if hint is int and isinstance(value, bool) or not isinstance(value, hint):
    raise _wrong_type(where, hint.__name__, value)
  if hint is float and not math.isfinite(value):
    raise UserError(f'{where}: is not a finite number ({value})')
  if hint is int and abs(value) > _LARGEST_INT:
    raise UserError(f'{where}: {value} is too large')
  return value


def _wrong_type(where: str, wanted: str, value: Any) -> UserError:
  return UserError(f'{where}: expected {wanted}, got {type(value).__name__} {value!r}')
