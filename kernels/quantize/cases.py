"""Inputs that every backend must get right; the tests draw from here."""

import numpy as np

_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E4M3_TIES = (1.0625, 1.1875, 17.0, 432.0, 2.0 ** -10, 3 * 2.0 ** -10)


def rows(columns: int = 128, seed: int = 0) -> np.ndarray:
  """Returns 64 rows of float32: normal ones, then what is special about formats.

  Outliers, very small and large numbers, zeros, subnormal numbers, values on and right beside the
  middle between two representable ones, saturation, NaN and infinity (rows 40 and 41).
  """
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((64, columns)).astype(np.float32)
  x[:8] *= np.exp(3 * rng.standard_normal((8, columns))).astype(np.float32)
  x[8:12] *= 1e-30
  x[12:16] *= 1e30
  x[16] = 0
  x[17, 16:48] = 0
  x[18] = 448 * 2.0 ** rng.integers(-9, 9, columns) * rng.choice([1, 1 + 2.0 ** -23], columns)
  x[19, 3] = x[20] = np.finfo(np.float32).max
  x[21:24] = np.array([[1e-34], [1e-40], [1e-45]], np.float32)
  x[24, 1] = 1e-7  # lost beside the rest
  near = np.array([1 - 2.0 ** -23, 1 - 2.0 ** -24, 1, 1 + 2.0 ** -23])
  for row, scale in zip(range(25, 33), 2.0 ** np.arange(-104, 104, 26), strict=True):
    ties = rng.choice(_E2M1_TIES, columns) * rng.choice(near, columns)
    x[row] = scale * ties * rng.choice([-1, 1], columns)
    x[row, ::16] = 6 * scale  # the scale of every block, 1 for NVFP4 beside the next
    x[row, 0] = 6 * 448 * scale
  for row in range(33, 37):
    x[row] = rng.choice(_E4M3_TIES, columns) * rng.choice(near, columns)
    x[row, ::32] = 448
  x[37] *= np.float32(2.0 ** -124)  # around the least normal number
  x[38, :16], x[38, 16:32] = 2.0 ** -126, 2.0 ** -105
  x[40, 40], x[41, 7] = np.nan, -np.inf
  return x
