"""The grouped matmul beside torch._grouped_mm, jax.lax.ragged_dot and one dense product.

Rows are sorted by group on every side before the clock starts. Group sizes are a balanced
(multinomial) or a Zipf draw; the same arrays go to every side.
"""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.bench import machine, paired
from composer_jax.bench.worker import Worker, peer_script
from composer_jax.errors import InfrastructureError
from composer_jax.kernels.grouped_matmul import api

TOLERANCE = 1e-4  # largest difference from the peer, of the largest value
PASSES = ('forward', 'forward_backward')


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of one problem.

  Attributes:
    e: groups.
    k: width of a row.
    n: width of a product.
    t: rows.
  """

  e: int
  k: int
  n: int
  t: int


SHAPES = (Shape(16, 256, 512, 2048), Shape(64, 256, 128, 2048), Shape(128, 512, 256, 4096))
DRAWS = ('balanced', 'zipf')


def problem(shape: Shape, draw: str, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns float32 x `[T, K]`, w `[E, K, N]`, dy `[T, N]` and int32 sizes `[E]`."""
  rng = np.random.default_rng(seed)
  weight = np.ones(shape.e) if draw == 'balanced' else 1.0 / np.arange(1, shape.e + 1)
  sizes = rng.multinomial(shape.t, weight / weight.sum()).astype(np.int32)
  normal = lambda *dims: rng.standard_normal(dims, dtype=np.float32)  # noqa: E731
  return {'x': normal(shape.t, shape.k), 'w': normal(shape.e, shape.k, shape.n) / 16,
          'dy': normal(shape.t, shape.n), 'sizes': sizes}


def run(peer_python: str | None, rounds: int, *, show: Callable[[str], None],
        shapes: tuple[Shape, ...] = SHAPES, script: str = 'torch_grouped_matmul') -> dict[str, Any]:
  """Measures every shape and draw; `show` gets the report line by line.

  Args:
    peer_python: an interpreter with torch, or None.
    rounds: interleaved rounds that count; ragged_dot, many times slower, gets one.
    show: prints a line.
    shapes: what to measure.
    script: name of the peer's script.

  Returns:
    What was shown, JSON-ready.

  Raises:
    UserError: the interpreter does not do.
    InfrastructureError: the peer failed, or the results differ.
  """
  with contextlib.ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    worker = peer_python and stack.enter_context(
        Worker(peer_python, peer_script(script), machine.threads()))
    facts = {'target': 'kernels', 'op': 'grouped_matmul', 'rounds': rounds,
             'warm_ups': paired.WARM_UPS, 'peer': worker.about if worker else None,
             'machine': machine.describe() | machine.gemm_rate(worker), 'rows': []}
    for line in machine.lines(facts['machine']):
      show(line)
    show(f'grouped matmul, float32, {rounds} interleaved rounds; minimum and median in ms; peer: '
         + (f'torch {worker.about["torch"]}, torch._grouped_mm' if worker else 'none'))
    show(_HEADER)
    for shape in shapes:
      for draw in DRAWS:
        for row in _measure(shape, draw, rounds, worker, folder):
          facts['rows'].append(row)
          show(_line(row))
  return facts


def _measure(shape: Shape, draw: str, rounds: int, worker: Worker | None, folder: Path
             ) -> list[dict[str, Any]]:
  """Returns one row of the table for each pass."""
  arrays = problem(shape, draw)
  x, w, dy, sizes = (jnp.asarray(arrays[name]) for name in ('x', 'w', 'dy', 'sizes'))
  difference = None
  if worker:
    np.savez(folder / 'problem.npz', **arrays)
    worker.ask('load', arrays=str(folder / 'problem.npz'), threads=machine.threads())
    difference = _difference(worker, folder, _passes('xla')['forward_backward'](x, w, dy, sizes))
  rows = []
  for name in PASSES:
    times = 1 if name == 'forward' else 3
    flops = 2 * times * shape.t * shape.k * shape.n
    sides = {'xla': machine.timed(_passes('xla')[name], x, w, dy, sizes),
             'dense': machine.timed(_dense(times), x, w[0])}
    if worker:
      sides['peer'] = lambda name=name: worker.ask(name)['seconds']
    seconds = paired.interleave(sides, rounds)
    row = dataclasses.asdict(shape) | {
        'draw': draw, 'largest_group': int(sizes.max()), 'pass': name, 'gflop': flops / 1e9,
        'max_difference': difference}
    for side, values in seconds.items():
      row |= {f'{side}_{key}': value for key, value in paired.summary(values).items()}
    if draw == DRAWS[0]:  # its cost does not depend on the sizes
      ragged = machine.timed(_passes('ragged_dot')[name], x, w, dy, sizes)
      row |= {f'ragged_dot_{key}': value for key, value in paired.summary(
          paired.interleave({'ragged_dot': ragged}, 1, warm_ups=1)['ragged_dot']).items()}
    if worker:
      row |= paired.ratio(seconds['xla'], seconds['peer'])
    rows.append(row)
  return rows


