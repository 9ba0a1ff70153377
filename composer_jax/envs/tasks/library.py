"""Real code for L1 and L2: modules of the running standard library, as small packages.

A module is copied into the package `kit`, its C accelerators are taken out (else the copy would
not run its own code), and imports of its siblings become relative. Expected values are what the
original computes here; only code of the standard library is ever run in this process.
"""

import ast
import contextlib
import functools
import pathlib
import random
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence

from composer_jax.envs.sandbox.server import safe_repr
from composer_jax.envs.types import Case

PACKAGE = 'kit'
_WORDS = ('apple', 'ape', 'apply', 'maple', 'ripple', 'grape', 'a', 'by', 'over', 'extraordinary',
          'line', 'x-ray', 'The', 'quick', 'fox', 'well-known')
_PATHS = ('/usr/lib', 'a/b/c.txt', '/a//b/../c', 'x.tar.gz', '', '.bashrc', 'dir/', '../up', '/',
          'a/.hid', 'c:/win/x.py', 'a\\b.c')

_JSON = ('{"a": [1, 2.5, null]}', '["x\\u0041", "\\n", true]', '{}', '[]', '-1e3',
         '"\\ud83d\\ude00"', '[1,', '{"a" 1}', '"abc', '"a\\tb"', 'false')


@functools.cache
def sources(modules: tuple[str, ...], init: str = '') -> types.MappingProxyType[str, str]:
  """Returns path -> text of a package that holds copies of standard-library modules.

  Args:
    modules: module names in dependency order, `json.decoder` for a submodule (the copy is
      `decoder`).
    init: module whose text becomes the package's own; empty for an empty one.
  """
  siblings = {m.rpartition('.')[2]: m for m in modules}
  files = {f'{PACKAGE}/__init__.py': _copy(init, siblings) if init else ''}
  for short, name in siblings.items():
    files[f'{PACKAGE}/{short}.py'] = _copy(name, siblings)
  return types.MappingProxyType(files)


@functools.cache
def _text(module: str) -> str:
  # Not by import: some modules (posixpath) are frozen and do not know their file.
  root = pathlib.Path(sysconfig.get_path('stdlib'), *module.split('.'))
  path = root / '__init__.py' if root.is_dir() else root.with_suffix('.py')
  return path.read_text(encoding='utf-8')


def _copy(module: str, siblings: Mapping[str, str]) -> str:
  """Returns a module's text without accelerators and with relative imports of its siblings."""
  text = _without_accelerators(_text(module))
  text = re.sub(r"\nif __name__ == .__main__.:\n.*\Z", '\n', text, flags=re.DOTALL)
  for short, name in siblings.items():
    parent = name.rpartition('.')[0]
    whole = re.escape(name)
    text = re.sub(rf'^(\s*)from {whole} import ', rf'\1from .{short} import ', text, flags=re.M)
    if parent:
      text = re.sub(rf'^(\s*)from {re.escape(parent)} import {short}$', rf'\1from . import {short}',
                    text, flags=re.M)
    else:
      text = re.sub(rf'^(\s*)import {whole}$', rf'\1from . import {short}', text, flags=re.M)
  return text


def _without_accelerators(text: str) -> str:
  """Replaces `try: from _x import y / except ImportError: BODY` by BODY."""
  lines = text.split('\n')
  for node in reversed([n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Try)]):
    imports = [n for n in node.body if isinstance(n, ast.ImportFrom)]
    if not imports or len(imports) != len(node.body) or not imports[0].module.startswith('_'):
      continue
    handler = node.handlers[0].body
    body = [] if isinstance(handler[0], ast.Pass) else [
      ' ' * node.col_offset + ast.unparse(n) for n in handler]
    lines[node.lineno - 1:node.end_lineno] = body
  return '\n'.join(lines)


@contextlib.contextmanager
def loaded(modules: tuple[str, ...], init: str = '') -> Iterator[None]:
  """Makes the package of `sources` importable as `kit` for a while, without touching the disk."""
  found = _modules(modules, init)
  sys.modules.update(found)
  try:
    yield
  finally:
    for name in found:
      sys.modules.pop(name, None)


@functools.cache
def _modules(modules: tuple[str, ...], init: str) -> dict[str, types.ModuleType]:
  files = sources(modules, init)
  package = types.ModuleType(PACKAGE)
  package.__path__, package.__package__ = [], PACKAGE
  found = {PACKAGE: package}
  order = [m.rpartition('.')[2] for m in modules]
  try:
    for short in order:
      name = f'{PACKAGE}.{short}'
      module = types.ModuleType(name)
      module.__package__ = PACKAGE
      found[name] = module
      sys.modules.update(found)
      exec(compile(files[f'{PACKAGE}/{short}.py'], name, 'exec'), vars(module))
      setattr(package, short, module)
    exec(compile(files[f'{PACKAGE}/__init__.py'], PACKAGE, 'exec'), vars(package))
  finally:
    for name in found:
      sys.modules.pop(name, None)
  return found


