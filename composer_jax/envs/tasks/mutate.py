"""Small source mutations found through the syntax tree and applied to the text, one line each.

Operators: compare, bool and arithmetic flips, a negated `if`, an integer off by one (the classes of
SWE-smith's procedural mutants). The rest of the line keeps its formatting, so that the repair is a
one-line edit too.
"""

import ast
import dataclasses
from collections.abc import Iterator

_COMPARE = {'<': '<=', '<=': '<', '>': '>=', '>=': '>', '==': '!=', '!=': '==', 'in': 'not in',
            'not in': 'in', 'is': 'is not', 'is not': 'is'}
_ARITHMETIC = {'+': '-', '-': '+', '*': '+', '//': '*', '/': '*', '%': '//'}


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One changed line.

  Attributes:
    kind: `compare`, `bool`, `arith`, `negate` or `off_by_one`.
    line: 1-based line number.
    text: the whole line after the change.
  """

  kind: str
  line: int
  text: str

  def apply(self, source: str) -> str:
    """Returns the source with the line replaced."""
    lines = source.split('\n')
    lines[self.line - 1] = self.text
    return '\n'.join(lines)


def find_function(source: str, name: str) -> ast.FunctionDef:
  """Returns the definition of `name`, dotted for a method.

  Raises:
    KeyError: the source does not define it.
  """
  scope: ast.AST = ast.parse(source)
  for part in name.split('.'):
    scope = next((n for n in ast.walk(scope) if isinstance(n, (ast.FunctionDef, ast.ClassDef))
                  and n.name == part), None)
    if scope is None:
      raise KeyError(name)
  return scope


def mutations(source: str, function: str) -> list[Mutation]:
  """Returns the mutations of one function's body, in source order; only ASCII lines are touched."""
  lines = source.split('\n')
  found = []
  for kind, node, start, end, new in _candidates(find_function(source, function), lines):
    line = lines[node.lineno - 1]
    if line.isascii():
      found.append(Mutation(kind, node.lineno, line[:start] + new + line[end:]))
  return sorted(set(found), key=lambda m: (m.line, m.kind, m.text))


def _candidates(function: ast.FunctionDef, lines: list[str]
                ) -> Iterator[tuple[str, ast.AST, int, int, str]]:
  """Yields (kind, node, start column, end column, replacement), one-line nodes only."""
  for node in ast.walk(function):
    if getattr(node, 'lineno', 0) != getattr(node, 'end_lineno', -1) and not isinstance(
        node, (ast.If, ast.While)):
      continue
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
      yield from _between(node, node.left, node.comparators[0], lines, _COMPARE, 'compare')
    elif isinstance(node, ast.BoolOp):
      for left, right in zip(node.values, node.values[1:], strict=False):
        yield from _between(node, left, right, lines, {'and': 'or', 'or': 'and'}, 'bool')
    elif isinstance(node, ast.BinOp):
      yield from _between(node, node.left, node.right, lines, _ARITHMETIC, 'arith')
    elif isinstance(node, (ast.If, ast.While)) and node.test.lineno == node.test.end_lineno:
      test = node.test
      text = lines[test.lineno - 1][test.col_offset:test.end_col_offset]
      yield 'negate', test, test.col_offset, test.end_col_offset, f'not ({text})'
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000:
      yield 'off_by_one', node, node.col_offset, node.end_col_offset, str(node.value + 1)


def _between(node: ast.AST, left: ast.expr, right: ast.expr, lines: list[str],
             table: dict[str, str], kind: str) -> Iterator[tuple[str, ast.AST, int, int, str]]:
  """Yields the flip of the operator that stands between two operands."""
  start, end = left.end_col_offset, right.col_offset
  gap = lines[node.lineno - 1][start:end]
  operator = gap.strip(' ()')
  if operator in table and gap.count(operator) == 1:
    at = start + gap.index(operator)
    yield kind, node, at, at + len(operator), table[operator]
