import dataclasses

import pytest

from composer_jax.bench import ops, problems
from composer_jax.errors import InfrastructureError, UserError


def few(small):
  return [p for p in problems.problems(True) if p.op in ('moe_permute', 'mla_attention')]


def test_table(monkeypatch):
  monkeypatch.setattr(ops, 'problems', few)
  lines = []
  facts = ops.run([], 2, show=lines.append)
  rows = {(r['op'], r['backend']): r for r in facts['rows'] if r['problem'].startswith(
      ('forward', 'there'))}
  assert rows['moe_permute', 'xla']['error'] == 0
  dense, hopper = rows['mla_attention', 'dense'], rows['mla_attention', 'mosaic_sm90']
  assert dense['error'] < 1e-5 and dense['median_ms'] > 0 and dense['ratio_to_peer'] > 0
  assert 'Hopper' in hopper['reason'] and 'median_ms' not in hopper
  assert sum('Hopper' in line for line in lines) == 1 and facts['copy_tbs'] > 0


def test_a_wrong_result_is_an_error(monkeypatch):
  wrong = [dataclasses.replace(p, expected=lambda *a, p=p: 2 * p.function('xla')(*a))
           for p in few(True) if p.op == 'moe_permute']
  monkeypatch.setattr(ops, 'problems', lambda small: wrong)
  with pytest.raises(InfrastructureError, match='1 wrong results: moe_permute.*error 5'):
    ops.run([], 1, show=lambda line: None)


def test_an_unknown_op_is_refused():
  with pytest.raises(UserError, match="unknown op 'sort'.*grouped_matmul"):
    ops.run(['sort'], 1, show=lambda line: None)
