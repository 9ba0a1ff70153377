import collections
import time

import pytest

from composer_jax.envs import taskset
from composer_jax.envs.rewards import contraband
from composer_jax.envs.tasks import l1, l2, library, mutate, validate
from composer_jax.envs.types import Case, Task


def level(name, split, count, seed=0):
  return taskset.load(taskset.TasksetConfig(level=name), split, count, seed)


def test_l2_tasks_are_all_admitted(grader):
  for split in taskset.SPLITS:
    tasks = level('l2', split, len(l2._features(split)))
    verdicts = list(validate.validate(tasks, grader, wait=lambda: time.sleep(0.002)))
    assert [v.reason for v in verdicts] == [''] * len(tasks)


def test_l1_gold_always_passes_and_most_mutants_are_caught(grader):
  tasks = level('l1', 'train', 20)
  reasons = collections.Counter(
    v.reason for v in validate.validate(tasks, grader, wait=lambda: time.sleep(0.002)))
  assert reasons[''] >= 8
  assert not [r for r in reasons if r and not r.startswith('no-op')]


def case(expr, expected):
  return Case('main', expr, expected)


def task(**changes):
  base = {'id': 'x', 'level': 'l1', 'instruction': '', 'files': {'main.py': 'def f(): return 2\n'},
          'visible': [case('f()', '1')], 'hidden': [case('f()+1', '2')], 'entry': 'main.py',
          'solution': {'main.py': 'def f(): return 1\n'}}
  return Task(**{**base, **changes})


FLAKY = 'import os\ndef f(): return 1 + (os.getrandom(1)[0] % 2) * (os.getrandom(1)[0] % 2)\n'


@pytest.mark.parametrize(('bad', 'reason'), [
  (task(), ''),
  (task(solution={'main.py': 'def f(): return 3\n'}), 'gold fails'),
  (task(solution={'main.py': 'def f(): return 2\n'}), 'the solution changes nothing'),
  (task(visible=[case('f()', '2')], solution={'main.py': 'def f(): return 1 + 1\n'},
        hidden=[case('f() + 1', '3')]), 'no-op passes the visible cases'),
  (task(hidden=[case('type(f()).__name__', "'int'")]), 'no-op passes the hidden cases'),
  (task(hidden=[]), 'no visible or no hidden case'),
  (task(protected=('main.py',)), 'the solution changes a protected file'),
  (task(entry='other.py'), 'the entry is not among the files'),
  (task(solution={'new.py': ''}), 'the solution has files that the workspace lacks'),
])
def test_admission_reasons(bad, reason, grader):
  verdict = next(iter(validate.validate([bad], grader, wait=lambda: time.sleep(0.002))))
  assert verdict.reason == reason


def test_flaky_gold_is_not_admitted(grader):
  tasks = [task(id=str(i), solution={'main.py': FLAKY},
                visible=[case('[f() for _ in range(2)]', '[1, 1]')]) for i in range(12)]
  verdicts = list(validate.validate(tasks, grader, wait=lambda: time.sleep(0.002)))
  assert len(verdicts) == 12 and not all(v.admitted for v in verdicts)


def test_splits_share_no_function():
  for name, module in (('l1', l1), ('l2', l2)):
    keys = {s: {tuple(t.meta['key']) for t in level(name, s, min(module.available(s), 40))}
            for s in taskset.SPLITS}
    assert keys['train']
    assert keys['heldout']
    assert not keys['train'] & keys['heldout']


def test_same_seed_same_task():
  for name in ('l1', 'l2'):
    assert list(level(name, 'train', 4, 1)) == list(level(name, 'train', 4, 1))
    assert list(level(name, 'train', 4, 1)) != list(level(name, 'train', 4, 2))


def test_deleted_feature_is_gone_but_its_callers_stay():
  for item in level('l2', 'train', len(l2._features('train'))):
    name = item.meta['function']
    text = '\n'.join(item.files.values())
    assert f'def {name}(' not in text
    assert name in text
    assert not [p for p in item.files if not p.endswith(('.py', 'tests.txt'))]


def test_accelerators_are_out_and_the_copy_runs_its_own_code():
  text = library.sources(('heapq',))['kit/heapq.py']
  assert '_heapq' not in text
  with library.loaded(('heapq',)):
    import sys
    assert type(sys.modules['kit.heapq'].heappush).__name__ == 'function'
  assert 'kit' not in __import__('sys').modules


def test_mutations_are_single_parsable_lines():
  source = library.sources(('textwrap',))['kit/textwrap.py']
  found = mutate.mutations(source, 'TextWrapper._wrap_chunks')
  assert len(found) > 10
  kinds = {m.kind for m in found}
  assert {'compare', 'negate', 'arith'} <= kinds
  for mutation in found:
    mutant = mutation.apply(source)
    compile(mutant, 'mutant', 'exec')
    assert sum(a != b for a, b in zip(mutant.split('\n'), source.split('\n'), strict=True)) == 1


def test_mutations_by_hand():
  source = 'def f(a, b):\n  if a < b and b:\n    return a + 1\n'
  texts = {m.text.strip() for m in mutate.mutations(source, 'f')}
  assert texts == {'if a <= b and b:', 'if a < b or b:', 'if not (a < b and b):', 'return a - 1',
                   'return a + 2'}


def test_borrowing_the_original_is_contraband():
  item = level('l1', 'train', 1)[0]
  assert not contraband(item, {**item.files, **item.solution})
  for line in ('from bisect import *', '__import__("heapq")', 'exec(open("/usr/lib/x").read())',
               'commonprefix = os.path.commonprefix', 'f = getattr(os, "pa" + "th").join',
               'f = os.makedirs.__globals__["path"].join',
               '[c for c in ().__class__.__base__.__subclasses__()]'):
    path = item.entry
    assert contraband(item, {path: line + '\n' + item.files[path]}).startswith(path)
