import collections
import random
import time

import pytest

from composer_jax.envs import taskset
from composer_jax.envs.tasks import functions, l0
from composer_jax.errors import UserError

CONFIG = taskset.TasksetConfig()


def run(source, expr):
  """Runs a template of ours (never a model's code) as the oracle of `functions.evaluate`."""
  scope = {}
  exec(source, scope)
  return repr(eval(expr, scope))


def test_keys_are_disjoint_and_all_there():
  train, heldout = set(functions.keys('train')), set(functions.keys('heldout'))
  assert not train & heldout
  assert len(train) > 600
  assert len(heldout) > 150
  assert {k[0] for k in heldout} == set(functions.FAMILIES)


@pytest.mark.parametrize('split', taskset.SPLITS)
def test_tasks_stay_in_their_split(split):
  tasks = taskset.load(CONFIG, split, 200, 3)
  assert all(functions.split_of(tuple(t.meta['key'])) == split for t in tasks)


def test_python_agrees_with_the_generator():
  for task in taskset.load(CONFIG, 'train', 150, 5):
    good, bad = task.solution['main.py'], task.files['main.py']
    for cases in (task.visible, task.hidden):
      assert all(run(good, c.expr) == c.expected_repr for c in cases)
      assert any(run(bad, c.expr) != c.expected_repr for c in cases)


def test_bug_is_one_line_and_hidden_cases_are_unseen():
  for task in taskset.load(CONFIG, 'heldout', 150, 6):
    good, bad = task.solution['main.py'].split('\n'), task.files['main.py'].split('\n')
    assert len(good) == len(bad)
    assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
    assert (len(task.visible), len(task.hidden)) == (3, 8)
    assert not {c.expr for c in task.visible} & {c.expr for c in task.hidden}


def test_wrong_edits_change_something_and_do_not_solve():
  for task in taskset.load(CONFIG, 'train', 150, 7):
    for path, line, text in task.meta['wrong_edits']:
      lines = task.files[path].split('\n')
      assert lines[line - 1].strip() != text
      indent = lines[line - 1][:len(lines[line - 1]) - len(lines[line - 1].lstrip())]
      lines[line - 1] = indent + text
      outcomes = [run('\n'.join(lines), c.expr) == c.expected_repr for c in task.visible]
      assert not all(outcomes)


def test_mutation_mix_is_the_configured_one():
  weights = {'cond': 1.0, 'expr': 3.0}
  config = l0.L0Config(mutation_weights=weights)
  seen = collections.Counter(l0.generate(config, 'train', 0, i).meta['mutation']
                             for i in range(400))
  assert set(seen) == {'cond', 'expr'}
  assert 0.68 < seen['expr'] / 400 < 0.82


def test_same_seed_same_task_other_seed_other_task():
  first = taskset.load(CONFIG, 'train', 20, 1)
  assert list(first) == list(taskset.load(CONFIG, 'train', 30, 1))[:20]
  assert list(first) != list(taskset.load(CONFIG, 'train', 20, 2))
  assert len({t.id for t in first}) == 20


def test_order_of_the_weights_does_not_matter():
  weights = l0.L0Config().mutation_weights
  other = l0.L0Config(mutation_weights=dict(sorted(weights.items())))
  reverse = l0.L0Config(mutation_weights=dict(reversed(weights.items())))
  for index in range(20):
    task = l0.generate(l0.L0Config(), 'train', 0, index)
    assert l0.generate(other, 'train', 0, index) == task
    assert l0.generate(reverse, 'train', 0, index) == task


def test_thousands_of_distinct_tasks():
  tasks = taskset.load(CONFIG, 'train', 2000, 0)
  assert len({(t.instruction, t.files['main.py']) for t in tasks}) > 1950


def test_generation_takes_about_a_millisecond():
  begin = time.process_time()
  collections.deque(iter(taskset.load(CONFIG, 'train', 300, 9)), maxlen=0)
  assert (time.process_time() - begin) / 300 < 2e-3


def test_documents_are_clean_functions_of_their_split():
  documents = list(functions.documents('heldout', 50, 0))
  assert documents == list(functions.documents('heldout', 50, 0))
  for text in documents:
    assert text.startswith('# ')
    compile(text, 'document', 'exec')
  train = {functions.document(random.Random(i), 'train') for i in range(300)}
  assert not train & set(documents)


@pytest.mark.parametrize('bad', [{'typo': 1.0}, {'cond': -1.0}, {}])
def test_bad_weights(bad):
  with pytest.raises(ValueError, match='mutation_weights'):
    l0.L0Config(mutation_weights=bad)


def test_bad_requests():
  with pytest.raises(UserError, match='split'):
    taskset.load(CONFIG, 'test', 1, 0)
  with pytest.raises(UserError, match='count'):
    taskset.load(CONFIG, 'train', 0, 0)
  with pytest.raises(UserError, match='there are'):
    taskset.load(taskset.TasksetConfig(level='l2'), 'train', 10_000, 0)
