"""Packed INT4 against hand-made words, plain Python integers, and its own round trip."""

import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint import packed_int4
from composer_jax.errors import UserError

BF16 = ml_dtypes.bfloat16


def test_a_hand_made_word():
  # Nibbles from the lowest: 8 7 6 5 4 3 2 1, less 8.
  packed = np.array([[0x12345678, 0, -1, 0x0000000f]], np.int64)
  packed = packed.astype(np.uint32).view(np.int32)
  scale = np.array([[0.5]], BF16)
  expected = [0, -0.5, -1, -1.5, -2, -2.5, -3, -3.5] + [-4] * 8 + [3.5] * 8 + [3.5] + [-4] * 7
  assert packed_int4.decode(packed, scale).tolist() == [expected]


def test_order_of_words_and_sign_bit_in_plain_integers():
  rng = np.random.default_rng(0)
  values = rng.integers(-8, 8, (3, 64))
  words = [[sum((int(v) + 8) << 4 * i for i, v in enumerate(row[8 * w:8 * w + 8]))
            for w in range(8)] for row in values]
  assert max(max(row) for row in words) >= 2**31  # words whose sign bit is set are among them
  scale = np.array([[1, 2], [4, 0.25], [8, 1]], BF16)
  weight = values * np.repeat(scale.astype(np.float64), 32, axis=1)
  packed, kept = packed_int4.encode(weight.astype(np.float32), scale)
  assert packed.dtype == np.int32
  assert packed.view(np.uint32).tolist() == words
  assert kept.dtype == BF16
  assert np.array_equal(kept, scale)
  assert np.array_equal(packed_int4.decode(packed, kept), weight)


def test_untrained_weights_come_back_byte_for_byte_even_from_bfloat16():
  """All 16 codes in all 8 lanes under many scales; the packed words are arbitrary otherwise."""
  rng = np.random.default_rng(1)
  count = 4000
  bits = rng.integers(0x2000, 0x5f80, (count, 1)).astype(np.uint16)  # 2^-63 .. 2^64
  bits[::2] |= 0x8000  # a scale may be negative
  scale = bits.view(BF16)
  codes = rng.integers(0, 16, (count, 32))
  codes[:16] = (np.arange(16)[:, None] + np.arange(32)) % 16
  assert all(len(set(codes[:16, lane])) == 16 for lane in range(8))
  words = (codes.reshape(count, 4, 8).astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64)))
  packed = words.sum(-1).astype(np.uint32).view(np.int32)
  exact = packed_int4.decode(packed, scale)
  assert np.array_equal(exact, (codes - 8) * scale.astype(np.float64))
  for weight in (exact, exact.astype(BF16)):
    assert packed_int4.fits(weight, scale).all()
    again, kept = packed_int4.encode(weight, scale)
    assert again.tobytes() == packed.tobytes()
    assert kept.tobytes() == scale.tobytes()


def test_fresh_scale_is_absmax_over_seven_and_a_half():
  rng = np.random.default_rng(2)
  weight = rng.normal(size=(2, 5, 96)).astype(np.float32)  # with a leading axis
  packed, scale = packed_int4.encode(weight)
  groups = weight.reshape(2, 5, 3, 32).astype(np.float64)
  expected = (np.abs(groups).max(-1) / 7.5).astype(np.float32).astype(BF16)
  assert np.array_equal(scale, expected)
  decoded = packed_int4.decode(packed, scale).reshape(groups.shape)
  factor = scale.astype(np.float64)[..., None]
  values = np.clip(np.rint(groups / factor), -8, 7)
  assert np.array_equal(decoded, values * factor)
  assert (np.abs(decoded - groups) <= factor * 0.54).all()


def test_a_group_that_outgrew_its_scale_gets_a_fresh_one():
  weight = np.ones((1, 96), np.float32)
  weight[0, 40] = 7.5  # rounds to 8, which saturates
  weight[0, 70] = 7.49
  old = np.ones((1, 3), BF16)
  assert packed_int4.fits(weight, old).tolist() == [[True, False, True]]
  weight[0, 40] = -8.49
  assert packed_int4.fits(weight, old).all()
  weight[0, 40] = -15
  assert packed_int4.encode(weight, old)[1].tolist() == [[1, 2, 1]]
  assert not packed_int4.fits(weight, np.zeros((1, 3), BF16)).any()


@pytest.mark.parametrize('largest', [0.0, -0.0, 1e-44, 1e-38, 3e38, -3.3e38])
def test_extreme_groups_stay_finite(largest):
  weight = np.zeros((1, 64), np.float32)
  weight[0, 3] = largest
  packed, scale = packed_int4.encode(weight)
  assert (scale.astype(np.float32) > 0).all()
  decoded = packed_int4.decode(packed, scale)
  assert np.isfinite(decoded).all()
  assert not decoded[0, 4:].any()
  if abs(largest) < 1e-40:
    assert not decoded.any()
  else:
    assert abs(decoded[0, 3] - largest) <= 0.13 * abs(largest)


@pytest.mark.parametrize(('call', 'message'), [
    (lambda: packed_int4.encode(np.zeros((2, 48), np.float32), name='a.b'), 'a.b.*multiple of 32'),
    (lambda: packed_int4.encode(np.full((1, 32), np.nan, np.float32)), 'not finite'),
    (lambda: packed_int4.encode(np.full((1, 32), -np.inf, np.float32)), 'not finite'),
    (lambda: packed_int4.decode(np.zeros((1, 4), np.int64), np.ones((1, 1), BF16)), 'int32'),
    (lambda: packed_int4.decode(np.zeros((1, 4), np.int32), np.ones((1, 2), BF16)), 'belong'),
    (lambda: packed_int4.decode(np.zeros((1, 4), np.int32), np.ones((1, 1), np.float32)),
     'bfloat16'),
    (lambda: packed_int4.decode(np.zeros((1, 4), np.int32), np.full((1, 1), np.nan, BF16)),
     'not finite'),
    (lambda: packed_int4.fits(np.zeros((1, 32), np.float32), np.ones((1, 2), BF16)), r'\[1, 1\]'),
])
def test_what_does_not_fit_is_one_line(call, message):
  with pytest.raises(UserError, match=message) as caught:
    call()
  assert '\n' not in str(caught.value)
