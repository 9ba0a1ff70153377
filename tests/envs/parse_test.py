import ast
import inspect
import random

import pytest

from composer_jax.envs.tools import parse as parse_module
from composer_jax.envs.tools.edit import apply_edit
from composer_jax.envs.tools.parse import parse
from composer_jax.envs.tools.registry import TOOL_NAMES
from composer_jax.envs.types import Call, CallErrorClass


def call(text):
  return parse(text, TOOL_NAMES, 'main.py')


@pytest.mark.parametrize(('text', 'name', 'arguments'), [
  ('read_file', 'read_file', {'path': 'main.py'}),
  ('read_file pkg/a.py', 'read_file', {'path': 'pkg/a.py'}),
  ('read_file pkg/a.py:3-9', 'read_file',
   {'path': 'pkg/a.py', 'first': 3, 'last': 9, 'range': True}),
  ('edit_file 4|if v >= t:', 'edit_file',
   {'path': 'main.py', 'first': 4, 'last': 4, 'range': False, 'text': 'if v >= t:'}),
  ('edit_file pkg/a.py:12|x = a | b', 'edit_file',
   {'path': 'pkg/a.py', 'first': 12, 'last': 12, 'range': False, 'text': 'x = a | b'}),
  ('edit_file a.py:1-2|one\n  two', 'edit_file',
   {'path': 'a.py', 'first': 1, 'last': 2, 'range': True, 'text': 'one\n  two'}),
  ('edit_file 2|', 'edit_file',
   {'path': 'main.py', 'first': 2, 'last': 2, 'range': False, 'text': ''}),
  ('search def f', 'search', {'pattern': 'def f'}),
  (' run_tests\n', 'run_tests', {}),
  ('finish', 'finish', {}),
])
def test_good_calls(text, name, arguments):
  assert call(text) == Call(name, arguments)


@pytest.mark.parametrize(('text', 'error'), [
  ('', CallErrorClass.UNKNOWN_TOOL),
  ('rm -rf /', CallErrorClass.UNKNOWN_TOOL),
  ('finish now', CallErrorClass.BAD_ARGUMENTS),
  ('edit_file 0|x', CallErrorClass.BAD_ARGUMENTS),
  ('edit_file 5-2|x', CallErrorClass.BAD_ARGUMENTS),
  ('edit_file x', CallErrorClass.BAD_ARGUMENTS),
  ('edit_file |x', CallErrorClass.BAD_ARGUMENTS),
  ('edit_file ' + '9' * 5000 + '|x', CallErrorClass.BAD_ARGUMENTS),
  ('edit_file \u0663|x', CallErrorClass.BAD_ARGUMENTS),  # an Arabic-Indic digit
  ('edit_file 1|\0', CallErrorClass.BAD_ARGUMENTS),
  ('search', CallErrorClass.BAD_ARGUMENTS),
  ('read_file /etc/passwd', CallErrorClass.NOT_ALLOWED),
  ('read_file ../x', CallErrorClass.NOT_ALLOWED),
  ('read_file a/../../x', CallErrorClass.NOT_ALLOWED),
  ('edit_file /tmp/x.py:1|y', CallErrorClass.NOT_ALLOWED),
])
def test_bad_calls_have_a_class(text, error):
  result = call(text)
  assert result.error == error
  assert result.message


def test_a_tool_that_the_task_lacks_is_unknown():
  assert parse('search x', ('read_file',), 'main.py').error == CallErrorClass.UNKNOWN_TOOL


def test_fuzz_never_raises():
  rng = random.Random(0)
  pieces = [*TOOL_NAMES, ' ', ':', '|', '-', '\n', '\0', '/', '..', '<|end|>',
            '<|result|>', '\ufffd', '\ud800', '99', '0', 'main.py', '__import__("os")',
            '"', "'", '\\', '{', '\u2028', '\t']
  for _ in range(10_000):
    text = ''.join(rng.choices(pieces, k=rng.randint(0, 8)))
    if rng.random() < 0.3:
      text += ''.join(chr(rng.randrange(0x3000)) for _ in range(rng.randint(0, 20)))
    result = call(text)
    assert isinstance(result, Call)
    assert (result.error is None) == (result.message == '')


def test_parser_never_evaluates():
  tree = ast.parse(inspect.getsource(parse_module))
  names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
  assert not names & {'eval', 'exec', 'compile', '__import__'}


def test_edit_keeps_indentation_of_the_old_line():
  assert apply_edit('a\n    b\nc\n', 2, 2, '  x = 1 ') == 'a\n    x = 1\nc\n'


def test_edit_range_is_verbatim_and_form_feeds_do_not_end_lines():
  assert apply_edit('a\n\x0cb\nc\n', 2, 2, '  x\ny') == 'a\n  x\ny\nc\n'
  assert apply_edit('a\n    b\n', 2, 2, 'x', verbatim=True) == 'a\nx\n'


def test_edit_append_delete_and_missing_line():
  assert apply_edit('a\n', 2, 2, 'b') == 'a\nb\n'
  assert apply_edit('a\nb\n', 1, 1, '') == 'b\n'
  assert apply_edit('a\n', 3, 3, 'b') is None
  assert apply_edit('a\n', 1, 2, 'b') is None
