"""One finished smoke run that the tests of recipe, API and notebooks look at."""

import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

# Most of the tests' time is compilation. Set before JAX starts, and inherited by what tests start.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMOKE = ROOT / 'experiments' / 'tiny' / 'smoke.py'


class CommandLine:
  """Starts `python -m composer_jax` as a user would, with the smoke config."""

  root = ROOT
  config = f'--config={SMOKE}'
  # Programs that are quick to compile and slow to run.
  environment = os.environ | {'JAX_PLATFORMS': 'cpu',
                              'XLA_FLAGS': '--xla_backend_optimization_level=0'}

  def start(self, verb, *arguments, **options):
    command = [sys.executable, '-m', 'composer_jax', verb, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, **options)

  def run(self, verb, *arguments):
    """Runs to the end; returns (exit code, stdout, stderr)."""
    process = self.start(verb, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
      out, err = process.communicate(timeout=900)
    finally:
      process.kill()
    return process.returncode, out, err

  def run_smoke(self, workdir, *arguments):
    """Runs the smoke config, which has to succeed; returns stdout."""
    code, out, err = self.run('run', self.config, f'--workdir={workdir}', *arguments)
    assert code == 0, err
    assert 'Traceback' not in err
    return out


@pytest.fixture(scope='session')
def command_line():
  return CommandLine()


@pytest.fixture(scope='session')
def smoke_run(tmp_path_factory, command_line):
  """Folder of a run of the whole smoke recipe; only to be read."""
  shared = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:  # each worker has a folder of its own in a common one
    shared = shared.parent
  folder = shared / 'smoke_run'
  with (shared / 'smoke_run.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker makes it; if it fails, the next one tries
    if not (shared / 'smoke_run.done').exists():
      command_line.run_smoke(folder)
      (shared / 'smoke_run.done').touch()
  return folder


def _products(jaxpr, inside=()):
  import jax  # not before the environment is set
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if 'dot' in name:
      yield equation, inside
    for inner in jax.tree.leaves(equation.params):
      if hasattr(inner, 'eqns'):
        yield from _products(inner, (*inside, name))


@pytest.fixture
def products():
  """A function jaxpr -> every matrix product in it, with the names of the operations around it."""
  return lambda closed: list(_products(closed.jaxpr))
