"""Templated list functions: the programs of the L0 tasks and of the clean pretraining documents.

A `Program` is a family and its slots. The same object is rendered as source, described in one line,
evaluated, and mutated slot by slot, so that nothing has to be executed to know what a task expects.
Programs are held out by their *key* (family and slots); names and inputs are drawn independently.
"""

import dataclasses
import functools
import random
import zlib
from collections.abc import Callable, Iterator

Value = int | list[int] | None

# code template, words, meaning; {v} item, {p} parameter
CONDITIONS: dict[str, tuple[str, str, Callable[[int, int], bool]]] = {
  'all': ('', '', lambda v, p: True),
  'ge': ('{v} >= {p}', 'at least {p}', lambda v, p: v >= p),
  'le': ('{v} <= {p}', 'at most {p}', lambda v, p: v <= p),
  'gt': ('{v} > {p}', 'above {p}', lambda v, p: v > p),
  'lt': ('{v} < {p}', 'below {p}', lambda v, p: v < p),
  'eq': ('{v} == {p}', 'equal to {p}', lambda v, p: v == p),
  'ne': ('{v} != {p}', 'not {p}', lambda v, p: v != p),
  'even': ('{v} % 2 == 0', 'even', lambda v, p: v % 2 == 0),
  'odd': ('{v} % 2 == 1', 'odd', lambda v, p: v % 2 == 1),
  'pos': ('{v} > 0', 'above 0', lambda v, p: v > 0),
  'neg': ('{v} < 0', 'below 0', lambda v, p: v < 0),
}
EXPRESSIONS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
  'item': ('{v}', 'items', lambda v, p: v),
  'times_p': ('{v} * {p}', 'items times {p}', lambda v, p: v * p),
  'plus_p': ('{v} + {p}', 'items plus {p}', lambda v, p: v + p),
  'minus_p': ('{v} - {p}', 'items minus {p}', lambda v, p: v - p),
  'twice': ('{v} * 2', 'items times 2', lambda v, p: v * 2),
  'next': ('{v} + 1', 'items plus 1', lambda v, p: v + 1),
  'square': ('{v} * {v}', 'squares', lambda v, p: v * v),
  'abs': ('abs({v})', 'abs items', lambda v, p: abs(v)),
}
STEPS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
  'one': ('1', 'items', lambda v, p: 1),
  'two': ('2', '', lambda v, p: 2),
  'v': ('{v}', '', lambda v, p: v),
}
POSTS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
  'none': ('{r}', '', lambda r, p: r),
  'plus_p': ('{r} + {p}', 'plus {p}', lambda r, p: r + p),
  'minus_p': ('{r} - {p}', 'minus {p}', lambda r, p: r - p),
  'times_p': ('{r} * {p}', 'times {p}', lambda r, p: r * p),
  'twice': ('{r} * 2', 'times 2', lambda r, p: r * 2),
  'negated': ('-{r}', 'negated', lambda r, p: -r),
}
FINISHERS: dict[str, tuple[str, str, Callable[[list[int]], list[int]]]] = {
  'none': ('{r}', '', list),
  'reversed': ('{r}[::-1]', 'reversed', lambda r: r[::-1]),
  'sorted': ('sorted({r})', 'sorted', sorted),
}
ELSES: dict[str, tuple[str, Callable[[int], int]]] = {
  'minus_one': ('-1', lambda p: -1),
  'zero': ('0', lambda p: 0),
  'p': ('{p}', lambda p: p),
}
INITS: dict[str, dict[str, tuple[str, Callable[[int], int]]]] = {
  'number': {'zero': ('0', lambda p: 0), 'one': ('1', lambda p: 1),
             'minus_one': ('-1', lambda p: -1), 'p': ('{p}', lambda p: p)},
  'list': {'empty': ('[]', lambda p: []), 'zero': ('[0]', lambda p: [0]),
           'p': ('[{p}]', lambda p: [p])},
  'start': {'zero': ('{xs}', lambda p: 0), 'one': ('{xs}, 1', lambda p: 1)},
}
OPERATORS: dict[str, tuple[str, ...]] = {
  'number': ('+=', '-=', '*=', '='),
  'list': ('append', 'insert'),
}
RETURNS: dict[str, tuple[str, ...]] = {
  'sum': ('acc', 'p', 'v'), 'cnt': ('acc', 'p', 'v'), 'lst': ('acc', 'xs'), 'idx': ('i', 'v'),
}
FAMILIES = ('sum', 'cnt', 'lst', 'idx')
MUTATION_CLASSES = ('cond', 'expr', 'post', 'aug', 'rv', 'init', 'else')

