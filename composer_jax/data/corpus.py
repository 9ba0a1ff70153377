"""Building a corpus once, and reading it back as memory-mapped tokens.

    <dir>/manifest.json            written last: config, counts, compressor baselines
    <dir>/tokenizer.json                or the files of the tokenizer given in the config
    <dir>/<source>/train.tokens.npy     all documents one after the other; uint16, or uint32 where
                                        the tokenizer has more than 65,536 ids
    <dir>/<source>/train.offsets.npy    int64 [documents + 1]
    <dir>/<source>/heldout.*.npy

The work happens in `<dir>.part`, which becomes `<dir>` by one rename at the end: a corpus that is
there is complete. An interrupted build keeps the tokenizer and the sources already tokenised.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax import config as config_lib
from composer_jax.data import compression, sources
from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.data.config import CorpusConfig
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.files import read_json, replacing
from composer_jax.progress import Progress, progress

SPLITS = ('train', 'heldout')
SAMPLES = 'samples'
_FORMAT = 1
_TOKENIZER_DONE = 'tokenizer.done'  # of an unfinished build: all files of the tokenizer are there

ExtraDocuments = Mapping[str, tuple[Iterable[str], Iterable[str]]]


def build(config: CorpusConfig, out_dir: str | pathlib.Path,
          extra_documents: ExtraDocuments | None = None, *,
          tokenizer_samples: Iterable[str] = (), extra_fingerprint: str = '') -> 'Corpus':
  """Builds the corpus, or opens it if it is there.

  Args:
    config: sources, filters and tokenizer.
    out_dir: where the corpus goes.
    extra_documents: name -> (train texts, held-out texts) of sources made by the caller. The
      iterables are read only when something has to be built.
    tokenizer_samples: further texts for the tokenizer (rendered traces); train split only.
    extra_fingerprint: stands for everything that the iterables depend on.

  Returns:
    The opened corpus.

  Raises:
    UserError: an unusable source or tokenizer, or `out_dir` holds a corpus of another config.
    InfrastructureError: the disk does not take the files.
  """
  out_dir = pathlib.Path(out_dir)
  extra_documents = extra_documents or {}
  fingerprint = corpus_fingerprint(config, extra_documents, extra_fingerprint)
  if (out_dir / 'manifest.json').exists():
    corpus = Corpus(out_dir)
    if corpus.manifest['fingerprint'] != fingerprint:
      raise UserError(f'{out_dir}: holds a corpus of another config; choose another folder or '
                      'delete it')
    return corpus
  _check_names(config, extra_documents)
  if out_dir.exists() and not _is_empty_folder(out_dir):
    raise UserError(f'{out_dir}: is not empty and holds no corpus; choose another folder')
  given = _given_tokenizer(config)
  try:
    _build(config, out_dir, extra_documents, given, tokenizer_samples, fingerprint)
  except OSError as error:
    raise InfrastructureError(f'{out_dir}: cannot write the corpus '
                              f'({error.strerror or error})') from error
  return Corpus(out_dir)


def corpus_fingerprint(config: CorpusConfig, extra_names: Iterable[str] = (),
                       extra_fingerprint: str = '') -> str:
  """Returns what a corpus folder is recognised by; equal fingerprints mean an equal request."""
  return config_lib.fingerprint({
      'format': _FORMAT, 'config': config, 'extra': sorted(extra_names),
      'extra_fingerprint': extra_fingerprint})


class Documents:
  """One split of one source, memory-mapped.

  Attributes:
    tokens: uint16 or uint32, the documents one after the other, without separators.
    offsets: int64 `[documents + 1]`, where each document begins in `tokens`.
  """

  def __init__(self, folder: pathlib.Path, split: str):
    self.tokens = np.load(folder / f'{split}.tokens.npy', mmap_mode='r')
    self.offsets = np.load(folder / f'{split}.offsets.npy')

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def __getitem__(self, index: int) -> np.ndarray:
    """Returns the token ids of document `index`, a view of the file."""
    return self.tokens[self.offsets[index]:self.offsets[index + 1]]


class Corpus:
  """A complete corpus on disk.

  Attributes:
    path: its folder.
    manifest: what `manifest.json` says.
    sources: names of the sources, extra ones included.
  """

  def __init__(self, path: str | pathlib.Path):
    """Opens the corpus.

    Raises:
      UserError: there is none, or it is damaged.
    """
    self.path = pathlib.Path(path)
    if not (self.path / 'manifest.json').exists():
      raise UserError(f'{path}: holds no corpus (no manifest.json)')
    self.manifest: dict[str, Any] = read_json(self.path / 'manifest.json', 'sources')
    self.sources: list[str] = list(self.manifest['sources'])
    self._tokenizer: tokenizer_lib.Tokenizer | None = None

  @property
  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    """The corpus's tokenizer."""
    if self._tokenizer is None:
      self._tokenizer = tokenizer_lib.load(self.path)
    return self._tokenizer

  def documents(self, source: str, split: str) -> Documents:
    """Returns one split (`train` or `heldout`) of one source.

    Raises:
      UserError: no such source, with the nearest name.
    """
    if source not in self.sources:
      raise UserError(f'{self.path}: no data source {source}'
                      f'{config_lib.nearest(source, self.sources)}')
    return Documents(self.path / source, split)

  def heldout_files(self, source: str, max_bytes: int | None = None) -> list[bytes]:
    """Returns held-out files as bytes: as many whole ones, from the first, as `max_bytes` allows.

    At least one file comes back; None means all of them.
    """
    documents = self.documents(source, 'heldout')
    files: list[bytes] = []
    total = 0
    for index in range(len(documents)):
      data = self.tokenizer.decode_bytes(documents[index].tolist())
      total += len(data)
      if files and max_bytes is not None and total > max_bytes:
        break
      files.append(data)
    return files

  def baselines(self, source: str, max_bytes: int | None = None) -> compression.Baselines:
    """Returns the compressors' bits per byte on `heldout_files(source, max_bytes)`."""
    return compression.baselines(self.heldout_files(source, max_bytes))


