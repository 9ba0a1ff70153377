"""Grain pipelines from packed rows to batches; their state is one integer, exact to the batch.

Rows are packed once (`rows.py`); Grain shuffles them anew each epoch, mixes the sources and counts
batches. Everything is random access, so that a restored iterator continues with the very next
batch, and nothing runs in another process or thread.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from composer_jax.batch import Batch
from composer_jax.data import mixture as mixture_lib
from composer_jax.data.corpus import Corpus
from composer_jax.data.rows import DocumentSequences, Row, Rows, TraceSequences
from composer_jax.errors import UserError


class Loader(Iterator[Batch]):
  """An endless iterator of NumPy batches with exact state.

  Attributes:
    rows: source -> its packed rows.
  """

  def __init__(self, rows: Mapping[str, Rows], shares: Mapping[str, float], batch_size: int,
               seed: int):
    """Mixes rows of each source by `shares`, `batch_size` rows at a time.

    Shares count rows: a share of 0.25 is every fourth row, hence (up to padding) every fourth
    token, whatever the lengths of the documents.
    """
    self.rows = dict(rows)
    parts = []
    for number, name in enumerate(shares):
      part = grain.MapDataset.range(len(self.rows[name])).map(_Tag(name))
      parts.append(part.seed(seed + 7919 * number).shuffle().repeat())
    dataset = grain.MapDataset.mix(parts, list(shares.values())) if len(parts) > 1 else parts[0]
    dataset = dataset.batch(batch_size, drop_remainder=True, batch_fn=list)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._iterator = iter(dataset.to_iter_dataset(options))

  def __next__(self) -> Batch:
    return collate([self.rows[name][row] for name, row in next(self._iterator)])

  def get_state(self) -> dict[str, Any]:
    """Returns a JSON-able dict; a loader built alike continues from it with the next batch."""
    return json.loads(json.dumps(self._iterator.get_state()))

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was taken."""
    self._iterator.set_state(dict(state))


class _Tag:
  """Row number -> (source, row number)."""

  def __init__(self, name: str):
    self._name = name

  def __call__(self, row: int) -> tuple[str, int]:
    return self._name, int(row)


def cpt_loader(mixture: Mapping[str, float], corpus_dir: str | pathlib.Path, batch_size: int,
               seq_len: int, seed: int) -> Loader:
  """Returns batches of the train split of a corpus.

  Args:
    mixture: source -> relative weight.
    corpus_dir: a built corpus.
    batch_size: B, rows of a batch.
    seq_len: S, tokens of a row; longer documents continue in further rows.
    seed: packing order, shuffling.

  Raises:
    UserError: no corpus there, or a mixture that does not fit it.
  """
  corpus = Corpus(corpus_dir)
  shares = mixture_lib.shares(mixture, corpus.sources)
  doc_id = corpus.tokenizer.doc_id
  rows = {}
  for name in shares:
    documents = corpus.documents(name, 'train')
    sequences = DocumentSequences(documents.tokens, documents.offsets, doc_id)
    rows[name] = Rows(sequences, seq_len, seed)
  return Loader(rows, shares, batch_size, seed)


def trace_loader(traces: str | pathlib.Path | Sequence[str | pathlib.Path], batch_size: int,
                 seq_len: int, seed: int, *, context_weight: float = 0.0) -> Loader:
  """Returns batches of recorded agent traces for SFT.

  The ids and the role mask are those of the live run, never a second rendering.

  Args:
    traces: one or more files of `envs.traces.write_traces`; a line is `{"id", "segments":
      [[token id, ...], ...], "trainable": [flag, ...], ...}`, one flag a segment: true for the
      model's own tokens, false for context, null for own tokens that must not be learnt.
    batch_size: B, rows of a batch.
    seq_len: S; a trace is never cut.
    seed: packing order, shuffling.
    context_weight: loss weight of prompt and tool results; the model's own tokens weigh 1, those
      that must not be learnt 0.

  Raises:
    UserError: a file is missing or malformed, there is no trace, or one is too long.
  """
  paths = [traces] if isinstance(traces, str | pathlib.Path) else list(traces)
  rows = {'traces': Rows(_trace_sequences(paths, seq_len, context_weight), seq_len, seed)}
  return Loader(rows, {'traces': 1.0}, batch_size, seed)


def trace_batches(path: str | pathlib.Path, batch_size: int, seq_len: int) -> list[Batch]:
  """Returns batches to evaluate on: every recorded trace of a file once, always packed alike.

  The model's own tokens are targets of weight 1, prompts and tool results have weight 0. The last
  batch is filled up with rows of padding.

  Args:
    path: a file as `trace_loader` reads it.
    batch_size: B.
    seq_len: S; a trace is never cut.

  Raises:
    UserError: the file is missing, malformed or empty, or a trace is too long.
  """
  return _in_order(Rows(_trace_sequences([path], seq_len, 0.0), seq_len, seed=None), batch_size)


