"""Byte-level BPE in the JSON format of the `tokenizers` library: our own and published ones.

Our own pre-split is made for code and small vocabularies: a word with an optional leading space, a
single digit, a single punctuation mark with an optional leading space, or a newline with its
indentation. A line number, an operator and an identifier therefore never share a token, and an
edited line costs the same tokens wherever it stands.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from composer_jax.data import tokenizer_roles
from composer_jax.data.tokenizer_base import Tokenizer, to_bytes
from composer_jax.errors import UserError

FILE = 'tokenizer.json'

_PRE_SPLIT = r' ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]|\n[ \t]*|[^\S\n]+'
_ASCII_PRE_SPLIT = re.compile(
    r' ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\n[ \t]*|[^\S\n]+', re.ASCII)
_MAX_PIECES = 200_000  # pieces whose ids are remembered; some 30 MB
_MARK = re.compile(r'<[|｜].*[|｜]>', re.DOTALL)


class BpeTokenizer(Tokenizer):
  """A `tokenizer.json`; normaliser and pre-tokenizer are those of the file.

  Added tokens that the file calls special are never made from text. Published files leave some of
  their marks (such as `<｜User｜>`) without that flag: added tokens spelled `<|...|>` are special
  here in any case. Other added tokens (runs of spaces, words) are made from text as the file says.
  Where the file has no normaliser, decoding gives back any bytes; with one (Qwen's NFC), it gives
  back normalised text.
  """

  def __init__(self, text: str, config: Mapping[str, Any], files: Mapping[str, bytes],
               where: str):
    """Reads the JSON `text`.

    Args:
      text: content of `tokenizer.json`.
      config: content of `tokenizer_config.json`, empty where there is none.
      files: name -> content of further files to carry along.
      where: names the tokenizer in messages.

    Raises:
      UserError: the text is damaged or no byte-level BPE.
    """
    spec = _parse(text, where)
    _check_byte_level(spec, where)
    changed = _protect_marks(spec)
    try:
      backend = tokenizers.Tokenizer.from_str(json.dumps(spec) if changed else text)
    except Exception as error:  # the library raises bare Exception for every malformed file
      raise UserError(f'{where}: is not a tokenizer file ({error})') from error
    backend.no_truncation()
    backend.no_padding()
    # Without this the backend would turn the text "<|end|>" of a file into the special id.
    backend.encode_special_tokens = True
    added = backend.get_added_tokens_decoder()
    specials = {token.content: index for index, token in added.items() if token.special}
    family, roles = tokenizer_roles.roles_of(specials, config)
    super().__init__(where, _byte_table(backend, where), specials, family, roles,
                     {**files, FILE: text.encode()})
    self._backend = backend
    pre_split = (spec.get('pre_tokenizer') or {}).get('pretokenizers')
    self._pieces = _Pieces(backend) if pre_split == _pre_tokenizer_json() else None

  def _encode_text(self, text: str) -> list[int]:
    if self._pieces is not None and text.isascii():
      # Several times faster: code repeats its words, and most of it is ASCII.
      pieces = _ASCII_PRE_SPLIT.findall(text)
      return list(itertools.chain.from_iterable(map(self._pieces.__getitem__, pieces)))
    return self._backend.encode(text, add_special_tokens=False).ids


def train(texts: Iterable[str], vocab_size: int = 512,
          special_tokens: Sequence[str] = tokenizer_roles.SPECIAL_TOKENS) -> BpeTokenizer:
  """Trains a byte-level BPE.

  Args:
    texts: training texts; only the train part of a corpus belongs here.
    vocab_size: number of ids wanted, specials and the 256 bytes included. Few texts can give fewer.
    special_tokens: they take the first ids, in this order.

  Raises:
    UserError: `vocab_size` has no room for the bytes and the special tokens.
  """
  floor = 256 + len(special_tokens)
  if vocab_size < floor:
    raise UserError(f'vocab_size: {vocab_size} is below {floor} (256 bytes + special tokens)')
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = _pre_tokenizer()
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
      vocab_size=vocab_size, special_tokens=list(special_tokens), show_progress=False,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
  valid = (to_bytes(text).decode('utf-8', errors='replace') for text in texts)
  backend.train_from_iterator(valid, trainer)
  return BpeTokenizer(backend.to_str(), {}, {}, 'tokenizer')


class _Pieces(dict):
  """Piece of the pre-split -> its ids, filled from the backend on first use."""

  def __init__(self, backend: tokenizers.Tokenizer):
    super().__init__()
    self._backend = backend

  def __missing__(self, piece: str) -> list[int]:
    if len(self) >= _MAX_PIECES:
      self.clear()
    ids = self[piece] = self._backend.encode(piece).ids
    return ids


def _parse(text: str, where: str) -> dict[str, Any]:
  """Returns the JSON object of a tokenizer file whose model is a BPE."""
  try:
    spec = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where}: is not a tokenizer file ({error})') from error
  model = spec.get('model') if isinstance(spec, dict) else None
  if not isinstance(model, dict):
    raise UserError(f'{where}: is not a tokenizer file (no model)')
  kind = model.get('type') or ('BPE' if 'merges' in model else 'unknown')  # old files have no type
  if kind != 'BPE':
    raise UserError(f'{where}: holds a {kind} model; only byte-level BPE can be read')
  if model.get('dropout'):
    raise UserError(f'{where}: model.dropout is {model["dropout"]}; ids would be random')
  return spec


def _check_byte_level(spec: Mapping[str, Any], where: str) -> None:
  """Raises for a BPE over characters (sentencepiece style), which loses bytes."""
  steps = list(_steps(spec.get('pre_tokenizer')))
  byte_level = [step for step in steps if step.get('type') == 'ByteLevel']
  if not byte_level:
    raise UserError(f'{where}: its BPE works on characters, not on bytes (no ByteLevel '
                    'pre-tokenizer, as in sentencepiece models); only byte-level BPE can be read')
  if any(step.get('add_prefix_space') for step in byte_level):
    raise UserError(f'{where}: add_prefix_space puts a space before every text; set it to false')


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
  """Yields a pre-tokenizer, or the parts of a sequence of them."""
  if isinstance(part, dict):
    yield part
    for inner in part.get('pretokenizers') or []:
      yield from _steps(inner)


def _protect_marks(spec: dict[str, Any]) -> bool:
  """Flags added tokens that are spelled as marks as special; returns whether any was not."""
  changed = False
  for token in spec.get('added_tokens') or []:
    if not token.get('special') and _MARK.fullmatch(str(token.get('content', ''))):
      token['special'] = changed = True
  return changed


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(_PRE_SPLIT), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])


def _pre_tokenizer_json() -> list[dict]:
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = _pre_tokenizer()
  return json.loads(backend.to_str())['pre_tokenizer']['pretokenizers']


def _byte_alphabet() -> dict[str, int]:
  """Returns printable stand-in -> byte of byte-level BPE (GPT-2, `bytes_to_unicode`)."""
  kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  moved = [b for b in range(256) if b not in set(kept)]
  return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(moved)}


def _byte_table(backend: tokenizers.Tokenizer, where: str) -> list[bytes]:
  """Returns the bytes of each id; added tokens are spelled plainly, the others in stand-ins."""
  vocab = backend.get_vocab(with_added_tokens=True)
  table = [b''] * (max(vocab.values(), default=-1) + 1)
  alphabet = _byte_alphabet()
  added = {token.content for token in backend.get_added_tokens_decoder().values()}
  for token, index in vocab.items():
    try:
      table[index] = (token.encode() if token in added
                      else bytes([alphabet[character] for character in token]))
    except KeyError as error:
      raise UserError(f'{where}: token {token!r} (id {index}) is not made of bytes') from error
  return table
