"""Hostile candidates fail, correct ones pass, broken sandboxes are nobody's failure."""

import json
import time

import pytest

from composer_jax.envs import grading
from composer_jax.envs.sandbox import SandboxError, SandboxPool
from composer_jax.envs.types import Case
from composer_jax.errors import InfrastructureError

CASES = [
  Case('calc', 'calc([3, 1, 2], 2)', '[6, 2, 4]'),
  Case('calc', 'calc([], 5)', '[]'),
  Case('calc', 'calc(None, 5)', 'raises TypeError'),
]
CORRECT = 'def calc(xs, p):\n  return [x * p for x in xs]\n'

# Each knows the interface and the visible behaviour, none computes the right answer.
HOSTILE = {
  'wrong': 'def calc(xs, p):\n  return [x + p for x in xs]\n',
  'empty': '',
  'syntax': 'def calc(:\n',
  'exit at import': 'import os\nos._exit(0)\n',
  'exit in call': 'import os\ndef calc(xs, p):\n  os._exit(0)\n',
  'system exit': 'def calc(xs, p):\n  raise SystemExit(0)\n',
  'fake verdict': """
import os, sys
print('PASS', flush=True)
print('{"ok": true, "reprs": ["[6, 2, 4]"], "passed": true}', flush=True)
for fd in range(3, 20):
  try:
    os.write(fd, b'\\0\\0\\0\\x04PASS\\0\\0\\0\\0' * 3)
  except OSError:
    pass
os._exit(0)
""",
  'equal to everything': """
class Yes:
  def __eq__(self, other): return True
  def __repr__(self): return '[6, 2, 4]'
  def __hash__(self): return 0
def calc(xs, p):
  return Yes()
""",
  'forged list': """
class Forged(list):
  def __repr__(self): return '[6, 2, 4]'
def calc(xs, p):
  return Forged()
""",
  'patched builtins': """
import builtins, sys
builtins.repr = lambda x: 'True'
builtins.sorted = builtins.len = lambda x: []
builtins.eval = lambda *a: True
sys.modules['__main__'].safe_repr = lambda *a: 'True'
sys.modules['__main__']._evaluate = lambda *a: ('True', '')
def calc(xs, p):
  return True
""",
  'hang': 'def calc(xs, p):\n  while True: pass\n',
  'hang at import': 'while True: pass\n',
  'recursion': 'def calc(xs, p):\n  return calc(xs, p)\n',
  'deep result': 'def calc(xs, p):\n  for _ in range(100000): xs = [xs]\n  return xs\n',
  'crash': 'import ctypes\ndef calc(xs, p):\n  ctypes.string_at(0)\n',
  'huge': 'def calc(xs, p):\n  return "x" * 3_000_000\n',
  'memory': 'def calc(xs, p):\n  return len(bytearray(1 << 40))\n',
  'look for the answers': """
import os, gc, sys
def calc(xs, p):
  seen = []
  for folder, _, files in os.walk('/workspace'):
    seen += [open(os.path.join(folder, f)).read() for f in files]
  seen += [o for o in gc.get_objects() if type(o) is dict and 'expected_repr' in o]
  frame = sys._getframe()
  while frame:
    seen += [v for v in frame.f_locals.values() if type(v) is dict and 'expected_repr' in v]
    frame = frame.f_back
  return eval(next(s['expected_repr'] for s in seen if type(s) is dict))
""",
  'kill the parent': 'import os, signal\nos.kill(-1, 9)\nos.kill(1, 9)\nos.kill(os.getpid(), 9)\n',
  'leave a helper': """
import os, time
if os.fork():
  os._exit(0)
time.sleep(60)
""",
}


@pytest.fixture(scope='module')
def pool():
  with SandboxPool(2) as pool:
    yield pool


@pytest.fixture(scope='module')
def grader(pool):
  return grading.Grader(pool, timeout_s=2.0)


def finish(ticket, seconds=60.0):
  end = time.monotonic() + seconds
  while (verdict := ticket.poll()) is None:
    assert time.monotonic() < end
    time.sleep(0.002)
  return verdict


