"""The nouns of an environment: task, case, limits, call, result, stop reason, trace.

A *task* is data. A *harness* (`envs.harness.Episode`) runs the agent loop on it, a *sandbox* is
where its code runs, and a *trace* says what happened. Nothing here runs code or imports jax.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Protocol

Request = dict[str, Any]
Response = dict[str, Any]


class StopReason(enum.StrEnum):
  """Why an episode ended; every cause has its own value, so that none is taken for another."""

  FINISHED = 'finished'  # the agent called `finish`
  MAX_CALLS = 'max_calls'  # the last allowed tool call was answered and was not `finish`
  MAX_TOKENS = 'max_tokens'  # the episode's token budget is spent
  TURN_CUT = 'turn_cut'  # one turn reached its own token cap before its end token
  CONTEXT_FULL = 'context_full'  # the sampler's context window is full
  CRASHED = 'crashed'  # the agent's code took all memory of its sandbox: the agent's fault
  ABORTED = 'aborted'  # stopped from outside (shutdown, stale weights): no verdict on the agent
  INFRASTRUCTURE = 'infrastructure'  # sandbox or grader broke: no verdict on the agent


class FailureClass(enum.StrEnum):
  """Who is to blame when an episode did not earn its reward."""

  AGENT = 'agent'  # wrong or hostile answer
  INFRA = 'infra'  # sandbox or grader broken or gone
  BUDGET = 'budget'  # calls, tokens or context ran out


class CallErrorClass(enum.StrEnum):
  """Why a tool call was not carried out; its result text is shown to the agent."""

  UNKNOWN_TOOL = 'unknown_tool'
  BAD_ARGUMENTS = 'bad_arguments'
  NOT_FOUND = 'not_found'
  NOT_ALLOWED = 'not_allowed'


@dataclasses.dataclass(frozen=True)
class Case:
  """One test: an expression, evaluated in a fresh child that imported the candidate.

  Attributes:
    module: dotted module imported as the candidate; its public names are in scope of `expr`.
    expr: Python expression over the module's names (and the module itself, by its last name).
    expected_repr: `repr` of the right value; it never enters a sandbox, comparison is done outside.
      A raised exception counts as the value `raises TypeName`.
    setup: statements run before `expr` in the same namespace.
    shown: short form for the message about a failing visible case; empty means `expr`.
  """

  module: str
  expr: str
  expected_repr: str
  setup: str = ''
  shown: str = ''


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of one episode (our choice; sized for the L0 tasks).

  Attributes:
    max_calls: tool calls, `finish` included.
    max_turn_tokens: sampled tokens of one turn, end token included.
    max_tokens: all tokens of the episode (prompt, sampled, results).
    test_timeout_s: wall-clock seconds of one `run_tests`, or of one grading.
    output_bytes: a tool result longer than this is cut.
  """

  max_calls: int = 8
  max_turn_tokens: int = 32
  max_tokens: int = 256
  test_timeout_s: float = 5.0
  output_bytes: int = 2048

  def __post_init__(self):
    if min(self.max_calls, self.max_turn_tokens, self.max_tokens, self.output_bytes) < 1 or (
        self.test_timeout_s <= 0):
      raise ValueError('limits must be above 0')


@dataclasses.dataclass(frozen=True)
class Task:
  """One repository to repair, with the tests the agent may see and the ones that decide.

  Attributes:
    id: unique and reproducible: same config, split and seed give the same id and content.
    level: `l0`, `l1` or `l2`.
    instruction: what the agent is told.
    files: path -> text of the starting workspace.
    visible: cases that `run_tests` runs.
    hidden: cases that decide the reward.
    entry: path that a `read_file` or `edit_file` without a path means.
    tools: names of the tools that exist in this task.
    limits: bounds of an episode.
    solution: path -> text of the files that the reference repair changes.
    protected: paths whose agent-made changes are dropped before grading.
    meta: family, slots, mutation class and so on; JSON-able; never shown to the agent.
  """

  id: str
  level: str
  instruction: str
  files: dict[str, str]
  visible: list[Case]
  hidden: list[Case]
  entry: str
  tools: tuple[str, ...] = ('read_file', 'edit_file', 'search', 'run_tests', 'finish')
  limits: Limits = Limits()
  solution: dict[str, str] = dataclasses.field(default_factory=dict)
  protected: tuple[str, ...] = ()
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call:
  """A parsed tool call. `error` set means that it must not be carried out."""

  name: str
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  error: CallErrorClass | None = None
  message: str = ''


