"""A run folder with invented numbers, written file by file as the stages would."""

import json
import math
import random
from pathlib import Path

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(2)> & "quoted" \u2028 {{ x }}'


def write_run(path: Path, seed: int = 0, *, hostile: str = HOSTILE) -> Path:
  """Writes a finished run of every stage."""
  rng = random.Random(seed)
  config = {'seed': seed, 'stages': ['cpt', 'sft', 'rl'], 'tracker': {'api_key': 'very-secret-1'},
            'note': hostile}
  _json(path / 'config.json', {'config': config, 'fingerprint': 'abc123def456',
                               'version': {'composer_jax': '0.1.0', 'python': '3.12.1'}})
  _json(path / 'data' / 'manifest.json', {'sources': {
      'stdlib': {'gzip_bits_per_byte': 2.1, 'xz_bits_per_byte': 1.8},
      'functions': {'gzip_bits_per_byte': 1.2, 'xz_bits_per_byte': 0.9}}})
  _pretraining(path / 'stages' / 'cpt', rng)
  _pretraining(path / 'stages' / 'long_context', rng, steps=80, start=2.2)
  _sft(path / 'stages' / 'sft', rng, hostile)
  _rl(path / 'stages' / 'rl', rng, hostile)
  for name, rate in (('sft', 0.46), ('rl', 0.73)):
    _evaluation(path / 'stages' / f'eval_{name}', rng, rate)
  _json(path / 'results.json', {
      'stages': {'cpt': {'bits_per_byte': 1.43, 'gzip_bits_per_byte': 1.9, 'xz_bits_per_byte': 1.6,
                         'wall_s': 61.0, 'sources': {
                             'stdlib': {'bits_per_byte': 1.81, 'gzip_bits_per_byte': 2.1,
                                        'xz_bits_per_byte': 1.8}}}},
      'eval': {'sft': {'pass_at_1': 0.46, 'ci95': [0.42, 0.5], 'best_of_8': 0.8, 'tasks': 200},
               'rl': {'pass_at_1': 0.73, 'ci95': [0.69, 0.77], 'best_of_8': 0.9, 'tasks': 200}},
      'wall_s': 640.0, 'peak_rss_gb': 3.2})
  return path


def _json(path: Path, value) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value))


def _lines(path: Path, rows) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def _pretraining(folder: Path, rng, steps: int = 300, start: float = 6.2) -> None:
  rows = []
  for step in range(1, steps + 1):
    rows.append({'step': step, 'loss': 1.6 + (start - 1.6) * math.exp(-step / 60)
                 + rng.gauss(0, 0.06), 'grad_norm': 1 / step + 0.2, 'lr': 3e-3 * min(1, step / 20),
                 'tokens_per_s': 20000 + rng.gauss(0, 900), 'load_max': 1.1 + 1 / step,
                 'moe/strange_metric': rng.random()})
    if step % 50 == 0:
      rows.append({'step': step, 'eval/bits_per_byte/stdlib': 1.6 + 2 * math.exp(-step / 90),
                   'eval/bits_per_byte/functions': 0.7 + 2 * math.exp(-step / 50)})
  rows[9]['loss'] = 'NaN'
  _lines(folder / 'metrics.jsonl', rows)
  _json(folder / 'summary.json', {'fingerprint': 'x', 'wall_s': 61.0, 'loss': 1.71,
                                  'bits_per_byte': 1.43})


def _sft(folder: Path, rng, hostile: str) -> None:
  rows = [{'step': step, 'loss': 0.4 + 1.5 * math.exp(-step / 40) + rng.gauss(0, 0.03)}
          for step in range(10, 400, 10)]
  rows += [{'step': step, 'eval/heldout_loss': loss}
           for step, loss in ((0, 2.6), (200, 0.5), (400, 0.437))]
  _lines(folder / 'metrics.jsonl', sorted(rows, key=lambda row: row['step']))
  _lines(folder / 'traces.jsonl', [_trace(rng, 'sft', 0, i, hostile) for i in range(30)])
  _json(folder / 'summary.json', {'wall_s': 130.0, 'loss': 0.41, 'heldout_loss': 0.437})


