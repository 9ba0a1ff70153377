"""Peers that work, fail, die, or are none; nothing stays behind."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from composer_jax.bench import worker as worker_lib
from composer_jax.bench.worker import Worker
from composer_jax.cli import main as cli
from composer_jax.errors import InfrastructureError, UserError

STUB = pathlib.Path(__file__).parent / 'stub_peer.py'


@pytest.fixture
def stub(tmp_path):
  """Returns a function: answers -> script of a peer that gives them."""
  def make(**answers):
    (tmp_path / 'answers.json').write_text(json.dumps(answers))
    return shutil.copy(STUB, tmp_path)
  return make


def test_answers_in_order_and_the_end_ends_it(stub):
  script = stub(step=[{'seconds': 1}, {'seconds': 2}])
  with Worker(sys.executable, script, threads=2) as worker:
    assert worker.about['torch'] == 'stub'
    assert [worker.ask('step')['seconds'] for _ in range(3)] == [1, 2, 2]
    process = psutil.Process(worker._process.pid)
    assert process.environ()['OMP_WAIT_POLICY'] == 'PASSIVE'  # an idle peer must not spin
    assert 'PYTHONPATH' not in process.environ()
  assert not process.is_running()


@pytest.mark.parametrize('answer, message', [
    ({'error': 'ValueError: too big'}, "failed in 'step': ValueError: too big"),
    ('die', 'ended with code 1: MemoryError: the last line'),
    ('talk', 'something other than JSON: not JSON'),
    ('hang', 'no answer for 0 s')])
def test_a_peer_that_fails_midway(stub, monkeypatch, answer, message):
  monkeypatch.setattr(worker_lib, 'ANSWER_S', 0.3 if answer == 'hang' else 60)
  with pytest.raises(InfrastructureError, match=message):
    with Worker(sys.executable, stub(step=[{}, answer]), threads=1) as worker:
      process = psutil.Process(worker._process.pid)
      worker.ask('step')
      worker.ask('step')
  assert not process.is_running()


def test_a_late_answer_is_not_taken_for_the_next_one(stub, monkeypatch):
  monkeypatch.setattr(worker_lib, 'ANSWER_S', 0.3)
  with Worker(sys.executable, stub(step=['hang', {}]), threads=1) as worker:
    with pytest.raises(InfrastructureError, match='no answer for 0 s'):
      worker.ask('step')
    monkeypatch.setattr(worker_lib, 'ANSWER_S', 60)
    with pytest.raises(InfrastructureError, match='ended with code -9'):
      worker.ask('step')


def test_interpreters_that_do_not_do(tmp_path):
  needs = tmp_path / 'needs.py'
  needs.write_text('import a_package_that_is_not_there\n')
  for python, script, message in (
      ('/no/such/python', needs, 'No such file'),
      (str(tmp_path), needs, 'Permission denied'),
      (sys.executable, needs, "No module named 'a_package_that_is_not_there'; it has to be a Py"),
      (shutil.which('cat'), needs, 'other than JSON'),
      (shutil.which('true'), needs, 'ended with code 0: it said nothing')):
    with pytest.raises(UserError, match=message):
      Worker(python, script, threads=1)


def test_ctrl_c_and_kill_leave_no_peer(stub, tmp_path):
  """SIGINT to the parent alone (as the peer has its own session), and SIGKILL."""
  code = textwrap.dedent("""
      import signal
      import sys
      from composer_jax.bench.worker import Worker
      signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits none
      with Worker(sys.executable, sys.argv[1], threads=1) as worker:
        print(worker._process.pid, flush=True)
        if sys.argv[2] == 'busy':
          worker.ask('step')
        sys.stdin.read()
      """)
  for number, state in ((signal.SIGINT, 'busy'), (signal.SIGKILL, 'idle')):
    parent = subprocess.Popen([sys.executable, '-c', code, stub(step=['hang']), state],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL)
    peer = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, number)
    try:
      parent.wait(timeout=90)
    finally:
      parent.kill()
    parent.stdin.close()
    parent.stdout.close()
    psutil.wait_procs([peer], timeout=90)
    assert not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize('arguments, message', [
    ([], 'needs one of train_step, kernels'),
    (['train_stp'], 'did you mean train_step?'),
    (['train_step', '--steps=0'], '--steps=0: has to be at least 1'),
    (['kernels', '--ops=softmax'], 'linear_cross_entropy'),
    (['kernels', '--targets=h200'], '--compile_only'),
    (['kernels', '--peer_python=/no/such/python'], '--peer_python=/no/such/python: No such file'),
    (['train_step', '--config=x'], 'takes no --config')])
def test_wrong_command_lines(capsys, arguments, message):
  assert cli.main(['bench', *arguments]) == 2
  err = capsys.readouterr().err
  assert message in err and err.count('\n') == 1