def _build(config: CorpusConfig, out_dir: pathlib.Path, extra_documents: ExtraDocuments,
           given: tokenizer_lib.Tokenizer | None, tokenizer_samples: Iterable[str],
           fingerprint: str) -> None:
  """Does the work of `build` in `<out_dir>.part` and renames it."""
  start = time.monotonic()
  part = out_dir.with_name(out_dir.name + '.part')
  marker = part / 'fingerprint'
  if part.exists() and (not marker.exists() or marker.read_text() != fingerprint):
    shutil.rmtree(part)
  part.mkdir(parents=True, exist_ok=True)
  _write(marker, fingerprint)
  names = [*config.sources, *extra_documents]
  with progress(2 * len(names) + 1, 'corpus') as bar:
    collected = _collect(config, extra_documents, bar)
    if not (part / _TOKENIZER_DONE).exists():
      made = given
      if made is None:
        groups = {name: texts.train for name, texts in collected.items()}
        made = _train_tokenizer(config, groups | {SAMPLES: list(tokenizer_samples)})
      made.save(part)
      _write(part / _TOKENIZER_DONE, '')
    tokenizer = tokenizer_lib.load(part)
    # A vocabulary smaller than the model's is allowed, and shown.
    padded = tokenizer.vocab_size < config.vocab_size
    bar.update(tokenizer=f'{tokenizer.vocab_size} of {config.vocab_size} ids' if padded
               else tokenizer.vocab_size)
    entries = {}
    for name, texts in collected.items():
      entry = part / name / 'entry.json'
      if not entry.exists():
        _write(entry, json.dumps(_tokenise(part / name, texts, tokenizer)))
      entries[name] = read_json(entry)
      bar.update(source=name)
  manifest = {
      'fingerprint': fingerprint,
      'config': config_lib.as_dict(config),
      'python': platform.python_version(),
      'vocab_size': tokenizer.vocab_size,
      'sources': entries,
      'wall_s': round(time.monotonic() - start, 2),
  }
  _write(part / 'manifest.json', json.dumps(manifest, indent=1))
  marker.unlink()
  (part / _TOKENIZER_DONE).unlink()
  os.replace(part, out_dir)  # also replaces an empty folder, and no other


def _collect(config: CorpusConfig, extra_documents: ExtraDocuments,
             bar: Progress) -> dict[str, sources.Collected]:
  """Reads every source; a text that one source gave is not taken from a later one."""
  seen: set[bytes] = set()
  collected = {}
  for name, source in config.sources.items():
    collected[name] = sources.collect(name, source, config, seen)
    if not collected[name].heldout:
      raise UserError(f'data source {name}: none of its {len(collected[name].train)} files fell '
                      'into the held-out split; raise heldout_fraction or heldout_bytes')
    bar.update(source=name)
  for name, (train, heldout) in extra_documents.items():
    # Held-out texts are claimed first: whatever equals one of them is dropped from training.
    dropped = {'duplicate': 0}
    heldout = _unique(_within(heldout, config.heldout_bytes), seen, dropped)
    collected[name] = sources.Collected(_unique(train, seen, dropped), heldout, dropped)
    if not collected[name].train or not heldout:
      raise UserError(f'data source {name}: no {"held-out" if not heldout else "train"} documents')
    bar.update(source=name)
  return collected


