"""Command lines as a user types them; each error is one line and has its exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_jax.cli import main as cli
from composer_jax.cli import run as run_verb
from composer_jax.errors import InfrastructureError, NumericsError, UserError

TINY = Path(__file__).resolve().parents[2] / 'experiments' / 'tiny' / 'composer2.py'


@pytest.fixture
def run(capsys):
  """Runs a command line in this process; returns exit code, output and error output."""
  def call(*argv):
    code = cli.main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err
  return call


def _one_line(err: str) -> str:
  assert err.startswith('composer-jax: error: ') and err.count('\n') == 1 and err.endswith('\n')
  return err


def test_help_lists_every_verb(run):
  code, out, _ = run('--help')
  assert code == 0
  for verb in ('run', 'data', 'eval', 'sweep', 'report', 'doctor', 'plan', 'serve', 'bench'):
    assert f'\n  {verb} ' in out


def test_no_verb(run):
  code, out, _ = run()
  assert code == 2 and 'usage:' in out


def test_unknown_verb_lists_what_there_is(run):
  code, _, err = run('rnu')
  assert code == 2
  assert 'did you mean run?' in _one_line(err) and 'doctor' in err


@pytest.mark.parametrize('verb', list(cli.LATER))
def test_later_verbs_say_so(run, verb):
  code, _, err = run(verb, '--config=x')
  assert code == 2 and 'comes later' in _one_line(err) and 'run, data' in err


@pytest.mark.parametrize('verb', list(cli.VERBS))
def test_help_of_a_verb(run, verb):
  code, out, _ = run(verb, '--help')
  assert code == 0 and f'composer-jax {verb}' in out and '--json' in out


@pytest.mark.parametrize(('argv', 'message'), [
    (['run', '--worklist=x'], 'worklist'),
    (['run', 'extra', '--workdir=x'], "argument 'extra'"),
    (['run', '--config=x.py'], '--workdir=DIR is missing'),
    (['run', '--workdir=x'], '--config=FILE is missing'),
    (['run', '--workdir=x', '--config'], '--config needs a value'),
    (['run', '--workdir=x', '--config.a.b', '--dry_run'], '--config.a.b needs a value'),
    (['run', '--workdir=x', '--config=no/such.py'], 'no/such.py: there is no such file'),
    (['data', '--workdir=x'], 'needs one of build, inspect'),
    (['data', 'biuld', '--workdir=x'], 'did you mean build?'),
    (['report', '--workdir=no/such'], 'there is no such folder'),
    (['report', '--workdir=.', '--config.a=1'], 'takes no --config'),
    (['eval', '--workdir=no/such'], 'there is no such folder'),
    (['doctor', '--model=huge'], 'huge'),
])
def test_mistakes(run, argv, message):
  code, _, err = run(*argv)
  assert code == 2 and message in _one_line(err)


def test_report_of_a_folder_without_a_run(run, tmp_path):
  code, _, err = run('report', f'--workdir={tmp_path}')
  assert code == 2 and 'holds no run' in _one_line(err)


@pytest.mark.parametrize(('error', 'code'), [
    (UserError('a\nb'), 2), (InfrastructureError('no sandbox'), 3), (NumericsError('nan'), 4),
    (OSError(28, 'No space left on device', 'file'), 3), (KeyboardInterrupt(), 130)])
def test_exit_codes(run, monkeypatch, error, code):
  def fail(argv):
    raise error
  monkeypatch.setattr(cli, '_dispatch', fail)
  got, _, err = run('run')
  assert got == code and err.count('\n') == 1


def test_sigterm_closes_what_is_open_and_ends_with_one_line(run, monkeypatch):
  closed = []

  def work(argv):
    try:
      os.kill(os.getpid(), signal.SIGTERM)
      signal.pause()
    finally:
      closed.append(True)
  monkeypatch.setattr(cli, '_dispatch', work)
  before = signal.getsignal(signal.SIGTERM)
  code, _, err = run('run')
  assert closed and code == 143
  assert err == 'composer-jax: stopped by SIGTERM; the same command continues\n'
  assert signal.getsignal(signal.SIGTERM) == before


def test_unexpected_errors_keep_their_traceback(monkeypatch):
  def fail(argv):
    raise RuntimeError('a fault of ours')
  monkeypatch.setattr(cli, '_dispatch', fail)
  with pytest.raises(RuntimeError, match='a fault of ours'):
    cli.main(['run'])


def _process(*argv, cwd):
  return subprocess.run([sys.executable, '-m', 'composer_jax', *argv], cwd=cwd, text=True,
                        capture_output=True, check=False)


def test_help_starts_no_jax(tmp_path):
  start = time.monotonic()
  done = _process('run', '--help', cwd=tmp_path)
  assert done.returncode == 0 and 'usage: composer-jax run' in done.stdout
  code = ('import sys; from composer_jax.cli import main; main.main(["run", "--help"]); '
          'assert "jax" not in sys.modules')
  subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, cwd=tmp_path)
  assert time.monotonic() - start < 30


def test_typo_in_an_override(tmp_path):
  """The whole way of `run`, in a process of its own: one line, code 2, and nothing was made."""
  done = _process('run', f'--config={TINY}', '--workdir=w', '--config.cpt.stpes=3', cwd=tmp_path)
  assert done.returncode == 2
  assert 'did you mean steps?' in _one_line(done.stderr)
  assert not (tmp_path / 'w').exists()


def test_wrong_type_in_an_override(run, tmp_path):
  code, _, err = run('run', f'--config={TINY}', f'--workdir={tmp_path}/w', '--config.cpt.steps=x')
  assert code == 2 and "config.cpt.steps: expected int, got str 'x'" in _one_line(err)
  assert not (tmp_path / 'w').exists()


def test_json_file(run, tmp_path):
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'manifest.json').write_text('{"sources": {}}')
  code, out, _ = run('data', 'inspect', f'--workdir={tmp_path}', f'--json={tmp_path}/out.json')
  assert code == 0 and json.loads(out) == {'sources': {}}
  assert json.loads((tmp_path / 'out.json').read_text()) == {'sources': {}}


def test_last_lines_of_a_run_without_verdicts():
  results = {'eval': {'sft': {'pass_at_1': None, 'ci95': None, 'tasks': 3}}}
  assert run_verb.summary(results) == ['eval sft: no attempt got a verdict  tasks 3']
