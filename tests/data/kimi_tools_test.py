"""Declarations of tools, against text written by hand from the documented form."""

import pytest

from composer_jax.data import kimi_tools
from composer_jax.errors import UserError


def _tool(parameters, **more):
  return [{'type': 'function', 'function': {'name': 'f', 'parameters': parameters, **more}}]


def _around(*lines):
  return '\n'.join(['# Tools', '', '## functions', 'namespace functions {', *lines, '}', ''])


def test_properties_comments_and_limits():
  tools = _tool({
      'type': 'object', 'required': ['path', 'count'], 'properties': {
          'unit': {'enum': ['a', 1, None], 'description': 'One of.'},
          'path': {'type': 'string', 'description': 'Where.\n\nReally.', 'minLength': 1,
                   'maxLength': 9, 'default': 'ä'},
          'count': {'type': 'integer', 'minimum': 0, 'default': 3},
          'any': {}, 'flag': {'type': 'boolean', 'default': False},
          'either': {'type': ['string', 'null', 'array']},
          'deep': {'type': 'object', 'properties': {'x': {'type': 'number'}},
                   'additionalProperties': False}}}, description='Does it.\nWell.')
  assert kimi_tools.as_typescript(tools) == _around(
      '// Does it.', '// Well.', 'type f = (_: {',
      '  // minimum: 0', '  // Default: 3', '  count: number,',
      '  // Where.', '', '  // Really.', '  // maxLength: 9, minLength: 1', '  // Default: "ä"',
      '  path: string,',
      '  any?: any,',
      '  deep?: {', '    x?: number,', '    [k: string]: never', '  },',
      '  either?: string | null | Array<any>,',
      '  // Default: False', '  flag?: boolean,',
      '  // One of.', '  unit?: "a" | 1 | None', '}) => any;')


def test_arrays_unions_references_and_open_objects():
  tools = _tool({
      '$defs': {'P': {'type': 'object', 'description': 'A point.',
                      'properties': {'x': {'type': 'number'}}, 'required': ['x']}},
      'type': 'object', 'additionalProperties': {'type': 'integer'}, 'properties': {
          'a': {'type': 'array', 'items': {'type': 'string'}, 'minItems': 1},
          'b': {'type': 'array', 'items': {'$ref': '#/$defs/P', 'description': 'Each.'}},
          'c': {'anyOf': [{'type': 'array'}, {'$ref': '#/$defs/P'}]}}})
  assert kimi_tools.as_typescript(tools) == _around(
      '// A point.', 'interface P {', '  x: number', '}',
      'type f = (_: {', '  // minItems: 1', '  a?: Array<string>,',
      '  b?: Array<', '    // Each.', '    P', '  >,', '  c?: Array<any> | P,',
      '  [k: string]: number', '}) => any;')


def test_a_schema_that_refers_to_itself():
  tools = _tool({'type': 'object', 'properties': {'next': {'$ref': '#'}}})
  assert kimi_tools.as_typescript(tools) == _around(
      'interface parameters {', '  next?: parameters', '}', 'type f = (_: parameters) => any;')


def test_several_functions_and_none():
  tools = [*_tool(None), *_tool({}, description='')]
  assert kimi_tools.as_typescript(tools) == _around('type f = (_: {}) => any;',
                                                    'type f = (_: {}) => any;')


@pytest.mark.parametrize('parameters', [
    {'properties': {'a': {'$ref': '#/$defs/None'}}}, {'properties': {'a': {'title': 'A'}}},
    {'properties': {'a': {'type': ['odd']}}}, {'properties': ['a']}])
def test_schemas_that_cannot_be_declared_name_the_tool(parameters):
  with pytest.raises(UserError, match='tools: the parameters of f cannot be declared'):
    kimi_tools.as_typescript(_tool(parameters))
  with pytest.raises(UserError, match='is no object of type function'):
    kimi_tools.as_typescript([{'type': 'plugin'}])
