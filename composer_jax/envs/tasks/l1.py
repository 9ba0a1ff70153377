"""L1: one real function of the standard library with one mutated line, in a one-module package."""

import dataclasses
import functools
import random
import zlib

from composer_jax.envs.tasks import library
from composer_jax.envs.tasks.config import LevelConfig
from composer_jax.envs.tasks.mutate import Mutation, mutations
from composer_jax.envs.types import Limits, Task

# module -> [(function whose body is mutated, case templates)]
TARGETS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
  'bisect': [
    ('bisect_left', ('bisect_left({sorted}, {int})', 'bisect_left({sorted}, {int}, 1, 3)',
                     'bisect_left({sorted}, {int}, key=abs)')),
    ('bisect_right', ('bisect_right({sorted}, {int})', 'bisect_right({sorted}, {int}, 1, 3)')),
    ('insort_right', ('(lambda a: (insort_right(a, {int}), a)[1])({sorted})',)),
    ('insort_left', ('(lambda a: (insort_left(a, {int}, key=abs), a)[1])({sorted})',)),
  ],
  'heapq': [
    ('_siftdown', ('(lambda h: ([heappush(h, v) for v in {ints}], h)[1])([])',)),
    ('_siftup', ('(lambda h: (heapify(h), heappop(h), h))({ints})',)),
    ('heapify', ('(lambda h: (heapify(h), h)[1])({ints})',)),
    ('heappop', ('(lambda h: (heapify(h), heappop(h), heappop(h), h))({ints})',)),
    ('heappushpop', ('(lambda h: (heapify(h), heappushpop(h, {int}), h))({ints})',)),
    ('merge', ('list(merge({sorted}, {sorted}))', 'list(merge({sorted}, {sorted}, key=abs))')),
    ('nsmallest', ('nsmallest({nat}, {ints})', 'nsmallest(1, {ints})')),
    ('nlargest', ('nlargest({nat}, {ints})', 'nlargest({nat}, {ints}, key=abs)')),
  ],
  'textwrap': [
    ('TextWrapper._wrap_chunks', ('wrap({text}, {width})', 'wrap({text}, {width}, max_lines=2)')),
    ('TextWrapper._handle_long_word', ('wrap({text}, {nat})',)),
    ('TextWrapper._munge_whitespace', ('wrap({text} + "\\tx", {width})',)),
    ('TextWrapper._split', ('wrap({text}, {width}, break_on_hyphens=False)', 'wrap({text}, 9)')),
    ('dedent', ('dedent({block})',)),
    ('indent', ('indent({block}, "> ")',)),
    ('shorten', ('shorten({text}, {width})',)),
  ],
  'statistics': [
    ('median', ('median({ints})', 'median({floats})')),
    ('median_low', ('median_low({ints})',)),
    ('median_high', ('median_high({ints})',)),
    ('multimode', ('multimode({ints})',)),
    ('quantiles', ('quantiles({ints})', 'quantiles({floats}, n=3, method="inclusive")')),
    ('harmonic_mean', ('harmonic_mean({positive})',)),
    ('fmean', ('fmean({ints})', 'fmean({floats})')),
    ('correlation', ('correlation([1, 2, 3], [{int}, {int}, {int}])',)),
  ],
  'string': [('capwords', ('capwords({text})', 'capwords({text}, "e")'))],
  'colorsys': [
    ('rgb_to_hls', ('rgb_to_hls({unit}, {unit}, {unit})',)),
    ('hls_to_rgb', ('hls_to_rgb({unit}, {unit}, {unit})',)),
    ('_v', ('hls_to_rgb({unit}, {unit}, {unit})',)),
    ('rgb_to_hsv', ('rgb_to_hsv({unit}, {unit}, {unit})',)),
    ('hsv_to_rgb', ('hsv_to_rgb({unit}, {unit}, {unit})',)),
    ('yiq_to_rgb', ('yiq_to_rgb({unit}, {unit}, {unit})',)),
  ],
  'fractions': [
    ('Fraction._add', ('str(Fraction({int}, {nat}) + Fraction({int}, {nat}))',)),
    ('Fraction._sub', ('str(Fraction({int}, {nat}) - Fraction({int}, {nat}))',)),
    ('Fraction._mul', ('str(Fraction({int}, {nat}) * Fraction({int}, {nat}))',)),
    ('Fraction._div', ('str(Fraction({int}, {nat}) / Fraction({int}, {nat}))',)),
    ('Fraction.limit_denominator', ('str(Fraction({unit}).limit_denominator({nat}))',)),
    ('Fraction.__floor__', ('Fraction({int}, {nat}).__floor__()',)),
  ],
  'posixpath': [
    ('join', ('join({path}, {path})', 'join({path}, {relative}, {path})')),
    ('split', ('split({path})',)),
    ('basename', ('basename({path})',)),
    ('dirname', ('dirname({path})',)),
    ('commonpath', ('commonpath([{absolute}, {absolute}])', 'commonpath(["a/b", {relative}])')),
    ('relpath', ('relpath({absolute}, {absolute})',)),
  ],
  'shlex': [
    ('quote', ('quote({shell})', 'quote({word})')),
    ('shlex.read_token', ('split({shell})', 'list(shlex({shell}))', 'split({shell}, True)')),
  ],
  'difflib': [
    ('get_close_matches', ('get_close_matches({word}, {words})',
                           'get_close_matches({word}, {words}, 1, 0.3)')),
    ('SequenceMatcher.find_longest_match',
     ('tuple(SequenceMatcher(None, {word}, {word}).find_longest_match())',)),
    ('SequenceMatcher.get_matching_blocks',
     ('[tuple(b) for b in SequenceMatcher(None, {text}, {text}).get_matching_blocks()]',)),
    ('SequenceMatcher.get_opcodes', ('SequenceMatcher(None, {word}, {word}).get_opcodes()',)),
    ('SequenceMatcher.quick_ratio', ('SequenceMatcher(None, {word}, {word}).quick_ratio()',)),
    ('unified_diff', ('list(unified_diff({words}, {words}))',)),
    ('_format_range_unified', ('list(unified_diff({words}, {words}, n=0))',)),
  ],
  'calendar': [
    ('isleap', ('isleap({year})',)),
    ('leapdays', ('leapdays(1900, {year})',)),
    ('monthrange', ('[int(v) for v in monthrange({year}, {month})]',)),
    ('weekday', ('int(weekday({year}, {month}, {day}))',)),
    ('Calendar.itermonthdays', ('list(Calendar().itermonthdays({year}, {month}))',)),
    ('timegm', ('timegm(({year}, {month}, {day}, 1, 2, 3))',)),
  ],
  'fnmatch': [('translate', ('translate({glob})',))],
  'getopt': [
    ('getopt', ('getopt(["-a", "-b", "v", {word}, "--", "-c"], "ab:c")',
                'getopt(["--al={word}", {word}], "", ["al=", "be"])')),
    ('short_has_arg', ('getopt(["-bx", {word}], "ab:c")', 'getopt(["-z", {word}], "ab:c")')),
  ],
}


