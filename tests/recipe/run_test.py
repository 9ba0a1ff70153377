"""What a finished run leaves, and that it is found finished."""

import json
import re
import shutil

import numpy as np
import pytest

from composer_jax import api, metrics
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.recipe.schema import STAGES

TRAINED = ('cpt', 'long_context', 'sft', 'rl')


def read(path):
  return json.loads(path.read_text())


@pytest.fixture(scope='module')
def results(smoke_run):
  return read(smoke_run / 'results.json')


def test_results_have_the_documented_keys(results):
  assert results.keys() == {'stages', 'eval', 'wall_s', 'peak_rss_gb'}
  assert results['stages'].keys() == {'data', 'cpt', 'long_context', 'sft', 'rl'}
  assert results['eval'].keys() == {'sft', 'rl'}
  for name in ('cpt', 'long_context'):
    for key in ('bits_per_byte', 'gzip_bits_per_byte', 'xz_bits_per_byte'):
      assert 0 < results['stages'][name][key] < 8
  for row in results['eval'].values():
    assert {'pass_at_1', 'ci95', 'best_of_8', 'tasks'} <= row.keys()
    low, high = row['ci95']
    assert 0 <= low <= row['pass_at_1'] <= high <= 1
    assert row['pass_at_1'] <= row['best_of_8'] <= 1
    assert row['tasks'] == 3
  assert all(stage['wall_s'] > 0 for stage in results['stages'].values())
  assert results['wall_s'] >= sum(stage['wall_s'] for stage in results['stages'].values())
  assert 0.1 < results['peak_rss_gb'] < 6


@pytest.mark.parametrize('stage', STAGES)
def test_every_stage_leaves_a_summary(smoke_run, stage):
  summary = read(smoke_run / 'stages' / stage / 'summary.json')
  assert re.fullmatch('[0-9a-f]{12}', summary['fingerprint'])
  assert summary['wall_s'] > 0


@pytest.mark.parametrize('stage', TRAINED)
def test_training_logs_every_step_once(smoke_run, stage):
  config = read(smoke_run / 'config.json')['config']
  rows = metrics.read(smoke_run / 'stages' / stage / 'metrics.jsonl')
  assert [r['step'] for r in rows if 'loss' in r] == list(range(1, config[stage]['steps'] + 1))
  assert (smoke_run / 'stages' / stage / 'params').is_dir()


@pytest.mark.parametrize('stage', ['cpt', 'long_context'])
@pytest.mark.parametrize('source', ['stdlib', 'functions'])
def test_bits_per_byte_falls_at_every_evaluation(smoke_run, stage, source):
  rows = metrics.read(smoke_run / 'stages' / stage / 'metrics.jsonl')
  name = f'eval/bits_per_byte/{source}'
  values = [row[name] for row in rows if name in row]
  assert len(values) == 3
  assert all(after < before for before, after in zip(values, values[1:], strict=False))


def test_heldout_loss_is_that_of_demonstrations_one_by_one(smoke_run, results):
  """Each trace in a row of its own, its log-softmax in float64."""
  text = (smoke_run / 'stages' / 'sft' / 'heldout_demonstrations.jsonl').read_text()
  traces = [json.loads(line) for line in text.splitlines()]
  assert len(traces) == 6 and all('-heldout-' in trace['task_id'] for trace in traces)
  tokens, trainable, valid = (np.zeros((6, 256), int) for _ in range(3))
  for row, trace in enumerate(traces):
    ids = [token for segment in trace['segments'] for token in segment]
    pairs = zip(trace['segments'], trace['trainable'], strict=True)
    flags = [flag is True for segment, flag in pairs for _ in segment]
    tokens[row, :len(ids)], trainable[row, :len(ids)], valid[row, :len(ids)] = ids, flags, 1
  model = api.load(smoke_run, stage='sft')
  logits = np.float64(model.forward(model.params, tokens, segment_ids=valid).logits)
  logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  costs = -np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
  want = (costs * trainable[:, 1:]).sum() / trainable[:, 1:].sum()
  assert results['stages']['sft']['heldout_loss'] == pytest.approx(want, rel=1e-5)


