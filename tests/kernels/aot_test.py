"""Every kernel becomes machine code for every device that it is meant for."""

import pytest

from composer_jax.bench import compiled
from composer_jax.kernels import aot

# Target, op and how many of its programs, the first ones: what takes two minutes.
# `bench kernels --compile_only` compiles everything for every target.
COMPILED = (
    ('h200', 'grouped_matmul', 4), ('h200', 'quantize', 3), ('h200', 'mla_attention', 1),
    ('b200', 'grouped_matmul', 7), ('b200', 'quantize', 4), ('gb300', 'grouped_matmul', 1),
    ('gb300', 'quantize', 1), ('v5p', 'grouped_matmul', 3), ('v5p', 'mla_attention', 1),
    ('v5p', 'linear_cross_entropy', 1), ('v6e', 'grouped_matmul', 1),
    ('tpu7x', 'grouped_matmul', 1))


@pytest.mark.parametrize('target, op, most', COMPILED)
def test_programs_compile_without_spills_and_use_what_they_are_meant_to(target, op, most):
  found = list(aot.compile_ops(target, [op], most=most))
  assert len(found) == most
  assert not {c.program: fault for c in found
              if (fault := compiled.describe_fault(c)) is not None}


def test_every_op_and_target_is_compiled_for_something():
  assert {op for _, op, _ in COMPILED} == set(aot.ops())
  assert {target for target, _, _ in COMPILED} == set(aot.TARGETS)


def test_an_unknown_target_is_refused():
  with pytest.raises(ValueError, match='h200, b200'):
    next(aot.compile_ops('h100', ['grouped_matmul']))
