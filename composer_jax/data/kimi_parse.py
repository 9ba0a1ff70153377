"""From the ids that a Kimi model sampled to reasoning, text and tool calls.

    [reasoning] </think> [text] <|tool_calls_section_begin|>
      <|tool_call_begin|> functions.name:0 <|tool_call_argument_begin|> {"a": 1} <|tool_call_end|>
      ...
    <|tool_calls_section_end|> <|im_end|>

Marks are recognised by their ids alone: the same characters inside reasoning, text or arguments are
text. Whatever is malformed comes back as data (`BadCall`, `Problem`), for the harness to answer;
nothing here raises on account of what a model wrote. As in vLLM's parser, a section of calls ends
unclosed reasoning. Format: moonshotai/Kimi-K2-Instruct, docs/tool_call_guidance.md.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from composer_jax.data.tokenizer_base import Tokenizer

# Part in the grammar -> spelling.
MARKS = {
    'end': '<|im_end|>', 'middle': '<|im_middle|>',
    'section_begin': '<|tool_calls_section_begin|>', 'section_end': '<|tool_calls_section_end|>',
    'call_begin': '<|tool_call_begin|>', 'argument_begin': '<|tool_call_argument_begin|>',
    'call_end': '<|tool_call_end|>',
}
THINK_MARKS = {'think_open': '<think>', 'think_close': '</think>'}

_CALL_ID = re.compile(r'(?:functions\.)?+([A-Za-z_][A-Za-z0-9_.-]*):[0-9]{1,9}')


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A well-formed call.

  Attributes:
    id: as the model wrote it, `functions.name:index`; the answer has to repeat it.
    name: the function.
    arguments: the JSON object.
    text: its JSON text.
  """

  id: str
  name: str
  arguments: Mapping[str, Any]
  text: str


@dataclasses.dataclass(frozen=True)
class BadCall:
  """A call that cannot be carried out.

  Attributes:
    kind: `missing_id`, `bad_id`, `duplicate_id`, `unknown_tool`, `bad_json`, `not_an_object`,
      `unknown_form` (marks in another order) or `truncated`.
    message: one line for the model.
    id: the id, as far as one was written.
  """

  kind: str
  message: str
  id: str = ''


@dataclasses.dataclass(frozen=True)
class Problem:
  """A flaw outside the calls.

  Attributes:
    kind: `unexpected_mark`, `stray_text` (in or after the section of calls), `unclosed_reasoning`,
      `unclosed_section` or `after_end`.
    message: one line.
  """

  kind: str
  message: str


@dataclasses.dataclass(frozen=True)
class Turn:
  """What a model said.

  Attributes:
    reasoning: text inside the thinking block.
    content: text outside of it, before the calls.
    calls: in their order, good and bad ones.
    problems: flaws outside the calls.
    ended: whether the model ended its turn; False for a turn cut off by a limit.
  """

  reasoning: str
  content: str
  calls: tuple[ToolCall | BadCall, ...]
  problems: tuple[Problem, ...]
  ended: bool


def parse(tokenizer: Tokenizer, ids: Sequence[int], *, in_reasoning: bool = False,
          may_reason: bool = False, tools: Collection[str] | None = None) -> Turn:
  """Parses one turn.

  Args:
    tokenizer: a Kimi tokenizer.
    ids: what the model sampled after the prompt; any ids at all.
    in_reasoning: the prompt ended with `<think>`.
    may_reason: the model may begin with `<think>` itself.
    tools: names of the functions that there are; None admits every name.
  """
  machine = _Machine(tokenizer, in_reasoning, may_reason, tools)
  for position, token in enumerate(ids):
    machine.take(int(token))
    if machine.ended:
      if position + 1 < len(ids):
        machine.problem('after_end', f'{len(ids) - position - 1} tokens after the end of the turn')
      break
  return machine.finish()


def parse_call(call_id: str, text: str, tools: Collection[str] | None = None
               ) -> ToolCall | BadCall:
  """Returns the call with this id and this JSON text, or what is wrong with it."""
  call_id = call_id.strip()
  if not call_id:
    return BadCall('missing_id', 'a tool call has no id; write functions.NAME:INDEX')
  match = _CALL_ID.fullmatch(call_id)
  if not match:
    return BadCall('bad_id', f'{call_id!r} is no id of a tool call; write functions.NAME:INDEX',
                   call_id)
  name = match[1]
  if tools is not None and name not in tools:
    return BadCall('unknown_tool', f'there is no tool {name}', call_id)
  try:
    arguments = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
  except (ValueError, RecursionError) as error:
    return BadCall('bad_json', f'the arguments of {call_id} are not JSON: {error}', call_id)
  if not isinstance(arguments, dict):
    return BadCall('not_an_object', f'the arguments of {call_id} are no JSON object', call_id)
  return ToolCall(call_id, name, arguments, text)


def _no_constant(word: str) -> NoReturn:
  raise ValueError(f'{word} is no JSON number')


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) != len(pairs):
    raise ValueError('a key is there twice')
  return found


