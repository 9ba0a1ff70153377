"""Documents into fixed rows: one assignment, and functions that lay any per-token array out by it.

Pre-training, SFT and RL share these functions, so that tokens, masks, log-probs and recorded expert
ids can never be packed differently from one another.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

Rows = list[list[int]]


def pack(lengths: Sequence[int] | Int[np.ndarray, 'n'], row_len: int, *, decreasing: bool = False,
         open_rows: int = 256) -> Rows:
  """Assigns items to rows by first fit: each goes into the first open row with room for it.

  Args:
    lengths: tokens of each item, between 1 and `row_len`.
    row_len: tokens of a row.
    decreasing: place long items first (first-fit decreasing): fuller rows, another order. Without
      it the order of the items is kept within a row.
    open_rows: how many unfilled rows to look at; beyond it the fullest one is closed. It bounds the
      time on a large corpus; with fewer rows than this the result is exact first fit.

  Returns:
    For each row, the indices of its items, in their order inside the row.

  Raises:
    ValueError: an item is empty or longer than a row.
  """
  lengths = np.asarray(lengths, np.int64)
  if lengths.size and (lengths.min() < 1 or lengths.max() > row_len):
    bad = int(np.argmax((lengths < 1) | (lengths > row_len)))
    raise ValueError(f'item {bad} has {lengths[bad]} tokens; a row holds 1 to {row_len}')
  order = np.argsort(-lengths, kind='stable') if decreasing else np.arange(len(lengths))
  rows: Rows = []
  free = np.zeros(open_rows, np.int64)  # room left in each open row; 0 where there is none
  owner = [-1] * open_rows
  used = 0
  for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
    slot = int(np.argmax(free[:used] >= length)) if used else 0
    if used and free[slot] >= length:
      rows[owner[slot]].append(item)
      free[slot] -= length
      continue
    rows.append([item])
    if length == row_len:
      continue
    if used == open_rows:
      # Keep the open rows in the order they were begun, so that "first" stays well defined.
      closed = int(np.argmin(free))
      free[closed:-1] = free[closed + 1:].copy()
      owner.pop(closed)
      owner.append(-1)
      used -= 1
    free[used], owner[used] = row_len - length, len(rows) - 1
    used += 1
  return rows


def place(items: Sequence[np.ndarray], rows: Rows, row_len: int, fill: float = 0,
          n_rows: int | None = None) -> np.ndarray:
  """Lays per-token arrays out by an assignment.

  Args:
    items: arrays `[length, ...]` with equal trailing axes and type; item i is what `rows` calls i.
    rows: an assignment, as `pack` returns it; items that it leaves out are not used.
    row_len: tokens of a row.
    fill: value of the places no item takes.
    n_rows: rows of the result; more than `len(rows)` appends rows of `fill`.

  Returns:
    Array `[n_rows, row_len, ...]`.
  """
  n_rows = len(rows) if n_rows is None else n_rows
  trailing = items[0].shape[1:] if len(items) else ()
  out = np.full((n_rows, row_len, *trailing), fill, items[0].dtype if len(items) else np.int32)
  for r, row in enumerate(rows):
    start = 0
    for index in row:
      item = items[index]
      out[r, start:start + len(item)] = item
      start += len(item)
  return out


def layout(lengths: Sequence[int] | Int[np.ndarray, 'n'], rows: Rows, row_len: int,
           n_rows: int | None = None) -> tuple[Int[np.ndarray, 'r s'], Int[np.ndarray, 'r s']]:
  """Returns (segment ids, positions) of an assignment, each int32 `[n_rows, row_len]`.

  Segment ids count 1, 2, ... within a row and are 0 at padding; positions restart at 0 with each
  item and are 0 at padding.
  """
  n_rows = len(rows) if n_rows is None else n_rows
  segment_ids = np.zeros((n_rows, row_len), np.int32)
  positions = np.zeros((n_rows, row_len), np.int32)
  count = np.arange(row_len, dtype=np.int32)
  for r, row in enumerate(rows):
    start = 0
    for number, index in enumerate(row, 1):
      stop = start + int(lengths[index])
      segment_ids[r, start:stop] = number
      positions[r, start:stop] = count[:stop - start]
      start = stop
  return segment_ids, positions


def shift(tokens: Int[np.ndarray, 'n'], token_weights: Float[np.ndarray, 'n']
          ) -> tuple[Int[np.ndarray, 'n'], Float[np.ndarray, 'n']]:
  """Turns "this token carries this loss weight" into targets and their weights.

  Args:
    tokens: ids of one document.
    token_weights: loss weight of *producing* each token.

  Returns:
    (targets, weights): position i has to predict `tokens[i + 1]` with weight
    `token_weights[i + 1]`; the last position predicts nothing (target 0, weight 0).
  """
  targets = np.zeros_like(tokens)
  weights = np.zeros(len(tokens), np.float32)
  targets[:-1] = tokens[1:]
  weights[:-1] = token_weights[1:]
  return targets, weights
