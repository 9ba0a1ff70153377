"""Which package may import which; what must not be imported at import time; no cycles."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEAVES = {'config', 'metrics', 'batch', 'errors', 'files', 'progress', 'redact', 'profiling',
          'stopping', 'allocator'}

# Package (or module) of composer_jax -> the others it may import, besides the leaves.
ALLOWED = {
    'kernels': set(),
    'sharding': set(),
    'models': {'sharding', 'kernels'},
    'data': set(),
    'envs': {'data'},
    'checkpoint': {'models', 'sharding'},
    'train': {'models', 'sharding', 'checkpoint', 'data', 'kernels'},
    'rollout': {'models', 'sharding', 'kernels', 'checkpoint'},
    'rl': {'train', 'rollout', 'envs', 'data', 'models', 'sharding', 'checkpoint', 'kernels'},
    'evals': {'rollout', 'envs', 'data', 'models'},
    'report': set(),
    'sweep': {'recipe.workdir', 'report'},
    'recipe': {'kernels', 'sharding', 'models', 'data', 'envs', 'checkpoint', 'train', 'rollout',
               'rl', 'evals', 'report'},
    'bench': {'models', 'train', 'kernels', 'checkpoint'},
    'api': {'kernels', 'sharding', 'models', 'data', 'envs', 'checkpoint', 'train', 'rollout',
            'rl', 'evals', 'report', 'recipe'},
    'cli': None,  # anything
    '__main__': {'cli'},
    '__init__': set(),
}
NO_JAX_PACKAGES = ('data', 'envs', 'report', 'sweep', 'cli')
NO_JAX_EXCEPTIONS = {'composer_jax.data.loader'}  # batches leave it as arrays
THIRD_PARTY_OF_KERNELS = {'jax', 'jaxlib', 'numpy', 'ml_dtypes', 'jaxtyping'}


def _modules() -> dict[str, Path]:
  """Dotted name -> file of every module of the library and the kernels."""
  found = {}
  for top, prefix in ((ROOT / 'composer_jax', 'composer_jax'),
                      (ROOT / 'kernels', 'composer_jax.kernels')):
    for path in top.rglob('*.py'):
      parts = path.relative_to(top).with_suffix('').parts
      parts = parts[:-1] if parts[-1] == '__init__' else parts
      found['.'.join([prefix, *parts])] = path
  return found


MODULES = _modules()


@functools.cache
def _imports(name: str, path: Path, *, top_level: bool) -> set[str]:
  """Absolute names that a module imports; with `top_level`, only what runs at its import."""
  package = name if path.name == '__init__.py' else name.rpartition('.')[0]
  found = set()
  todo = [ast.parse(path.read_text(encoding='utf-8'))]
  while todo:
    node = todo.pop()
    if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
      continue
    if top_level and isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test):
      continue
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        parents = package.split('.')
        base = '.'.join(filter(None, [*parents[:len(parents) - node.level + 1], base]))
      for alias in node.names:
        inner = f'{base}.{alias.name}'
        found.add(inner if inner in MODULES else base)
    todo += list(ast.iter_child_nodes(node))
  return found


def _package(name: str) -> str:
  parts = name.split('.')
  return parts[1] if len(parts) > 1 else '__init__'


@pytest.mark.parametrize('package', sorted({_package(name) for name in MODULES}))
def test_imports_point_one_way(package):
  if package in LEAVES:
    allowed = LEAVES - {'metrics'} if package == 'batch' else LEAVES
  else:
    assert package in ALLOWED, f'{package}: say in ALLOWED what it may import'
    allowed = ALLOWED[package]
  if allowed is None:
    return
  wrong = []
  for name, path in MODULES.items():
    if _package(name) != package:
      continue
    for target in _imports(name, path, top_level=False):
      if not target.startswith('composer_jax.') or _package(target) in {package, *LEAVES}:
        continue
      inside = target.removeprefix('composer_jax.')
      if _package(target) not in allowed and inside not in allowed:
        wrong.append(f'{name} imports {target}')
  assert not wrong


def test_kernels_import_only_jax_and_numpy():
  wrong = []
  for name, path in MODULES.items():
    if _package(name) == 'kernels':
      for target in _imports(name, path, top_level=False):
        top = target.split('.')[0]
        if top not in THIRD_PARTY_OF_KERNELS | set(sys.stdlib_module_names) and not (
            target.startswith('composer_jax.kernels')):
          wrong.append(f'{name} imports {target}')
  assert not wrong


def test_nothing_imports_the_command_line_or_experiments():
  wrong = [f'{name} imports {target}' for name, path in MODULES.items()
           if _package(name) not in ('cli', '__main__')
           for target in _imports(name, path, top_level=False)
           if target.startswith(('composer_jax.cli', 'experiments'))]
  assert not wrong


def _cycle(edges: dict[str, set[str]]) -> list[str]:
  """Returns one cycle of a directed graph, or []."""
  state: dict[str, int] = {}
  trail: list[str] = []

  def visit(node: str) -> list[str]:
    state[node] = 1
    trail.append(node)
    for target in sorted(edges.get(node, ())):
      if state.get(target) == 1:
        return trail[trail.index(target):] + [target]
      if target not in state and (found := visit(target)):
        return found
    state[node] = 2
    trail.pop()
    return []

  for node in sorted(edges):
    if node not in state and (found := visit(node)):
      return found
  return []


def test_cycle_finder():
  assert _cycle({'a': {'b'}, 'b': {'c'}, 'c': set()}) == []
  assert _cycle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c', 'b']


def test_no_cycles_between_packages():
  edges: dict[str, set[str]] = {}
  for name, path in MODULES.items():
    targets = {_package(t) for t in _imports(name, path, top_level=False)
               if t.startswith('composer_jax.')}
    edges.setdefault(_package(name), set()).update(targets - {_package(name)})
  assert _cycle(edges) == []


def test_no_cycles_between_modules():
  edges = {name: {t for t in _imports(name, path, top_level=True) if t in MODULES and t != name}
           for name, path in MODULES.items()}
  for name, targets in edges.items():  # a package's __init__ names its own modules
    targets -= {t for t in list(targets) if name.startswith(t + '.')}
  assert _cycle(edges) == []


def test_the_package_itself_imports_nothing():
  tree = ast.parse((ROOT / 'composer_jax' / '__init__.py').read_text())
  assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]


def test_no_folder_of_odds_and_ends():
  names = {part for name in MODULES for part in name.split('.')}
  assert not names & {'utils', 'util', 'common', 'helpers', 'misc'}


def test_no_jax_where_none_is_needed():
  """Imports, in a process of its own, every module that must do without jax."""
  names = sorted(name for name in MODULES
                 if _package(name) in NO_JAX_PACKAGES and name not in NO_JAX_EXCEPTIONS)
  names.append('composer_jax.recipe.workdir')
  code = ('import importlib, sys\n'
          f'for name in {names!r}:\n'
          '  importlib.import_module(name)\n'
          '  assert "jax" not in sys.modules, name + " imports jax"\n')
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
