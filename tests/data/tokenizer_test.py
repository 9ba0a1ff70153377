"""The tokenizer is lossless on any input, and no text can produce a special id."""

import random

import pytest
import tokenizers

from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.errors import UserError

TEXTS = [
    'def total(xs, t):\n    acc = 0\n    for v in xs:\n        if v >= t:\n'
    '            acc += v * t\n    return acc - t\n',
    'class Node:\n  """A node."""\n\n  def __init__(self, value=None):\n    self.value = value\n',
] * 3


@pytest.fixture(scope='module', name='tok')
def _tok():
  return tokenizer_lib.train(TEXTS, 320)


def test_round_trip_of_unicode_text(tok):
  rng = random.Random(0)
  alphabet = 'ab_ \n\t\r019+-=()é漢😀\u2028\u0000\u00a0ß٣'
  for _ in range(300):
    text = ''.join(rng.choices(alphabet, k=rng.randrange(40)))
    assert tok.decode(tok.encode(text)) == text
    assert tok.decode_bytes(tok.encode(text)) == text.encode()


def test_round_trip_of_arbitrary_bytes(tok):
  rng = random.Random(1)
  cases = [bytes(range(256)), b'', b'\xff' * 7, 'é'.encode()[:1], b'ok\xc3\n\x80\xbf']
  cases += [rng.randbytes(rng.randrange(60)) for _ in range(300)]
  for data in cases:
    assert tok.decode_bytes(tok.encode_bytes(data)) == data


def test_text_with_escaped_bytes_keeps_them(tok):
  text = b'caf\xe9 \xff'.decode('utf-8', errors='surrogateescape')
  assert tok.decode_bytes(tok.encode(text)) == b'caf\xe9 \xff'
  assert tok.decode(tok.encode('\ud800')) == '\ufffd' * 3  # not a byte escape: still no crash


def test_special_spellings_in_text_never_become_special_ids(tok):
  special_ids = set(tok.specials.values())
  rng = random.Random(2)
  for _ in range(300):
    parts = rng.choices([*tokenizer_lib.SPECIAL_TOKENS, 'x', ' ', '\n', '<|', '|>'], k=6)
    text = ''.join(parts)
    for ids in (tok.encode(text), tok.encode(text + 'é')[:-2], tok.encode_bytes(text.encode())):
      assert not special_ids & set(ids)
      assert tok.decode(ids) == text


def test_special_ids_survive_save_and_load_and_stay_unreachable(tok, tmp_path):
  tok.save(tmp_path)
  loaded = tokenizer_lib.load(tmp_path)
  assert loaded.specials == tok.specials == dict(
      zip(tokenizer_lib.SPECIAL_TOKENS, range(6), strict=True))
  text = 'if a == 12:\n    <|end|> <|doc|>'
  assert loaded.encode(text) == tok.encode(text)
  assert not set(loaded.encode(text)) & set(loaded.specials.values())
  assert loaded.vocab_size == tok.vocab_size == 320


def test_the_fast_path_for_ascii_equals_the_library(tok, tmp_path):
  tok.save(tmp_path)
  library = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  library.encode_special_tokens = True
  rng = random.Random(3)
  every = ''.join(map(chr, range(128)))
  likely = every + ' \n\t\r' * 20 + 'abc_xyz019<|>' * 5
  texts = [every, every[::-1], *TEXTS]
  texts += [''.join(rng.choices(likely, k=rng.randrange(50))) for _ in range(2000)]
  for text in texts:
    assert tok.encode(text) == library.encode(text).ids


def test_pre_split_keeps_digits_punctuation_and_indentation_apart(tok):
  # Trained to exhaustion on one repeated line, merges can reach only inside the pre-split pieces.
  tok = tokenizer_lib.train(['\n    total_sum += 123 * (x)'] * 50, 400)
  pieces = [tok.decode([i]) for i in tok.encode('\n    total_sum += 123 * (x)')]
  assert pieces == ['\n    ', 'total_sum', ' +', '=', ' ', '1', '2', '3', ' *', ' (', 'x', ')']


def test_training_is_deterministic(tok):
  assert tokenizer_lib.train(iter(TEXTS), 320).files == tok.files


def test_every_id_has_bytes_and_single_bytes_are_all_there(tok):
  assert all(tok.decode_bytes([i]) for i in range(tok.vocab_size))
  singles = {tok.decode_bytes([i]) for i in range(tok.vocab_size)}
  assert {bytes([b]) for b in range(256)} <= singles


def test_bad_requests_are_user_errors(tmp_path):
  with pytest.raises(UserError, match='261 is below 262'):
    tokenizer_lib.train(TEXTS, 261)
  with pytest.raises(UserError, match='cannot read the tokenizer'):
    tokenizer_lib.load(tmp_path / 'none.json')
  (tmp_path / 'bad.json').write_text('{"a": 1}')
  with pytest.raises(UserError, match='is not a tokenizer file'):
    tokenizer_lib.load(tmp_path / 'bad.json')
