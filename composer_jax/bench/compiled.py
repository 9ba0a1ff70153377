"""Every kernel compiled ahead of time: what each takes of a device that is not here."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.errors import InfrastructureError, UserError
from composer_jax.kernels import aot


def run(targets: Sequence[str], ops: Sequence[str], *, show: Callable[[str], None],
        write: Callable[[dict[str, Any]], None]) -> None:
  """Compiles the programs of ops for targets; `show` gets the table line by line.

  Args:
    targets: keys of `aot.TARGETS`; none stands for all.
    ops: folders of `kernels/`; none stands for all that have something to compile.
    show: prints a line.
    write: gets what was shown, JSON-ready, also when something failed.

  Raises:
    UserError: unknown target or op.
    InfrastructureError: a compiler is not installed, or a program failed to compile, spills
      registers, or lacks an instruction that it is meant to use; the table is complete even so.
  """
  targets = targets or list(aot.TARGETS)
  for given, known, what in ((targets, list(aot.TARGETS), 'target'), (ops, aot.ops(), 'op')):
    for name in given:
      if name not in known:
        raise UserError(f'unknown {what} {name!r} (there are: {", ".join(known)})')
  for target in targets:
    if (reason := aot.obstacle(target)) is not None:
      raise InfrastructureError(f'cannot compile for {target}: {reason}')
  facts: dict[str, Any] = {'target': 'kernels', 'compile_only': True, 'rows': []}
  show('compiled for the device and not run; spills in bytes, shared memory and temporaries in KiB')
  show(_HEADER)
  faults = []
  for target in targets:
    for compiled in aot.compile_ops(target, ops or aot.ops()):
      facts['rows'].append(_row(compiled))
      show(_line(compiled))
      if (fault := describe_fault(compiled)) is not None:
        faults.append(f'{compiled.program} for {target}: {fault}')
  write(facts)
  if faults:
    raise InfrastructureError(f'{len(faults)} of {len(facts["rows"])} programs: {faults[0]}')


def describe_fault(compiled: aot.Compiled) -> str | None:
  """Returns what is wrong with a compiled program in a few words, None for nothing."""
  if compiled.error is not None:
    return compiled.error
  if compiled.missing:
    return f'no instruction matches {", ".join(compiled.missing)}'
  if compiled.spill_bytes:
    return f'{compiled.spill_bytes} bytes of registers are spilled'
  return None


def _row(compiled: aot.Compiled) -> dict[str, Any]:
  row = dataclasses.asdict(compiled)
  row['compile_s'] = row.pop('seconds')
  return row


_HEADER = (f'{"target":7} {"program":52} {"s":>5} {"kernels":>7} {"registers":>9} {"spills":>6} '
           f'{"smem":>5} {"tmem":>5} {"temp":>9}')


def _line(c: aot.Compiled) -> str:
  if c.error is not None:
    return f'{c.target:7} {c.program:52} failed: {c.error}'
  on_gpu = aot.TARGETS[c.target].kind != 'tpu'
  figures = [str(v) if on_gpu else '-'
             for v in (c.registers, c.spill_bytes, c.smem_bytes // 1024, c.tmem_columns)]
  return (f'{c.target:7} {c.program:52} {c.seconds:5.1f} {c.kernels:7} {figures[0]:>9} '
          f'{figures[1]:>6} {figures[2]:>5} {figures[3]:>5} {c.temp_bytes // 1024:9}'
          + (f'  lacks {", ".join(c.missing)}' if c.missing else ''))
