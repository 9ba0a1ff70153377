"""SIGTERM and Ctrl-C in stages with sandboxes: one line, nothing left running, nothing lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from composer_jax import metrics
from composer_jax.cli import config_file
from composer_jax.recipe import runner

OVERRIDES = {'rl.steps': '10', 'eval.tasks': '6'}  # enough of both to be stopped in the middle
FILES = {'rl': 'metrics.jsonl', 'eval_sft': 'rows.jsonl'}


@pytest.fixture(scope='module')
def folder(smoke_run, command_line, tmp_path_factory):
  """A run that has done everything up to SFT."""
  folder = tmp_path_factory.mktemp('stopped') / 'run'
  config = config_file.load(command_line.config.partition('=')[2], OVERRIDES.items())
  assert runner.adopt_stages(config, folder, [smoke_run]) == ['data', 'cpt', 'long_context', 'sft']
  shutil.copytree(smoke_run / '.xla', folder / '.xla')
  return folder


@pytest.fixture
def arguments(folder):
  return [f'--workdir={folder}', *(f'--config.{key}={value}' for key, value in OVERRIDES.items())]


def stop_at(command_line, arguments, stage, path, lines, number):
  """Starts the stage, sends a signal once the file has so many lines, and waits for the end.

  Returns the exit code and what was said on standard error, progress aside.
  """
  process = command_line.start('run', command_line.config, f'--stages={stage}', *arguments,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               start_new_session=True)
  try:
    while not path.exists() or path.read_text().count('\n') < lines:
      assert process.poll() is None, process.stderr.read()
      time.sleep(0.001)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, number)  # as a terminal does
    _, err = process.communicate(timeout=300)
  finally:
    process.kill()
  assert not psutil.wait_procs(children, timeout=20)[1]
  return process.returncode, [line for line in err.splitlines()
                              if not re.match(r'\w+: \d+/\d+ ', line)]


@pytest.mark.parametrize('stage', ['eval_sft', 'rl'])
def test_a_stopped_stage_says_so_and_continues(command_line, folder, arguments, stage):
  path = folder / 'stages' / stage / FILES[stage]
  for number, lines in ((signal.SIGTERM, 2), (signal.SIGINT, 5)):
    code, said = stop_at(command_line, arguments, stage, path, lines, number)
    assert code == 128 + number, said
    assert said == [f'composer-jax: stopped by {number.name}; the same command continues']
    assert not (path.parent / 'summary.json').exists(), 'stopped too late'
  command_line.run_smoke(folder, f'--stages={stage}', *arguments[1:])
  if stage == 'rl':
    assert [row['step'] for row in metrics.read(path)] == list(range(1, 11))
    assert json.loads((path.parent / 'summary.json').read_text())['steps'] == 10
  else:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({(row['task_id'], row['sample']) for row in rows}) == len(rows) == 6 * 8
