"""Which special token of a tokenizer plays which part in documents and conversations.

The corpus and the harness need six marks. Every family of tokenizers spells them its own way:

    pad      fills rows
    doc      stands before each document
    user     opens an instruction
    call     opens what the model says
    result   opens what a tool answers
    end      ends each of the last three
"""

import types
from collections.abc import Collection, Mapping
from typing import Any

PAD = '<|pad|>'
DOC = '<|doc|>'
USER = '<|user|>'
CALL = '<|call|>'
RESULT = '<|result|>'
END = '<|end|>'
SPECIAL_TOKENS = (PAD, DOC, USER, CALL, RESULT, END)

ROLES = ('pad', 'doc', 'user', 'call', 'result', 'end')

# Kimi K2 and K2.5: moonshotai/Kimi-K2.5, tokenizer_config.json and chat_template.jinja; a tool's
# answer is a system message. DeepSeek-V3: deepseek-ai/DeepSeek-V3, tokenizer_config.json.
FAMILIES: Mapping[str, Mapping[str, str]] = types.MappingProxyType({
    'composer': dict(zip(ROLES, SPECIAL_TOKENS, strict=True)),
    'kimi': {'pad': '[PAD]', 'doc': '[BOS]', 'user': '<|im_user|>', 'call': '<|im_assistant|>',
             'result': '<|im_system|>', 'end': '<|im_end|>'},
    'deepseek': {'pad': '<｜▁pad▁｜>', 'doc': '<｜begin▁of▁sentence｜>', 'user': '<｜User｜>',
                 'call': '<｜Assistant｜>', 'result': '<｜tool▁output▁begin｜>',
                 'end': '<｜end▁of▁sentence｜>'},
})


def roles_of(tokens: Collection[str], config: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
  """Returns the family of a tokenizer and its table role -> token.

  A family is recognised by holding all its tokens. Any other tokenizer is of the family `generic`
  and has the roles that its `tokenizer_config.json` names: pad, doc (the token that begins a
  sequence, or the one that ends it where there is none) and end.

  Args:
    tokens: spellings of the added tokens.
    config: content of `tokenizer_config.json`, empty where there is none.
  """
  for family, table in FAMILIES.items():
    if all(token in tokens for token in table.values()):
      return family, dict(table)
  named = {key: _spelling(config.get(f'{key}_token')) for key in ('bos', 'eos', 'pad')}
  roles = {'pad': named['pad'], 'doc': named['bos'] or named['eos'], 'end': named['eos']}
  return 'generic', {role: token for role, token in roles.items() if token in tokens}


def _spelling(value: Any) -> str:
  """Returns the spelling of a token that the config gives as a string or as an object."""
  if isinstance(value, Mapping):
    value = value.get('content')
  return value if isinstance(value, str) else ''