def cases(module: str, templates: Sequence[str], count: int, rng: random.Random) -> list[Case]:
  """Returns distinct cases whose expected values the loaded package computes.

  Args:
    module: dotted module whose names the expressions use.
    templates: expressions with {placeholders}, see `fill`.
    count: cases wanted; fewer come back when the templates do not have as many values.
    rng: draws the values.
  """
  found: dict[str, Case] = {}
  for i in range(count * 4):
    expr = fill(templates[i % len(templates)], rng)
    if expr not in found:
      found[expr] = Case(module=module, expr=expr, expected_repr=_expected(module, expr))
    if len(found) == count:
      break
  return list(found.values())


def _expected(module: str, expr: str) -> str:
  # As in the sandbox: the module under its own name, then its names, which win.
  scope = {module.rpartition('.')[2]: sys.modules[module], **vars(sys.modules[module])}
  try:
    return safe_repr(eval(expr, scope))
  except Exception as error:  # noqa: BLE001  whatever the original raises is the expected outcome
    return f'raises {type(error).__name__}'


def fill(template: str, rng: random.Random) -> str:
  """Fills {placeholders} of a case template with Python literals."""
  return re.sub(r'\{(\w+)\}', lambda m: repr(_DRAW[m.group(1)](rng)), template)


def test_file(shown: Sequence[Case]) -> str:
  """Returns a readable file of the visible cases; it informs the agent and decides nothing."""
  lines = ['# The visible tests; `run_tests` runs them. Changes to this file have no effect.']
  lines += [f'# {c.module}: {c.expr} == {c.expected_repr}' for c in shown]
  return '\n'.join(lines) + '\n'


def _ints(rng: random.Random) -> list[int]:
  return [rng.randint(-5, 9) for _ in range(rng.randint(3, 7))]


_DRAW = {
  'int': lambda r: r.randint(-4, 9),
  'nat': lambda r: r.randint(1, 6),
  'ints': _ints,
  'sorted': lambda r: sorted(_ints(r)),
  'floats': lambda r: [round(r.uniform(-4, 9), 2) for _ in range(r.randint(3, 7))],
  'positive': lambda r: [round(r.uniform(0.5, 9), 2) for _ in range(r.randint(3, 7))],
  'unit': lambda r: round(r.random(), 3) if r.random() < 0.8 else r.choice((0.0, 0.5, 1.0)),
  'word': lambda r: r.choice(_WORDS),
  'words': lambda r: r.sample(_WORDS, r.randint(2, 5)),
  'text': lambda r: ' '.join(r.choices(_WORDS, k=r.randint(4, 14))) + r.choice(('', '  ', '.\n')),
  'width': lambda r: r.randint(8, 30),
  'block': lambda r: '\n'.join(' ' * r.choice((0, 2, 4, 4, 6)) + r.choice((*_WORDS, ''))
                               for _ in range(r.randint(2, 5))),
  'path': lambda r: r.choice(_PATHS),
  'relative': lambda r: r.choice([p for p in _PATHS if p and not p.startswith('/')]),
  'absolute': lambda r: '/' + '/'.join(r.choices('abcd', k=r.randint(1, 4))),
  'year': lambda r: r.choice((1900, 2000, 2023, 2024, r.randint(1901, 2099))),
  'month': lambda r: r.randint(1, 12),
  'day': lambda r: r.randint(1, 28),
  'shell': lambda r: r.choice(('a b', '"x y" z', "it\\'s", "'q r' s", 'a\\ b c', '# no', ''))
                     + r.choice((' t', ' "u"', '', ' #c', " 'v w'")),
  'glob': lambda r: r.choice(('*.py', 'a?c', '[ab]*', '[!x]y', 'a[', '**', 'x.[ch]', '')),
  'json': lambda r: r.choice(('%s', '[%s, 1]', '{"k": %s}', ' %s ')) % r.choice(_JSON),
  'data': lambda r: r.choice(({'a': [1, 2.5, None]}, ['é', '\n"', True], {'k': {}}, [], 'tab\t',
                              {'n': -1, 'm': [[1], {'z': 'ü'}]}, [r.randint(0, 99), 'q'])),
}