def test_heldout_loss_falls_and_its_last_value_is_the_result(smoke_run, results):
  rows = metrics.read(smoke_run / 'stages' / 'sft' / 'metrics.jsonl')
  values = {row['step']: row['eval/heldout_loss'] for row in rows if 'eval/heldout_loss' in row}
  assert list(values) == [0, 20, 40]
  assert values[0] > values[20] > values[40] == results['stages']['sft']['heldout_loss']


@pytest.mark.parametrize('stage', ['eval_sft', 'eval_rl'])
def test_every_attempt_is_evaluated_once(smoke_run, stage):
  lines = (smoke_run / 'stages' / stage / 'rows.jsonl').read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if 'task_id' in row]
  assert len({(row['task_id'], row['sample']) for row in rows}) == len(rows) == 3 * 8


def test_both_evaluations_take_the_same_tasks(smoke_run):
  def tasks(stage):
    lines = (smoke_run / 'stages' / stage / 'rows.jsonl').read_text().splitlines()
    return {row.get('task_id') for row in map(json.loads, lines)}
  assert tasks('eval_sft') == tasks('eval_rl')


def test_rl_trained_and_wrote_rollouts(smoke_run):
  rows = metrics.read(smoke_run / 'stages' / 'rl' / 'metrics.jsonl')
  assert sum(row['tokens_trained'] for row in rows) > 100
  assert max(row['gap_max'] for row in rows) > 0
  config = read(smoke_run / 'config.json')['config']['rl']
  assert max(row['lr'] for row in rows) == pytest.approx(config['optimizer']['lr'])
  for row in rows:
    if 'kl' in row:
      assert row['reward/kl'] == pytest.approx(-config['kl_coefficient'] * row['kl'])
  traces = [json.loads(line) for line in
            (smoke_run / 'stages' / 'rl' / 'traces.jsonl').read_text().splitlines()]
  assert traces and all(trace['turns'] for trace in traces)


@pytest.mark.parametrize('stage', ['eval_sft', 'eval_rl'])
def test_evaluations_leave_rollouts_for_the_viewer(smoke_run, stage):
  rows = [json.loads(line) for line in
          (smoke_run / 'stages' / stage / 'traces.jsonl').read_text().splitlines()]
  assert {row['task_id'] for row in rows} and len(rows) <= 2 * 3
  verdicts = [(row['task_id'], row['correct']) for row in rows]
  assert len(set(verdicts)) == len(verdicts)
  for token in (t for row in rows for turn in row['turns'] for t in turn['tokens']):
    assert (token['lp'] is not None) == (token['m'] == 1) and 'tlp' not in token
  assert f'"stage":"{stage}"' in (smoke_run / 'report.html').read_text()


def test_report_is_one_self_contained_file(smoke_run):
  page = (smoke_run / 'report.html').read_text()
  assert '</html>' in page
  outside = re.findall(r'(?:src|href)\s*=\s*["\'](?!#|data:)([^"\']+)', page)
  assert not [link for link in outside if not link.startswith('https://')], outside
  assert not re.search(r'<(script|img|iframe)[^>]+src\s*=\s*["\']https?:', page)
  assert not re.search(r'<link[^>]+stylesheet', page)
  assert 'gzip' in page and 'Trainer against sampler' in page


def snapshot(folder):
  return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
          for top in ('stages', 'data', 'config.json')
          for path in ([folder / top] if (folder / top).is_file() else (folder / top).rglob('*'))
          if path.is_file()}


