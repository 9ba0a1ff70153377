"""Every op on the device that is here: op x problem x backend, each checked before it is timed.

Times are CUPTI's of the kernels on a GPU, and the clock's around finished calls elsewhere. Inputs
are random, and sets of them are taken in turn, so that a call does not find its own in the cache.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.bench import machine
from composer_jax.bench.problems import Problem, problems
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.kernels import platform

SETS = 3
_ENOUGH_S = 3.0  # of one backend on one problem, where time is the clock's
# Dense TFLOP/s by operand type and TB/s of memory, from NVIDIA's data sheets.
NAMEPLATE = {'H100': {'bfloat16': 989, 'fp8': 1979, 'memory': 3.35},
             'H200': {'bfloat16': 989, 'fp8': 1979, 'memory': 4.8},
             'B200': {'bfloat16': 2250, 'fp8': 4500, 'fp4': 9000, 'memory': 8.0},
             'GB300': {'bfloat16': 2500, 'fp8': 5000, 'fp4': 15000, 'memory': 8.0}}


def run(ops: list[str], rounds: int, *, show: Callable[[str], None], small: bool | None = None
        ) -> dict[str, Any]:
  """Checks and times every backend that is usable here; `show` gets the table line by line.

  Args:
    ops: which; none stands for all.
    rounds: timed calls.
    show: prints a line.
    small: take shapes for a CPU; by default where there is no accelerator.

  Returns:
    What was shown, JSON-ready.

  Raises:
    UserError: unknown op.
    InfrastructureError: a backend's results differ from the reference's; the table is complete
      even so.
  """
  known = sorted({problem.op for problem in problems(small=True)} | {'quantize'})
  for name in ops:
    if name not in known:
      raise UserError(f'unknown op {name!r} (there are: {", ".join(known)})')
  device = platform.current()
  small = device.kind is None if small is None else small
  facts: dict[str, Any] = {'target': 'kernels', 'device': device.name, 'jax': jax.__version__,
                           'rounds': rounds, 'small': small, 'rows': [], **_ceilings(small, rounds)}
  show(f'{device.name}, jax {jax.__version__}, {rounds} rounds; measured ceilings: '
       f'{facts["matmul_tflops"]:.3g} TFLOP/s ({facts["matmul_dtype"]} matmul), '
       f'{facts["copy_tbs"]:.3g} TB/s (copy)')
  show(_HEADER)
  wrong, absent = [], {}
  for problem in problems(small):
    if ops and problem.op not in ops:
      continue
    for row in _measure(problem, rounds, facts):
      facts['rows'].append(row)
      if row['reason'] is not None:
        absent[problem.op, row['backend']] = row['reason'].rpartition(': ')[2]
        continue
      show(_line(row))
      if row['error'] is not None and not row['error'] <= problem.tolerance:
        wrong.append(f'{problem.op} {problem.name}, {row["backend"]}: error {row["error"]:.1e}, '
                     f'limit {problem.tolerance:.0e}')
  for (op, backend), reason in absent.items():
    show(f'{op} {backend}: {reason}')
  if wrong:
    raise InfrastructureError(f'{len(wrong)} wrong results: {wrong[0]}')
  return facts


def _measure(problem: Problem, rounds: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns a row for each backend, those that refuse with their reason."""
  sets = [problem.arrays(seed) for seed in range(SETS)]
  want = jax.tree.map(np.asarray, jax.jit(problem.expected)(*sets[0]))
  rows, peer = [], None
  for backend in problem.backends:
    row = {'op': problem.op, 'problem': problem.name, 'backend': backend, 'error': None,
           'reason': None}
    function = jax.jit(problem.function(backend))
    try:
      got = jax.block_until_ready(function(*sets[0]))
    except ValueError as error:
      rows.append(row | {'reason': str(error).splitlines()[0]})
      continue
    seconds = timed(function, sets, rounds)
    row |= {'error': _error(got, want), 'median_ms': 1e3 * seconds,
            'tflops': problem.flops / seconds / 1e12, 'tbs': problem.bytes / seconds / 1e12}
    row |= _shares(problem, row, facts)
    peer = peer or (seconds if backend == problem.peer else None)
    rows.append(row)
  for row in rows:
    row['ratio_to_peer'] = row['median_ms'] / 1e3 / peer if peer and 'median_ms' in row else None
  return rows


def timed(function: Callable[..., Any], sets: list[tuple[Any, ...]], rounds: int) -> float:
  """Returns the median seconds of a call on the sets in turn: `rounds` calls, fewer if slow."""
  if jax.default_backend() == 'gpu':
    from jax.experimental.mosaic.gpu import profiler
    measure = profiler.measure(function)
    return statistics.median(measure(*sets[i % len(sets)])[1] / 1e3 for i in range(rounds))
  for arguments in sets:
    jax.block_until_ready(function(*arguments))
  seconds = []
  while len(seconds) < rounds and (len(seconds) < 3 or sum(seconds) < _ENOUGH_S):
    seconds.append(machine.timed(function, *sets[len(seconds) % len(sets)])())
  return statistics.median(seconds)


def _ceilings(small: bool, rounds: int) -> dict[str, Any]:
  """Measures a square matmul and a copy."""
  size, dtype = (1024, jnp.float32) if small else (8192, jnp.bfloat16)
  a = jax.random.normal(jax.random.key(0), (size, size), dtype)
  product = timed(jax.jit(lambda x, y: jnp.matmul(x, y, precision='highest')), [(a, a)], rounds)
  big = jnp.zeros((size, size * 4), dtype)
  copy = timed(jax.jit(lambda x: x + 1), [(big,)], rounds)
  return {'matmul_tflops': 2 * size ** 3 / product / 1e12, 'matmul_dtype': jnp.dtype(dtype).name,
          'copy_tbs': 2 * big.nbytes / copy / 1e12}


def _shares(problem: Problem, row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
  """Returns shares of what the data sheet says and of what was measured, by what bounds the op."""
  plate = next((p for name, p in NAMEPLATE.items() if name in facts['device']), {})
  if problem.flops:
    nameplate, got, ceiling = plate.get(problem.dtype), row['tflops'], facts['matmul_tflops']
  else:
    nameplate, got, ceiling = plate.get('memory'), row['tbs'], facts['copy_tbs']
  return {'share_of_nameplate': nameplate and got / nameplate, 'share_of_measured': got / ceiling}


def _error(got: Any, want: Any) -> float:
  """Returns the largest difference over the largest value, over all results."""
  def of(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
  return max(of(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


_HEADER = (f'{"op":21} {"problem":50} {"backend":12} {"ms":>9} {"TFLOP/s":>8} {"TB/s":>7} '
           f'{"nameplate":>9} {"measured":>8} {"to peer":>7} {"error":>8}')


def _line(row: dict[str, Any]) -> str:
  plate, ratio = row['share_of_nameplate'], row['ratio_to_peer']
  return (f'{row["op"]:21} {row["problem"]:50} {row["backend"]:12} {row["median_ms"]:9.3f} '
          f'{row["tflops"]:8.3g} {row["tbs"]:7.3g} '
          f'{"-" if plate is None else format(plate, ".0%"):>9} '
          f'{row["share_of_measured"]:8.0%} '
          f'{"-" if ratio is None else format(ratio, ".2f"):>7} {row["error"]:8.0e}')


