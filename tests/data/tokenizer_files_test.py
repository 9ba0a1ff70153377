"""Published tokenizers: JSON files and `tiktoken.model`, against the libraries that define them."""

import base64
import json
import random

import pytest
import tokenizers
from tokenizers import pre_tokenizers, processors

from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.data import tokenizer_tiktoken
from composer_jax.data.chat import Renderer, flatten, render_segments
from composer_jax.errors import UserError

ALPHABET = ['a', 'B', 'é', '漢', '字', 'か', ' ', '  ', '\n', '\t', '\r\n', "'s", "'LL", '12', '3',
            '.', '<|im_end|>', '<think>', '[EOS]', '😀', '\u0301', '\u2003', 'ß', '\x00',
            'items', 'func']
DEEPSEEK = ['<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>', '<｜User｜>',
            '<｜Assistant｜>', '<｜tool▁output▁begin｜>']


def _random_texts(count):
  rng = random.Random(0)
  return [''.join(rng.choices(ALPHABET, k=rng.randrange(20))) for _ in range(count)]


# tiktoken.model


def test_tiktoken_ids_equal_those_of_the_tokenizers_library(kimi, bare_bpe):
  library = tokenizers.Tokenizer.from_str(bare_bpe.files['tokenizer.json'].decode())
  # As written in tokenization_kimi.py, where the two lines on words are spelled out.
  words = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
           r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
           r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
           r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
  pattern = '|'.join([r'[\p{Han}]+', *words, r'\p{N}{1,3}', r' ?[^\s\p{L}\p{N}]+[\r\n]*',
                      r'\s*[\r\n]+', r'\s+(?!\S)', r'\s+'])
  library.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(pattern), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  for text in _random_texts(500):
    ids = kimi.encode(text)
    assert ids == library.encode(text).ids
    assert kimi.decode(ids) == text


def test_tiktoken_is_lossless_on_any_bytes_and_text_gives_no_special_id(kimi):
  rng = random.Random(1)
  for _ in range(300):
    data = rng.randbytes(rng.randrange(50))
    assert kimi.decode_bytes(kimi.encode_bytes(data)) == data
  for text in kimi.specials:
    ids = kimi.encode(text)
    assert max(ids) < 320 and kimi.decode(ids) == text
  escaped = b'caf\xe9'.decode('utf-8', errors='surrogateescape')
  assert kimi.decode_bytes(kimi.encode(escaped)) == b'caf\xe9'


def test_kimi_special_ids_follow_the_ranks(kimi):
  # The documented ids of Kimi K2 and K2.5, which has 163,584 ranks.
  documented = {
      '[BOS]': 163584, '[EOS]': 163585, '<|im_end|>': 163586, '<|im_user|>': 163587,
      '<|im_assistant|>': 163588, '<|im_system|>': 163594, '<|tool_calls_section_begin|>': 163595,
      '<|tool_calls_section_end|>': 163596, '<|tool_call_begin|>': 163597,
      '<|tool_call_argument_begin|>': 163598, '<|tool_call_end|>': 163599, '<|im_middle|>': 163601,
      '<|media_begin|>': 163602, '<|media_pad|>': 163605, '<think>': 163606, '</think>': 163607,
      '[UNK]': 163838, '[PAD]': 163839}
  for name, index in documented.items():
    assert kimi.special(name) == index - 163584 + 320
  assert kimi.vocab_size == 320 + 256 and len(kimi.specials) == 256
  assert kimi.specials['<|reserved_token_325|>'] == 325
  assert (kimi.family, kimi.pad_id, kimi.doc_id) == ('kimi', 320 + 255, 320)
  assert kimi.decode([kimi.end_id]) == '<|im_end|>'


