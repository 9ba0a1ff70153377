"""Block FP8 against float64 arithmetic, and its own round trip."""

import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint import block_fp8
from composer_jax.errors import UserError

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


def _spread(scale, shape):
  """Each block's scale at each of its weights, float64."""
  wide = np.repeat(np.repeat(scale.astype(np.float64), 128, 0), 128, 1)
  return wide[:shape[0], :shape[1]]


def test_against_float64_with_ragged_blocks():
  rng = np.random.default_rng(0)
  weight = rng.normal(size=(300, 200)).astype(np.float32)
  weight[:128, 128:] *= 1e-3
  codes, scale = block_fp8.encode(weight)
  assert codes.dtype == FP8
  assert scale.shape == (3, 2)
  for row in range(3):
    for column in range(2):
      block = weight[128 * row:128 * row + 128, 128 * column:128 * column + 128]
      assert scale[row, column] == np.float32(np.abs(block).max() / np.float32(448))
  wide = _spread(scale, weight.shape)
  decoded = block_fp8.decode(codes, scale)
  assert np.array_equal(decoded, (codes.astype(np.float64) * wide).astype(np.float32))
  # Half a step: 2^-4 of the weight, or half of the smallest subnormal code, 2^-10.
  assert (np.abs(decoded - weight) <= np.maximum(np.abs(weight) * 2**-4, wide * 2**-10)).all()
  assert np.abs(codes.astype(np.float32)).max() == 448


def test_untrained_weights_come_back_byte_for_byte_even_from_bfloat16():
  """All 254 finite codes, each in each of many blocks with random scales; negative zero too."""
  rng = np.random.default_rng(1)
  finite = np.array([c for c in range(256) if c & 0x7f != 0x7f], np.uint8)
  assert len(finite) == 254
  codes = rng.choice(finite, (260, 1290))
  for row in (0, 128, 256):
    for start in range(0, 1280, 128):  # two rows of a block hold 256 codes
      rows = slice(row, row + 2)
      codes[rows, start:start + 128] = np.append(finite, finite[:2]).reshape(2, 128)
  scale = np.exp(rng.uniform(np.log(1e-20), np.log(1e20), (3, 11))).astype(np.float32)
  scale[1] *= -1
  exact = block_fp8.decode(codes.view(FP8), scale)
  negative = (codes >= 0x80) ^ (_spread(scale, codes.shape) < 0)
  assert np.array_equal(np.signbit(exact), negative)  # of zeros too
  for weight in (exact, exact.astype(BF16)):
    assert block_fp8.fits(weight, scale).all()
    again, kept = block_fp8.encode(weight, scale)
    assert again.tobytes() == codes.tobytes()
    assert kept.tobytes() == scale.tobytes()


def test_a_block_that_outgrew_its_scale_gets_a_fresh_one():
  weight = np.ones((2, 300), np.float32)
  weight[0, 0] = -464  # rounds to 448 still
  weight[0, 200] = 465
  old = np.ones((1, 3), np.float32)
  assert block_fp8.fits(weight, old).tolist() == [[True, False, True]]
  codes, scale = block_fp8.encode(weight, old)
  assert scale.tolist() == [[1, np.float32(465 / 448), 1]]
  assert codes.astype(np.float32)[0, [0, 200]].tolist() == [-448, 448]
  assert not block_fp8.fits(weight, 0 * old).any()


@pytest.mark.parametrize('largest', [0.0, 1e-45, 1e-38, np.finfo(np.float32).max, -3e38])
def test_extreme_blocks_stay_finite(largest):
  weight = np.zeros((3, 130), np.float32)
  weight[1, 1] = largest
  codes, scale = block_fp8.encode(weight)
  assert (scale > 0).all()
  decoded = block_fp8.decode(codes, scale)
  assert np.isfinite(decoded).all()
  assert np.count_nonzero(decoded) == (abs(largest) > 1e-40)
  if abs(largest) > 1e-40:
    assert abs(decoded[1, 1] / np.float64(largest) - 1) < 0.07


@pytest.mark.parametrize('code', [0x7f, 0xff])
def test_nan_codes_are_an_error_that_names_the_place(code):
  codes = np.zeros((2, 3), np.uint8)
  codes[1, 2] = code
  with pytest.raises(UserError, match=r'gate: holds 1 NaN codes, the first at \[1, 2\]'):
    block_fp8.decode(codes.view(FP8), np.ones((1, 1), np.float32), name='gate')


@pytest.mark.parametrize(('call', 'message'), [
    (lambda: block_fp8.encode(np.full((1, 32), np.nan, np.float32)), 'not finite'),
    (lambda: block_fp8.encode(np.zeros(4, np.float32)), 'matrix'),
    (lambda: block_fp8.decode(np.zeros((129, 4), FP8), np.ones((1, 1), np.float32)), r'\[2, 1\]'),
    (lambda: block_fp8.decode(np.zeros((1, 4), BF16), np.ones((1, 1), np.float32)), 'float8_e4m3'),
    (lambda: block_fp8.decode(np.zeros((1, 4), FP8), np.ones((1, 1), BF16)), 'must be float32'),
    (lambda: block_fp8.decode(np.zeros((1, 4), FP8), np.full((1, 1), np.inf, np.float32)),
     'not finite'),
])
def test_what_does_not_fit_is_one_line(call, message):
  with pytest.raises(UserError, match=message) as caught:
    call()
  assert '\n' not in str(caught.value)
