"""Reads config and sweep files, and applies `section.field=value` overrides.

A config is a Python file whose `get_config(arg='')` returns an ml_collections ConfigDict, or the
JSON that a run writes (`workdir/config.json`). Overrides land in the ConfigDict, so that references
between fields follow; whether a key exists and a value has the right type is decided in one place,
where the sections become dataclasses (`composer_jax.config.build`).
"""

import ast
import contextlib
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_collections

from composer_jax.config import as_dict
from composer_jax.errors import UserError

_WORDS = {'true': True, 'false': False, 'none': None}


def load(spec: str, overrides: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
  """Returns the config of `FILE[:arg]` with the overrides applied.

  Raises:
    UserError: the file is missing or wrong, or an override has no value to land on.
  """
  path, argument = split(spec)
  if path.suffix == '.json':
    if argument:
      raise UserError(f'--config={spec}: a JSON config takes no argument')
    config = ml_collections.ConfigDict(_read_json(path))
  else:
    config = call_get_config(load_module(path), argument)
  for key, text in overrides:
    set_value(config, key, parse_value(text, current_value(config, key)))
  with _errors_of(path):  # placeholders that nobody filled, keys of several kinds
    return as_dict(config.to_dict())


def load_module(path: Path) -> types.ModuleType:
  """Imports a config file; it can import files beside it, and from folders beside its own.

  Raises:
    UserError: the file is missing, or its code fails (the error and the line are named).
  """
  if not path.is_file():
    raise UserError(f'--config={path}: there is no such file')
  spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path.resolve())
  if spec is None or spec.loader is None:
    raise UserError(f'--config={path}: not a Python or JSON file')
  module = importlib.util.module_from_spec(spec)
  with _folders_on_path(path.resolve()), _errors_of(path):
    spec.loader.exec_module(module)
  return module


def call_get_config(module: types.ModuleType, argument: str = '') -> ml_collections.ConfigDict:
  """Calls `get_config`, with the argument when there is one.

  Raises:
    UserError: there is no such function, it fails, or it does not return a ConfigDict.
  """
  path = Path(module.__file__)
  function = getattr(module, 'get_config', None)
  if function is None:
    raise UserError(f'--config={path}: has no get_config()')
  if argument and not inspect.signature(function).parameters:
    raise UserError(f'--config={path}:{argument}: get_config() takes no argument')
  with _folders_on_path(path), _errors_of(path):
    config = function(argument) if argument else function()
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(f'--config={path}: get_config() returned {type(config).__name__}, '
                    'not a ConfigDict')
  return config


def call_get_sweep(module: types.ModuleType) -> list[dict[str, Any]]:
  """Returns the override dicts that `get_sweep` yields.

  Raises:
    UserError: there is no such function, it fails, or it yields something else than dicts.
  """
  path = Path(module.__file__)
  if not hasattr(module, 'get_sweep'):
    raise UserError(f'--config={path}: has no get_sweep()')
  with _folders_on_path(path), _errors_of(path):
    found = list(module.get_sweep())
  for overrides in found:
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
      raise UserError(f'--config={path}: get_sweep() yields dicts of overrides '
                      f'{{"section.field": value}}, not {overrides!r}')
  return found


def current_value(config: Any, key: str) -> Any:
  """Returns the value at `section.field`; None when there is none yet."""
  for part in key.split('.'):
    if not hasattr(config, 'keys') or part not in config:
      return None
    config = config[part]
  return config


def set_value(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
  """Sets `section.field`, making sections on the way; the key's existence is checked later.

  Raises:
    UserError: the key is malformed, or a whole section would be replaced by a plain value.
  """
  parts = key.split('.')
  if not all(parts):
    raise UserError(f'--config.{key}: a key is section.field')
  with config.unlocked(), config.ignore_type():
    section = config
    for part in parts[:-1]:
      if part not in section or section[part] is None:
        section[part] = ml_collections.ConfigDict()
      section = section[part]
      if not isinstance(section, ml_collections.ConfigDict):
        raise UserError(f'--config.{key}: {part} is a value, not a section')
    old = section.get(parts[-1])
    if isinstance(old, ml_collections.ConfigDict) and value is not None and not isinstance(
        value, (dict, ml_collections.ConfigDict)):
      raise UserError(f'--config.{key}: is a section; set one of its fields '
                      f'({", ".join(sorted(old))})')
    section[parts[-1]] = value


def override(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
  """Returns a copy of a plain config with `section.field` keys set to the given values."""
  changed = ml_collections.ConfigDict(config)
  for key, value in overrides.items():
    set_value(changed, key, value)
  return as_dict(changed.to_dict())


def parse_value(text: str, current: Any) -> Any:
  """Turns an override's text into a value, guided by what it replaces.

  Text stays text where there was text; a list may be written `a,b`; else it is a Python literal
  (`true`, `false`, `none` in any case), and whatever is no literal is text.
  """
  if isinstance(current, str) and text[:1] not in ('"', "'"):
    return None if text == 'None' else text
  if text.lower() in _WORDS:
    return _WORDS[text.lower()]
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    value = text
  if isinstance(current, (list, tuple)) and not isinstance(value, (list, tuple)):
    parts = text.split(',') if isinstance(value, str) else [value]
    return [p.strip() if isinstance(p, str) else p for p in parts]
  return value


def split(spec: str) -> tuple[Path, str]:
  """Splits FILE[:arg]; a file whose own name holds a colon wins."""
  if Path(spec).is_file() or ':' not in spec:
    return Path(spec), ''
  file, _, argument = spec.partition(':')
  return Path(file), argument


def _read_json(path: Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise UserError(f'--config={path}: {error.strerror or error}') from error
  except (ValueError, RecursionError) as error:
    raise UserError(f'--config={path}: is not JSON ({error})') from error
  if isinstance(value, dict) and {'config', 'fingerprint'} <= value.keys():
    value = value['config']  # the form in which a run keeps its own config
  if not isinstance(value, dict):
    raise UserError(f'--config={path}: is not a JSON object')
  return value


@contextlib.contextmanager
def _folders_on_path(file: Path) -> Iterator[None]:
  before = list(sys.path)
  sys.path[:] = [str(file.parent), *before, str(file.parent.parent)]
  try:
    yield
  finally:
    sys.path[:] = before


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
  """Any failure of a user's config file is the user's error, with the line it came from."""
  try:
    yield
  except UserError:
    raise
  except (Exception, SystemExit) as error:
    line = getattr(error, 'lineno', None)
    trace = error.__traceback__
    while trace is not None:
      if Path(trace.tb_frame.f_code.co_filename) == path.resolve():
        line = trace.tb_lineno
      trace = trace.tb_next
    where = f'{path}:{line}' if line else f'{path}'
    raise UserError(f'--config={where}: {type(error).__name__}: {error}') from error
