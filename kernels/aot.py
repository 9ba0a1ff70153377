"""Compiles kernels to machine code for GPUs and TPUs that are not here, and reads what came out.

Each target is compiled in a process of its own: Mosaic GPU can serve one architecture a process,
and an instruction that an architecture lacks ends the process. What an op compiles is listed by
`programs(target)` in its `programs.py`.

The compilers are the packages jax-cuda13-plugin and jax-cuda13-pjrt, and libtpu (the extra "aot").
They are taken from the environment, or from the folder `aot` in it, where `.ci/venv` puts them:
apart from it they cannot make JAX look for devices.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from composer_jax.kernels import platform


@dataclasses.dataclass(frozen=True)
class Target:
  """A device to compile for.

  Attributes:
    kind: family of kernels.
    description: NVIDIA's name of the GPU, or a TPU topology of one host.
    cores: streaming multiprocessors of the GPU, or TensorCores that one program sees.
  """

  kind: platform.Kind
  description: str
  cores: int


TARGETS = {
    'h200': Target('sm90', 'NVIDIA H200 141GB HBM3e', 132),
    'b200': Target('sm100', 'NVIDIA B200', 148),
    'gb300': Target('sm100', 'NVIDIA GB300', 148),
    'v5p': Target('tpu', 'v5p:2x2x1', 1),
    'v6e': Target('tpu', 'v6e:2x2', 1),
    'tpu7x': Target('tpu', 'tpu7x:2x2x1', 1),
}
_OPCODES = re.compile(r'\b((?:wgmma|tcgen05|cp\.async\.bulk|multimem|cvt|div|mma)\.[\w.:]+)')


@dataclasses.dataclass(frozen=True)
class Program:
  """Something to compile.

  Attributes:
    name: op, direction and format, for tables.
    function: what is compiled; its kernels take the backend that the target has.
    arguments: shapes and types.
    instructions: regular expressions; each must match an opcode of the PTX.
  """

  name: str
  function: Callable[..., Any]
  arguments: tuple[jax.ShapeDtypeStruct, ...]
  instructions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What came out of compiling one program.

  Attributes:
    program: its name.
    target: key of `TARGETS`.
    seconds: time of tracing, lowering and compiling.
    error: one line, None when it compiled.
    kernels: number of Pallas kernels in the program.
    registers: most per thread in a kernel; GPU only.
    spill_bytes: stores and loads of spilled registers, in bytes; GPU only.
    smem_bytes: most shared memory of a kernel; GPU only.
    tmem_columns: most columns of tensor memory of a kernel; Blackwell only.
    temp_bytes: device memory beside arguments and results.
    opcodes: how often each notable PTX opcode occurs; GPU only.
    missing: expressions of `Program.instructions` that nothing matched.
  """

  program: str
  target: str
  seconds: float = 0.0
  error: str | None = None
  kernels: int = 0
  registers: int = 0
  spill_bytes: int = 0
  smem_bytes: int = 0
  tmem_columns: int = 0
  temp_bytes: int = 0
  opcodes: dict[str, int] = dataclasses.field(default_factory=dict)
  missing: tuple[str, ...] = ()


def ops() -> list[str]:
  """Returns the ops that have something to compile: the folders with a `programs.py`."""
  here = pathlib.Path(__file__).parent
  return sorted(path.parent.name for path in here.glob('*/programs.py'))


def obstacle(target: str) -> str | None:
  """Returns why nothing can be compiled for a target here, or None when it can."""
  package = 'libtpu' if TARGETS[target].kind == 'tpu' else 'jax_plugins/xla_cuda13'
  if any((pathlib.Path(folder) / package).is_dir() for folder in _search_path()):
    return None
  return ("the compiler is not installed (pip install 'composer-jax[aot]', or `make venv` in a "
          'clone)')