@functools.cache
def _passes(impl: str) -> dict[str, Callable[..., Any]]:
  """Returns the jitted passes of a backend, each of (x, w, dy, sizes)."""
  @jax.jit
  def forward(x, w, dy, sizes):
    return api.grouped_matmul(x, w, sizes, impl=impl)

  @jax.jit
  def forward_backward(x, w, dy, sizes):
    y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, impl=impl), x, w)
    return y, *pull(dy)

  return {'forward': forward, 'forward_backward': forward_backward}


@functools.cache
def _dense(times: int) -> Callable[..., Any]:
  """Returns `times` dense products of all rows with one matrix: the bound for this many FLOPs."""
  product = functools.partial(jnp.matmul, precision='highest')  # as the op has it

  @jax.jit
  def dense(x, w):
    y = product(x, w)
    return y if times == 1 else (y, product(y, w.T), product(x.T, y))

  return dense


def _difference(worker: Worker, folder: Path, ours: tuple[jax.Array, ...]) -> float:
  """Returns the largest difference from the peer's y, dx and dw, each over its largest value.

  Raises:
    InfrastructureError: it is above `TOLERANCE`.
  """
  worker.ask('forward_backward')
  worker.ask('results', arrays=str(folder / 'results.npz'))
  with np.load(folder / 'results.npz') as theirs:
    gap = max(float(np.abs(theirs[name] - got).max() / np.abs(theirs[name]).max())
              for name, got in zip(('y', 'dx', 'dw'), ours, strict=True))
  if not gap <= TOLERANCE:
    raise InfrastructureError(f'not the same computation: results differ from the peer\'s by '
                              f'{gap:.1e} (limit {TOLERANCE:.0e}); no ratio is given')
  return gap


_HEADER = (f'{"E":>4} {"K":>4} {"N":>4} {"T":>5} {"draw":8} {"largest":>7} {"pass":8} '
           f'{"ours xla":>14} {"peer":>14} {"one dense":>14} {"ragged_dot":>10} '
           f'{"ours/peer":>9} {"quartiles":>12} {"max diff":>9}')


def _line(row: dict[str, Any]) -> str:
  def pair(side: str) -> str:
    if f'{side}_min_ms' not in row:
      return '-'
    return f'{row[f"{side}_min_ms"]:.1f} {row[f"{side}_median_ms"]:.1f}'

  ragged = f'{row["ragged_dot_min_ms"]:.0f}' if 'ragged_dot_min_ms' in row else '-'
  ratio, quartiles, difference = '-', '-', '-'
  if 'ratio_median' in row:
    ratio = f'{row["ratio_median"]:.2f}'
    quartiles = f'{row["ratio_q25"]:.2f} {row["ratio_q75"]:.2f}'
    difference = f'{row["max_difference"]:.0e}'
  return (f'{row["e"]:4} {row["k"]:4} {row["n"]:4} {row["t"]:5} {row["draw"]:8} '
          f'{row["largest_group"]:7} {"fwd" if row["pass"] == "forward" else "fwd+bwd":8} '
          f'{pair("xla"):>14} {pair("peer"):>14} {pair("dense"):>14} {ragged:>10} '
          f'{ratio:>9} {quartiles:>12} {difference:>9}')