def _rl(folder: Path, rng, hostile: str) -> None:
  rows = []
  for step in range(1, 121):
    rows.append({'step': step, 'reward_mean': 0.46 + 0.3 * (1 - math.exp(-step / 50))
                 + rng.gauss(0, 0.07), 'entropy': 0.4 * math.exp(-step / 90) + 0.1,
                 'gap_max': 10 ** rng.uniform(-5.6, -4.6), 'gap_p99': 10 ** rng.uniform(-6.4, -6),
                 'gap_mean': 10 ** rng.uniform(-7.2, -7), 'staleness_mean': rng.uniform(0.4, 1.2),
                 'staleness_max': rng.choice([1, 2]), 'kl': 0.02 * step / 120,
                 'tokens_per_episode': 45 - step / 12 + rng.gauss(0, 1.5),
                 'loss': rng.gauss(0, 0.02)})
  _lines(folder / 'metrics.jsonl', rows)
  _lines(folder / 'traces.jsonl', [_trace(rng, 'rl', i // 8, i, hostile) for i in range(400)])
  _json(folder / 'summary.json', {'wall_s': 213.0, 'loss': 0.01})


def _evaluation(folder: Path, rng, rate: float) -> None:
  classes = {'off_by_one': 0.1, 'compare': 0.0, 'operator': -0.2, hash_name(): 0.05}
  rows = []
  for task in range(200):
    name = rng.choice(list(classes))
    rows += [{'task_id': f'l0-{task}', 'sample': sample, 'mutation': name,
              'reward': float(rng.random() < rate + classes[name]), 'tokens': rng.randint(60, 130),
              'stop_reason': rng.choice(['finished', 'finished', 'max_calls']),
              'calls': rng.randint(3, 6)} for sample in range(8)]
  rows[3] |= {'reward': None, 'stop_reason': 'infrastructure'}
  _lines(folder / 'rows.jsonl', rows)
  _json(folder / 'summary.json', {'wall_s': 40.0})


def hash_name() -> str:
  return 'constant<b>'


def _trace(rng, stage: str, step: int, number: int, hostile: str) -> dict:
  calls = [('read_file', 'def clamp(v, lo, hi):\n  return min(lo, max(v, hi))', None),
           ('edit_file 2|  return max(lo, min(v, hi))', 'ok', None),
           ('run_test', 'unknown tool', 'unknown_tool'), ('run_tests', 'pass', None),
           ('finish', '', None)]
  turns = []
  for call, result, error in calls:
    tokens = []
    for piece in call.replace(' ', '\x00 ').split('\x00'):
      lp = -rng.expovariate(3)
      tokens.append({'t': piece, 'm': 1, 'lp': lp, 'tlp': lp + rng.gauss(0, 1e-5), 'v': step})
    tokens += [{'t': piece + ' ', 'm': 0, 'lp': None, 'tlp': None, 'v': -1}
               for piece in result.split(' ')]
    turns.append({'call': call, 'result': result, 'error': error, 'tokens': tokens})
  return {'id': f'{stage}-{number}', 'stage': stage, 'step': step, 'task_id': f'l0-{number // 8}',
          'group_id': f'g{number // 8}', 'instruction': f'Keep v between lo and hi. {hostile}',
          'files': {'main.py': 'def clamp(v, lo, hi):\n  return min(lo, max(v, hi))\n'},
          'reward': float(rng.random() < 0.6) if number % 17 else None,
          'reward_parts': {'hidden': 1.0, 'length': -0.03, 'kl': -0.001},
          'stop_reason': rng.choice(['finished', 'max_calls']), 'turns': turns}