def compile_ops(target: str, ops: Sequence[str], *, most: int | None = None, limit_s: float = 900
                ) -> Iterator[Compiled]:
  """Compiles the programs of some ops for a target, in another process.

  Args:
    target: key of `TARGETS`.
    ops: folders of `kernels/` that have a `programs.py`.
    most: programs of each op, the first ones; None for all.
    limit_s: time after which the rest is given up, in seconds.

  Yields:
    One result a program, as it comes. A program that ends the compiler's process is reported as
    failed, and the next ones go on in a new process.

  Raises:
    ValueError: unknown target, or no compiler for it here.
  """
  if target not in TARGETS:
    raise ValueError(f'unknown target {target!r} (there are: {", ".join(TARGETS)})')
  if (reason := obstacle(target)) is not None:
    raise ValueError(f'cannot compile for {target}: {reason}')
  deadline, done = time.monotonic() + limit_s, 0
  while True:
    names: list[str] = []
    reported = 0
    with _compiler(target, ops, most, skip=done) as process:
      for line in process.stdout:
        if not line.startswith('{'):
          continue
        message = json.loads(line)
        if 'programs' in message:
          names = message['programs'][done:]
        else:
          reported += 1
          yield Compiled(**{**message, 'missing': tuple(message['missing'])})
        if time.monotonic() > deadline:
          process.kill()
      code = process.wait()
      errors = process.complaint()
    done += reported
    if reported == len(names) and code == 0:
      return
    if not names or reported == len(names):
      raise RuntimeError(f'compiling for {target} failed: {errors}')
    late = time.monotonic() > deadline
    yield Compiled(names[reported], target,
                   error=f'not done in {limit_s:.0f} s' if late else f'compiler died: {errors}')
    done += 1
    if late or reported + 1 == len(names):
      return


def _search_path() -> list[str]:
  return [*sys.path, str(pathlib.Path(sys.prefix) / 'aot')]


class _Compiler(subprocess.Popen):
  """A compiling process; what it prints besides results goes to a file."""

  def __init__(self, command, log, **options):
    self._log = log
    super().__init__(command, stderr=log, **options)

  def complaint(self) -> str:
    """Returns the last line that says something."""
    self._log.seek(0)
    lines = [line.strip() for line in self._log.read().splitlines()]
    telling = [line for line in lines if 'rror' in line or 'fatal' in line] or lines
    return telling[-1][:300] if telling else f'exit code {self.returncode}'


@contextlib.contextmanager
def _compiler(target, ops, most, skip) -> Iterator[_Compiler]:
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
                 'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost',
                 'XLA_FLAGS': '--xla_gpu_enable_cub_radix_sort=false',
                 'PYTHONPATH': os.pathsep.join(filter(None, [
                     os.environ.get('PYTHONPATH'), str(pathlib.Path(sys.prefix) / 'aot')]))}
  command = [sys.executable, '-m', 'composer_jax.kernels.aot', target, *ops, f'--skip={skip}']
  command += [f'--most={most}'] if most else []
  with tempfile.TemporaryFile('w+', errors='replace') as log:
    process = _Compiler(command, log, stdout=subprocess.PIPE, text=True, env=environment)
    try:
      yield process
    finally:
      if process.poll() is None:
        process.kill()
      process.wait()
      process.stdout.close()


def _main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('target')
  parser.add_argument('ops', nargs='+')
  parser.add_argument('--skip', type=int, default=0)
  parser.add_argument('--most', type=int)
  flags = parser.parse_args()
  target = TARGETS[flags.target]
  devices = _devices(target)
  programs = [program for op in flags.ops
              for program in importlib.import_module(f'composer_jax.kernels.{op}.programs')
              .programs(target)[:flags.most]]
  print(json.dumps({'programs': [p.name for p in programs]}), flush=True)
  for program in programs[flags.skip:]:
    result = _compile(program, flags.target, devices[0])
    print(json.dumps(dataclasses.asdict(result)), flush=True)


