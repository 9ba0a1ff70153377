"""The agent loop: one `Episode` is one attempt at one task, driven from outside and never blocking.

It implements the scheduler's session protocol structurally: `poll` says READY (tokens to feed,
then a turn to sample), WAITING (the sandbox or the grader works) or DONE. The token buffer is
append-only: sampled ids are kept as they came and nothing is encoded twice.
"""

import enum
import hashlib
import time
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from composer_jax.envs import rewards
from composer_jax.envs.tools import registry
from composer_jax.envs.tools.parse import parse
from composer_jax.envs.types import (
  CallResult,
  Case,
  Limits,
  Request,
  Response,
  SandboxHandle,
  StopReason,
  Task,
  Trace,
  Turn,
)
from composer_jax.errors import InfrastructureError


class Status(enum.StrEnum):
  """What an episode wants next; the values are those of the scheduler's own enum."""

  READY = 'ready'
  WAITING = 'waiting'
  DONE = 'done'


class _Phase(enum.Enum):
  RESET = enum.auto()
  READY = enum.auto()  # tokens are pending
  TURN = enum.auto()  # the model speaks
  TOOL = enum.auto()
  SNAPSHOT = enum.auto()
  GRADING = enum.auto()
  DONE = enum.auto()


class ChatRenderer(Protocol):
  """The part of `data.chat.Renderer` that the harness uses."""

  end_id: int

  def user(self, text: str) -> list[int]: ...
  def call_open(self) -> list[int]: ...
  def call(self, text: str) -> list[int]: ...
  def result(self, text: str) -> list[int]: ...
  def call_text(self, ids: Sequence[int]) -> str: ...


class Ticket(Protocol):
  """A grading in progress."""

  def poll(self) -> bool | None:
    """Returns the verdict, None while it is not there; raises InfrastructureError if none comes."""


class GraderLike(Protocol):
  """Runs hidden cases in a process that never shared anything with the agent's code."""

  def submit(self, files: Mapping[str, str], cases: Sequence[Case],
             timeout_s: float | None = None) -> Ticket:
    """Starts grading final files; `timeout_s` bounds all cases together."""


_ABORT_REASONS = {
  'context_full': StopReason.CONTEXT_FULL,
  'budget': StopReason.MAX_TOKENS,
  'shutdown': StopReason.ABORTED,
  'error': StopReason.INFRASTRUCTURE,  # a method of ours raised: our fault, never the agent's
}
_CUTS = (StopReason.TURN_CUT, StopReason.MAX_TOKENS)