def _trace_sequences(paths: Sequence[str | pathlib.Path], seq_len: int, context_weight: float
                     ) -> TraceSequences:
  """Returns the traces of all files with their loss weights."""
  ids, weights = [], []
  for path in paths:
    for name, trace_ids, own, context in read_traces(path):
      if len(trace_ids) > seq_len:
        raise UserError(f'{path}: trace {name} has {len(trace_ids)} tokens, seq_len is {seq_len}')
      ids.append(trace_ids)
      weights.append(own.astype(np.float32) + np.float32(context_weight) * context)
  if not ids:
    raise UserError(f'{", ".join(map(str, paths))}: no traces')
  return TraceSequences(ids, weights)


def read_traces(path: str | pathlib.Path
                ) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
  """Yields (id, token ids int32 `[n]`, own bool `[n]`, context bool `[n]`) of each line of a file.

  `own` marks the model's tokens, `context` prompts and tool results; tokens that the model wrote
  and must not learn are neither.

  Raises:
    UserError: the file cannot be read, or a line is not a trace.
  """
  try:
    lines = pathlib.Path(path).read_text().splitlines()
  except OSError as error:
    raise UserError(f'{path}: cannot read the traces ({error.strerror or error})') from error
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
      segments = [np.asarray(s, np.int32).reshape(-1) for s in record['segments']]
      flags = record['trainable']
      if len(flags) != len(segments):
        raise ValueError(f'{len(segments)} segments, {len(flags)} flags')
      if not all(flag is None or isinstance(flag, bool) for flag in flags):
        raise ValueError('a flag is none of true, false and null')
      own, context = (np.repeat(np.array([flag is kind for flag in flags], bool),
                                [len(s) for s in segments]) for kind in (True, False))
      ids = np.concatenate([np.zeros(0, np.int32), *segments])
    except (ValueError, KeyError, TypeError) as error:
      raise UserError(f'{path}:{number}: is not a trace ({error})') from error
    if len(ids) < 2:
      raise UserError(f'{path}:{number}: is not a trace (fewer than two tokens)')
    yield str(record.get('id', number)), ids, own, context


def heldout_batches(corpus_dir: str | pathlib.Path, source: str, seq_len: int, batch_size: int,
                    max_bytes: int | None = None) -> tuple[list[Batch], int]:
  """Returns batches that cover the held-out files of a source, and their exact size in bytes.

  Every token of every file is the target of exactly one place of weight 1, so that the bits per
  byte of these files are (sum of weight * negative log-likelihood in nats) / ln 2 / bytes. Files
  longer than `seq_len` continue in another stretch, whose context begins anew; the end of a file is
  not predicted. `Corpus.baselines(source, max_bytes)` gives the compressors' figures on the same
  bytes. The last batch is filled up with rows of padding.

  Args:
    corpus_dir: a built corpus.
    source: name of the source.
    seq_len: S.
    batch_size: B.
    max_bytes: use only the first files that fit in it together, at least one; None uses all.
  """
  corpus = Corpus(corpus_dir)
  documents = corpus.documents(source, 'heldout')
  files = corpus.heldout_files(source, max_bytes)
  rows = Rows(DocumentSequences(documents.tokens, documents.offsets, corpus.tokenizer.doc_id,
                                count=len(files)), seq_len, seed=None)
  return _in_order(rows, batch_size), sum(map(len, files))


def _in_order(rows: Rows, batch_size: int) -> list[Batch]:
  """Returns all rows as batches, the last one filled up with rows of padding."""
  padding = Row(*(np.zeros(rows.row_len, dtype) for dtype in (
      np.int32, np.int32, np.float32, np.int32, np.int32)))
  batches = []
  for start in range(0, len(rows), batch_size):
    group = [rows[r] for r in range(start, min(start + batch_size, len(rows)))]
    batches.append(collate(group + [padding] * (batch_size - len(group))))
  return batches


def collate(rows: Sequence[Row]) -> Batch:
  """Stacks rows; the denominator is the batch's summed loss weight (1 where that is zero)."""
  weights = np.stack([row.weights for row in rows])
  total = np.float32(weights.sum(dtype=np.float64))
  return Batch(
      tokens=np.stack([row.tokens for row in rows]),
      targets=np.stack([row.targets for row in rows]),
      weights=weights,
      positions=np.stack([row.positions for row in rows]),
      segment_ids=np.stack([row.segment_ids for row in rows]),
      denominator=total if total > 0 else np.float32(1.0))
