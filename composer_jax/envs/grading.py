"""The grader: decides on hidden cases, in sandboxes that never ran this episode's agent.

A grading sandbox is wiped, gets the final files and the *expressions* of the cases, and answers
with texts; expected values stay in this process, where the texts are compared. So nothing that the
candidate can do (exit, print, patch builtins, forge its answers) tells it what to answer. A
candidate that dies or floods fails, and so does one that hangs, twice: the first time it may have
been the machine that stood still. When a sandbox breaks, another one is tried, and then an
infrastructure failure is reported, which is no verdict.
"""

import collections
from collections.abc import Mapping, Sequence

from composer_jax.envs.sandbox import LATE, Sandbox, SandboxError, SandboxPool
from composer_jax.envs.tools.registry import wire
from composer_jax.envs.types import Case, Request
from composer_jax.errors import InfrastructureError


class Grading:
  """One submission on its way.

  Attributes:
    passed: the verdict, None until it is there.
    reprs: what the candidate answered, one text a case (see `envs.types.SandboxHandle`).
    detail: the first case that failed and why, for people; never shown to an agent.
  """

  def __init__(self, grader: 'Grader', request: Request, cases: Sequence[Case]):
    self.passed: bool | None = None
    self.reprs: list[str] = []
    self.detail = ''
    self._grader, self._request, self._cases = grader, request, cases
    self._sandbox: Sandbox | None = None
    self._errors: list[str] = []
    self._late = False

  def poll(self) -> bool | None:
    """Returns whether all cases passed, None while that is not known.

    Raises:
      InfrastructureError: sandboxes broke each time; nothing can be said about the candidate.
    """
    if not self.done:
      self._grader.advance(self)
    if self.passed is None and self.done:
      raise InfrastructureError('grading failed: ' + '; '.join(self._errors))
    return self.passed

  @property
  def done(self) -> bool:
    """True when `poll` has an answer, or an error."""
    return self.passed is not None or len(self._errors) >= self._grader.attempts

  def fileno(self) -> int | None:
    """Returns the descriptor to wait on; None while no sandbox is free for this submission."""
    return self._sandbox.fileno() if self._sandbox else None

  # Used by the grader.

  def start(self, sandbox: Sandbox) -> None:
    """Sends the submission to a sandbox."""
    self._sandbox = sandbox
    try:
      sandbox.send(self._request)
    except SandboxError as error:
      self.fail(error)

  def fail(self, error: SandboxError) -> None:
    """Counts a sandbox that broke, or that could not even be started."""
    self._errors.append(str(error))

  def step(self) -> Sandbox | None:
    """Looks for the answer; returns the sandbox once this submission does not need it any more."""
    if self._sandbox is None:
      return None
    if not self._sandbox.broken:
      try:
        response = self._sandbox.poll()
      except SandboxError as error:
        self._broke(error)
      else:
        if response is None:
          return None
        if response['ok']:
          self._judge(response)
        else:
          self._refuse(response)
    sandbox, self._sandbox = self._sandbox, None
    return sandbox

  def _broke(self, error: SandboxError) -> None:
    if error.out_of_memory:
      # The cgroup holds nothing but the sandbox, so the candidate took all of its memory.
      self.passed, self.detail = False, str(error)
    else:
      self.fail(error)

  def _refuse(self, response: Mapping) -> None:
    """The files cannot even be laid out (a bad path, too large): the candidate's fault."""
    self.passed, self.detail = False, f'files refused: {response["message"]}'

  def _judge(self, response: Mapping) -> None:
    if LATE in response['reprs'] and not self._late:
      self._late = True  # no verdict yet: the grader starts it again
      return
    self.reprs = response['reprs']
    answers = zip(self._cases, self.reprs, response['messages'], strict=True)
    wrong = [(c, got, why) for c, got, why in answers if got != c.expected_repr]
    self.passed = not wrong
    if wrong:
      case, got, why = wrong[0]
      self.detail = f'{case.expr}: got {got[:200]}, want {case.expected_repr[:200]} {why}'.rstrip()


class Grader:
  """Grades submissions side by side in the sandboxes of a pool of its own.

  Attributes:
    attempts: sandboxes that may break over one submission before it is given up.
  """

  def __init__(self, pool: SandboxPool, *, timeout_s: float = 5.0, attempts: int = 3):
    """Makes a grader.

    Args:
      pool: sandboxes for grading only; agents' code must not run in them. The caller closes it.
      timeout_s: wall-clock seconds for all cases of a submission that does not name its own.
      attempts: see the class.
    """
    self.attempts = attempts
    self._pool, self._timeout_s = pool, timeout_s
    self._waiting: collections.deque[Grading] = collections.deque()
    self._running: list[Grading] = []

  def submit(self, files: Mapping[str, str], cases: Sequence[Case],
             timeout_s: float | None = None) -> Grading:
    """Starts grading final files; never waits.

    Args:
      files: path -> text; the whole workspace.
      cases: must all give their expected value.
      timeout_s: wall-clock seconds for all cases together.

    Raises:
      ValueError: there are no cases, which would let anything pass.
    """
    if not cases:
      raise ValueError('nothing to grade: no cases')
    timeout = self._timeout_s if timeout_s is None else timeout_s
    request = {'op': 'run_cases', 'cases': [wire(c) for c in cases], 'timeout': timeout,
               'files': dict(files)}
    grading = Grading(self, request, tuple(cases))
    self._waiting.append(grading)
    self._fill()
    return grading

  def advance(self, grading: Grading) -> None:
    """Moves one submission on, and all running ones when it waits for a sandbox."""
    running = [grading] if grading in self._running else list(self._running)
    for other in running:
      sandbox = other.step()
      if sandbox is not None:
        self._pool.release(sandbox)
        self._running.remove(other)
        if not other.done:
          self._waiting.appendleft(other)
    self._fill()

  def _fill(self) -> None:
    while self._waiting and self._pool.available:
      grading = self._waiting.popleft()
      try:
        sandbox = self._pool.acquire()
      except SandboxError as error:  # charged to this submission, whoever's poll brought us here
        grading.fail(error)
        if not grading.done:
          self._waiting.appendleft(grading)
        continue
      self._running.append(grading)
      grading.start(sandbox)
