"""A corpus on disk: exact bytes, disjoint splits, honest baselines, atomic and resumable."""

import gzip
import json
import lzma
import shutil

import numpy as np
import pytest

from composer_jax.config import build as build_config
from composer_jax.data import compression, sources
from composer_jax.data import corpus as corpus_lib
from composer_jax.data import rows as rows_lib
from composer_jax.data.config import CorpusConfig
from composer_jax.errors import InfrastructureError, UserError


def _texts(corpus, source, split):
  documents = corpus.documents(source, split)
  return [corpus.tokenizer.decode_bytes(documents[i].tolist()).decode()
          for i in range(len(documents))]


def test_tokens_give_back_exactly_the_files(corpus, code_folder, functions):
  on_disk = {path.read_text() for path in code_folder.rglob('*.py')}
  train, heldout = _texts(corpus, 'code', 'train'), _texts(corpus, 'code', 'heldout')
  assert set(train) | set(heldout) == on_disk
  assert len(train) + len(heldout) == len(on_disk) == 60
  assert len(heldout) > 5
  for split, texts in (('train', train), ('heldout', heldout)):
    entry = corpus.manifest['sources']['code'][split]
    assert entry['files'] == len(texts)
    assert entry['bytes'] == sum(len(t.encode()) for t in texts)
    assert entry['tokens'] == len(corpus.documents('code', split).tokens)
  assert _texts(corpus, 'functions', 'train') == functions(0, 300)


def test_no_special_id_is_stored(corpus):
  for source in corpus.sources:
    tokens = corpus.documents(source, 'train').tokens
    assert tokens.dtype == np.uint16
    assert tokens.min() >= 6 and tokens.max() < corpus.manifest['vocab_size'] == 320


def test_baselines_recomputed_from_the_files(corpus, code_folder):
  fraction = corpus.manifest['config']['heldout_fraction']
  wanted = sorted(p.read_bytes() for p in code_folder.rglob('*.py')
                  if sources.split_of(p.read_text(), fraction) == 'heldout')
  files = corpus.heldout_files('code')
  assert sorted(files) == wanted
  joined = b''.join(files)
  entry = corpus.manifest['sources']['code']
  bits = 8 / len(joined)
  assert entry['gzip_bits_per_byte'] == bits * len(gzip.compress(joined, 9))
  assert entry['xz_bits_per_byte'] == bits * len(lzma.compress(joined, preset=9))
  assert entry['gzip_per_file_bits_per_byte'] == pytest.approx(
      bits * sum(len(gzip.compress(f, 9)) for f in files), rel=1e-12)
  assert entry['xz_per_file_bits_per_byte'] == pytest.approx(
      bits * sum(len(lzma.compress(f, preset=9)) for f in files[:20]), rel=1e-12)
  assert len(files) <= 20


def test_baselines_of_a_part_are_those_of_its_files(corpus):
  files = corpus.heldout_files('code')
  cap = len(files[0]) + len(files[1])
  part = corpus.baselines('code', cap)
  assert (part.files, part.bytes) == (2, cap)
  assert part == compression.baselines(files[:2])
  assert corpus.baselines('code', cap - 1).files == 1
  assert corpus.heldout_files('code', 1) == files[:1]


def test_tokenizer_never_sees_heldout_text(corpus_config, functions, tmp_path, monkeypatch):
  seen = []
  real = corpus_lib.tokenizer_lib.train
  monkeypatch.setattr(corpus_lib.tokenizer_lib, 'train',
                      lambda texts, *args: real(_keep(texts, seen), *args))
  config = corpus_config(tokenizer_weights={'code': 3.0}, tokenizer_bytes=40_000)
  corpus = corpus_lib.build(config, tmp_path / 'c', {
      'functions': (functions(0, 900), functions(1000, 50))})
  train = _texts(corpus, 'code', 'train')
  heldout = _texts(corpus, 'code', 'heldout') + _texts(corpus, 'functions', 'heldout')
  assert seen and not set(seen) & set(heldout)
  from_code = sum(len(t) for t in seen if any(f.startswith(t) for f in train))
  assert from_code == min(30_000, sum(map(len, train)))
  assert sum(map(len, seen)) - from_code == 10_000