def test_names_of_special_ids_come_from_the_config(kimi_folder, tmp_path):
  data = (kimi_folder / 'tiktoken.model').read_bytes()
  (tmp_path / 'tiktoken.model').write_bytes(data)
  config = tmp_path / 'tokenizer_config.json'
  config.write_text(json.dumps({'added_tokens_decoder': {
      '320': {'content': '[BOS]', 'special': True}, '323': {'content': '<|open|>'}}}))
  tok = tokenizer_lib.load(tmp_path)
  assert tok.special('<|open|>') == 323 and '<|im_user|>' not in tok.specials
  with pytest.raises(UserError, match='no token for the role user'):
    _ = tok.user_id
  tok.save(tmp_path / 'copy')
  assert tokenizer_lib.load(tmp_path / 'copy').specials == tok.specials
  config.write_text('{"added_tokens_decoder": {"163586": {"content": "<|im_end|>"}}}')
  with pytest.raises(UserError, match='has 320 ranks.*163586.*do not belong together'):
    tokenizer_lib.load(tmp_path)


def test_text_is_cut_where_kimis_own_code_cuts_it(monkeypatch):
  monkeypatch.setattr(tokenizer_tiktoken, '_MAX_RUN', 5)
  monkeypatch.setattr(tokenizer_tiktoken, '_MAX_CHARS', 17)
  rng = random.Random(2)
  for _ in range(500):
    text = ''.join(rng.choices(['a', 'xyzxyz', ' ', '\n\n\n', '\u2003\x1c'], k=rng.randrange(14)))
    want = [piece for start in range(0, len(text), 17)
            for piece in _slow_cut(text[start:start + 17], 5)]
    assert list(tokenizer_tiktoken._chunks(text)) == want


def _slow_cut(text, most):
  """One character at a time: a new piece where a run of one kind would exceed `most`."""
  pieces, run = [''], 0
  for n, character in enumerate(text):
    same = n > 0 and character.isspace() == text[n - 1].isspace()
    run = run + 1 if same else 1
    if run > most:
      pieces.append('')
      run = 1
    pieces[-1] += character
  return pieces


def test_a_million_equal_characters(kimi):
  for text in (' ' * 1_000_000, 'a' * 300_000):  # the first overflows the library's stack
    assert kimi.decode(kimi.encode(text)) == text


@pytest.mark.parametrize(('change', 'message'), [
    (lambda lines: [b'?' + lines[0][1:], *lines[1:]], ':1: is not a line'),
    (lambda lines: [lines[0] + b' 7', *lines[1:]], ':1: is not a line'),
    (lambda lines: [*lines, lines[3]], ':321: token is there twice'),
    (lambda lines: [*lines, base64.b64encode(b'qqqq') + b' 3'], ':321: rank 3 is there twice'),
    (lambda lines: lines[:300] + lines[301:], 'rank 300 is missing'),
    (lambda lines: [*lines[256:300]], 'rank 0 is missing'),
    (lambda lines: [b'\x0a\x0e\x0a\x05<unk>\x15\x00\x80'], 'models of sentencepiece cannot'),
    (lambda lines: [], 'holds no token'),
    (lambda lines: [base64.b64encode(bytes([65, n])) + b' %d' % n for n in range(9)],
     'lacks byte 0'),
])
def test_damaged_rank_files(kimi_folder, tmp_path, change, message):
  lines = (kimi_folder / 'tiktoken.model').read_bytes().splitlines()
  (tmp_path / 'tiktoken.model').write_bytes(b'\n'.join(change(lines)))
  with pytest.raises(UserError, match=message):
    tokenizer_lib.load(tmp_path)


# tokenizer.json


@pytest.fixture(scope='module', name='published')
def _published(bare_bpe):
  """A function: added tokens -> a tokenizer of the library in the manner of published ones."""
  def make(*added):
    library = tokenizers.Tokenizer.from_str(bare_bpe.files['tokenizer.json'].decode())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_tokens(list(added))
    return library
  return make


