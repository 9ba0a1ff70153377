"""Packing keeps every token once, never overflows, and lays all arrays out alike (D4, E4)."""

import numpy as np
import pytest

from composer_jax.data import packing


def _brute_force_first_fit(lengths, row_len):
  rows, free = [], []
  for item, length in enumerate(lengths):
    for r, room in enumerate(free):
      if room >= length:
        rows[r].append(item)
        free[r] -= length
        break
    else:
      rows.append([item])
      free.append(row_len - length)
  return rows


def test_hand_made_assignment():
  assert packing.pack([5, 4, 3, 4, 8, 1], 8) == [[0, 2], [1, 3], [4], [5]]
  assert packing.pack([5, 4, 3, 4, 8, 1], 8, decreasing=True) == [[4], [0, 2], [1, 3], [5]]
  assert packing.pack([], 8) == []


@pytest.mark.parametrize('seed', range(20))
def test_equals_brute_force_first_fit_while_few_rows_are_open(seed):
  rng = np.random.default_rng(seed)
  row_len = int(rng.integers(4, 60))
  lengths = rng.integers(1, row_len + 1, size=int(rng.integers(1, 200)))
  assert packing.pack(lengths, row_len) == _brute_force_first_fit(lengths, row_len)


@pytest.mark.parametrize('seed', range(20))
@pytest.mark.parametrize('open_rows', [1, 2, 7])
def test_any_assignment_holds_each_item_once_and_fits(seed, open_rows):
  rng = np.random.default_rng(100 + seed)
  row_len = int(rng.integers(4, 60))
  lengths = rng.integers(1, row_len + 1, size=150)
  for decreasing in (False, True):
    rows = packing.pack(lengths, row_len, decreasing=decreasing, open_rows=open_rows)
    assert sorted(i for row in rows for i in row) == list(range(150))
    assert max(lengths[row].sum() for row in rows) <= row_len
    if not decreasing:
      assert all(row == sorted(row) for row in rows)


@pytest.mark.parametrize('lengths', [[3, 0, 2], [3, 9, 2]])
def test_an_item_that_no_row_can_hold_is_refused(lengths):
  with pytest.raises(ValueError, match='item 1 has'):
    packing.pack(lengths, 8)


@pytest.mark.parametrize('seed', range(10))
def test_every_per_token_array_is_permuted_like_the_tokens(seed):
  rng = np.random.default_rng(seed)
  row_len = 32
  lengths = rng.integers(1, row_len + 1, size=40)
  tokens = [rng.integers(1, 1000, size=n).astype(np.int32) for n in lengths]
  routing = [np.stack([t, t + 1, t + 2, t + 3], -1).reshape(-1, 2, 2).astype(np.uint16)
             for t in tokens]
  rows = packing.pack(lengths, row_len, decreasing=True)
  token_rows = packing.place(tokens, rows, row_len, n_rows=len(rows) + 2)
  routing_rows = packing.place(routing, rows, row_len, n_rows=len(rows) + 2)
  segment_ids, positions = packing.layout(lengths, rows, row_len, n_rows=len(rows) + 2)
  real = segment_ids > 0
  assert real.sum() == lengths.sum() and not real[-2:].any()
  np.testing.assert_array_equal(routing_rows[real][:, 0, 0], token_rows[real])
  np.testing.assert_array_equal(routing_rows[real][:, 1, 1], token_rows[real] + 3)
  assert routing_rows.dtype == np.uint16 and not routing_rows[~real].any()
  # Read every item back from segment ids alone, with positions counting from 0.
  for r, row in enumerate(rows):
    for number, index in enumerate(row, 1):
      at = segment_ids[r] == number
      np.testing.assert_array_equal(token_rows[r][at], tokens[index])
      np.testing.assert_array_equal(positions[r][at], np.arange(lengths[index]))


def test_layout_by_hand():
  segment_ids, positions = packing.layout([2, 3, 1], [[0, 2], [1]], 4, n_rows=3)
  assert segment_ids.tolist() == [[1, 1, 2, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
  assert positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]


def test_shift_by_hand():
  # <|user|> a <|end|> <|call|> b <|end|>: the call text and its end are what the model produces.
  tokens = np.array([2, 10, 5, 3, 11, 5], np.int32)
  targets, weights = packing.shift(tokens, np.array([0, 0, 0, 0, 1, 1], np.float32))
  assert targets.tolist() == [10, 5, 3, 11, 5, 0]
  assert weights.tolist() == [0, 0, 0, 1, 1, 0]