NAMES: dict[str, tuple[str, ...]] = {
  'f': ('calc', 'run', 'solve', 'apply', 'work', 'get'),
  'xs': ('xs', 'nums', 'vals', 'seq', 'data', 'row'),
  'v': ('v', 'x', 'n', 'e', 'k'),
  'p': ('t', 'p', 'm', 'b', 'c'),
  'acc': ('acc', 'out', 'res', 'total', 's', 'r'),
}

Key = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True)
class Program:
  """One function: its family and slots.

  Attributes:
    family: `sum`, `cnt`, `lst` or `idx` (first index).
    cond: key of CONDITIONS.
    expr: key of EXPRESSIONS (`sum`, `lst`), of STEPS (`cnt`), or `none` (`idx`).
    post: key of POSTS (`sum`, `cnt`), FINISHERS (`lst`) or ELSES (`idx`).
    init: key of the family's INITS table; the first key is the right one.
    op: accumulation operator; the first of the family's OPERATORS is the right one.
    ret: which variable is returned; the first of the family's RETURNS is the right one.
  """

  family: str
  cond: str
  expr: str
  post: str
  init: str = ''
  op: str = ''
  ret: str = ''

  @property
  def key(self) -> Key:
    """The slots that define the intent; what the train / held-out split looks at."""
    return (self.family, self.cond, self.expr, self.post)


def program(key: Key) -> Program:
  """Returns the correct program of a key."""
  kind = _kind(key[0])
  return Program(*key, init=next(iter(INITS[kind])),
                 op=OPERATORS[kind][0] if kind in OPERATORS else '', ret=RETURNS[key[0]][0])


@functools.cache
def keys(split: str) -> tuple[Key, ...]:
  """Returns the slot tuples of a split, `train` or `heldout`: crc32 % 5 == 0 is held out."""
  everything = [('sum', c, e, p) for c in CONDITIONS for e in EXPRESSIONS for p in POSTS]
  everything += [('cnt', c, 'one', p) for c in CONDITIONS if c != 'all' for p in POSTS]
  everything += [('lst', c, e, p) for c in CONDITIONS for e in EXPRESSIONS for p in FINISHERS]
  everything += [('idx', c, 'none', p) for c in CONDITIONS if c != 'all' for p in ELSES]
  return tuple(k for k in everything if split_of(k) == split)


def split_of(key: Key) -> str:
  """Returns the split that a slot tuple belongs to."""
  return 'heldout' if zlib.crc32('/'.join(key).encode()) % 5 == 0 else 'train'


def mutations(correct: Program, mutation: str) -> list[Program]:
  """Returns the one-line mutants of a program in one class (possibly none)."""
  kind = _kind(correct.family)
  slot, options = {
    'cond': ('cond', [c for c in CONDITIONS if c != 'all'] if correct.cond != 'all' else []),
    'expr': ('expr', {'cnt': STEPS, 'idx': []}.get(correct.family, EXPRESSIONS)),
    'post': ('post', {'lst': FINISHERS, 'idx': []}.get(correct.family, POSTS)),
    'aug': ('op', OPERATORS.get(kind, ())),
    'rv': ('ret', RETURNS[correct.family]),
    'init': ('init', INITS[kind]),
    'else': ('post', ELSES if correct.family == 'idx' else []),
  }[mutation]
  return [dataclasses.replace(correct, **{slot: o}) for o in options
          if o != getattr(correct, slot)]


@functools.cache
def keys_with(split: str, mutation: str) -> tuple[Key, ...]:
  """Returns the keys of a split that have a mutant in the class."""
  return tuple(k for k in keys(split) if mutations(program(k), mutation))


