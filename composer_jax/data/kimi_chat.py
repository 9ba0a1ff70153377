"""Conversations with Kimi K2 and K2.5 as tokens: append-only, role mask exact to the token.

    <|im_system|>tool_declare<|im_middle|>DECLARATIONS<|im_end|>
    <|im_system|>system<|im_middle|>TEXT<|im_end|>
    <|im_user|>user<|im_middle|>TEXT<|im_end|>
    <|im_assistant|>assistant<|im_middle|><think>MODEL TOKENS<|im_end|>
    <|im_system|>tool<|im_middle|>## Return of functions.name:0
    TEXT<|im_end|>

(without line breaks between the messages). The model owns everything from the end of the prompt to
its `<|im_end|>`; what it owns is parsed by `kimi_parse`. Each piece between two marks is encoded on
its own, as the published templates do it in effect, and pieces are only ever appended: sampled ids
are never encoded again. Reasoning of earlier turns therefore stays, which is what the K2.6 template
calls `preserve_thinking`; the K2.5 template drops it once a turn without calls has followed, so the
two agree up to the first such turn, and wherever turns have no reasoning. No system message is put
in where there is none, as K2's template does (`chat_template.check_chat_template` compares the
two).

Sources: chat_template.jinja of moonshotai/Kimi-K2-Instruct, Kimi-K2-Thinking and Kimi-K2.5.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from composer_jax.data import kimi_parse, kimi_tools
from composer_jax.data.chat import Segment, flatten
from composer_jax.data.kimi_parse import ToolCall, Turn
from composer_jax.data.tokenizer_base import Tokenizer
from composer_jax.errors import UserError

# k2 does not reason; k2_thinking opens its reasoning itself; for k2_5 the prompt opens it, and for
# k2_5_instant the prompt opens and closes it.
Style = Literal['k2', 'k2_thinking', 'k2_5', 'k2_5_instant']
_PROMPT_END = {'k2': (), 'k2_thinking': (), 'k2_5': ('<think>',),
               'k2_5_instant': ('<think>', '</think>')}


class KimiRenderer:
  """Encodes the pieces of a conversation; stateless, so that it can serve many at once.

  Attributes:
    tokenizer: the tokenizer in use.
    style: which model's conversations.
    end_id: id of `<|im_end|>`, which the model has to sample to end a turn.
  """

  def __init__(self, tokenizer: Tokenizer, style: Style = 'k2_5'):
    """Looks up the marks.

    Raises:
      UserError: the tokenizer lacks one of them.
    """
    if style not in _PROMPT_END:
      raise UserError(f'chat style {style}: there are {", ".join(_PROMPT_END)}')
    self.tokenizer = tokenizer
    self.style = style
    needed = {**kimi_parse.MARKS, 'user': '<|im_user|>', 'assistant': '<|im_assistant|>',
              'system': '<|im_system|>', **(kimi_parse.THINK_MARKS if style != 'k2' else {})}
    self._marks = {part: tokenizer.special(token) for part, token in needed.items()}
    self._prompt_end = [tokenizer.special(token) for token in _PROMPT_END[style]]
    self.end_id = self._marks['end']

  def _message(self, mark: str, name: str, text: str) -> list[int]:
    return [*self._opening(mark, name), *self.tokenizer.encode(text), self.end_id]

  def _opening(self, mark: str, name: str) -> list[int]:
    return [self._marks[mark], *self.tokenizer.encode(name), self._marks['middle']]

  def declare(self, tools: kimi_tools.Tools) -> list[int]:
    """Returns the declaration of tools, given as OpenAI objects; the first message of all."""
    typescript = self.style in ('k2_5', 'k2_5_instant')
    text = kimi_tools.as_typescript(tools) if typescript else kimi_tools.as_json(tools)
    return self._message('system', 'tool_declare', text)

  def system(self, text: str, name: str = 'system') -> list[int]:
    """Returns a system message; `name` is who speaks."""
    return self._message('system', name, text)

  def user(self, text: str, name: str = 'user') -> list[int]:
    """Returns a user's message; `name` is who speaks."""
    return self._message('user', name, text)

  def result(self, call_id: str, text: str, name: str = 'tool') -> list[int]:
    """Returns the answer to the tool call `call_id`."""
    return self._message('system', name, f'## Return of {call_id}\n{text}')

  def call_open(self, name: str = 'assistant') -> list[int]:
    """Returns the prompt after which the model speaks, under this name."""
    return [*self._opening('assistant', name), *self._prompt_end]

  def call(self, content: str = '', reasoning: str = '', calls: Iterable[tuple[str, str]] = ()
           ) -> list[int]:
    """Returns what a model that says this samples, its end included; for demonstrations.

    Args:
      content: text.
      reasoning: text of the thinking block.
      calls: (id, JSON text of the arguments) pairs.

    Raises:
      UserError: there is reasoning in a style without.
    """
    encode, marks = self.tokenizer.encode, self._marks
    if reasoning and self.style in ('k2', 'k2_5_instant'):
      raise UserError(f'the chat style {self.style} has no reasoning')
    ids = [marks['think_open']] if self.style == 'k2_thinking' else []
    if self.style in ('k2_thinking', 'k2_5'):
      ids += [*encode(reasoning), marks['think_close']]
    ids += encode(content)
    calls = list(calls)
    if calls:
      ids.append(marks['section_begin'])
      for call_id, text in calls:
        ids += [marks['call_begin'], *encode(call_id), marks['argument_begin'], *encode(text),
                marks['call_end']]
      ids.append(marks['section_end'])
    return [*ids, self.end_id]

  def parse(self, ids: Sequence[int], tools: Collection[str] | None = None) -> Turn:
    """Returns what sampled ids say; see `kimi_parse.parse`."""
    return kimi_parse.parse(self.tokenizer, ids, in_reasoning=self.style == 'k2_5',
                            may_reason=self.style == 'k2_thinking', tools=tools)