def test_a_gpt2_like_file_gives_the_ids_of_the_library(published, tmp_path):
  library = published(tokenizers.AddedToken('<|endoftext|>', special=True),
                      tokenizers.AddedToken('    ', special=False, normalized=False))
  library.post_processor = processors.TemplateProcessing(
      single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 320)])
  library.enable_truncation(3)
  library.enable_padding(length=7)
  library.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'tokenizer_config.json').write_text(
      '{"eos_token": {"content": "<|endoftext|>"}, "bos_token": null}')
  tok = tokenizer_lib.load(tmp_path)
  library.no_truncation()
  library.no_padding()
  for text in [*_random_texts(300), 'if x:\n        return', 'items<|endoftext|>']:
    ids = tok.encode(text)
    assert tok.decode(ids) == text and 320 not in ids
    if '<|endoftext|>' not in text:
      assert ids == library.encode(text, add_special_tokens=False).ids
  assert tok.special('<|endoftext|>') == 320 == tok.doc_id == tok.end_id
  assert 321 in tok.encode('x    y')
  with pytest.raises(UserError, match='generic has no token for the role pad; it has doc, end'):
    _ = tok.pad_id
  with pytest.raises(UserError, match=r'no special token <\|endoftext> .did you mean'):
    tok.special('<|endoftext>')


def test_marks_without_the_special_flag_are_still_out_of_reach(published, tmp_path):
  # DeepSeek-V3's file leaves <｜User｜> and the tool marks without the flag.
  library = published(*(tokenizers.AddedToken(name, special=n < 3)
                        for n, name in enumerate(DEEPSEEK)))
  library.save(str(tmp_path / 'tokenizer.json'))
  assert library.encode('<｜User｜>').ids == [323]
  tok = tokenizer_lib.load(tmp_path / 'tokenizer.json')
  for name in DEEPSEEK:
    assert tok.decode(tok.encode(name)) == name
    assert max(tok.encode(name)) < 320
  assert tok.family == 'deepseek'
  roles = ('doc', 'end', 'pad', 'user', 'call', 'result')
  assert [tok.role(role) for role in roles] == [*range(320, 326)]


@pytest.mark.parametrize('change', [
    lambda spec: spec['model'].update(type='Unigram'),
    lambda spec: spec['model'].update(type='WordPiece'),
    lambda spec: spec.update(pre_tokenizer={'type': 'Metaspace', 'replacement': '▁'}),
    lambda spec: spec.update(pre_tokenizer=None),
    lambda spec: spec['pre_tokenizer'].update(add_prefix_space=True),
    lambda spec: spec['model'].update(dropout=0.1),
    lambda spec: spec.pop('model'),
    lambda spec: spec['model'].pop('vocab'),
    lambda spec: spec['model']['vocab'].update({'▁a': 320}),
])
def test_files_of_other_kinds_are_one_line(published, tmp_path, change):
  spec = json.loads(published().to_str())
  change(spec)
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(spec))
  with pytest.raises(UserError, match=f'^{path}: [^\n]+$'):
    tokenizer_lib.load(tmp_path)


def test_folders_without_a_readable_tokenizer(tmp_path):
  with pytest.raises(UserError, match='holds no tokenizer'):
    tokenizer_lib.load(tmp_path)
  (tmp_path / 'tokenizer.model').write_bytes(b'\x0a')
  with pytest.raises(UserError, match='holds tokenizer.model, which cannot be read'):
    tokenizer_lib.load(tmp_path)
  with pytest.raises(UserError, match='is not a tokenizer file'):
    (tmp_path / 'tokenizer.json').write_bytes(b'\xff\xfe')
    tokenizer_lib.load(tmp_path)


# Fitting the rest


def test_vocabulary_against_the_model(kimi):
  assert tokenizer_lib.check_vocabulary(kimi, 576) == ''
  assert 'has 576 ids, the model 600; the last 24 stay' in tokenizer_lib.check_vocabulary(kimi, 600)
  with pytest.raises(UserError, match='has 576 ids, the model only 575'):
    tokenizer_lib.check_vocabulary(kimi, 575)


def test_the_harness_renderer_speaks_with_kimis_marks(kimi):
  renderer = Renderer(kimi)
  ids, mask = flatten(render_segments(renderer, 'fix <|im_end|>', [('read', 'ok'), ('done', None)]))
  assert kimi.decode(ids) == ('<|im_user|>fix <|im_end|><|im_end|><|im_assistant|>read<|im_end|>'
                              '<|im_system|>ok<|im_end|><|im_assistant|>done<|im_end|>')
  assert ids.count(kimi.end_id) == 4
  own = [token for token, on in zip(ids, mask, strict=True) if on]
  assert own == [*renderer.call('read'), *renderer.call('done')]
