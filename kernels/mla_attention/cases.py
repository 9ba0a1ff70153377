"""Inputs that every backend must get right; the tests draw from here."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
  """One problem.

  Attributes:
    name: what is special about it.
    documents: lengths of the documents of each row; the rest is padding.
    length: tokens of a row.
    heads: of both sides.
    key: width of a key.
    value: width of a value.
  """

  name: str
  documents: tuple[tuple[int, ...], ...]
  length: int
  heads: int = 2
  key: int = 192
  value: int = 128

  def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns float32 q, k `[B, S, H, P]`, v and d_out `[B, S, H, N]`, and segment_ids `[B, S]`.

    Padding holds NaN and infinity.
    """
    rng = np.random.default_rng(seed)
    segments = np.zeros((len(self.documents), self.length), np.int32)
    for row, documents in zip(segments, self.documents, strict=True):
      ids = np.repeat(np.arange(1, len(documents) + 1), documents)
      row[:len(ids)] = ids
    shape = (*segments.shape, self.heads)
    arrays = {'q': rng.standard_normal((*shape, self.key)) / self.key ** 0.5,
              'k': rng.standard_normal((*shape, self.key)),
              'v': rng.standard_normal((*shape, self.value)),
              'd_out': rng.standard_normal((*shape, self.value))}
    for array in arrays.values():
      array[segments == 0] = np.nan
      array[segments == 0][::2] = np.inf
    return {name: a.astype(np.float32) for name, a in arrays.items()} | {'segment_ids': segments}


CASES = (
    Case('one document a row', ((40,), (40,)), 40, key=24, value=16),
    Case('packed, ragged, padded', ((7, 1, 20), (33,), ()), 33, key=24, value=16),
    Case('documents of one token', ((1,) * 9,), 12, heads=1, key=8, value=8),
    Case('keys as wide as values', ((5, 11),), 16, heads=3, key=8, value=8),
)
# For interpreters, which take long: documents end inside of blocks, and start after some.
TILED = (
    Case('three documents and padding', ((60, 150, 50),), 290, heads=1),
    Case('two rows', ((130,), (64, 1)), 130, heads=1),
)
