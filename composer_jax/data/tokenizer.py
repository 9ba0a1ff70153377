"""Reading a tokenizer, whatever its format, and checking that it fits a model.

    tokenizer = load('models/Kimi-K2.5')       # a Hugging Face folder, or one file of it
    ids = tokenizer.encode('def f(x):')
"""

import pathlib

from composer_jax.data import tokenizer_bpe, tokenizer_tiktoken
from composer_jax.data.tokenizer_base import Tokenizer
from composer_jax.data.tokenizer_bpe import train
from composer_jax.data.tokenizer_roles import SPECIAL_TOKENS
from composer_jax.errors import UserError
from composer_jax.files import read_json

__all__ = ['SPECIAL_TOKENS', 'Tokenizer', 'check_vocabulary', 'find', 'load', 'train']

_FILES = (tokenizer_tiktoken.FILE, tokenizer_bpe.FILE)  # a folder with one of them has a tokenizer
_CONFIG = 'tokenizer_config.json'
# What belongs to a published tokenizer beside its vocabulary. The programs among them are carried
# along for other software and never run.
_COMPANIONS = (_CONFIG, 'special_tokens_map.json', 'chat_template.jinja', 'tokenization_kimi.py',
               'tool_declaration_ts.py')


def load(path: str | pathlib.Path) -> Tokenizer:
  """Reads a tokenizer.

  Args:
    path: a `tokenizer.json` (`tokenizers` library, byte-level BPE), a `tiktoken.model` (Kimi), or a
      folder that holds one of them. A `tokenizer_config.json` beside it is read too.

  Raises:
    UserError: the file is missing, damaged, or of a kind that cannot be read.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = _file_in(path)
  data = _read(path)
  config = read_json(path.parent / _CONFIG) if (path.parent / _CONFIG).exists() else {}
  files = {name: _read(path.parent / name) for name in _COMPANIONS
           if (path.parent / name).is_file()}
  if path.suffix != '.json':
    return tokenizer_tiktoken.TiktokenTokenizer(data, config, files, str(path))
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    raise UserError(f'{path}: is not a tokenizer file ({error})') from error
  return tokenizer_bpe.BpeTokenizer(text, config, files, str(path))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> str:
  """Checks that a model has an embedding for each id of a tokenizer.

  Args:
    tokenizer: the tokenizer.
    vocab_size: V of the model.

  Returns:
    Empty when the two agree; else a sentence about the ids of the model that no text gives, as in
    models whose vocabulary is padded.

  Raises:
    UserError: the tokenizer has ids beyond the model's vocabulary.
  """
  if tokenizer.vocab_size > vocab_size:
    raise UserError(f'{tokenizer.where}: has {tokenizer.vocab_size} ids, the model only '
                    f'{vocab_size} (vocab_size); they do not belong together')
  if tokenizer.vocab_size == vocab_size:
    return ''
  return (f'{tokenizer.where}: has {tokenizer.vocab_size} ids, the model {vocab_size}; the last '
          f'{vocab_size - tokenizer.vocab_size} stay unused')


def find(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the file of a folder that `load` would read, None without one."""
  return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def _file_in(folder: pathlib.Path) -> pathlib.Path:
  """Returns the tokenizer file of a folder."""
  found = find(folder)
  if found is not None:
    return found
  for name in ('tokenizer.model', 'spiece.model', 'vocab.txt', 'vocab.json'):
    if (folder / name).is_file():
      raise UserError(f'{folder}: holds {name}, which cannot be read; save the tokenizer as a '
                      f'{tokenizer_bpe.FILE} of byte-level BPE')
  raise UserError(f'{folder}: holds no tokenizer ({tokenizer_bpe.FILE} or '
                  f'{tokenizer_tiktoken.FILE})')


def _read(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise UserError(f'{path}: cannot read the tokenizer ({error.strerror or error})') from error