def test_correct_passes(grader):
  ticket = grader.submit({'calc.py': CORRECT}, CASES)
  assert finish(ticket) is True and ticket.detail == ''
  assert ticket.reprs == [c.expected_repr for c in CASES]


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_fails(grader, pool, name):
  ticket = grader.submit({'calc.py': HOSTILE[name]}, CASES)
  assert finish(ticket) is False and ticket.detail
  assert pool.replaced == 0  # nor did it break its sandbox
  assert finish(grader.submit({'calc.py': CORRECT}, CASES)) is True


def test_all_cases_must_pass(grader):
  source = 'def calc(xs, p):\n  return [6, 2, 4] if xs else xs\n'
  ticket = grader.submit({'calc.py': source}, CASES)
  assert finish(ticket) is False
  assert ticket.reprs[0] == CASES[0].expected_repr
  assert 'calc(None, 5)' in ticket.detail
  with pytest.raises(ValueError, match='no cases'):
    grader.submit({'calc.py': CORRECT}, [])


def test_expected_values_are_not_sent(grader, monkeypatch):
  sent = []
  monkeypatch.setattr(
    grading.Sandbox, 'send',
    lambda self, request, send=grading.Sandbox.send: (sent.append(request), send(self, request)),
  )  # fmt: skip
  assert finish(grader.submit({'calc.py': CORRECT}, CASES)) is True
  text = json.dumps(sent)
  assert 'calc([], 5)' in text
  assert not any(c.expected_repr in text for c in CASES if c.expected_repr != '[]')


def test_bad_files_are_the_candidates_fault(grader):
  for files in ({'../x': ''}, {'calc.py': CORRECT, 'big': 'x' * (20 << 20)}):
    assert finish(grader.submit(files, CASES)) is False


def test_more_submissions_than_sandboxes(grader, pool):
  sources = [CORRECT, HOSTILE['wrong'], HOSTILE['exit at import']] * 8
  tickets = [grader.submit({'calc.py': s}, CASES) for s in sources]
  assert [finish(t) for t in tickets] == [s == CORRECT for s in sources]
  assert pool.available == pool.size


def test_forgotten_submissions_do_not_block(grader):
  for _ in range(5):
    grader.submit({'calc.py': CORRECT}, CASES)
  assert finish(grader.submit({'calc.py': CORRECT}, CASES)) is True


class NoSandboxes:
  """A pool on a machine that cannot start any process."""

  available = 1

  def acquire(self):
    raise SandboxError('cannot start a sandbox')


def test_sandboxes_that_cannot_start_are_no_verdict_and_nobody_waits_for_ever():
  grader = grading.Grader(NoSandboxes(), attempts=2)
  tickets = [grader.submit({'calc.py': CORRECT}, CASES) for _ in range(3)]
  for ticket in tickets:
    with pytest.raises(InfrastructureError, match='cannot start'):
      ticket.poll()
    assert ticket.passed is None


def test_a_submission_may_name_its_own_time_limit(grader):
  slow = 'import time\ndef calc(xs, p):\n  time.sleep(0.4)\n  return [x * p for x in xs]\n'
  assert finish(grader.submit({'calc.py': slow}, CASES)) is True
  assert finish(grader.submit({'calc.py': slow}, CASES, 0.2)) is False


def test_a_broken_sandbox_is_replaced_and_no_verdict():
  with SandboxPool(1) as pool:
    grader = grading.Grader(pool, timeout_s=60.0, attempts=2)
    slow = 'import time\ndef calc(xs, p):\n  time.sleep(0.3)\n  return [x * p for x in xs]\n'

    def kill_running(ticket, kills):
      done = 0
      while done < kills:
        ticket.poll()
        if pool._used:
          (sandbox,) = pool._used.values()
          if not sandbox.broken and sandbox.start_s is not None:
            sandbox._process.kill()
            sandbox._process.wait()
            done += 1
        time.sleep(0.005)

    ticket = grader.submit({'calc.py': slow}, CASES)
    kill_running(ticket, 1)
    assert finish(ticket) is True  # on a second sandbox
    ticket = grader.submit({'calc.py': slow}, CASES)
    kill_running(ticket, 1)
    with pytest.raises(InfrastructureError, match='grading failed'):
      kill_running(ticket, 5)
    with pytest.raises(InfrastructureError):
      ticket.poll()
    assert ticket.passed is None
    assert finish(grader.submit({'calc.py': CORRECT}, CASES)) is True
