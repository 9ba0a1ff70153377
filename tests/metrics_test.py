import json
import math

import numpy as np
import pytest

from composer_jax import metrics
from composer_jax.errors import UserError


def test_rows_come_back(tmp_path):
  path = tmp_path / 'deep' / 'metrics.jsonl'
  with metrics.MetricsLog(path) as log:
    log.append(1, loss=np.float32(1.5), tokens=np.int64(7), skipped=True)
    log.append(1, **{'eval/stdlib/bits_per_byte': 2.0})
    log.append(2, loss=math.nan, grad_norm=math.inf, low=-math.inf, kind='sft')
  rows = metrics.read(path)
  assert rows[0] == {'step': 1, 'loss': 1.5, 'tokens': 7, 'skipped': True}
  assert rows[1] == {'step': 1, 'eval/stdlib/bits_per_byte': 2.0}
  assert math.isnan(rows[2]['loss']) and rows[2]['grad_norm'] == math.inf
  assert rows[2]['low'] == -math.inf and rows[2]['kind'] == 'sft'


def test_every_line_is_strict_json(tmp_path):
  with metrics.MetricsLog(tmp_path / 'm.jsonl') as log:
    log.append(1, loss=math.nan)
  def refuse(word):
    raise AssertionError(word)
  json.loads((tmp_path / 'm.jsonl').read_text(), parse_constant=refuse)


def test_resume_drops_rows_of_later_steps(tmp_path):
  path = tmp_path / 'm.jsonl'
  with metrics.MetricsLog(path) as log:
    for step in range(1, 8):
      log.append(step, loss=float(step))
  with metrics.MetricsLog(path, resume_step=4) as log:
    for step in range(5, 10):
      log.append(step, loss=10.0 * step)
  rows = metrics.read(path)
  assert [row['step'] for row in rows] == list(range(1, 10))
  assert rows[3]['loss'] == 4.0 and rows[4]['loss'] == 50.0


def test_resume_at_any_point_leaves_no_duplicates(tmp_path):
  rng = np.random.default_rng(0)
  path = tmp_path / 'm.jsonl'
  reached = 0
  while reached < 60:
    saved = int(rng.integers(0, reached + 1))  # the newest checkpoint may be older than the log
    with metrics.MetricsLog(path, resume_step=saved) as log:
      for step in range(saved + 1, min(60, saved + int(rng.integers(1, 25))) + 1):
        log.append(step, loss=float(step))
        if step % 5 == 0:
          log.append(step, **{'eval/x': 1.0})
        reached = step
    if rng.random() < 0.5:  # killed inside a line
      with path.open('a') as file:
        file.write('{"step": 61, "lo')
  pairs = [(row['step'], name) for row in metrics.read(path) for name in row if name != 'step']
  assert len(pairs) == len(set(pairs))
  assert [s for s, name in pairs if name == 'loss'] == list(range(1, 61))


def test_starting_over(tmp_path):
  path = tmp_path / 'm.jsonl'
  with metrics.MetricsLog(path) as log:
    log.append(0, loss=1.0)
  with metrics.MetricsLog(path, resume_step=-1) as log:
    log.append(0, loss=2.0)
  assert metrics.read(path) == [{'step': 0, 'loss': 2.0}]


def test_a_step_cannot_be_logged_twice(tmp_path):
  with metrics.MetricsLog(tmp_path / 'm.jsonl') as log:
    log.append(3, loss=1.0)
    log.append(3, other=1.0)
    with pytest.raises(ValueError, match='loss at step 3'):
      log.append(3, loss=2.0)
    with pytest.raises(ValueError, match='loss at step 2'):
      log.append(2, loss=2.0)
  assert len(metrics.read(tmp_path / 'm.jsonl')) == 2


def test_refuses_what_is_no_number(tmp_path):
  with metrics.MetricsLog(tmp_path / 'm.jsonl') as log:
    with pytest.raises(TypeError, match='list'):
      log.append(1, counts=[1, 2])
  assert metrics.read(tmp_path / 'm.jsonl') == []


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / 'm.jsonl'
  path.write_text('{"step": 1, "loss": 1.0}\nnonsense\n{"step": 2, "loss": 1.0}\n')
  with pytest.raises(UserError, match=r'm\.jsonl:2: is damaged'):
    metrics.read(path)


def test_no_file_is_no_rows(tmp_path):
  assert metrics.read(tmp_path / 'none.jsonl') == []
