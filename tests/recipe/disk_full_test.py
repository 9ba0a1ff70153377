"""The disk fills up between two checkpoints: one line, exit code 3, and the run continues later."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from composer_jax.checkpoint import leaves, manager
from composer_jax.envs.sandbox import bwrap

# Runs inside a namespace whose folder `small` is a file system of 24 MB.
INSIDE = """
import json, pathlib, shutil, subprocess, sys, time
small, out, command = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
shutil.copytree(out / 'run', small / 'run')
checkpoints = small / 'run' / 'stages' / 'cpt' / 'checkpoints'

def complete():
  return sorted(int(p.name) for p in checkpoints.glob('*') if p.name.isdigit())

process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
while not complete() and process.poll() is None:
  time.sleep(0.001)
ballast = open(small / 'ballast', 'wb', buffering=0)
for size in (1 << 20, 1 << 12, 1 << 6):
  try:
    while True:
      ballast.write(bytes(size))
  except OSError:
    pass
ballast.close()
_, error = process.communicate()
report = {'code': process.returncode, 'error': error, 'kept': complete()}
(small / 'ballast').unlink()
again = subprocess.run(command, capture_output=True, text=True)
report |= {'again': again.returncode, 'again_error': again.stderr}
if again.returncode == 0:
  shutil.copytree(small / 'run' / 'stages' / 'cpt' / 'params', out / 'params')
(out / 'report.json').write_text(json.dumps(report))
"""


@pytest.fixture(scope='module')
def outcome(smoke_run, command_line, tmp_path_factory):
  out = tmp_path_factory.mktemp('disk_full')
  small = out / 'small'
  small.mkdir()
  for name in ('config.json', 'data', 'stages/data', '.xla'):
    (out / 'run' / name).parent.mkdir(parents=True, exist_ok=True)
    (shutil.copy2 if name == 'config.json' else shutil.copytree)(
        smoke_run / name, out / 'run' / name)
  inside = out / 'inside.py'
  inside.write_text(INSIDE)
  command = [sys.executable, '-m', 'composer_jax', 'run', command_line.config,
             f'--workdir={small / "run"}', '--stages=cpt']
  subprocess.run(
      [bwrap.candidates()[0], '--unshare-user', '--die-with-parent', '--dev-bind', '/', '/',
       '--size', str(24 << 20), '--tmpfs', small, sys.executable, inside, small, out, *command],
      check=True, timeout=600, cwd=command_line.root, env=command_line.environment)
  return out, json.loads((out / 'report.json').read_text())


def test_it_ends_with_one_line_and_exit_code_3(outcome):
  report = outcome[1]
  assert report['code'] == 3, report['error']
  complaints = [line for line in report['error'].splitlines() if not line.startswith('cpt: ')]
  assert len(complaints) == 1, report['error']
  assert complaints[0].startswith('composer-jax: error: ')
  assert 'disk is full' in complaints[0] or 'No space left' in complaints[0]


def test_the_checkpoint_before_is_intact_and_the_run_continues(outcome, smoke_run):
  out, report = outcome
  assert report['kept']
  assert report['again'] == 0, report['again_error']
  assert 'damaged' not in report['again_error']
  ours, theirs = (leaves.flatten(manager.load_params(folder)[0])
                  for folder in (smoke_run / 'stages' / 'cpt' / 'params', out / 'params'))
  assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