class Episode:
  """One attempt at one task.

  Deterministic: the same delivered tokens give the same results, trace and reward (wall times
  aside). A failure of the sandbox or the grader ends it with `StopReason.INFRASTRUCTURE` and no
  reward.

  Attributes:
    id: `group_id/sample_index`; seeds the sampling of this episode.
    group_id: attempts at the same prompt share it.
    tokens: all token ids so far.
    trainable: for each token, whether the model sampled it.
    turns: what happened so far.
    stop: why it ended, None while it runs.
    reward: 1, 0, or None (no verdict, or not over).
  """

  def __init__(self, task: Task, sandbox: SandboxHandle, grader: GraderLike,
               renderer: ChatRenderer, limits: Limits | None = None, group_id: str = '',
               sample_index: int = 0,
               release: Callable[[SandboxHandle], None] | None = None):
    """Starts the workspace reset.

    Args:
      task: what to do.
      sandbox: an idle sandbox, ours until the episode is over.
      grader: decides on the hidden cases.
      renderer: encodes the conversation.
      limits: instead of the task's own.
      group_id: defaults to the task's id.
      sample_index: number of this attempt within its group.
      release: called once with the sandbox, as soon as the episode does not need it any more.
    """
    self.task = task
    self.limits = limits or task.limits
    self.group_id = group_id or task.id
    self.sample_index = sample_index
    self.id = f'{self.group_id}/{sample_index}'
    self.tokens: list[int] = []
    self.trainable: list[bool] = []
    self.turns: list[Turn] = []
    self.stop: StopReason | None = None
    self.reward: float | None = None
    self._sandbox, self._grader, self._renderer = sandbox, grader, renderer
    self._release = release
    self._hash = hashlib.blake2b(digest_size=8)
    self._context_hashes: list[str] = []
    self._hidden_pass: bool | None = None
    self._final: dict[str, str] = {}
    self._error = ''
    self._started = self._turn_started = time.monotonic()
    self._wall_s = 0.0
    self._pending = [*renderer.user(task.instruction), *renderer.call_open()]
    self._prompt_tokens = len(self._pending) - len(renderer.call_open())
    self._phase = _Phase.RESET
    self._run: Generator[Request, Response, object] | None = None
    self._start(_reset(task))

  # Session protocol.

  def poll(self) -> Status:
    """Advances as far as the sandbox and the grader have answered, without blocking."""
    while self._phase in (_Phase.RESET, _Phase.TOOL, _Phase.SNAPSHOT):
      try:
        response = self._sandbox.poll()
      except InfrastructureError as error:
        self._fail(error)
        break
      if response is None:
        return Status.WAITING
      self._feed(response)
    if self._phase == _Phase.GRADING:
      self._poll_grader()
    if self._phase == _Phase.DONE:
      return Status.DONE
    return Status.WAITING if self._phase == _Phase.GRADING else Status.READY

  def next_tokens(self) -> list[int]:
    """Returns the ids to append before the model speaks; once per READY."""
    if self._phase != _Phase.READY:
      raise RuntimeError(f'{self.id}: next_tokens while {self._phase.name}')
    pending, self._pending = self._pending, []
    self._append(pending, sampled=False)
    self._phase = _Phase.TURN
    return pending

  def max_new_tokens(self) -> int:
    """Returns how many tokens this turn may sample, its end token included."""
    left = self.limits.max_tokens - len(self.tokens) - len(self._pending)
    return min(self.limits.max_turn_tokens, left)

  def deliver(self, tokens: list[int], ended: bool) -> None:
    """Takes the sampled ids of a turn; `ended` False means that it was cut."""
    if self._phase != _Phase.TURN:
      raise RuntimeError(f'{self.id}: deliver while {self._phase.name}')
    self._context_hashes.append(self._hash.hexdigest())
    start = len(self.tokens)
    self._append(tokens, sampled=True)
    end = len(self.tokens)
    self._turn_started = time.monotonic()
    text = self._renderer.call_text(tokens)
    call = parse(text, self.task.tools, self.task.entry) if ended else None
    self.turns.append(Turn(text, call, None, (start, end), (end, end), ended))
    if call is None:
      turn_cap = len(tokens) >= self.limits.max_turn_tokens
      self._end(StopReason.TURN_CUT if turn_cap else StopReason.MAX_TOKENS)
    elif call.error is not None:
      self._answer(CallResult(f'error: {call.message}', call.error))
    elif call.name == 'finish':
      self._phase = _Phase.SNAPSHOT
      self._start(_snapshot(self.task))
    else:
      self._phase = _Phase.TOOL
      self._start(registry.run(call, self.task))

  def abort(self, reason: str) -> None:
    """Stops from outside; a precise reason overrides our own reading of a cut turn."""
    stop = _ABORT_REASONS.get(reason, StopReason.ABORTED)
    if self._phase != _Phase.DONE:
      self._end(stop, error=reason if stop == StopReason.INFRASTRUCTURE else '')
    elif self.stop in _CUTS and self.turns and not self.turns[-1].ended:
      self.stop = stop
      self.reward = rewards.task_reward(stop, self._hidden_pass)

  # What is left behind.

  @property
  def waiting_on(self) -> SandboxHandle | None:
    """The sandbox whose answer is awaited, for selectors; None when none is."""
    busy = self._phase in (_Phase.RESET, _Phase.TOOL, _Phase.SNAPSHOT)
    return self._sandbox if busy else None

  def trace(self) -> Trace:
    """Returns the record of a finished episode.

    Raises:
      RuntimeError: the episode is not over.
    """
    if self._phase != _Phase.DONE or self.stop is None:
      raise RuntimeError(f'{self.id}: trace of an episode that is not over')
    parts = rewards.reward_parts(self.turns, self.stop, self._hidden_pass, self._prompt_tokens)
    return Trace(
      task_id=self.task.id, level=self.task.level, group_id=self.group_id,
      sample_index=self.sample_index, instruction=self.task.instruction, stop_reason=self.stop,
      reward=self.reward, valid=self.reward is not None,
      failure=rewards.failure_class(self.stop, self._hidden_pass), parts=parts, turns=self.turns,
      prompt_span=(0, min(self._prompt_tokens, len(self.tokens))), tokens=self.tokens,
      trainable=self.trainable, context_hashes=self._context_hashes,
      diff={p: t for p, t in self._final.items() if t != self.task.files.get(p)},
      wall_s=self._wall_s, error=self._error,
      meta={k: v for k, v in self.task.meta.items() if k != 'wrong_edits'})

  # The state machine.

  def _append(self, tokens: list[int], *, sampled: bool) -> None:
    self.tokens.extend(tokens)
    self.trainable.extend([sampled] * len(tokens))
    self._hash.update(array('I', tokens).tobytes())

  def _start(self, run: Generator[Request, Response, object]) -> None:
    self._run = run
    self._feed(None)

  def _feed(self, response: Response | None) -> None:
    """Resumes the running request sequence with a response and sends its next request."""
    try:
      self._sandbox.send(self._run.send(response))
    except StopIteration as stop:
      self._run = None
      self._completed(stop.value)
    except InfrastructureError as error:
      self._fail(error)
    except (KeyError, TypeError, ValueError) as error:
      self._fail(InfrastructureError(f'malformed response of the sandbox: {error!r}'))

  def _completed(self, value: object) -> None:
    if self._phase == _Phase.RESET:
      room = self.limits.max_tokens - len(self._pending)
      if room < 1:
        self._end(StopReason.MAX_TOKENS)
      else:
        self._phase = _Phase.READY
    elif self._phase == _Phase.TOOL:
      self._answer(value)
    else:
      self._grade(value)

  def _answer(self, result: CallResult) -> None:
    """Records a tool's answer and decides whether the model may speak again."""
    turn = self.turns[-1]
    result = _cut(result, self.limits.output_bytes)
    turn.result = result
    turn.wall_s = time.monotonic() - self._turn_started
    if len(self.turns) >= self.limits.max_calls:
      self._end(StopReason.MAX_CALLS)
      return
    body = self._renderer.result(result.text)
    pending = [*body, *self._renderer.call_open()]
    if len(self.tokens) + len(pending) + 1 > self.limits.max_tokens:
      self._end(StopReason.MAX_TOKENS)
      return
    turn.result_span = (len(self.tokens), len(self.tokens) + len(body))
    self._pending = pending
    self._phase = _Phase.READY

  def _grade(self, final: dict[str, str]) -> None:
    self.turns[-1].wall_s = time.monotonic() - self._turn_started
    self._final = final
    self._give_back()
    self._error = rewards.contraband(self.task, final)
    if self._error:
      self._hidden_pass = False
      self._end(StopReason.FINISHED, error=f'borrowed the original: {self._error}')
      return
    kept = {p: self.task.files[p] for p in self.task.protected}
    self._phase = _Phase.GRADING
    try:
      self._ticket = self._grader.submit({**final, **kept}, self.task.hidden,
                                         self.limits.test_timeout_s)
    except InfrastructureError as error:
      self._fail(error)

  def _poll_grader(self) -> None:
    try:
      verdict = self._ticket.poll()
    except InfrastructureError as error:
      self._fail(error)
      return
    if verdict is not None:
      self._hidden_pass = bool(verdict)
      self._end(StopReason.FINISHED)

  def _fail(self, error: InfrastructureError) -> None:
    """Ends without a verdict, unless the agent's own code filled the sandbox's memory."""
    blamed = getattr(error, 'out_of_memory', False)
    self._end(StopReason.CRASHED if blamed else StopReason.INFRASTRUCTURE, error=str(error))

  def _end(self, stop: StopReason, error: str = '') -> None:
    self._phase = _Phase.DONE
    self._pending = []
    self.stop = stop
    self._error = error
    self.reward = rewards.task_reward(stop, self._hidden_pass)
    self._wall_s = time.monotonic() - self._started
    self._give_back()

  def _give_back(self) -> None:
    if self._release is not None:
      release, self._release = self._release, None
      release(self._sandbox)


def _reset(task: Task) -> Generator[Request, Response, None]:
  response = yield {'op': 'reset', 'files': task.files}
  if not response['ok']:
    raise InfrastructureError(f'reset refused: {response.get("message")}')


def _snapshot(task: Task) -> Generator[Request, Response, dict[str, str]]:
  """Reads back the files that count; protected ones and files that code created do not."""
  final = {}
  for path in task.files:
    if path in task.protected:
      continue
    response = yield {'op': 'read_file', 'path': path}
    if response['ok']:
      final[path] = response['text']
  return final


def _cut(result: CallResult, limit: int) -> CallResult:
  data = result.text.encode('utf-8', errors='replace')
  if len(data) <= limit:
    return result
  text = data[:limit].decode('utf-8', errors='ignore') + '\n[cut]'
  return CallResult(text, result.error_class, result.passed)
