"""The kernel table with small shapes and a peer made of answers and NumPy."""

import pathlib
import sys

import numpy as np
import pytest

from composer_jax.bench import kernels
from composer_jax.errors import InfrastructureError

SHAPE = kernels.Shape(4, 8, 6, 600)
NUMPY_PEER = '''
import json, sys
import numpy as np
print(json.dumps({'torch': 'numpy'}), flush=True)
for line in sys.stdin:
  m, answer = json.loads(line), {}
  if m['do'] == 'load':
    p = dict(np.load(m['arrays']))
  elif m['do'] == 'results':
    ends = np.cumsum(p['sizes'])
    parts = [slice(e - s, e) for e, s in zip(ends, p['sizes'])]
    np.savez(m['arrays'], y=FACTOR * np.concatenate([p['x'][r] @ w for r, w in zip(parts, p['w'])]),
             dx=np.concatenate([p['dy'][r] @ w.T for r, w in zip(parts, p['w'])]),
             dw=np.stack([p['x'][r].T @ p['dy'][r] for r in parts]))
  else:
    answer = {'seconds': 1e6}
  print(json.dumps(answer), flush=True)
'''


@pytest.fixture
def measure(tmp_path, monkeypatch):
  """Returns a function that measures SHAPE beside a NumPy peer; gives (facts, lines)."""
  def run(factor):
    script = tmp_path / 'peer.py'
    script.write_text(NUMPY_PEER.replace('FACTOR', str(factor)))
    monkeypatch.setattr(kernels, 'peer_script', lambda name: pathlib.Path(script))
    lines = []
    return kernels.run(sys.executable, 2, show=lines.append, shapes=(SHAPE,)), lines
  return run


def test_table(measure):
  facts, lines = measure(1.0)
  assert [(r['draw'], r['pass']) for r in facts['rows']] == [
      ('balanced', 'forward'), ('balanced', 'forward_backward'),
      ('zipf', 'forward'), ('zipf', 'forward_backward')]
  for row in facts['rows']:
    assert row['ratio_median'] < 1 and row['peer_min_ms'] == 1e9
    assert row['max_difference'] < 1e-5
    assert ('ragged_dot_min_ms' in row) == (row['draw'] == 'balanced')
  assert facts['rows'][1]['gflop'] == pytest.approx(6e-9 * 600 * 8 * 6)
  assert len(lines) == 3 + 4 and lines[-1].split()[:5] == ['4', '8', '6', '600', 'zipf']


def test_other_results_give_no_ratio(measure):
  with pytest.raises(InfrastructureError, match='not the same computation: results differ'):
    measure(1.001)


def test_draws():
  balanced, zipf = (kernels.problem(SHAPE, draw)['sizes'] for draw in kernels.DRAWS)
  assert balanced.sum() == zipf.sum() == 600 and balanced.dtype == np.int32
  assert balanced.max() < 200 < zipf.max()
