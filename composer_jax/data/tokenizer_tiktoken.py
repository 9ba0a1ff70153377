"""Kimi's `tiktoken.model`: one `base64(bytes) rank` a line, then 256 ids for special tokens.

The format, the split pattern, the special ids and the limits below are those of
`tokenization_kimi.py` and `tokenizer_config.json` in moonshotai/Kimi-K2-Instruct and
moonshotai/Kimi-K2.5. The merging is done by the `tiktoken` library.
"""

import base64
import binascii
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tiktoken

from composer_jax.data import tokenizer_roles
from composer_jax.data.tokenizer_base import Tokenizer
from composer_jax.errors import UserError

FILE = 'tiktoken.model'
RESERVED = 256

# Han characters are split off from other letters; words keep one leading mark and an English
# contraction; digits come in threes.
_LETTER = r'\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]'
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = '|'.join([
    r'[\p{Han}]+',
    rf'[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTER}]*[\p{{Ll}}{_LETTER}]+{_CONTRACTION}',
    rf'[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTER}]+[\p{{Ll}}{_LETTER}]*{_CONTRACTION}',
    r'\p{N}{1,3}',
    r' ?[^\s\p{L}\p{N}]+[\r\n]*',
    r'\s*[\r\n]+',
    r'\s+(?!\S)',
    r'\s+',
])

# Place after the last rank -> spelling, for a file without a `tokenizer_config.json`; with Kimi's
# 163,584 ranks [BOS] is 163584 and [PAD] 163839. K2.5 adds the media and thinking tokens to K2.
SPECIAL_PLACES = {
    0: '[BOS]', 1: '[EOS]', 2: '<|im_end|>', 3: '<|im_user|>', 4: '<|im_assistant|>',
    6: '<|start_header_id|>', 7: '<|end_header_id|>', 9: '[EOT]', 10: '<|im_system|>',
    11: '<|tool_calls_section_begin|>', 12: '<|tool_calls_section_end|>',
    13: '<|tool_call_begin|>', 14: '<|tool_call_argument_begin|>', 15: '<|tool_call_end|>',
    17: '<|im_middle|>', 18: '<|media_begin|>', 19: '<|media_content|>', 20: '<|media_end|>',
    21: '<|media_pad|>', 22: '<think>', 23: '</think>', 254: '[UNK]', 255: '[PAD]',
}

# Kimi's code cuts text into calls of at most so many characters, and of so many of one kind (space
# or not) in a row. A million spaces in one call overflow the library's stack.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000
_RUN = re.compile(r'\s+|\S+')


class TiktokenTokenizer(Tokenizer):
  """A Kimi tokenizer; lossless on any bytes."""

  def __init__(self, data: bytes, config: Mapping[str, Any], files: Mapping[str, bytes],
               where: str):
    """Reads the content of a `tiktoken.model`.

    Args:
      data: content of the file.
      config: content of `tokenizer_config.json`, whose `added_tokens_decoder` names the special
        ids; where it is missing, they are those of Kimi K2.5.
      files: name -> content of further files to carry along.
      where: names the tokenizer in messages.

    Raises:
      UserError: the file is damaged, or the config names ids that it has no room for.
    """
    ranks = _read_ranks(data, where)
    specials = _specials(len(ranks), config, where)
    family, roles = tokenizer_roles.roles_of(specials, config)
    table = [*sorted(ranks, key=ranks.__getitem__), *(name.encode() for name in specials)]
    super().__init__(where, table, specials, family, roles, {**files, FILE: data})
    self._encoding = tiktoken.Encoding(
        name='kimi', pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)

  def _encode_text(self, text: str) -> list[int]:
    if len(text) <= _MAX_RUN:
      return self._encoding.encode_ordinary(text)
    return list(itertools.chain.from_iterable(
        map(self._encoding.encode_ordinary, _chunks(text))))


def _read_ranks(data: bytes, where: str) -> dict[bytes, int]:
  """Returns token -> rank in the order of ranks 0, 1, ..."""
  if not data.isascii():
    raise UserError(f'{where}: is not a tiktoken file ("base64 rank" on each line); models of '
                    'sentencepiece cannot be read')
  ranks: dict[bytes, int] = {}
  seen: set[int] = set()
  for number, line in enumerate(data.splitlines(), 1):
    if not line:
      continue
    try:
      token64, rank_text = line.split()
      token, rank = base64.b64decode(token64, validate=True), int(rank_text)
    except (ValueError, binascii.Error) as error:
      raise UserError(f'{where}:{number}: is not a line "base64 rank" of a tiktoken file'
                      ) from error
    if not token or token in ranks:
      raise UserError(f'{where}:{number}: {"token is there twice" if token else "empty token"}')
    if rank in seen:
      raise UserError(f'{where}:{number}: rank {rank} is there twice')
    ranks[token] = rank
    seen.add(rank)
  if not ranks:
    raise UserError(f'{where}: holds no token')
  missing = next((rank for rank in range(len(ranks)) if rank not in seen), None)
  if missing is not None:
    raise UserError(f'{where}: rank {missing} is missing; the file is cut or damaged')
  return ranks


def _specials(first: int, config: Mapping[str, Any], where: str) -> dict[str, int]:
  """Returns spelling -> id of the ids `first` and following, in their order."""
  if 'added_tokens_decoder' in config:
    try:
      names = {int(index): str(token['content'])
               for index, token in config['added_tokens_decoder'].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise UserError(f'{where}: tokenizer_config.json: added_tokens_decoder is damaged '
                      f'({error!r})') from error
  else:
    names = {first + place: name for place, name in SPECIAL_PLACES.items()}
  outside = [index for index in names if not first <= index < first + RESERVED]
  if outside:
    raise UserError(f'{where}: has {first} ranks, so special ids lie in {first}..'
                    f'{first + RESERVED - 1}, but tokenizer_config.json gives {outside[0]} to '
                    f'{names[outside[0]]}; the two files do not belong together')
  specials = {names.get(index, f'<|reserved_token_{index}|>'): index
              for index in range(first, first + RESERVED)}
  if len(specials) != RESERVED:
    raise UserError(f'{where}: tokenizer_config.json: two special ids share one spelling')
  return specials


def _chunks(text: str) -> Iterator[str]:
  """Cuts text exactly where Kimi's own code does, since a cut can change the ids around it."""
  for begin in range(0, len(text), _MAX_CHARS):
    part = text[begin:begin + _MAX_CHARS]
    last = 0
    for run in _RUN.finditer(part):
      for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
        yield part[last:cut]
        last = cut
    yield part[last:]
