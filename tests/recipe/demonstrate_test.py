"""Demonstrations in real sandboxes: all solved, or played again."""

import dataclasses
import json

import pytest

from composer_jax.cli import config_file
from composer_jax.errors import InfrastructureError
from composer_jax.recipe import schema, stages

OVERRIDES = {'traces.concurrency': 2, 'grading_sandboxes': 1}


@pytest.fixture(scope='module')
def context(command_line, tmp_path_factory):
  """A run whose data stage is done."""
  config = config_file.load(command_line.config.partition('=')[2])
  recipe = schema.resolve(config_file.override(config, OVERRIDES))
  context = stages.Context(recipe, tmp_path_factory.mktemp('run'))
  stages.data(context)
  return context


@pytest.fixture(scope='module')
def sandboxes(context):
  with stages.sandboxes(context.recipe, 2) as pair:
    yield pair


class WrongGrader:
  """Compares one task's hidden cases with what no function returns."""

  def __init__(self, grader, task):
    self._grader, self._task = grader, task

  def submit(self, files, cases, timeout_s=None):
    if cases == self._task.hidden:
      cases = [dataclasses.replace(case, expected_repr='?') for case in cases]
    return self._grader.submit(files, cases, timeout_s)


def test_a_restart_plays_again_what_was_not_solved(context, sandboxes, tmp_path):
  pool, grader = sandboxes
  path = tmp_path / 'demonstrations.jsonl'
  task = stages.admitted(context.recipe, 'train', 4, context.recipe.seed, grader)[2]
  with pytest.raises(InfrastructureError) as error:
    stages.demonstrate(context, pool, WrongGrader(grader, task), 'train', 4, path)
  message = str(error.value)
  assert 'did not solve 1 of 4 tasks' in message and task.id in message and '\n' not in message
  partial = tmp_path / 'demonstrations.jsonl.partial'
  kept = partial.read_text().splitlines()
  assert sorted(json.loads(row)['index'] for row in kept) == [0, 1, 3] and not path.exists()

  stats = stages.demonstrate(context, pool, grader, 'train', 4, path)
  rows = path.read_text().splitlines()
  assert stats.rows == 4 and [json.loads(row)['reward'] for row in rows] == [1] * 4
  assert set(kept) < set(rows)  # as they were: only the missing one was played


def test_a_split_gives_its_own_tasks(context, sandboxes, tmp_path):
  for split in ('train', 'heldout'):
    path = tmp_path / f'{split}.jsonl'
    assert stages.demonstrate(context, *sandboxes, split, 3, path).rows == 3
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert [row['task_id'].split('-')[1] for row in rows] == [split] * 3


def test_heldout_demonstrations_belong_to_the_fingerprint_of_sft(context):
  more = dataclasses.replace(context.recipe.traces, heldout=context.recipe.traces.heldout + 1)
  before, after = (stages.fingerprints(recipe) for recipe in (
      context.recipe, dataclasses.replace(context.recipe, traces=more)))
  changed = {stage for stage in before if before[stage] != after[stage]}
  assert changed == {'sft', 'eval_sft', 'rl', 'eval_rl'}
