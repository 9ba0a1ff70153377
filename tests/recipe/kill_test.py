"""kill -9 in every stage of one run; the same command continues, and nothing is different."""

import json
import random
import shutil
import subprocess
import time

import numpy as np
import psutil
import pytest

from composer_jax import metrics
from composer_jax.checkpoint import leaves, manager
from composer_jax.recipe.schema import STAGES


def lines(path):
  return path.read_text().count('\n') if path.exists() else 0


def rows_of(file):
  return lambda folder, stage: lines(folder / 'stages' / stage / file)


def corpus_files(folder, unused_stage):
  return len(list(folder.glob('data.part/**/*')))


# Stage, how far it is, and up to which count the random moment may lie.
MOMENTS = [
    ('data', corpus_files, 5),
    ('cpt', rows_of('metrics.jsonl'), 20),
    ('long_context', rows_of('metrics.jsonl'), 34),
    ('sft', rows_of('demonstrations.jsonl.partial'), 18),
    ('sft', rows_of('metrics.jsonl'), 34),
    ('eval_sft', rows_of('rows.jsonl'), 12),
    ('rl', rows_of('metrics.jsonl'), 3),
    ('eval_rl', rows_of('rows.jsonl'), 12),
]


def kill_at(command_line, folder, stage, progress, moment):
  """Starts the run, kills it when `progress` has reached `moment`, and waits for its children."""
  process = command_line.start('run', command_line.config, f'--workdir={folder}',
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
  try:
    while progress(folder, stage) < moment:
      assert process.poll() is None, process.stderr.read()
      time.sleep(0.001)
    children = psutil.Process(process.pid).children(recursive=True)
  finally:
    process.kill()
    process.communicate()
  psutil.wait_procs(children, timeout=20)
  assert not [child for child in children
              if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope='module')
def killed_run(smoke_run, command_line, tmp_path_factory):
  """A run that was killed once at every entry of `MOMENTS`, and then left alone."""
  folder = tmp_path_factory.mktemp('killed') / 'run'
  folder.mkdir()
  shutil.copytree(smoke_run / '.xla', folder / '.xla')
  seed = random.SystemRandom().randrange(2**32)
  draw = random.Random(seed)
  print(f'random moments of seed {seed}')  # shown when a test fails
  for stage, progress, most in MOMENTS:
    moment = draw.randint(1, most)
    print(f'{stage}: killed at {moment}')
    kill_at(command_line, folder, stage, progress, moment)
    assert not (folder / 'stages' / stage / 'summary.json').exists(), 'killed too late'
    before = STAGES[:STAGES.index(stage)]
    assert all((folder / 'stages' / s / 'summary.json').exists() for s in before)
  command_line.run_smoke(folder)
  return folder


@pytest.mark.parametrize('stage', ['cpt', 'long_context', 'sft'])
def test_final_parameters_are_those_of_an_uninterrupted_run(smoke_run, killed_run, stage):
  ours, theirs = (leaves.flatten(manager.load_params(run / 'stages' / stage / 'params')[0])
                  for run in (smoke_run, killed_run))
  assert ours.keys() == theirs.keys()
  for name in ours:
    assert np.asarray(ours[name]).tobytes() == np.asarray(theirs[name]).tobytes(), name


@pytest.mark.parametrize('stage', ['cpt', 'long_context', 'sft', 'rl'])
def test_every_step_is_logged_once(smoke_run, killed_run, stage):
  def steps(run):
    rows = metrics.read(run / 'stages' / stage / 'metrics.jsonl')
    return [row['step'] for row in rows if 'loss' in row]
  assert steps(killed_run) == steps(smoke_run)


def test_losses_are_those_of_an_uninterrupted_run(smoke_run, killed_run):
  for stage in ('cpt', 'long_context', 'sft'):
    def losses(run, stage=stage):
      return [(row['step'], row['loss']) for row in
              metrics.read(run / 'stages' / stage / 'metrics.jsonl') if 'loss' in row]
    assert losses(killed_run) == losses(smoke_run)


@pytest.mark.parametrize('file', [
    'stages/sft/demonstrations.jsonl', 'stages/sft/heldout_demonstrations.jsonl',
    'data/tokenizer.json', 'data/stdlib/train.tokens.npy', 'data/functions/train.tokens.npy'])
def test_data_are_those_of_an_uninterrupted_run(smoke_run, killed_run, file):
  assert (smoke_run / file).read_bytes() == (killed_run / file).read_bytes()


@pytest.mark.parametrize('stage', ['eval_sft', 'eval_rl'])
def test_every_attempt_is_there_once(killed_run, stage):
  text = (killed_run / 'stages' / stage / 'rows.jsonl').read_text()
  rows = [row for row in map(json.loads, text.splitlines()) if 'task_id' in row]
  assert len({(row['task_id'], row['sample']) for row in rows}) == len(rows) == 24


@pytest.mark.parametrize('stage', ['eval_sft', 'eval_rl'])
def test_the_same_attempts_are_shown(smoke_run, killed_run, stage):
  def shown(run):
    lines = (run / 'stages' / stage / 'traces.jsonl').read_text().splitlines()
    return [json.loads(line)['id'] for line in lines]
  assert len(set(shown(killed_run))) == len(shown(killed_run)) > 0
  if stage == 'eval_sft':  # RL is not repeated bit for bit
    assert shown(killed_run) == shown(smoke_run)


def test_the_run_is_complete(killed_run):
  results = json.loads((killed_run / 'results.json').read_text())
  assert results['eval'].keys() == {'sft', 'rl'}
  assert 'rl' in results['stages'] and results['stages']['rl']['steps'] == 4
  assert (killed_run / 'report.html').exists()
  # Time of killed calls counts: the run cannot have taken less than its stages.
  assert results['wall_s'] > 0.5 * sum(s['wall_s'] for s in results['stages'].values())
