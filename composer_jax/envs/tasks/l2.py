"""L2: a function that several files of a small package rely on is deleted; its callers remain.

The agent has to write it again from its uses and the visible tests. Only the definition and its
`__all__` entry go: the deleted text survives nowhere in the workspace, which holds no caches, no
bytecode and no version history.
"""

import dataclasses
import functools
import random
import re

from composer_jax.envs.tasks import library
from composer_jax.envs.tasks.config import LevelConfig
from composer_jax.envs.tasks.mutate import find_function
from composer_jax.envs.types import Case, Limits, Task


@dataclasses.dataclass(frozen=True)
class Feature:
  """One deletable function.

  Attributes:
    modules: modules of the package, in dependency order.
    init: module that becomes the package's `__init__`, or empty.
    place: short name of the module that defines the function.
    function: its name.
    uses: module -> case templates through the public interface.
    split: where it belongs.
  """

  modules: tuple[str, ...]
  place: str
  function: str
  uses: dict[str, tuple[str, ...]]
  split: str = 'train'
  init: str = ''


_PATHS = ('genericpath', 'posixpath', 'ntpath')
_ORDER = ('bisect', 'heapq', 'statistics', 'difflib')
_JSON = ('json.scanner', 'json.decoder', 'json.encoder')

FEATURES = (
  Feature(_PATHS, 'genericpath', '_splitext',
          {'kit.posixpath': ('splitext({path})',), 'kit.ntpath': ('splitext({path})',)}),
  Feature(_PATHS, 'genericpath', 'commonprefix',
          {'kit.posixpath': ('commonprefix([{absolute}, {absolute}])', 'commonprefix({words})'),
           'kit.ntpath': ('commonprefix([{path}, {path}])',)}, split='heldout'),
  Feature(_PATHS, 'genericpath', '_check_arg_types',
          {'kit.posixpath': ('join({path}, {int})', 'join({path}, {relative})'),
           'kit.ntpath': ('join({path}, {int})', 'commonpath([{relative}, {nat}])')}),
  Feature(_PATHS, 'posixpath', '_get_sep',
          {'kit.posixpath': ('join({path}, {relative})', 'split({path})', 'basename({path})')}),
  Feature(_ORDER, 'bisect', 'bisect_left',
          {'kit.bisect': ('bisect_left({sorted}, {int})',),
           'kit.statistics': ('median_grouped({ints})', 'median_grouped({ints}, 2)')}),
  Feature(_ORDER, 'heapq', 'nlargest',
          {'kit.heapq': ('nlargest({nat}, {ints})', 'nlargest({nat}, {ints}, key=abs)'),
           'kit.difflib': ('get_close_matches({word}, {words}, 2, 0.2)',)}, split='heldout'),
  Feature(_JSON, 'decoder', 'py_scanstring',
          {'kit': ('loads({json})',)}, init='json'),
  Feature(_JSON, 'scanner', 'py_make_scanner',
          {'kit': ('loads({json})',)}, init='json'),
  Feature(_JSON, 'encoder', 'py_encode_basestring_ascii',
          {'kit': ('dumps({data})', 'dumps({words})')}, split='heldout', init='json'),
)
_VARIANTS = 8  # draws of the cases for each feature


@dataclasses.dataclass(frozen=True)
class L2Config(LevelConfig):
  """What an L2 task looks like (our choice)."""

  visible_cases: int = 6
  hidden_cases: int = 16
  limits: Limits = Limits(max_calls=24, max_turn_tokens=2048, max_tokens=32768, output_bytes=8192)


@functools.cache
def _features(split: str) -> tuple[Feature, ...]:
  return tuple(f for f in FEATURES if f.split == split)


def available(split: str) -> int:
  """Returns how many tasks a split has."""
  return len(_features(split)) * _VARIANTS


def generate(config: L2Config, split: str, seed: int, index: int) -> Task:
  """Returns task number `index` of a split; see `l0.generate`.

  Args:
    config: what a task looks like.
    split: `train` or `heldout`.
    seed: draws the inputs.
    index: 0 .. available(split) - 1.
  """
  feature = _features(split)[index % len(_features(split))]
  rng = random.Random(f'l2/{split}/{seed}/{index}')
  files = library.sources(feature.modules, feature.init)
  path = f'{library.PACKAGE}/{feature.place}.py'
  visible, hidden = _draw_cases(config, feature, rng)
  return Task(
    id=f'l2-{split}-{seed}-{index}', level='l2',
    instruction=f'{feature.function} is missing from {path}: write it again from its uses',
    files={**files, path: delete(files[path], feature.function),
           'tests.txt': library.test_file(visible)},
    visible=visible, hidden=hidden, entry=path, limits=config.limits,
    solution={path: files[path]}, protected=('tests.txt',),
    meta={'function': feature.function, 'mutation': 'deleted', 'sealed': True,
          'key': [feature.place, feature.function]})


def delete(source: str, function: str) -> str:
  """Returns the source without a module-level function, its decorators and its `__all__` entry."""
  node = find_function(source, function)
  first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
  lines = source.split('\n')
  del lines[first - 1:node.end_lineno]
  text = '\n'.join(lines)
  exported = re.search(r'__all__ = \[.*?\]', text, re.DOTALL)
  if exported:
    kept = re.sub(rf"""(['"]){function}\1,?\s*""", '', exported.group())
    text = text[:exported.start()] + kept + text[exported.end():]
  return text


def _draw_cases(config: L2Config, feature: Feature,
                rng: random.Random) -> tuple[list[Case], list[Case]]:
  """Draws visible and hidden cases, both through every module that uses the feature."""
  visible, hidden = [], []
  total = config.visible_cases + config.hidden_cases
  with library.loaded(feature.modules, feature.init):
    for module, templates in feature.uses.items():
      found = library.cases(module, templates, -(-total // len(feature.uses)), rng)
      shown = max(1, len(found) * config.visible_cases // total)
      visible += found[:shown]
      hidden += found[shown:]
  return visible, hidden
