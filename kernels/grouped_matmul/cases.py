"""Inputs that every backend must get right; the tests draw from here."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
  """One problem.

  Attributes:
    name: what is special about it.
    sizes: rows of each group.
    padding: rows after the last group.
    k: width of the rows.
    n: width of the products.
    poison: fill the padding with NaN and infinity.
  """

  name: str
  sizes: tuple[int, ...]
  padding: int = 0
  k: int = 12
  n: int = 20
  poison: bool = False

  def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns x `[M, K]`, w `[E, K, N]`, group_sizes `[E]` and an output gradient `[M, N]`."""
    rng = np.random.default_rng(seed)
    real = sum(self.sizes)
    x = rng.standard_normal((real + self.padding, self.k)).astype(np.float32)
    dy = rng.standard_normal((real + self.padding, self.n)).astype(np.float32)
    if self.poison:
      x[real::2], x[real + 1::2] = np.nan, np.inf
      dy[real:] = np.nan
    w = rng.standard_normal((len(self.sizes), self.k, self.n)).astype(np.float32)
    return x, w, np.array(self.sizes, np.int32), dy


CASES = (
    Case('balanced', (64, 64, 64)),
    Case('ragged tails', (1, 65, 63, 130, 2)),
    Case('empty groups', (0, 5, 0, 0, 70, 0)),
    Case('one group has all', (0, 150, 0)),
    Case('no rows at all', (0, 0), padding=9),
    Case('poison in padding', (33, 0, 7), padding=90, poison=True),
    Case('one expert', (40,), padding=3, k=7, n=5),
    Case('many rows, balanced', (130, 128, 120, 134)),
    Case('many rows, some groups overflow', (260, 0, 65, 1, 130, 70, 66, 64), padding=7),
    Case('many rows in one group', (0, 0, 700, 0), k=5, n=6),
    Case('many rows, poison in padding', (90, 0, 230, 3), padding=250, poison=True),
    Case('many rows of padding', (0, 0, 0), padding=600, k=3, n=4, poison=True),
    Case('many experts', tuple(i % 3 for i in range(384)), padding=5, k=4, n=3),
)

# For interpreters, which take long: groups, rows and columns are no multiples of a tile.
TILED = (
    Case('ragged tails, empty groups, poison', (130, 0, 3, 128), padding=40, k=96, n=136,
         poison=True),
    Case('one group has all', (0, 150, 0), k=160, n=24),
    Case('no rows at all', (0, 0), padding=9, k=16, n=16),
)