def draw_names(rng: random.Random) -> dict[str, str]:
  """Draws function, list, item, parameter and accumulator names."""
  return {slot: rng.choice(options) for slot, options in NAMES.items()}


def render(what: Program, names: dict[str, str]) -> str:
  """Returns the program's source text."""
  kind = _kind(what.family)
  init = INITS[kind][what.init][0].format(**names)
  cond = CONDITIONS[what.cond][0].format(**names)
  if what.family == 'idx':
    hit = 'i' if what.ret == 'i' else names['v']
    return (f'def {names["f"]}({names["xs"]}, {names["p"]}):\n'
            f'    for i, {names["v"]} in enumerate({init}):\n'
            f'        if {cond}:\n            return {hit}\n'
            f'    return {ELSES[what.post][0].format(**names)}\n')
  expr = (STEPS if what.family == 'cnt' else EXPRESSIONS)[what.expr][0].format(**names)
  acc = names['acc']
  body = {'append': f'{acc}.append({expr})', 'insert': f'{acc}.insert(0, {expr})'}.get(
    what.op, f'{acc} {what.op} {expr}')
  post = (FINISHERS if kind == 'list' else POSTS)[what.post][0]
  lines = [f'def {names["f"]}({names["xs"]}, {names["p"]}):', f'    {acc} = {init}',
           f'    for {names["v"]} in {names["xs"]}:']
  lines += [f'        if {cond}:', f'            {body}'] if cond else [f'        {body}']
  lines.append(f'    return {post.format(r=names[what.ret], **names)}')
  return '\n'.join(lines) + '\n'


def describe(what: Program, names: dict[str, str]) -> str:
  """Returns the intent in one line: what the correct program of the key computes."""
  cond = CONDITIONS[what.cond][1]
  tail = f' if {cond}' if cond else ''
  if what.family == 'idx':
    text = f'first index{tail}, else {ELSES[what.post][0]}'
  elif what.family == 'lst':
    text = f'list of {EXPRESSIONS[what.expr][1]}{tail}'
    text += f', {FINISHERS[what.post][1]}' if what.post != 'none' else ''
  else:
    noun = 'count' if what.family == 'cnt' else f'sum of {EXPRESSIONS[what.expr][1]}'
    text = noun + tail + (f', {POSTS[what.post][1]}' if what.post != 'none' else '')
  return text.format(**names)


def evaluate(what: Program, xs: list[int], p: int) -> Value:
  """Returns what the rendered program returns for `f(xs, p)`; `xs` must not be empty."""
  kind = _kind(what.family)
  holds = CONDITIONS[what.cond][2]
  acc = INITS[kind][what.init][1](p)
  if what.family == 'idx':
    for i, v in enumerate(xs, acc):
      if holds(v, p):
        return i if what.ret == 'i' else v
    return ELSES[what.post][1](p)
  value = (STEPS if what.family == 'cnt' else EXPRESSIONS)[what.expr][2]
  for v in xs:
    if holds(v, p):
      acc = _accumulate(acc, what.op, value(v, p))
  result = {'acc': acc, 'p': p, 'v': xs[-1], 'xs': xs}[what.ret]
  return FINISHERS[what.post][2](result) if kind == 'list' else POSTS[what.post][2](result, p)


def document(rng: random.Random, split: str) -> str:
  """Returns one clean document: the intent as a comment, then the function."""
  what = program(rng.choice(keys(split)))
  names = draw_names(rng)
  return f'# {describe(what, names)}\n{render(what, names)}'


def documents(split: str, count: int, seed: int) -> Iterator[str]:
  """Yields `count` clean documents of a split's keys, the same ones for the same seed."""
  rng = random.Random(f'functions/{split}/{seed}')
  for _ in range(count):
    yield document(rng, split)


def _kind(family: str) -> str:
  return {'lst': 'list', 'idx': 'start'}.get(family, 'number')


def _accumulate(acc: Value, op: str, value: int) -> Value:
  if op == 'append':
    return [*acc, value]
  if op == 'insert':
    return [value, *acc]
  return {'+=': acc + value, '-=': acc - value, '*=': acc * value, '=': value}[op]
