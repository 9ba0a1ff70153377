"""Fixed rows over documents: which stretch of which document lies where.

A document of n tokens is `<|doc|> t1 ... tn`. It is cut into stretches of at most `row_len` inputs,
and every token t1 ... tn is the target of exactly one place: the first is predicted from `<|doc|>`,
and the first of a later stretch from the token before it, which opens that stretch. Stretches are
packed into rows once, in an order given by the seed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from composer_jax.data import packing


class Sequences(Protocol):
  """Token sequences with random access."""

  def __len__(self) -> int: ...

  def lengths(self) -> np.ndarray:
    """Returns int64 `[n]`, the tokens of each sequence."""

  def stretch(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, loss weight of producing each id) of tokens `start` to `stop`."""


@dataclasses.dataclass
class Row:
  """One packed row, arrays `[row_len]`; fields as in `composer_jax.batch.Batch`."""

  tokens: np.ndarray
  targets: np.ndarray
  weights: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray


class Rows:
  """Packed rows over sequences, with random access.

  Attributes:
    row_len: tokens of a row.
    tokens: inputs in all rows together, padding excluded.
  """

  def __init__(self, sequences: Sequences, row_len: int, seed: int | None):
    """Cuts and packs.

    Args:
      sequences: what to pack.
      row_len: tokens of a row.
      seed: order in which stretches are packed; None keeps the order of the sequences.
    """
    self.row_len = row_len
    self._sequences = sequences
    self._index, self._start, self._stop = _stretches(sequences.lengths(), row_len)
    if seed is not None:
      order = np.random.default_rng(seed).permutation(len(self._index))
      self._index, self._start, self._stop = (
          a[order] for a in (self._index, self._start, self._stop))
    lengths = self._stop - self._start
    self._rows = packing.pack(lengths, row_len)
    self.tokens = int(lengths.sum())

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, row: int) -> Row:
    out = Row(*(np.zeros(self.row_len, dtype) for dtype in (
        np.int32, np.int32, np.float32, np.int32, np.int32)))
    at = 0
    for number, piece in enumerate(self._rows[row], 1):
      start, stop = int(self._start[piece]), int(self._stop[piece])
      # One token more than the inputs: the last target.
      ids, weights = self._sequences.stretch(int(self._index[piece]), start, stop + 1)
      length = stop - start
      targets, target_weights = packing.shift(ids, weights)
      here = slice(at, at + length)
      out.tokens[here] = ids[:length]
      out.targets[here] = targets[:length]
      out.weights[here] = target_weights[:length]
      out.positions[here] = np.arange(length, dtype=np.int32)
      out.segment_ids[here] = number
      at += length
    return out


class DocumentSequences:
  """Documents of a corpus as `<|doc|>` and their tokens, every token with weight 1."""

  def __init__(self, tokens: np.ndarray, offsets: np.ndarray, doc_id: int,
               count: int | None = None):
    """Takes the first `count` documents (None: all) of memory-mapped tokens and offsets."""
    self._tokens = tokens
    self._offsets = offsets if count is None else offsets[:count + 1]
    self._doc_id = doc_id

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def lengths(self) -> np.ndarray:
    return np.diff(self._offsets) + 1

  def stretch(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    first = int(self._offsets[index]) - 1  # where <|doc|> would lie
    stop = min(stop, int(self._offsets[index + 1]) - first)
    ids = np.empty(stop - start, np.int32)
    if start == 0:
      ids[0] = self._doc_id
      ids[1:] = self._tokens[first + 1:first + stop]
    else:
      ids[:] = self._tokens[first + start:first + stop]
    return ids, np.ones(len(ids), np.float32)


class TraceSequences:
  """Recorded conversations: ids and loss weights exactly as recorded."""

  def __init__(self, ids: Sequence[np.ndarray], weights: Sequence[np.ndarray]):
    self._ids = ids
    self._weights = weights

  def __len__(self) -> int:
    return len(self._ids)

  def lengths(self) -> np.ndarray:
    return np.array([len(i) for i in self._ids], np.int64)

  def stretch(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return self._ids[index][start:stop], self._weights[index][start:stop]


def _stretches(lengths: np.ndarray, row_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Cuts sequences into input stretches [start, stop).

  A cut that would leave the last token alone is not made: with nothing to predict, it would only
  take room. The last token of a sequence is an input (with target weight 0) where it fits.
  """
  # ceil((length - 1) / row_len) stretches hold all targets; a single token needs none.
  counts = np.maximum(lengths - 1 + row_len - 1, 0) // row_len
  index = np.repeat(np.arange(len(lengths)), counts)
  first = np.cumsum(counts) - counts
  start = (np.arange(len(index)) - first[index]) * row_len
  stop = np.minimum(start + row_len, lengths[index])
  return index, start, stop