def _keep(texts, into):
  for text in texts:
    into.append(text)
    yield text


def test_built_again_is_opened_and_another_config_is_refused(corpus, corpus_config):
  config = corpus_config()

  def never():
    raise AssertionError('read although the corpus is there')
    yield

  again = corpus_lib.build(config, corpus.path, {'functions': (never(), never())})
  assert again.manifest == corpus.manifest
  with pytest.raises(UserError, match='a corpus of another config'):
    corpus_lib.build(corpus_config(vocab_size=321), corpus.path,
                     {'functions': ((), ())})
  with pytest.raises(UserError, match='a corpus of another config'):
    corpus_lib.build(config, corpus.path, {'functions': ((), ())}, extra_fingerprint='other')


def test_interrupted_it_continues_to_the_same_corpus(corpus, corpus_config, functions, tmp_path,
                                                     monkeypatch):
  extra = {'functions': (functions(0, 300), functions(1000, 50))}
  out = tmp_path / 'c'
  out.mkdir()  # an empty folder is as good as none
  real_write, real_save = corpus_lib._write, corpus_lib._save
  budget = 0

  def limited(real):
    def call(*args):
      nonlocal budget
      budget -= 1
      if budget < 0:
        raise KeyboardInterrupt
      real(*args)
    return call

  monkeypatch.setattr(corpus_lib, '_write', limited(real_write))
  monkeypatch.setattr(corpus_lib, '_save', limited(real_save))
  attempts = 0
  while True:
    budget = attempts
    attempts += 1
    try:
      built = corpus_lib.build(corpus_config(), out, extra,
                               tokenizer_samples=['finish'] * 20)
      break
    except KeyboardInterrupt:
      assert not list(out.iterdir())
  assert attempts >= 5
  for path in sorted(corpus.path.rglob('*')):
    other = out / path.relative_to(corpus.path)
    if path.is_file() and path.name != 'manifest.json':
      assert other.read_bytes() == path.read_bytes(), path
  without_time = [{k: v for k, v in c.manifest.items() if k != 'wall_s'} for c in (corpus, built)]
  assert without_time[0] == without_time[1]
  assert not list(tmp_path.glob('*.part'))


def test_a_left_over_of_another_config_is_not_mixed_in(corpus_config, functions, tmp_path):
  part = tmp_path / 'c.part'
  part.mkdir()
  (part / 'fingerprint').write_text('something else')
  (part / 'tokenizer.json').write_text('{}')
  built = corpus_lib.build(corpus_config(), tmp_path / 'c',
                           {'functions': (functions(0, 9), functions(90, 9))})
  assert built.tokenizer.vocab_size == 320


def test_extra_documents_are_deduplicated_and_kept_apart(corpus_config, functions, tmp_path):
  train, heldout = functions(0, 40), functions(100, 10)
  mixed = train + heldout[:3] + train[:5] + [train[0].replace('    ', '\t')]
  built = corpus_lib.build(corpus_config(), tmp_path / 'c',
                           {'functions': (mixed, heldout)})
  assert _texts(built, 'functions', 'train') == train
  assert _texts(built, 'functions', 'heldout') == heldout
  assert built.manifest['sources']['functions']['dropped'] == {'duplicate': 9}


def test_one_line_errors(corpus, corpus_config, tmp_path, monkeypatch):
  config = corpus_config()
  with pytest.raises(UserError, match='holds no corpus'):
    corpus_lib.Corpus(tmp_path)
  with pytest.raises(UserError, match=r'no data source cod \(did you mean code\?\)'):
    corpus.documents('cod', 'train')
  with pytest.raises(UserError, match=r'tokenizer_weights.cod: .*did you mean code'):
    corpus_lib.build(corpus_config(tokenizer_weights={'cod': 1.0}),
                     tmp_path / 'c')
  with pytest.raises(UserError, match='this name is taken'):
    corpus_lib.build(config, tmp_path / 'c', {'code': ((), ())})
  with pytest.raises(UserError, match='functions: no held-out documents'):
    corpus_lib.build(config, tmp_path / 'c', {'functions': (['x'], ())})
  with pytest.raises(UserError, match='fell into the held-out split; raise heldout_fraction'):
    corpus_lib.build(corpus_config(heldout_fraction=1e-9), tmp_path / 'c')
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.txt').write_text('precious')
  with pytest.raises(UserError, match='is not empty and holds no corpus'):
    corpus_lib.build(config, tmp_path / 'mine')
  assert (tmp_path / 'mine' / 'thesis.txt').read_text() == 'precious'

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(corpus_lib, '_save', full)
  with pytest.raises(InfrastructureError, match='No space left on device'):
    corpus_lib.build(config, tmp_path / 'full')
  assert not (tmp_path / 'full').exists()


