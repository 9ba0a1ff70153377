"""A sweep that is asked to stop lets its trial save, and waits for it."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import signal, sys, time
def save(number, frame):
  time.sleep(0.5)
  print('saving', file=sys.stderr, flush=True)
  open(sys.argv[1], 'a').write('saved')
  sys.exit(143)
signal.signal(signal.SIGTERM, save)
print('ready', file=sys.stderr, flush=True)
time.sleep(60)
"""
PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits none
from composer_jax.stopping import sigterm_unwinds
from composer_jax.sweep.runner import follow
with sigterm_unwinds():
  follow([sys.executable, '-c', sys.argv[1], sys.argv[2]])
"""


@pytest.mark.parametrize('how', ['ctrl_c', 'sigterm'])
def test_the_trial_saves_before_the_sweep_ends(tmp_path, how):
  saved = tmp_path / 'saved'
  process = subprocess.Popen([sys.executable, '-c', PARENT, CHILD, str(saved)],
                             stderr=subprocess.PIPE, text=True, start_new_session=True)
  assert process.stderr.readline() == 'ready\n'
  if how == 'ctrl_c':
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole group
  else:
    process.send_signal(signal.SIGTERM)
  assert 'saving' in process.stderr.read()
  assert process.wait(10) != 0
  assert saved.read_text() == 'saved'  # once, and before the sweep was gone


def test_a_second_request_kills(tmp_path):
  stubborn = CHILD.replace('time.sleep(0.5)', 'time.sleep(60)')
  process = subprocess.Popen([sys.executable, '-c', PARENT, stubborn, str(tmp_path / 'saved')],
                             stderr=subprocess.PIPE, text=True, start_new_session=True)
  assert process.stderr.readline() == 'ready\n'
  for _ in range(2):
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
  assert process.wait(10) != 0
  assert not (tmp_path / 'saved').exists()