class _Machine:
  """Reads a turn id by id; `state` is the part of the grammar that it is in."""

  def __init__(self, tokenizer: Tokenizer, in_reasoning: bool, may_reason: bool,
               tools: Collection[str] | None):
    self._tokenizer = tokenizer
    self._marks = {tokenizer.specials[token]: part for part, token in
                   (MARKS | THINK_MARKS).items() if token in tokenizer.specials}
    self._special_ids = set(tokenizer.specials.values())
    self._may_reason = may_reason
    self._tools = tools
    self._state = 'reasoning' if in_reasoning else 'content'
    self._texts: dict[str, list[int]] = {'reasoning': [], 'content': [], 'section': [],
                                         'header': [], 'arguments': []}
    self._section_seen = False
    self._in_section = False
    self._flaw = ''  # of the call being read
    self._calls: list[ToolCall | BadCall] = []
    self._problems: list[Problem] = []
    self.ended = False

  def take(self, token: int) -> None:
    """Reads one id."""
    if 0 <= token < self._tokenizer.vocab_size and token not in self._special_ids:
      self._texts[self._state].append(token)
      return
    part = self._marks.get(token, '')
    if part == 'end':
      self.ended = True
      return
    step = _STEPS.get((self._state, part))
    if step is None or not step(self):
      self._unexpected(token)

  def problem(self, kind: str, message: str) -> None:
    """Notes a flaw outside the calls."""
    self._problems.append(Problem(kind, message))

  def finish(self) -> Turn:
    """Returns the turn after its last id."""
    if self._state in ('header', 'arguments'):
      self._add(BadCall('truncated', 'the tool call is cut off', self._text('header').strip()))
    elif self._state == 'reasoning':
      self.problem('unclosed_reasoning', 'the reasoning has no end')
    if self._in_section:
      self.problem('unclosed_section', 'the section of tool calls has no end')
    if self._text('section').strip():
      self.problem('stray_text', 'there is text between or after the tool calls')
    return Turn(self._text('reasoning'), self._text('content'), tuple(self._calls),
                tuple(self._problems), self.ended)

  def _text(self, state: str) -> str:
    return self._tokenizer.decode(self._texts[state])

  def _unexpected(self, token: int) -> None:
    inside = 0 <= token < self._tokenizer.vocab_size
    name = self._tokenizer.decode([token]) if inside else f'id {token}'
    if self._state in ('header', 'arguments'):
      self._flaw = self._flaw or f'{name} inside a tool call'
    else:
      self.problem('unexpected_mark', f'{name} at a place where it means nothing')

  def _add(self, call: ToolCall | BadCall) -> None:
    if isinstance(call, ToolCall) and any(call.id == other.id for other in self._calls):
      call = BadCall('duplicate_id', f'the id {call.id} is there twice', call.id)
    self._calls.append(call)
    self._flaw = ''
    self._texts['header'], self._texts['arguments'] = [], []
    self._state = 'section' if self._section_seen else 'content'

  # Steps of the grammar; each returns whether its mark means something here.

  def think_open(self) -> bool:
    """Reasoning that the model begins itself: only as its first word, and only once."""
    if not self._may_reason or self._text('content').strip() or self._texts['reasoning']:
      return False
    self._may_reason = False
    self._state = 'reasoning'
    return True

  def think_close(self) -> bool:
    """The end of reasoning."""
    self._state = 'content'
    return True

  def section_begin(self) -> bool:
    """The beginning of the one section of calls; ends unclosed reasoning."""
    if self._section_seen:
      return False
    self._section_seen = self._in_section = True
    self._state = 'section'
    return True

  def section_end(self) -> bool:
    """The end of the section; what follows is stray."""
    if not self._in_section:
      return False
    if self._state in ('header', 'arguments'):
      self._add(BadCall('truncated', 'the tool call is cut off', self._text('header').strip()))
    self._in_section = False
    return True

  def call_begin(self) -> bool:
    """The beginning of a call, be it at a wrong place."""
    if self._state in ('header', 'arguments'):
      self._add(BadCall('truncated', 'the tool call is cut off', self._text('header').strip()))
    if not self._in_section:
      self._flaw = 'a tool call outside the section of tool calls'
    self._state = 'header'
    return True

  def argument_begin(self) -> bool:
    """The end of the id."""
    self._state = 'arguments'
    return True

  def call_end(self) -> bool:
    """The end of a call."""
    call_id = self._text('header').strip()
    if self._flaw:
      self._add(BadCall('unknown_form', self._flaw, call_id))
    elif self._state == 'header':
      kind = 'unknown_form' if call_id else 'missing_id'
      self._add(BadCall(kind, 'a tool call without arguments', call_id))
    else:
      try:
        text = self._tokenizer.decode_bytes(self._texts['arguments']).decode()
      except UnicodeDecodeError:
        self._add(BadCall('bad_json', f'the arguments of {call_id} are not UTF-8', call_id))
      else:
        self._add(parse_call(call_id, text, self._tools))
    return True


_Step = Callable[[_Machine], bool]
_STEPS: dict[tuple[str, str], _Step] = {
    ('content', 'think_open'): _Machine.think_open,
    ('reasoning', 'think_close'): _Machine.think_close,
    ('reasoning', 'section_begin'): _Machine.section_begin,
    ('content', 'section_begin'): _Machine.section_begin,
    ('content', 'call_begin'): _Machine.call_begin,
    ('section', 'call_begin'): _Machine.call_begin,
    ('section', 'section_end'): _Machine.section_end,
    ('header', 'argument_begin'): _Machine.argument_begin,
    ('header', 'call_end'): _Machine.call_end,
    ('header', 'call_begin'): _Machine.call_begin,
    ('header', 'section_end'): _Machine.section_end,
    ('arguments', 'call_end'): _Machine.call_end,
    ('arguments', 'call_begin'): _Machine.call_begin,
    ('arguments', 'section_end'): _Machine.section_end,
}