def _unique(texts: Iterable[str], seen: set[bytes], dropped: dict[str, int]) -> list[str]:
  kept = []
  for text in texts:
    digest = sources.content_digest(text)
    if not text or digest in seen:
      dropped['duplicate'] += 1
      continue
    seen.add(digest)
    kept.append(text)
  return kept


def _within(texts: Iterable[str], max_bytes: int) -> Iterable[str]:
  """Yields texts while they fit into `max_bytes` together; 0 means no bound."""
  total = 0
  for text in texts:
    total += len(text.encode(errors='surrogateescape'))
    if max_bytes and total > max_bytes:
      return
    yield text


def _given_tokenizer(config: CorpusConfig) -> tokenizer_lib.Tokenizer | None:
  """Returns the configured tokenizer, None where one has to be trained."""
  if not config.tokenizer:
    return None
  tokenizer = tokenizer_lib.load(config.tokenizer)
  tokenizer_lib.check_vocabulary(tokenizer, config.vocab_size)
  tokenizer.role('doc')  # the loader needs it; better missed now than after the build
  return tokenizer


def _train_tokenizer(config: CorpusConfig,
                     groups: Mapping[str, Sequence[str]]) -> tokenizer_lib.Tokenizer:
  """Trains on a sample with the configured share of each group that has texts."""
  weights = {name: config.tokenizer_weights.get(name, 1.0) for name, t in groups.items() if t}
  total = sum(weights.values())
  if not total:
    raise UserError('tokenizer_weights: every group has weight 0')
  shares = {name: int(config.tokenizer_bytes * weight / total) for name, weight in weights.items()}
  return tokenizer_lib.train(
      itertools.chain.from_iterable(_sample(groups[name], size) for name, size in shares.items()),
      config.vocab_size)


def _sample(texts: Sequence[str], size: int) -> Iterable[str]:
  """Yields texts until `size` characters; the last one is cut."""
  for text in texts:
    if size <= 0:
      return
    yield text[:size]
    size -= len(text)


def _tokenise(folder: pathlib.Path, texts: sources.Collected,
              tokenizer: tokenizer_lib.Tokenizer) -> dict[str, Any]:
  """Writes both splits of a source; returns its manifest entry."""
  folder.mkdir(exist_ok=True)
  entry: dict[str, Any] = {}
  for split in SPLITS:
    documents = getattr(texts, split)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    ids = [np.asarray(i, dtype) for i in map(tokenizer.encode, documents)]
    lengths = [len(i) for i in ids]
    _save(folder / f'{split}.tokens.npy', np.concatenate([*ids, np.zeros(0, dtype)]))
    _save(folder / f'{split}.offsets.npy', np.cumsum([0, *lengths], dtype=np.int64))
    sizes = [len(text.encode(errors='surrogateescape')) for text in documents]
    entry[split] = {'files': len(documents), 'bytes': sum(sizes), 'tokens': sum(lengths)}
  entry['dropped'] = dict(texts.dropped)
  files = [text.encode(errors='surrogateescape') for text in texts.heldout]
  entry |= dataclasses.asdict(compression.baselines(files))
  del entry['bytes'], entry['files']  # they stand under `heldout`
  return entry


def _is_empty_folder(path: pathlib.Path) -> bool:
  return path.is_dir() and not any(path.iterdir())


def _check_names(config: CorpusConfig, extra_documents: ExtraDocuments) -> None:
  if not config.sources and not extra_documents:
    raise UserError('data: no sources')
  for name in [*config.sources, *extra_documents]:
    if not name.isidentifier() or name == SAMPLES:
      raise UserError(f'data.sources.{name}: is not usable as the name of a source')
  twice = set(config.sources) & set(extra_documents)
  if twice:
    raise UserError(f'data.sources.{sorted(twice)[0]}: this name is taken by a source of the run')
  known = [*config.sources, *extra_documents, SAMPLES]
  for name in config.tokenizer_weights:
    if name not in known:
      raise UserError(f'data.tokenizer_weights.{name}: unknown key'
                      f'{config_lib.nearest(name, known)}')


def _write(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as file:
    file.write(text)


def _save(path: pathlib.Path, array: np.ndarray) -> None:
  with replacing(path, 'wb') as file:
    np.save(file, array)
