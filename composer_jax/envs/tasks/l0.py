"""L0: one templated function, one injected bug, a one-line intent.

The held-out split holds out slot tuples (the wording of the intent and the code), while names,
inputs and the mutation are drawn independently: it measures compositional generalisation over
shared templates. Some held-out tuples compute the same as a train tuple in other words.
"""

import dataclasses
import random

from composer_jax.envs.tasks import functions
from composer_jax.envs.tasks.config import LevelConfig
from composer_jax.envs.types import Case, Task

ENTRY = 'main.py'
MODULE = 'main'


def _default_weights() -> dict[str, float]:
  return {'cond': 0.2, 'expr': 0.15, 'post': 0.17, 'aug': 0.12, 'rv': 0.12, 'init': 0.16,
          'else': 0.08}


@dataclasses.dataclass(frozen=True)
class L0Config(LevelConfig):
  """What an L0 task looks like, beside what every level has (our choice throughout).

  Attributes:
    mutation_weights: relative frequency of each mutation class; the class is drawn first and the
      function after it, so the mix is exactly this one. Reinforcement learning forgets a class that
      demonstrations hardly teach, hence more of the classes that are learnt last (`init`, `cond`,
      `post`); see experiments/LOG.md.
    min_items: shortest input list.
    max_items: longest input list.
  """

  mutation_weights: dict[str, float] = dataclasses.field(default_factory=_default_weights)
  min_items: int = 3
  max_items: int = 5

  def __post_init__(self):
    super().__post_init__()
    unknown = set(self.mutation_weights) - set(functions.MUTATION_CLASSES)
    if unknown:
      raise ValueError(f'mutation_weights: unknown class {min(unknown)} '
                       f'(there are: {", ".join(functions.MUTATION_CLASSES)})')
    if min(self.mutation_weights.values(), default=0) < 0 or not any(
        self.mutation_weights.values()):
      raise ValueError('mutation_weights: need non-negative weights, at least one above 0')
    if not 1 <= self.min_items <= self.max_items:
      raise ValueError('min_items: must be at least 1 and at most max_items')


def generate(config: L0Config, split: str, seed: int, index: int) -> Task:
  """Returns task number `index` of a split; equal arguments give an equal task.

  Args:
    config: what a task looks like.
    split: `train` or `heldout`.
    seed: generator seed.
    index: 0, 1, 2, ...; there is no upper end.
  """
  rng = random.Random(f'l0/{split}/{seed}/{index}')
  classes = functions.MUTATION_CLASSES  # in this order, however the weights are written down
  mutation = rng.choices(classes, [config.mutation_weights.get(c, 0) for c in classes])[0]
  pool = functions.keys_with(split, mutation)
  while True:
    gold = functions.program(rng.choice(pool))
    bug = rng.choice(functions.mutations(gold, mutation))
    inputs = _draw_inputs(rng, config, config.visible_cases + config.hidden_cases)
    visible, hidden = inputs[:config.visible_cases], inputs[config.visible_cases:]
    if _differs(gold, bug, visible) and _differs(gold, bug, hidden):
      break
  names = functions.draw_names(rng)
  good, bad = functions.render(gold, names), functions.render(bug, names)
  return Task(
    id=f'l0-{split}-{seed}-{index}', level='l0',
    instruction=f'fix {names["f"]}: {functions.describe(gold, names)}',
    files={ENTRY: bad}, visible=[_case(gold, names, x) for x in visible],
    hidden=[_case(gold, names, x) for x in hidden], entry=ENTRY, limits=config.limits,
    solution={ENTRY: good},
    meta={'key': list(gold.key), 'family': gold.family, 'mutation': mutation,
          'wrong_edits': _wrong_edits(rng, gold, bug, mutation, names, visible)})


def _draw_inputs(rng: random.Random, config: L0Config, count: int) -> list[tuple[list[int], int]]:
  """Draws distinct (list, parameter) inputs.

  Half of the lists hold the parameter itself, without which `>` and `>=` look alike.
  """
  found: list[tuple[list[int], int]] = []
  while len(found) < count:
    p = rng.randint(2, 5)
    xs = [rng.randint(-4, 9) for _ in range(rng.randint(config.min_items, config.max_items))]
    if rng.random() < 0.5:
      xs[rng.randrange(len(xs))] = p
    if (xs, p) not in found:
      found.append((xs, p))
  return found


def _differs(one: functions.Program, other: functions.Program,
             inputs: list[tuple[list[int], int]]) -> bool:
  return any(functions.evaluate(one, *x) != functions.evaluate(other, *x) for x in inputs)


def _case(gold: functions.Program, names: dict[str, str], inputs: tuple[list[int], int]) -> Case:
  xs, p = inputs
  shown = f'[{",".join(map(str, xs))}],{p}'
  return Case(module=MODULE, expr=f'{names["f"]}({shown})', shown=shown,
              expected_repr=repr(functions.evaluate(gold, xs, p)))


def _wrong_edits(rng: random.Random, gold: functions.Program, bug: functions.Program,
                 mutation: str, names: dict[str, str],
                 visible: list[tuple[list[int], int]]) -> list[tuple[str, int, str]]:
  """Returns (path, line number, text) of a plausible edit that leaves a visible case failing.

  Mostly the right line with a third content; now and then another line, changed for the worse.
  """
  same_line = [p for p in functions.mutations(gold, mutation) if p != bug]
  before = functions.render(bug, names).splitlines()
  for attempt in range(8):
    if same_line and (attempt > 0 or rng.random() < 0.8):
      candidate = rng.choice(same_line)
    else:
      options = [p for c in functions.MUTATION_CLASSES if c != mutation
                 for p in functions.mutations(gold, c)]
      slot = _changed_slot(gold, bug)
      candidate = dataclasses.replace(rng.choice(options), **{slot: getattr(bug, slot)})
    after = functions.render(candidate, names).splitlines()
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(changed) == 1 and _differs(gold, candidate, visible):
      return [(ENTRY, changed[0] + 1, after[changed[0]].strip())]
  return []


def _changed_slot(gold: functions.Program, bug: functions.Program) -> str:
  return next(f.name for f in dataclasses.fields(gold)
              if getattr(gold, f.name) != getattr(bug, f.name))