class Conversation:
  """One growing conversation; ids that are there never change.

  Attributes:
    renderer: encodes the pieces.
    segments: runs of ids with one owner each, in order.
  """

  def __init__(self, renderer: KimiRenderer):
    self.renderer = renderer
    self.segments: list[Segment] = []
    self._calls = 0
    self._speaking = False
    self._cut = False

  @property
  def ids(self) -> list[int]:
    """All ids."""
    return flatten(self.segments)[0]

  @property
  def trainable(self) -> list[bool]:
    """For each id, whether the model owns it."""
    return flatten(self.segments)[1]

  def _context(self, ids: Iterable[int]) -> None:
    if self._speaking:
      raise ValueError('it is the turn of the model')
    if self._cut:  # the model was cut off: the end that it did not sample is not its own
      ids = [self.renderer.end_id, *ids]
      self._cut = False
    self.segments.append(Segment(tuple(ids), False))

  def declare(self, tools: kimi_tools.Tools) -> None:
    """Appends the declaration of tools; it has to come first."""
    if self.segments:
      raise ValueError('tools are declared before the first message')
    self._context(self.renderer.declare(tools))

  def system(self, text: str, name: str = 'system') -> None:
    """Appends a system message."""
    self._context(self.renderer.system(text, name))

  def user(self, text: str, name: str = 'user') -> None:
    """Appends a user's message."""
    self._context(self.renderer.user(text, name))

  def result(self, call_id: str, text: str, name: str = 'tool') -> None:
    """Appends the answer to a tool call."""
    self._context(self.renderer.result(call_id, text, name))

  def call_open(self, name: str = 'assistant') -> None:
    """Appends the prompt after which the model speaks."""
    self._context(self.renderer.call_open(name))
    self._speaking = True

  def sampled(self, ids: Sequence[int], tools: Collection[str] | None = None) -> Turn:
    """Appends sampled ids as they are, and returns what they say.

    Args:
      ids: from the end of the prompt to `<|im_end|>`, or to where a limit cut the turn off.
      tools: names of the functions that there are; None admits every name.
    """
    if not self._speaking:
      raise ValueError('it is not the turn of the model')
    turn = self.renderer.parse(ids, tools)
    self.segments.append(Segment(tuple(ids), True))
    self._speaking, self._cut = False, not turn.ended
    self._calls += len(turn.calls)
    return turn

  def say(self, content: str = '', reasoning: str = '',
          calls: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> list[ToolCall]:
    """Appends a prompt and a demonstrated turn; returns its calls with the ids they were given.

    Args:
      content: text.
      reasoning: text of the thinking block.
      calls: (function, arguments) pairs. Ids count on over the whole conversation.
    """
    made = [ToolCall(f'functions.{name}:{self._calls + n}', name, arguments,
                     json.dumps(arguments, ensure_ascii=False))
            for n, (name, arguments) in enumerate(calls)]
    self.call_open()
    self.sampled(self.renderer.call(content, reasoning, [(call.id, call.text) for call in made]))
    return made


def render_messages(renderer: KimiRenderer, messages: Iterable[Mapping[str, Any]],
                    tools: kimi_tools.Tools = (), *, prompt: bool = True) -> Conversation:
  """Renders OpenAI messages.

  Args:
    renderer: the renderer.
    messages: objects with `role` (system, user, assistant or tool) and `content`; an assistant's
      may have `reasoning_content` and `tool_calls`, a tool's has `tool_call_id`. A `name` takes
      the role's place behind the mark, whatever the role, as in the published templates.
    tools: OpenAI objects to declare; none are declared where it is empty.
    prompt: end with the prompt after which the model speaks.

  Raises:
    UserError: a message has another role, or content that is no text; a tool call or an answer has
      no id, or two calls of the conversation have the same.
  """
  conversation = Conversation(renderer)
  if tools:
    conversation.declare(tools)
  seen: set[str] = set()
  for number, message in enumerate(messages):
    role, content = message.get('role'), message.get('content') or ''
    if not isinstance(content, str):
      raise UserError(f'messages[{number}].content: is no text')
    name = message.get('name') or role
    if role == 'system':
      conversation.system(content, name)
    elif role == 'user':
      conversation.user(content, name)
    elif role == 'tool':
      call_id = _checked_id(message.get('tool_call_id'), f'messages[{number}].tool_call_id')
      conversation.result(call_id, content, name)
    elif role == 'assistant':
      calls = [_asked(call, number, seen) for call in message.get('tool_calls') or ()]
      conversation.call_open(name)
      conversation.sampled(renderer.call(content, message.get('reasoning_content') or '', calls))
    else:
      raise UserError(f'messages[{number}].role: {role} is none of system, user, assistant, tool')
  if prompt:
    conversation.call_open()
  return conversation


def _asked(call: Mapping[str, Any], number: int, seen: set[str]) -> tuple[str, str]:
  """Returns the id, which joins `seen`, and the JSON text of an OpenAI tool call."""
  where = f'messages[{number}].tool_calls'
  try:
    arguments = call['function']['arguments']
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call_id = call.get('id')
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise UserError(f'{where}: is damaged ({error!r})') from error
  call_id = _checked_id(call_id, f'{where}: id')
  if call_id in seen:
    raise UserError(f'{where}: id {call_id!r} belongs to an earlier call of the conversation')
  seen.add(call_id)
  return call_id, text


def _checked_id(call_id: Any, where: str) -> str:
  if not isinstance(call_id, str) or not call_id.strip():
    raise UserError(f'{where}: has to be a text that is not empty, got {call_id!r}')
  return call_id
