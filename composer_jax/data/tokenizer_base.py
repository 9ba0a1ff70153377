"""What every tokenizer of the project can do, whatever file it comes from."""

import abc
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from composer_jax import config as config_lib
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.files import replacing


class Tokenizer(abc.ABC):
  """Text <-> ids; special ids come from `special(name)` and the roles only, never from text.

  Attributes:
    where: the file it was read from, for messages.
    vocab_size: number of ids, the specials and unused ids between them included.
    specials: spelling -> id of the tokens that no text gives.
    family: `composer` (trained by this project), `kimi`, `deepseek` or `generic`.
    roles: role -> spelling, see `tokenizer_roles`.
    files: name -> content of the files that make it up, to be carried along with a checkpoint.
  """

  def __init__(self, where: str, table: Sequence[bytes], specials: Mapping[str, int], family: str,
               roles: Mapping[str, str], files: Mapping[str, bytes]):
    """Takes what a kind of tokenizer has read.

    Args:
      where: names the tokenizer in messages.
      table: bytes of each id; empty for unused ids.
      specials: spelling -> id.
      family: see the class.
      roles: role -> spelling.
      files: name -> content.

    Raises:
      UserError: one of the 256 bytes has no id, so that not every text could be encoded.
    """
    self.where = where
    self.vocab_size = len(table)
    self.specials = dict(specials)
    self.family = family
    self.roles = dict(roles)
    self.files = dict(files)
    self._bytes = list(table)
    special_ids = set(self.specials.values())
    singles = {data: index for index, data in enumerate(table)
               if len(data) == 1 and index not in special_ids}
    missing = [b for b in range(256) if bytes([b]) not in singles]
    if missing:
      raise UserError(f'{where}: the vocabulary lacks byte {missing[0]}')
    self._byte_ids = [singles[bytes([b])] for b in range(256)]

  def __len__(self) -> int:
    return self.vocab_size

  def special(self, name: str) -> int:
    """Returns the id of a special token given by its spelling, such as `<|end|>`.

    Raises:
      UserError: there is no such token.
    """
    if name not in self.specials:
      named = [token for token in self.specials if 'reserved' not in token]
      raise UserError(f'{self.where}: has no special token {name}'
                      f'{config_lib.nearest(name, named)}')
    return self.specials[name]

  def role(self, role: str) -> int:
    """Returns the id of the token that plays `role`, see `tokenizer_roles`.

    Raises:
      UserError: the tokenizer has no token for it.
    """
    if role not in self.roles:
      raise UserError(f'{self.where}: a tokenizer of the family {self.family} has no token for the '
                      f'role {role}; it has {", ".join(sorted(self.roles)) or "no role"}')
    return self.special(self.roles[role])

  @property
  def pad_id(self) -> int:
    """Id that fills rows; like the next five, a UserError where the family lacks the role."""
    return self.role('pad')

  @property
  def doc_id(self) -> int:
    """Id that stands before each document."""
    return self.role('doc')

  @property
  def user_id(self) -> int:
    """Id that opens an instruction."""
    return self.role('user')

  @property
  def call_id(self) -> int:
    """Id that opens what the model says."""
    return self.role('call')

  @property
  def result_id(self) -> int:
    """Id that opens what a tool answers."""
    return self.role('result')

  @property
  def end_id(self) -> int:
    """Id that ends a piece of a conversation."""
    return self.role('end')

  @abc.abstractmethod
  def _encode_text(self, text: str) -> list[int]:
    """Returns the ids of text that UTF-8 can express."""

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; special spellings inside it are encoded as plain characters."""
    if not text.isascii():
      try:
        text.encode()
      except UnicodeEncodeError:
        # Lone surrogates: what `errors="surrogateescape"` made of undecodable bytes.
        return self.encode_bytes(to_bytes(text))
    return self._encode_text(text)

  def encode_bytes(self, data: bytes) -> list[int]:
    """Returns the ids of any byte string; bytes that are not UTF-8 become single-byte tokens."""
    ids: list[int] = []
    for piece in _utf8_pieces(data):
      if isinstance(piece, str):
        ids.extend(self._encode_text(piece))
      else:
        ids.extend(self._byte_ids[b] for b in piece)
    return ids

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """Returns the exact bytes of the ids; a special id gives its spelling, an unused one none."""
    table = self._bytes
    return b''.join([table[i] for i in ids])

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of the ids; bytes that are not UTF-8 show as U+FFFD."""
    return self.decode_bytes(ids).decode('utf-8', errors='replace')

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes `files` into a folder, which `load` then reads.

    Raises:
      InfrastructureError: the disk does not take them.
    """
    folder = pathlib.Path(folder)
    try:
      folder.mkdir(parents=True, exist_ok=True)
      for name, content in self.files.items():
        with replacing(folder / name, 'wb') as stream:
          stream.write(content)
    except OSError as error:
      raise InfrastructureError(f'{folder}: cannot write the tokenizer '
                                f'({error.strerror or error})') from error


def _utf8_pieces(data: bytes) -> Iterator[str | bytes]:
  """Yields the valid UTF-8 runs of `data` as str and the bytes between them as bytes."""
  text = data.decode('utf-8', errors='surrogateescape')
  for piece in re.findall('[\udc80-\udcff]+|[^\udc80-\udcff]+', text):
    if '\udc80' <= piece[0] <= '\udcff':
      yield piece.encode('utf-8', errors='surrogateescape')
    else:
      yield piece


def to_bytes(text: str) -> bytes:
  """Encodes text that may hold lone surrogates: escaped bytes come back as those bytes."""
  try:
    return text.encode('utf-8', errors='surrogateescape')
  except UnicodeEncodeError:
    return text.encode('utf-8', errors='surrogatepass')
