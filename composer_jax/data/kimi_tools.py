"""Declarations of tools in the two forms that Kimi models were trained on.

K2 reads the OpenAI objects as JSON. K2.5 reads TypeScript: one function type for each tool, with
descriptions and limits as comments, required properties first, each group in alphabetical order.
The form is that of `tool_declaration_ts.py` in moonshotai/Kimi-K2.5, which sorts all keys of the
objects beforehand.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from composer_jax.errors import UserError

_LIMITS = {'string': ('maxLength', 'minLength', 'pattern'), 'number': ('maximum', 'minimum'),
           'integer': ('maximum', 'minimum'), 'array': ('maxItems', 'minItems')}
_UNION = {'string': 'string', 'number': 'number', 'integer': 'number', 'boolean': 'boolean',
          'null': 'null', 'object': '{}', 'array': 'Array<any>'}

Tools = Sequence[Mapping[str, Any]]


def as_json(tools: Tools) -> str:
  """Returns the tools as one line of JSON without spaces (K2)."""
  return json.dumps(tools, ensure_ascii=False, separators=(',', ':'))


def as_typescript(tools: Tools) -> str:
  """Returns the tools as TypeScript (K2.5).

  Args:
    tools: OpenAI objects, `{"type": "function", "function": {"name", "description",
      "parameters"}}`, where parameters is a JSON schema.

  Raises:
    UserError: a schema has a form that TypeScript comments cannot express; names the tool.
  """
  parts = []
  for tool in tools:
    function = tool.get('function') if tool.get('type') == 'function' else None
    if not function:
      raise UserError(f'tools: {json.dumps(tool)[:60]} is no object of type function')
    name = function.get('name', 'function')
    try:
      parts.append(_Declaration().function(_sorted(function)))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
      raise UserError(f'tools: the parameters of {name} cannot be declared ({error})') from error
  return ''.join(['# Tools\n\n## functions\nnamespace functions {\n',
                  *(part + '\n' for part in parts), '}\n'])


def _sorted(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _sorted(value[key]) for key in sorted(value)}
  return [_sorted(item) for item in value] if isinstance(value, list) else value


def _comment(text: str, indent: str = '') -> str:
  return '\n'.join(f'{indent}// {line}' if line else '' for line in text.split('\n'))


class _Declaration:
  """Writes one function; gathers the definitions that its schema refers to."""

  def __init__(self):
    self._definitions: dict[str, Any] = {}
    self._refers_to_itself = False

  def function(self, function: Mapping[str, Any]) -> str:
    """Returns the lines of one function."""
    schema = function.get('parameters') or {}
    parameters = self._object(schema, '')
    interfaces = []
    if self._refers_to_itself:
      properties = ',\n'.join(self._properties(schema, '  '))
      body = f'\n{properties}\n' if properties else ''
      interfaces.append(f'interface parameters {{{body}}}')
      parameters = 'parameters'
    for name, definition in list(self._definitions.items()):
      note = definition.get('description')
      interfaces.append((_comment(note) + '\n' if note else '')
                        + f'interface {name} {self._type(definition, "")}')
    note = function.get('description')
    lines = [*interfaces, _comment(note) if note else '',
             f'type {function.get("name", "function")} = (_: {parameters}) => any;']
    return '\n'.join(line for line in lines if line)

  def _type(self, schema: Any, indent: str) -> str:
    """Returns the type of a schema; `indent` is that of the line it stands in."""
    if isinstance(schema, bool):
      return 'any' if schema else 'null'
    if '$ref' in schema:
      return self._reference(schema['$ref'])
    if 'anyOf' in schema:
      return ' | '.join(self._type(option, indent) for option in schema['anyOf'])
    if 'enum' in schema:
      return ' | '.join(f'"{v}"' if isinstance(v, str) else str(v) for v in schema['enum'])
    kind = schema.get('type')
    if isinstance(kind, list):
      return ' | '.join(_UNION[option] for option in kind)
    if kind == 'object':
      return self._object(schema, indent)
    if kind == 'array':
      return self._array(schema, indent)
    if kind is None and schema:
      raise ValueError(f'{json.dumps(schema)[:60]} has no type')
    return {'integer': 'number', None: 'any'}.get(kind, kind)

  def _reference(self, target: str) -> str:
    if target == '#':
      self._refers_to_itself = True
      return 'parameters'
    name = target.removeprefix('#/$defs/')
    if name == target or name not in self._definitions:
      raise ValueError(f'unknown reference {target}')
    return name

  def _array(self, schema: Mapping[str, Any], indent: str) -> str:
    item = schema.get('items') or {}
    inner = indent + '  '
    notes = ''.join(self._notes(item, inner))
    if not notes:
      return f'Array<{self._type(item, indent)}>'
    return f'Array<\n{notes}{inner}{self._type(item, inner)}\n{indent}>'

  def _object(self, schema: Mapping[str, Any], indent: str) -> str:
    self._definitions.update(schema.get('$defs') or {})
    lines = list(self._properties(schema, indent + '  '))
    extra = schema.get('additionalProperties')
    if extra is not None:
      kind = 'never' if extra is False else self._type(extra, indent + '  ')
      lines.append(f'{indent}  [k: string]: {kind}')
    return '{\n' + ',\n'.join(lines) + f'\n{indent}}}' if lines else '{}'

  def _properties(self, schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yields each property with its comments."""
    required = set(schema.get('required') or [])
    properties = schema.get('properties') or {}
    for name in sorted(properties, key=lambda name: (name not in required, name)):
      prop = properties[name]
      notes = [*self._notes(prop, indent), *self._default(prop, indent)]
      optional = '' if name in required else '?'
      yield f'{"".join(notes)}{indent}{name}{optional}: {self._type(prop, indent)}'

  def _notes(self, schema: Any, indent: str) -> Iterable[str]:
    """Yields the comment lines of a schema: its description and its limits."""
    if isinstance(schema, bool):
      return
    if schema.get('description'):
      yield _comment(schema['description'], indent) + '\n'
    # Only a plain type shows its limits, as in `_type`.
    plain = not any(key in schema for key in ('$ref', 'anyOf', 'enum'))
    kind = schema.get('type')
    names = _LIMITS.get(kind, ()) if plain and isinstance(kind, str) else ()
    limits = ', '.join(f'{name}: {schema[name]}' for name in names if name in schema)
    if limits:
      yield f'{indent}// {limits}\n'

  def _default(self, schema: Any, indent: str) -> Iterable[str]:
    value = None if isinstance(schema, bool) else schema.get('default')
    if value is not None:
      text = repr(value) if isinstance(value, int | float) else json.dumps(value,
                                                                           ensure_ascii=False)
      yield f'{indent}// Default: {text}\n'
