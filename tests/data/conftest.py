import base64
import itertools
import random

import pytest

from composer_jax.data import corpus as corpus_lib
from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.data.config import CorpusConfig, SourceConfig

WORDS = ['total', 'items', 'value', 'node', 'index', 'é', 'café', 'result', 'key', 'path']


def source_text(rng: random.Random, lines: int) -> str:
  """Returns Python-like text unlike any other call's."""
  out = [f'"""Module {rng.random()}."""\n']
  for _ in range(lines):
    a, b, c = rng.choices(WORDS, k=3)
    out.append(f'def {a}_{rng.randrange(1000)}({b}):\n')
    out.append(f'    return {b} + {rng.randrange(99)}  # {c}\n')
  return ''.join(out)


@pytest.fixture(scope='session')
def code_folder(tmp_path_factory):
  """A folder of 60 small files of different sizes."""
  root = tmp_path_factory.mktemp('code')
  rng = random.Random(0)
  for n in range(60):
    path = root / f'package{n % 3}' / f'file{n}.py'
    path.parent.mkdir(exist_ok=True)
    path.write_text(source_text(rng, rng.randrange(5, 40)))
  return root


@pytest.fixture(scope='session')
def functions():
  """A function (start, count) -> short distinct documents."""
  def make(start: int, count: int) -> list[str]:
    numbers = range(start, start + count)
    return [f'# add {i}\ndef f{i}(x):\n    return x + {i * 7}\n' for i in numbers]
  return make


@pytest.fixture(scope='session')
def corpus_config(code_folder):
  """A function (**changes) -> config with one source, `code`, and 30% held out."""
  def make(**changes) -> CorpusConfig:
    fields = {'sources': {'code': SourceConfig(kind='folder', path=str(code_folder))},
              'vocab_size': 320, 'heldout_fraction': 0.3, 'heldout_bytes': 0} | changes
    return CorpusConfig(**fields)
  return make


@pytest.fixture(scope='session')
def corpus(corpus_config, functions, tmp_path_factory):
  """A built corpus with the sources `code` and `functions`."""
  return corpus_lib.build(
      corpus_config(), tmp_path_factory.mktemp('out') / 'corpus',
      {'functions': (functions(0, 300), functions(1000, 50))}, tokenizer_samples=['finish'] * 20)


@pytest.fixture(scope='session')
def bare_bpe():
  """A byte-level BPE without special tokens: its ids are ranks."""
  texts = ['fix the function: sum of items\n', 'functions.read:0', '{"path": "a.py"}', 'cafés 漢字',
           "It's done. I'll look.\n\n    return total", '<|im_end|> </think> 12345']
  return tokenizer_lib.train(texts * 5, 320, ())


@pytest.fixture(scope='session')
def kimi_folder(bare_bpe, tmp_path_factory):
  """A folder with a small `tiktoken.model`."""
  folder = tmp_path_factory.mktemp('kimi')
  tokens = [bare_bpe.decode_bytes([i]) for i in range(bare_bpe.vocab_size)]
  (folder / 'tiktoken.model').write_bytes(
      b''.join(b'%s %d\n' % (base64.b64encode(token), n) for n, token in enumerate(tokens)))
  return folder


@pytest.fixture(scope='session')
def kimi(kimi_folder):
  """Its tokenizer, with the special tokens of Kimi K2.5."""
  return tokenizer_lib.load(kimi_folder)


@pytest.fixture(scope='session')
def cut_spans():
  """A function (ids, mask) -> the runs of ids where the mask is on."""
  def cut(ids, mask):
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [[token for token, _ in run] for on, run in runs if on]
  return cut