def test_a_damaged_manifest_is_named(corpus, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(corpus.path, copy)
  for content in (json.dumps(corpus.manifest)[:-5], '{}', '[]'):
    (copy / 'manifest.json').write_text(content)
    with pytest.raises(UserError, match='manifest.json is damaged'):
      corpus_lib.Corpus(copy)


def test_config_from_a_mapping():
  config = build_config(CorpusConfig, {'sources': {'std': {'kind': 'stdlib', 'max_bytes': 5}},
                                       'tokenizer_weights': {'std': 2}})
  assert config.sources['std'].max_bytes == 5 and config.tokenizer_weights == {'std': 2.0}
  with pytest.raises(UserError, match='needs a path'):
    build_config(CorpusConfig, {'sources': {'a': {'kind': 'folder'}}})
  with pytest.raises(UserError, match='vocab_size must be at least 262'):
    build_config(CorpusConfig, {'vocab_size': 100})


def test_a_given_tokenizer_is_used_and_kept(corpus_config, functions, kimi_folder, kimi, tmp_path):
  extra = {'functions': (functions(0, 9), functions(90, 9))}
  given = tmp_path / 'given'
  shutil.copytree(kimi_folder, given)
  config = corpus_config(tokenizer=str(given), vocab_size=576)
  built = corpus_lib.build(config, tmp_path / 'c', extra)
  shutil.rmtree(given)
  assert built.tokenizer.specials == kimi.specials
  assert _texts(built, 'functions', 'train') == functions(0, 9)
  assert built.documents('functions', 'train')[0].tolist() == kimi.encode(functions(0, 1)[0])
  assert corpus_lib.build(config, tmp_path / 'c', extra).tokenizer.vocab_size == 576  # opened
  with pytest.raises(UserError, match='given: cannot read the tokenizer'):
    corpus_lib.build(config, tmp_path / 'd', extra)
  with pytest.raises(UserError, match='has 576 ids, the model only 575'):
    small = corpus_config(tokenizer=str(kimi_folder), vocab_size=575)
    corpus_lib.build(small, tmp_path / 'd', extra)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['c']  # nothing half-written


def test_ids_beyond_16_bits_are_stored_whole(corpus_config, functions, bare_bpe, tmp_path):
  spec = json.loads(bare_bpe.files['tokenizer.json'])
  vocab = spec['model']['vocab']
  vocab['def'], vocab['<|endoftext|>'] = 70_000, 70_002  # a hole before them
  spec['model']['merges'] += [['de', 'f'], ['d', 'e']]
  vocab.setdefault('de', 69_999)
  spec['added_tokens'] = [{'id': 70_002, 'content': '<|endoftext|>', 'special': True,
                           'single_word': False, 'lstrip': False, 'rstrip': False,
                           'normalized': False}]
  (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": "<|endoftext|>"}')
  built = corpus_lib.build(
      corpus_config(tokenizer=str(tmp_path / 'tokenizer.json'), vocab_size=70_003), tmp_path / 'c',
      {'functions': (functions(0, 9), functions(90, 9))})
  documents = built.documents('functions', 'train')
  assert documents.tokens.dtype == np.uint32 and documents.tokens.max() >= 69_999
  assert _texts(built, 'functions', 'train') == functions(0, 9)
  rows = rows_lib.Rows(rows_lib.DocumentSequences(documents.tokens, documents.offsets,
                                                  built.tokenizer.doc_id), 64, seed=None)
  row = rows[0]
  assert row.tokens[0] == 70_002 and row.tokens.dtype == np.int32
  assert row.tokens[1:].max() >= 69_999