@dataclasses.dataclass(frozen=True)
class L1Config(LevelConfig):
  """What an L1 task looks like (our choice)."""

  visible_cases: int = 6
  hidden_cases: int = 16
  limits: Limits = Limits(max_calls=12, max_turn_tokens=256, max_tokens=16384, output_bytes=8192)


@functools.cache
def _mutants(split: str) -> tuple[tuple[str, str, tuple[str, ...], Mutation], ...]:
  """Returns (module, function, templates, mutation) of a split; whole functions are held out."""
  found = []
  for module, targets in TARGETS.items():
    text = library.sources((module,))[f'{library.PACKAGE}/{module}.py']
    for function, templates in targets:
      held = zlib.crc32(f'{module}.{function}'.encode()) % 5 == 0
      if ('heldout' if held else 'train') == split:
        found += [(module, function, templates, m) for m in mutations(text, function)]
  return tuple(found)


def available(split: str) -> int:
  """Returns how many mutants a split has; `validate` refuses about one in four of them."""
  return len(_mutants(split))


def generate(config: L1Config, split: str, seed: int, index: int) -> Task:
  """Returns task number `index` of a split; see `l0.generate`.

  Args:
    config: what a task looks like.
    split: `train` or `heldout`.
    seed: orders the mutants and draws the inputs.
    index: 0 .. available(split) - 1.
  """
  module, function, templates, mutation = _mutants(split)[_order(split, seed)[index]]
  rng = random.Random(f'l1/{split}/{seed}/{index}')
  files = library.sources((module,))
  path, dotted = f'{library.PACKAGE}/{module}.py', f'{library.PACKAGE}.{module}'
  with library.loaded((module,)):
    cases = library.cases(dotted, templates, config.visible_cases + config.hidden_cases, rng)
  shown = max(1, len(cases) * config.visible_cases // (config.visible_cases + config.hidden_cases))
  visible, hidden = cases[:shown], cases[shown:]
  return Task(
    id=f'l1-{split}-{seed}-{index}', level='l1',
    instruction=f'repair {function} in {path}: its tests fail',
    files={**files, path: mutation.apply(files[path]), 'tests.txt': library.test_file(visible)},
    visible=visible, hidden=hidden, entry=path, limits=config.limits,
    solution={path: files[path]}, protected=('tests.txt',),
    meta={'module': module, 'function': function, 'mutation': mutation.kind,
          'key': [module, function], 'sealed': True})


@functools.cache
def _order(split: str, seed: int) -> list[int]:
  order = list(range(available(split)))
  random.Random(f'l1-order/{split}/{seed}').shuffle(order)
  return order