@dataclasses.dataclass(frozen=True)
class CallResult:
  """What a tool answered: the text for the agent, and a class when it could not do its work."""

  text: str
  error_class: CallErrorClass | None = None
  passed: bool | None = None  # run_tests only


@dataclasses.dataclass
class Turn:
  """One turn of a trace; spans are half-open indices into the episode's token buffer.

  Attributes:
    text: what the model wrote, decoded (for people; the token ids are the record).
    call: the parsed call, or None when the turn was cut.
    result: the tool's answer, or None when there was none.
    call_span: the sampled tokens, end token included when there is one.
    result_span: the rendered tool result (empty when none was appended).
    ended: the model wrote its end token.
    wall_s: seconds from the delivered turn to the tool's answer.
  """

  text: str
  call: Call | None
  result: CallResult | None
  call_span: tuple[int, int]
  result_span: tuple[int, int]
  ended: bool
  wall_s: float = 0.0


@dataclasses.dataclass
class Trace:
  """What happened in one episode.

  Attributes:
    reward: the task reward, or None where nothing can be said about the agent (`valid` False).
    valid: False for infrastructure failures and aborts: never train on it, never average it.
    failure: who is to blame when `reward` is not 1.
    parts: named parts of the reward and the counts that a length penalty weighs; see
      `envs.rewards.reward_parts`.
    prompt_span: the user turn in the token buffer.
    tokens: all token ids, in the order in which the model saw them.
    trainable: one flag a token: sampled by the model.
    context_hashes: one a turn, hash of the tokens before it (what its sampling was conditioned on).
    diff: path -> final text of the files that the agent changed.
  """

  task_id: str
  level: str
  group_id: str
  sample_index: int
  instruction: str
  stop_reason: StopReason
  reward: float | None
  valid: bool
  failure: FailureClass | None
  parts: dict[str, float]
  turns: list[Turn]
  prompt_span: tuple[int, int]
  tokens: list[int]
  trainable: list[bool]
  context_hashes: list[str]
  diff: dict[str, str]
  wall_s: float
  error: str = ''
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """Returns plain JSON-able data."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> 'Trace':
    """Rebuilds a trace from `to_json` data."""
    values = dict(data)
    values['stop_reason'] = StopReason(values['stop_reason'])
    values['failure'] = FailureClass(values['failure']) if values['failure'] else None
    values['prompt_span'] = tuple(values['prompt_span'])
    values['turns'] = [_turn_from_json(t) for t in values['turns']]
    return cls(**values)


def _turn_from_json(data: Mapping[str, Any]) -> Turn:
  values = dict(data)
  for name in ('call_span', 'result_span'):
    values[name] = tuple(values[name])
  if values['call']:
    call = dict(values['call'])
    call['error'] = CallErrorClass(call['error']) if call['error'] else None
    values['call'] = Call(**call)
  if values['result']:
    result = dict(values['result'])
    error = result['error_class']
    result['error_class'] = CallErrorClass(error) if error else None
    values['result'] = CallResult(**result)
  return Turn(**values)


class SandboxHandle(Protocol):
  """What tools need of a sandbox: one request in flight, answered without blocking.

  Requests (`op`) and the fields of their responses; a request that cannot be served answers
  `{"ok": False, "error": CLASS, "message": ...}`, all others have `"ok": True`:
    reset      files {path: text}                     ->
    read_file  path                                   -> text (the whole file)
    write_file path, text                             ->
    list                                              -> paths [str]
    search     pattern (plain text), limit            -> matches [[path, line number, line]]
    run_cases  cases [{module, setup, expr}], timeout -> reprs [str]; a case that raised answers
               `raises TypeName`, one that ran out of time or died `timeout` / `died`
  """

  def send(self, request: Request) -> None:
    """Sends one request; raises InfrastructureError when the sandbox is gone."""

  def poll(self) -> Response | None:
    """Returns the response when it is there, else None; raises InfrastructureError if broken."""

  def fileno(self) -> int:
    """Returns the descriptor that becomes readable with the response (for selectors)."""