def _devices(target: Target) -> list[Any]:
  from jax.experimental import topologies
  if target.kind == 'tpu':
    return topologies.get_topology_desc(target.description, platform='tpu').devices
  return topologies.get_topology_desc(platform='cuda', topology='1x1x1',
                                      target_config=_gpu_description(target.description)).devices


def _gpu_description(name: str) -> str:
  """Returns the GpuTargetConfigProto of a GPU, which lies as text in the CUDA plugin."""
  plugin = importlib.import_module('jax_plugins.xla_cuda13').__file__
  data = (pathlib.Path(plugin).parent / 'xla_cuda_plugin.so').read_bytes()
  for start in re.finditer(rb'gpu_device_info \{\n', data):
    text = data[start.start():data.find(b'\0', start.start())].decode('utf8', 'replace')
    if f'device_description_str: "{name}"' in text:
      return text
  raise RuntimeError(f'error: this jax-cuda13-plugin does not describe {name!r} (0.12 does)')


def _compile(program: Program, target_name: str, device: Any) -> Compiled:
  target = TARGETS[target_name]
  mesh = jax.sharding.Mesh(np.array([device]), ('_',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    # Read by the compiler at each compilation.
    os.environ.update({'MOSAIC_GPU_DUMP_TO': folder, 'MOSAIC_GPU_DUMP_PTX': '1',
                       'MOSAIC_GPU_DUMP_PTXAS': '1', 'MOSAIC_GPU_DUMP_RESOURCES': '1'})
    try:
      # Mosaic GPU takes the architecture from the default device.
      with (platform.pretending(target.kind, target.cores, device.device_kind),
            jax.default_device(device)):
        jitted = jax.jit(program.function, in_shardings=sharding, out_shardings=sharding)
        compiled = jitted.trace(*program.arguments).lower(
            lowering_platforms=('tpu' if target.kind == 'tpu' else 'cuda',)).compile()
    except Exception as error:  # noqa: BLE001 - whatever the compiler says is the result
      lines = [line for line in str(error).splitlines() if line.strip()] or ['']
      return Compiled(program.name, target_name, time.monotonic() - start,
                      error=f'{type(error).__name__}: {lines[0][:300]}')
    return _read(program, target_name, time.monotonic() - start, compiled, pathlib.Path(folder))


def _read(program: Program, target: str, seconds: float, compiled: Any,
          folder: pathlib.Path) -> Compiled:
  """Collects what the compiler reported about the kernels of a program."""
  kind: Literal['sm90', 'sm100', 'tpu'] = TARGETS[target].kind
  temp = compiled.memory_analysis().temp_size_in_bytes
  if kind == 'tpu':
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    return Compiled(program.name, target, seconds, kernels=kernels, temp_bytes=temp)
  ptx = [path.read_text() for path in folder.glob('*.ptx')]
  reports = '\n'.join(path.read_text() for path in folder.glob('*.ptxas'))
  resources = '\n'.join(path.read_text() for path in folder.glob('*.resources.txt'))
  opcodes = collections.Counter(m for text in ptx for m in _OPCODES.findall(text))
  missing = tuple(wanted for wanted in program.instructions
                  if not any(re.search(wanted, opcode) for opcode in opcodes))

  def numbers(pattern: str, text: str) -> list[int]:
    return [int(n) for n in re.findall(pattern, text)]

  tmem = [a + b for a, b in zip(numbers(r'tmem_scratch_cols=(\d+)', resources),
                                numbers(r'tmem_collective_scratch_cols=(\d+)', resources),
                                strict=True)]
  return Compiled(
      program.name, target, seconds, kernels=len(ptx),
      registers=max(numbers(r'Used (\d+) registers', reports), default=0),
      spill_bytes=sum(numbers(r'(\d+) bytes spill', reports)),
      smem_bytes=max(numbers(r'smem_scratch_bytes=(\d+)', resources), default=0),
      tmem_columns=max(tmem, default=0), temp_bytes=temp, opcodes=dict(opcodes), missing=missing)


if __name__ == '__main__':
  _main()
