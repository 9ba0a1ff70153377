import dataclasses

import pytest

from composer_jax.bench import compiled
from composer_jax.errors import UserError
from composer_jax.kernels import aot

FINE = aot.Compiled('op, forward', 'b200', seconds=1.0, kernels=1, registers=128)


def run(targets, ops):
  compiled.run(targets, ops, show=lambda line: None, write=lambda facts: None)


@pytest.mark.parametrize('targets, ops, said', [(['b100'], [], "unknown target 'b100'.*h200, b200"),
                                                ([], ['sort'], "unknown op 'sort'")])
def test_unknown_names_are_refused(targets, ops, said):
  with pytest.raises(UserError, match=said):
    run(targets, ops)


@pytest.mark.parametrize('change, said', [
    ({'error': 'ValueError: no'}, 'ValueError: no'), ({'missing': ('wgmma',)}, 'wgmma'),
    ({'spill_bytes': 8}, '8 bytes')])
def test_what_counts_as_a_fault(change, said):
  assert compiled.describe_fault(FINE) is None
  assert said in compiled.describe_fault(dataclasses.replace(FINE, **change))