def test_the_same_command_again_finds_the_work_done(smoke_run, command_line, results):
  before = snapshot(smoke_run)
  out = command_line.run_smoke(smoke_run)
  assert snapshot(smoke_run) == before
  assert read(smoke_run / 'results.json') == results
  assert 'eval rl: pass@1' in out
  row = results['stages']['cpt']['sources']['stdlib']
  assert re.search(rf'cpt: held-out bits per byte: .*stdlib {row["bits_per_byte"]:.3f} '
                   rf'\(gzip {row["gzip_bits_per_byte"]:.3f}', out)


def test_dry_run_says_that_all_is_done(smoke_run, command_line):
  before = snapshot(smoke_run)
  out = command_line.run_smoke(smoke_run, '--dry_run')
  assert json.loads(out) == dict.fromkeys(STAGES, 'done')
  assert snapshot(smoke_run) == before


def test_stages_of_another_run_are_reused_where_the_settings_are_equal(smoke_run, tmp_path):
  config = read(smoke_run / 'config.json')['config']
  config['rl']['steps'] += 1
  equal = ['data', 'cpt', 'long_context', 'sft', 'eval_sft']
  assert api.reuse(config, tmp_path / 'more', smoke_run) == equal
  assert api.run(config, tmp_path / 'more', dry_run=True) == {
    **dict.fromkeys(equal, 'done'), 'rl': 'run', 'eval_rl': 'run'}
  assert read(tmp_path / 'more' / 'config.json')['config']['rl'] == config['rl']
  assert read(tmp_path / 'more' / 'golden.json') == read(smoke_run / 'golden.json')
  assert api.reuse(config, tmp_path / 'more', smoke_run) == []
  results = api.run(config, tmp_path / 'more', stages=['eval_sft'])  # done: nothing runs
  assert results['wall_s'] > sum(stage['wall_s'] for stage in results['stages'].values())
  assert results['eval']['sft'] == read(smoke_run / 'results.json')['eval']['sft']
  assert api.reuse(config, tmp_path / 'few', smoke_run, stages=['data', 'cpt']) == ['data', 'cpt']


def test_artefacts_of_two_runs_are_not_mixed(smoke_run, tmp_path):
  """Equal settings do not make an equal corpus: a stage follows only what it was made from."""
  config = read(smoke_run / 'config.json')['config']
  api.reuse(config, tmp_path / 'own', smoke_run, stages=['data', 'cpt'])
  own = tmp_path / 'own' / 'stages' / 'cpt' / 'summary.json'
  own.write_text(json.dumps(read(own) | {'wall_s': 0.01}))
  assert api.reuse(config, tmp_path / 'own', smoke_run) == []


def test_what_cannot_be_reused_is_one_line(smoke_run, tmp_path, monkeypatch):
  config = read(smoke_run / 'config.json')['config']
  with pytest.raises(UserError, match='holds no run'):
    api.reuse(config, tmp_path / 'other', tmp_path)
  with pytest.raises(UserError, match='is the --workdir itself'):
    api.reuse(config, smoke_run, smoke_run)
  assert not (tmp_path / 'other').exists()
  with pytest.raises(UserError, match='no finished stage.*seed is 0 there and 1 here'):
    api.reuse(config | {'seed': 1}, tmp_path / 'seed', smoke_run)

  def full(source, target):
    raise shutil.Error([(str(source), str(target), 'No space left on device')])
  monkeypatch.setattr(shutil, 'copytree', full)
  with pytest.raises(InfrastructureError, match='cannot copy .*No space left'):
    api.reuse(config, tmp_path / 'full', smoke_run)


def test_a_stage_needs_the_one_that_it_starts_from(smoke_run, tmp_path):
  config = read(smoke_run / 'config.json')['config']
  with pytest.raises(UserError, match='eval_sft starts from sft, which is not finished'):
    api.run(config, tmp_path / 'run', stages=['eval_sft'])
  with pytest.raises(UserError, match='eval_sft starts from sft'):
    api.run(config, tmp_path / 'run', stages=['eval_sft'], dry_run=True)
  assert not (tmp_path / 'run').exists()
