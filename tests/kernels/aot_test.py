"""Every kernel becomes machine code for every device that it is meant for."""

import pytest

from composer_jax.bench import compiled
from composer_jax.kernels import aot

# The others of a family differ in the name of the architecture; `bench kernels --compile_only`
# compiles everything for every target, and takes minutes.
MOST = {'h200': 10, 'b200': 10, 'v5p': 10}


@pytest.mark.parametrize('op', aot.ops())
@pytest.mark.parametrize('target', aot.TARGETS)
def test_programs_compile_without_spills_and_use_what_they_are_meant_to(target, op):
  faults = {c.program: fault for c in aot.compile_ops(target, [op], most=MOST.get(target, 1))
            if (fault := compiled.describe_fault(c)) is not None}
  assert not faults


def test_an_unknown_target_is_refused():
  with pytest.raises(ValueError, match='h200, b200'):
    next(aot.compile_ops('h100', ['grouped_matmul']))
