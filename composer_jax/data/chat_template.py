"""Does a checkpoint's own chat template give what our renderer gives?

A published checkpoint brings a Jinja template. Training and sampling use `kimi_chat` instead, which
is append-only and takes marks from ids alone; here both are run on sample conversations, and every
difference is named.
"""

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from composer_jax.data import kimi_chat, kimi_tools
from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.data.tokenizer_base import Tokenizer
from composer_jax.errors import UserError
from composer_jax.files import read_json

_TOOLS = [{'type': 'function', 'function': {
    'name': 'read', 'description': 'Reads a file.', 'parameters': {
        'type': 'object', 'required': ['path'], 'properties': {
            'path': {'type': 'string', 'description': 'Where.'},
            'lines': {'type': 'integer', 'minimum': 1}}}}}]


def check_chat_template(folder: str | pathlib.Path) -> list[str]:
  """Compares the chat template of a Hugging Face folder with `kimi_chat`.

  Args:
    folder: holds the tokenizer, and a `chat_template.jinja` or a `chat_template` in its
      `tokenizer_config.json`.

  Returns:
    One line for each sample conversation that differs; empty when the two agree.

  Raises:
    UserError: no tokenizer or template there, or one that cannot be read.
  """
  folder = pathlib.Path(folder)
  if (folder / 'chat_template.jinja').is_file():
    template = (folder / 'chat_template.jinja').read_text()
  elif (folder / 'tokenizer_config.json').is_file():
    template = read_json(folder / 'tokenizer_config.json').get('chat_template')
  else:
    template = None
  if not isinstance(template, str):
    raise UserError(f'{folder}: holds no chat template (chat_template.jinja)')
  return differences(tokenizer_lib.load(folder), template, str(folder))


def differences(tokenizer: Tokenizer, template: str, where: str = 'chat template') -> list[str]:
  """Compares a template with `kimi_chat` on sample conversations.

  Args:
    tokenizer: a Kimi tokenizer.
    template: text of the Jinja template.
    where: names the template in messages.

  Returns:
    One line for each conversation that differs.

  Raises:
    UserError: the template cannot be run.
  """
  try:
    style = style_of(template)
    renderer = kimi_chat.KimiRenderer(tokenizer, style)
    lines = []
    for name, messages, tools in _samples(style):
      theirs = render(template, messages, tools, thinking=style != 'k2_5_instant')
      ours = kimi_chat.render_messages(renderer, messages, tools).ids
      if encode_marked(tokenizer, theirs) != ours:
        lines.append(f'{where}: {name}: {_first_difference(theirs, tokenizer.decode(ours))}')
    return lines
  except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
    raise UserError(f'{where}: the template cannot be run ({error})') from error


def style_of(template: str) -> kimi_chat.Style:
  """Returns the style of a template, from how its prompt ends."""
  prompt = render(template, [{'role': 'user', 'content': 'x'}])
  if prompt.endswith('<think>'):
    return 'k2_5'
  if prompt.endswith('</think>'):
    return 'k2_5_instant'
  return 'k2_thinking' if '<think>' in template else 'k2'


def render(template: str, messages: Sequence[Mapping[str, Any]], tools: kimi_tools.Tools = (), *,
           thinking: bool = True) -> str:
  """Renders OpenAI messages and the prompt with a template, in the environment of `transformers`.

  K2.5's tokenizer hands its template the declarations as TypeScript, and later templates keep
  earlier reasoning on demand; both are done here. The template runs in Jinja's sandbox.

  Args:
    template: text of the template.
    messages: OpenAI messages.
    tools: OpenAI objects.
    thinking: what the template is told about reasoning.

  Raises:
    jinja2.TemplateError: the template is malformed or refuses the messages.
  """
  return _compiled(template).render(
      messages=list(messages), tools=list(tools) or None, add_generation_prompt=True,
      tools_ts_str=kimi_tools.as_typescript(tools) if tools else None, thinking=thinking,
      preserve_thinking=True)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _raise
  return environment.from_string(template)


def encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
  """Returns the ids of rendered text, in which special spellings stand for special ids.

  Only for text of one's own: a user's text may contain such spellings.
  """
  names = sorted(tokenizer.specials, key=len, reverse=True)
  pieces = re.split('(' + '|'.join(map(re.escape, names)) + ')', text)
  return list(itertools.chain.from_iterable(
      [tokenizer.specials[piece]] if n % 2 else tokenizer.encode(piece)
      for n, piece in enumerate(pieces)))


def _samples(style: str) -> list[tuple[str, list[dict[str, Any]], kimi_tools.Tools]]:
  """Returns (name, messages, tools) of conversations in which both have to agree."""
  system = {'role': 'system', 'content': 'Be brief.'}
  user = {'role': 'user', 'content': ' Häuser 漢字\n\n  "quoted" '}
  reasoning = {'reasoning_content': 'Look first.\n'} if style in ('k2_thinking', 'k2_5') else {}

  def asking(*numbers: int) -> dict[str, Any]:
    return {'role': 'assistant', 'content': 'I look. ', **reasoning, 'tool_calls': [
        {'id': f'functions.read:{n}', 'type': 'function', 'function': {
            'name': 'read', 'arguments': json.dumps({'path': f'ä{n}'})}} for n in numbers]}

  def answers(*numbers: int) -> list[dict[str, Any]]:
    return [{'role': 'tool', 'tool_call_id': f'functions.read:{n}', 'content': f'  line {n}\n'}
            for n in numbers]

  said = {'role': 'assistant', 'content': 'Done.'}
  return [
      ('one question', [system, user], ()),
      ('two questions', [system, user, said, user], ()),
      ('declared tools', [system, user], _TOOLS),
      ('parallel calls', [system, user, asking(0, 1), *answers(0, 1)], _TOOLS),
      ('calls in a row', [system, user, asking(0), *answers(0), asking(1, 2), *answers(1, 2)],
       _TOOLS),
  ]


def _first_difference(theirs: str, ours: str) -> str:
  if theirs == ours:
    return 'the same text, cut into other ids'
  at = next((n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b),
            min(len(theirs), len(ours)))
  begin = max(0, at - 20)
  return (f'at character {at} the template gives {theirs[begin:at + 30]!r}, '
          f'the renderer {ours[begin:at + 30]!r}')


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
  """The filter as `transformers` defines it: plain JSON, without HTML escapes."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                    sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)
