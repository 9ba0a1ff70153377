"""Byte-level BPE whose special ids no text can produce.

The pre-split is made for code and small vocabularies: a word with an optional leading space, a
single digit, a single punctuation mark with an optional leading space, or a newline with its
indentation. A line number, an operator and an identifier therefore never share a token, and an
edited line costs the same tokens wherever it stands.
"""

import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from composer_jax.errors import UserError

PAD = '<|pad|>'
DOC = '<|doc|>'
USER = '<|user|>'
CALL = '<|call|>'
RESULT = '<|result|>'
END = '<|end|>'
SPECIAL_TOKENS = (PAD, DOC, USER, CALL, RESULT, END)

_PRE_SPLIT = r' ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]|\n[ \t]*|[^\S\n]+'
_ASCII_PRE_SPLIT = re.compile(
    r' ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\n[ \t]*|[^\S\n]+', re.ASCII)
_MAX_PIECES = 200_000  # pieces whose ids are remembered; some 30 MB


class Tokenizer:
  """Lossless text <-> ids; special ids come from `special(name)` only, never from text.

  Attributes:
    vocab_size: number of ids, the specials included.
    specials: name -> id of the special tokens; `pad_id`, `doc_id`, `user_id`, `call_id`,
      `result_id` and `end_id` name the six of this project.
  """

  def __init__(self, backend: tokenizers.Tokenizer):
    """Wraps a `tokenizers` object with a byte-level BPE and the six special tokens.

    Raises:
      UserError: the vocabulary lacks a special token or a byte.
    """
    # Without this the backend would turn the text "<|end|>" of a file into the special id.
    backend.encode_special_tokens = True
    self._backend = backend
    vocab = backend.get_vocab(with_added_tokens=True)
    missing = [name for name in SPECIAL_TOKENS if name not in vocab]
    if missing:
      raise UserError(f'tokenizer: the vocabulary lacks {missing[0]}')
    added = backend.get_added_tokens_decoder()
    self.specials = {token.content: index for index, token in added.items() if token.special}
    self.vocab_size = max(vocab.values()) + 1
    self._bytes = _byte_table(vocab, self.specials, self.vocab_size)
    self._byte_ids = _single_byte_ids(vocab)
    pre_split = (json.loads(backend.to_str()).get('pre_tokenizer') or {}).get('pretokenizers')
    self._pieces = _Pieces(backend) if pre_split == _pre_tokenizer_json() else None
    self.pad_id = vocab[PAD]
    self.doc_id = vocab[DOC]
    self.user_id = vocab[USER]
    self.call_id = vocab[CALL]
    self.result_id = vocab[RESULT]
    self.end_id = vocab[END]

  def __len__(self) -> int:
    return self.vocab_size

  def special(self, name: str) -> int:
    """Returns the id of a special token given by its spelling, such as `<|end|>`."""
    return self.specials[name]

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; special spellings inside it are encoded as plain characters."""
    if self._pieces is not None and text.isascii():
      # Several times faster: code repeats its words, and most of it is ASCII.
      pieces = _ASCII_PRE_SPLIT.findall(text)
      return list(itertools.chain.from_iterable(map(self._pieces.__getitem__, pieces)))
    try:
      return self._backend.encode(text).ids
    except (UnicodeEncodeError, TypeError):
      # Lone surrogates: what `errors="surrogateescape"` made of undecodable bytes.
      return self.encode_bytes(_to_bytes(text))

  def encode_bytes(self, data: bytes) -> list[int]:
    """Returns the ids of any byte string; bytes that are not UTF-8 become single-byte tokens."""
    ids: list[int] = []
    for piece in _utf8_pieces(data):
      if isinstance(piece, str):
        ids.extend(self._backend.encode(piece).ids)
      else:
        ids.extend(self._byte_ids[b] for b in piece)
    return ids

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """Returns the exact bytes of the ids; a special id gives its spelling."""
    return b''.join([self._bytes[i] for i in ids])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of the ids; bytes that are not UTF-8 show as U+FFFD."""
    return self.decode_bytes(ids).decode('utf-8', errors='replace')

  def token_bytes(self, index: int) -> bytes:
    """Returns the bytes of one id."""
    return self._bytes[index]

  def save(self, path: str | pathlib.Path) -> None:
    """Writes the tokenizer as a `tokenizer.json` that the `tokenizers` library reads too."""
    pathlib.Path(path).write_text(self.to_json())

  def to_json(self) -> str:
    """Returns the content of `tokenizer.json`."""
    return self._backend.to_str()


def train(texts: Iterable[str], vocab_size: int = 512,
          special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
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
  backend.train_from_iterator((_valid(text) for text in texts), trainer)
  return Tokenizer(backend)


def load(path: str | pathlib.Path) -> Tokenizer:
  """Reads a `tokenizer.json`.

  Raises:
    UserError: the file is missing or is not a byte-level BPE with our special tokens.
  """
  try:
    text = pathlib.Path(path).read_text()
  except OSError as error:
    raise UserError(f'{path}: cannot read the tokenizer ({error.strerror or error})') from error
  return from_json(text, str(path))


def from_json(text: str, where: str = 'tokenizer') -> Tokenizer:
  """Returns the tokenizer of a `tokenizer.json` text; `where` names it in messages."""
  try:
    json.loads(text)
    backend = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # the library raises bare Exception for every malformed file
    raise UserError(f'{where}: is not a tokenizer file ({error})') from error
  return Tokenizer(backend)


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


def _byte_table(vocab: dict[str, int], specials: dict[str, int], size: int) -> list[bytes]:
  alphabet = _byte_alphabet()
  table = [b''] * size
  for token, index in vocab.items():
    if token in specials:
      table[index] = token.encode()
    else:
      table[index] = bytes(alphabet[c] for c in token)
  return table


def _single_byte_ids(vocab: dict[str, int]) -> list[int]:
  by_byte = {b: c for c, b in _byte_alphabet().items()}
  missing = [b for b in range(256) if by_byte[b] not in vocab]
  if missing:
    raise UserError(f'tokenizer: the vocabulary lacks byte {missing[0]}')
  return [vocab[by_byte[b]] for b in range(256)]


def _utf8_pieces(data: bytes) -> Iterable[str | bytes]:
  """Yields the valid UTF-8 runs of `data` as str and the bytes between them as bytes."""
  text = data.decode('utf-8', errors='surrogateescape')
  for piece in re.findall('[\udc80-\udcff]+|[^\udc80-\udcff]+', text):
    if '\udc80' <= piece[0] <= '\udcff':
      yield piece.encode('utf-8', errors='surrogateescape')
    else:
      yield piece


def _to_bytes(text: str) -> bytes:
  """Encodes text that may hold lone surrogates: escaped bytes come back as those bytes."""
  try:
    return text.encode('utf-8', errors='surrogateescape')
  except UnicodeEncodeError:
    return text.encode('utf-8', errors='surrogatepass')


def _valid(text: str) -> str:
  return _to_bytes(text).decode('utf-8', errors='replace')
