"""The page of an invented run: complete, self-contained, and safe against what agents write."""

import html.parser
import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

from composer_jax import report
from composer_jax.errors import UserError
from composer_jax.report import comparison, curves, folder, rollout_viewer, svg, tables

LOADING = {'src', 'href', 'data', 'action', 'poster', 'srcset', 'background', 'xlink:href'}
VOID = {'meta', 'link', 'input', 'br', 'img', 'hr'}


class Page(html.parser.HTMLParser):
  """Collects elements, text and scripts, and checks that tags are balanced."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.scripts, self.texts, self.stack = [], [], [], []
    self.feed(text)
    self.close()
    assert self.stack == []

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in VOID:
      self.stack.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self.stack.pop() == tag

  def handle_data(self, data):
    (self.scripts if self.stack and self.stack[-1] == 'script' else self.texts).append(data)


def _check_self_contained(page, text):
  for tag, attributes in page.elements:
    for name, value in attributes.items():
      assert not name.startswith('on'), f'<{tag} {name}>'
      if name in LOADING:
        assert value.startswith(('#', 'data:')), f'<{tag} {name}={value}>'
    assert tag not in ('iframe', 'object', 'embed', 'img', 'base')
  assert not re.search(r'(@import|url\()', text)
  for script in page.scripts:
    assert not re.search(r'(fetch\(|XMLHttpRequest|import\(|innerHTML|document\.write|eval\()',
                         script if 'application/json' not in script else '')


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
  return synthetic.write_run(tmp_path_factory.mktemp('runs') / 'tiny')


@pytest.fixture(scope='module')
def built(run_folder):
  path = report.build(run_folder)
  text = path.read_text(encoding='utf-8')
  return path, text, Page(text)


def test_one_self_contained_file(built):
  path, text, page = built
  assert path.name == 'report.html' and path.stat().st_size < 5e6
  _check_self_contained(page, text)


def test_shows_every_part(built):
  _, text, page = built
  titles = ' '.join(page.texts)
  for part in ('cpt: bits per byte, stdlib', 'gzip 2.10 · xz 1.80',
               'Held-out bits per byte', 'gzip stdlib', 'xz functions', 'Loss', 'Entropy',
               'Loss on held-out demonstrations', 'heldout_loss 0.437',
               'Trainer against sampler', 'gap_p99', 'Staleness', 'KL to the reference', 'Length',
               'reward_mean, mean of 8', 'moe/strange_metric', 'off_by_one',
               '0.690 – 0.770', '0.900 (K = 8)', 'abc123def456', '10 min 40 s', '3.20 GB'):
    assert part in titles, part
  assert sum(tag == 'svg' for tag, _ in page.elements) >= 20


def test_a_finished_run_is_not_called_unfinished(built):
  assert 'Not finished' not in built[1]


def test_hostile_text_stays_text(built):
  _, text, page = built
  assert [t for t, _ in page.elements].count('script') == 3
  assert '<script>alert' not in text and '<img' not in text
  traces = json.loads(next(s for s in page.scripts if s.startswith('[{')))
  assert synthetic.HOSTILE in traces[0]['instruction']
  assert 'constant<b>' in page.texts


def test_secrets_are_gone(built):
  assert 'very-secret-1' not in built[1] and '[redacted]' in built[1]


def test_traces_are_spread_and_complete(built):
  _, _, page = built
  traces = json.loads(next(s for s in page.scripts if s.startswith('[{')))
  steps = sorted(t['step'] for t in traces if t['stage'] == 'rl')
  assert len(steps) == rollout_viewer.PER_STAGE and steps[0] == 0 and steps[-1] == 49
  trace = next(t for t in traces if t['stage'] == 'rl')
  assert trace['turns'][2]['error'] == 'unknown_tool'
  assert trace['turns'][0]['tokens'][0][1] == 1 and trace['turns'][0]['tokens'][0][2] < 0
  assert {t['verdict'] for t in traces} == {'solved', 'failed', 'none'}


def test_byte_budget_holds_and_keeps_the_spread(run_folder):
  path = run_folder / 'stages' / 'rl'
  traces, totals, bad = rollout_viewer.collect(rollout_viewer.sources(
      [('rl', path)], run_folder / 'no.json'), budget=20_000)
  assert totals == {'rl': 400} and bad == 0
  assert 4 < len(traces) < 20 and len(json.dumps(traces)) < 21_000
  steps = sorted(t['step'] for t in traces)
  assert steps[-1] - steps[0] > 30


@pytest.mark.parametrize('missing', [
    ['results.json'], ['config.json'], ['data'], ['stages/rl', 'stages/eval_rl'],
    ['stages/eval_sft/rows.jsonl'], ['stages/sft/metrics.jsonl', 'stages/rl/traces.jsonl'],
    ['results.json', 'config.json', 'data', 'stages/cpt/summary.json']])
def test_partial_runs(run_folder, tmp_path, missing):
  shutil.copytree(run_folder, tmp_path / 'run')
  for name in missing:
    path = tmp_path / 'run' / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  Page(report.build(tmp_path / 'run').read_text())


def test_a_run_that_only_began(tmp_path):
  (tmp_path / 'config.json').write_text(
      '{"config": {"stages": ["cpt", "rl"]}, "fingerprint": "f", "version": {}}')
  assert 'Not finished: cpt, rl.' in report.build(tmp_path).read_text()


def test_damaged_files_are_named_and_the_rest_is_shown(run_folder, tmp_path):
  shutil.copytree(run_folder, tmp_path / 'run')
  stages = tmp_path / 'run' / 'stages'
  (stages / 'cpt' / 'metrics.jsonl').write_text('garbage\n{"step": 1}\n')
  (stages / 'sft' / 'summary.json').write_text('[1, 2]')
  with (stages / 'sft' / 'traces.jsonl').open('a') as file:
    file.write('not json\n[]\n{"turns": 3}\n{"turns": [{"tokens": [4, {"t": 5}]}, 6]}\n{"turns": [')
  with (stages / 'rl' / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 121, "los')
  text = report.build(tmp_path / 'run').read_text()
  Page(text)
  assert 'cpt/metrics.jsonl' in text and 'sft/summary.json' in text and '3 lines that' in text


def test_no_run(tmp_path):
  with pytest.raises(UserError, match='holds no run'):
    report.build(tmp_path)


def test_table_numbers_from_rows(run_folder):
  """pass@1 is a mean of task means, and an episode without verdict counts nowhere."""
  names = ('task_id', 'reward', 'tokens', 'calls', 'mutation', 'stop_reason')
  rows = [('a', 1.0, 10, 2, 'm', 's'), ('a', 0.0, 20, 4, 'm', 's'), ('b', 1.0, 30, 6, 'n', 't'),
          ('b', None, 1, 1, 'n', 'infrastructure')]
  stage = folder.Stage('eval_x', run_folder, [], {},
                       [dict(zip(names, row, strict=True)) for row in rows])
  row = tables.eval_row('x', {}, stage)
  assert row.pass_at_1 == 0.75 and row.tasks == 2 and row.samples == 3
  assert row.without_verdict == 1 and row.tokens == 20 and row.calls == 4
  assert row.by_class == {'m': (0.5, 2), 'n': (1.0, 1)}
  assert row.stops == {'s': 0.5, 't': 0.25, 'infrastructure': 0.25}
  after = tables.eval_row('y', {'pass_at_1': 0.9, 'ci95': [0.8, 1.0], 'best_of_4': 0.95}, None)
  assert after.pass_at_1 == 0.9 and after.interval == (0.8, 1.0) and after.best_of == (4, 0.95)


def test_movement(run_folder):
  def row(by_task):
    return tables.EvalRow('n', None, None, None, None, 0, 0, 0, None, None, {}, {}, by_task)
  moved = tables.movement(row({'a': 0.5, 'b': 1.0, 'c': 0.0, 'd': 1.0}),
                          row({'a': 1.0, 'b': 1.0, 'c': 0.5, 'd': 0.0, 'e': 1.0}))
  assert moved == {'more': 2, 'same': 1, 'less': 1}


def test_demonstrations_are_decoded(tmp_path):
  """Token ids of a byte-level tokenizer: the prompt, then turns with the mask token by token."""
  special = ['<|user|>', '<|call|>', '<|result|>', '<|end|>']
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  known = tokenizers.Tokenizer(tokenizers.models.BPE(
      vocab={piece: i for i, piece in enumerate([*special, *alphabet])}, merges=[]))
  known.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  known.decoder = tokenizers.decoders.ByteLevel()
  known.add_special_tokens(special)
  (tmp_path / 'data').mkdir()
  known.save(str(tmp_path / 'data' / 'tokenizer.json'))

  def ids(text):
    return known.encode(text).ids

  row = {'id': 'd0', 'task_id': 't0', 'mutation': 'compare', 'reward': 1.0,
         'stop_reason': 'finished', 'trainable': [False, True, False, True],
         'segments': [ids('<|user|>fix f<|end|><|call|>'), ids('read_file<|end|>'),
                      ids('<|result|>x = 1\n<|end|><|call|>'), ids('finish<|end|>')]}
  folder_ = tmp_path / 'stages' / 'sft'
  folder_.mkdir(parents=True)
  bad = {'segments': [[1]], 'trainable': []}
  (folder_ / 'demonstrations.jsonl').write_text(f'{json.dumps(row)}\n{json.dumps(bad)}\n')
  traces, totals, wrong = rollout_viewer.collect(rollout_viewer.sources(
      [('sft', folder_)], tmp_path / 'data' / 'tokenizer.json'))
  assert totals == {'sft': 2} and wrong == 1 and len(traces) == 1
  trace = traces[0]
  assert trace['instruction'] == '<|user|>fix f<|end|>' and trace['verdict'] == 'solved'
  assert [(t['call'], t['result']) for t in trace['turns']] == [('read_file', 'x = 1\n'),
                                                                ('finish', '')]
  first = trace['turns'][0]['tokens']
  assert ''.join(t[0] for t in first) == '<|call|>read_file<|end|><|result|>x = 1\n<|end|>'
  trained = ''.join(t[0] for t in first if t[1])
  assert trained == 'read_file<|end|>'
  report.build(tmp_path)


def test_running_mean():
  points = [(i, float(i)) for i in range(1, 21)]
  means = curves.running_mean(points)
  assert means[0] == (1, 1.0) and means[3] == (4, 2.5) and means[19] == (20, 16.5)


def test_thinning_keeps_ends_and_extremes():
  points = [(i, math.sin(i / 50)) for i in range(10_000)]
  points[5_123] = (5_123, 7.0)
  points[77] = (77, -9.0)
  kept = svg.thin(points)
  assert len(kept) <= svg.MAX_POINTS + 2
  assert (5_123, 7.0) in kept and (77, -9.0) in kept
  assert [p[0] for p in kept] == sorted(p[0] for p in kept)


@pytest.mark.parametrize('bounds', [(0, 1), (-3.2, 8.7), (1e-7, 3e-7), (0, 12345), (99, 101)])
def test_ticks_are_round_and_inside(bounds):
  ticks = svg.ticks(*bounds)
  assert 2 <= len(ticks) <= 12
  assert all(bounds[0] - 1e-12 <= t <= bounds[1] + 1e-9 for t in ticks)
  step = ticks[1] - ticks[0]
  mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
  assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-6


def test_values_that_are_not_finite_leave_gaps():
  points = [(1, 1.0), (2, math.nan), (3, 2.0), (4, 3.0), (5, math.inf)]
  chart = curves.chart('t', [svg.Series('s', points)])
  assert chart.svg.count('<polyline') == 2 and 'nan' not in chart.svg
  assert '2 values are not finite' in chart.note
  assert 'no finite value' in curves.chart('t', [svg.Series('s', [(1, math.nan)])]).svg


def test_a_point_is_drawn_where_its_value_is():
  axes = svg.Axes(0, 10, 0, 4, False)
  assert axes.x(5) == svg.LEFT + (svg.WIDTH - svg.LEFT - svg.RIGHT) / 2
  assert axes.y(4) == svg.TOP and axes.y(0) == svg.HEIGHT - svg.BOTTOM
  log = svg.Axes(0, 10, -2, 2, True)
  assert log.y(1.0) == (axes.y(4) + axes.y(0)) / 2


def test_comparison_page(tmp_path):
  planned = []
  for number, status in enumerate(['finished', 'finished', 'failed']):
    planned.append({'id': f'trial{number}', 'overrides': {'rl.q': f'<{number}>'}, 'label': '',
                    'status': status, 'error': 'boom </pre><b>' if status == 'failed' else None})
    if status == 'finished':
      synthetic.write_run(tmp_path / 'trials' / f'trial{number}', number)
  planned.append({'id': 'later', 'overrides': {}, 'label': '', 'status': 'planned', 'error': None})
  (tmp_path / comparison.SWEEP_FILE).write_text(json.dumps({'trials': planned}))
  text = comparison.build(tmp_path).read_text()
  page = Page(text)
  _check_self_contained(page, text)
  shown = ' '.join(page.texts)
  for part in ('rl.q', '<1>', 'trial1', 'failed', 'boom </pre><b>', 'planned', 'rl: reward',
               'cpt: loss', 'cpt: bits_per_byte/stdlib', '0.690 – 0.770',
               'pass@1 of each trial', 'cpt bits per byte', 'sft loss, mean of 8',
               'rl reward, mean of 8', 'sft held-out loss', '0.437', 'sft: heldout_loss'):
    assert part in shown, part
  assert 'rl loss' not in shown


def test_a_trial_is_named_by_what_it_changes():
  def label(overrides):
    return comparison.label(comparison.Row('t', overrides, 'planned', None, None, [], {}))
  assert label({'rl.q': 2.0, 'cpt.seed': 1, 'sft.seed': 1}) == 'q=2.0 seed=1'
  assert label({}) == 'base'


def test_comparison_needs_a_sweep(tmp_path):
  with pytest.raises(UserError, match='holds no sweep'):
    comparison.build(tmp_path)
