"""What the machine gives: cores, threads, and its rate for one dense float32 product."""

import functools
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.bench import paired
from composer_jax.bench.worker import Worker

GEMM_SIZE = 1024
_ROUNDS = 10


def threads() -> int:
  """Returns the cores that this process may use; each side runs as many threads."""
  return len(cores())


def cores() -> list[int]:
  """Returns the numbers of the cores that this process, and a worker of it, may use."""
  if hasattr(os, 'sched_getaffinity'):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def describe() -> dict[str, Any]:
  """Returns processor, cores, threads of each side and the one-minute load."""
  return {'processor': _processor(), 'cores': cores(), 'threads': threads(),
          'omp_wait_policy': 'PASSIVE', 'load_1min': os.getloadavg()[0],
          'jax': jax.__version__}


def timed(fn: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
  """Returns a function that calls `fn`, waits for its arrays and returns the seconds."""
  def call() -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn(*arguments))
    return time.perf_counter() - start

  return call


def gemm_rate(peer: Worker | None) -> dict[str, float]:
  """Measures one dense float32 product on every side, interleaved.

  Returns:
    `gemm_ours_gflops_per_s`, `gemm_peer_gflops_per_s` (with a peer), each from the fastest of
    several, and the larger as `gemm_gflops_per_s`.
  """
  a = jnp.ones((GEMM_SIZE, GEMM_SIZE), jnp.float32)
  product = jax.jit(functools.partial(jnp.matmul, precision='highest'))  # as the models have it
  sides = {'ours': timed(product, a, a)}
  if peer:
    sides['peer'] = lambda: peer.ask('gemm', size=GEMM_SIZE)['seconds']
  seconds = paired.interleave(sides, _ROUNDS)
  rates = {f'gemm_{name}_gflops_per_s': 2e-9 * GEMM_SIZE ** 3 / min(values)
           for name, values in seconds.items()}
  return rates | {'gemm_gflops_per_s': max(rates.values())}


def _processor() -> str:
  info = Path('/proc/cpuinfo')
  if info.is_file():
    for line in info.read_text(encoding='utf-8').splitlines():
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor() or platform.machine()


def lines(facts: dict[str, Any]) -> list[str]:
  """Returns the machine as text."""
  rates = ', '.join(f'{name} {facts[key]:.0f}' for name in ('ours', 'peer')
                    if (key := f'gemm_{name}_gflops_per_s') in facts)
  return [f'machine: {facts["processor"]}, {facts["threads"]} threads a side on cores '
          f'{",".join(map(str, facts["cores"]))} (OMP_WAIT_POLICY=PASSIVE), load '
          f'{facts["load_1min"]:.1f}; dense float32 GEMM GFLOP/s: {rates}']
