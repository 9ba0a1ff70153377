"""At learning rate 0 the trainer sees what the sampler saw."""

import json
import shutil

import jax
import numpy as np
import pytest

from composer_jax import metrics
from composer_jax.checkpoint import manager
from composer_jax.cli import config_file
from composer_jax.recipe import runner

OVERRIDES = {'rl.optimizer.lr': '0', 'rl.steps': '10'}


@pytest.fixture(scope='module')
def run_at_rate_0(smoke_run, command_line, tmp_path_factory):
  folder = tmp_path_factory.mktemp('rate_0') / 'run'
  shutil.copytree(smoke_run / '.xla', folder / '.xla')
  out = command_line.run_smoke(
      folder, f'--reuse={smoke_run}', '--stages=data,cpt,long_context,sft,rl',
      *(f'--config.{key}={value}' for key, value in OVERRIDES.items()))
  assert out.startswith(f'copied from {smoke_run}: data, cpt, long_context, sft\n')
  return folder


def test_log_probs_agree_on_every_sampled_token(run_at_rate_0):
  rows = metrics.read(run_at_rate_0 / 'stages' / 'rl' / 'metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(1, 11))
  assert sum(row['tokens_trained'] for row in rows) > 500
  for row in rows:  # `zero_signal` is 'shaped' here: whatever was sampled is trained on
    assert row['zero_signal_fraction'] == 0
    assert row['tokens_trained'] == pytest.approx(row['rollouts'] * row['sampled_per_episode'])
  assert 0 < max(row['gap_max'] for row in rows) < 1e-4


def test_log_probs_of_the_written_rollouts_agree(run_at_rate_0):
  lines = (run_at_rate_0 / 'stages' / 'rl' / 'traces.jsonl').read_text().splitlines()
  tokens = [token for line in lines for turn in json.loads(line)['turns']
            for token in turn['tokens'] if token['m']]
  assert len(tokens) > 100
  gaps = np.abs([token['lp'] - token['tlp'] for token in tokens])
  assert gaps.max() < 1e-4


def test_nothing_moved(run_at_rate_0):
  stages = run_at_rate_0 / 'stages'
  before, after = (manager.load_params(stages / name / 'params')[0] for name in ('sft', 'rl'))
  assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), before, after))


def test_finished_stages_are_not_adopted_under_other_settings(smoke_run, command_line, tmp_path):
  config = config_file.load(command_line.config.partition('=')[2], [('sft.steps', '41')])
  assert runner.adopt_stages(config, tmp_path / 'run', [smoke_run]) == [
      'data', 'cpt', 'long_context']
