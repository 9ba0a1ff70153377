"""How forced tokens (prompts, tool results) are cut into chunks of few static widths."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32


@dataclasses.dataclass(frozen=True)
class PrefillItem:
  """One chunk of one slot.

  Attributes:
    slot: cache row.
    order: 0 for the slot's first chunk in this tick, then 1, 2, ...
    start: tokens in front of the chunk in the slot's sequence.
    tokens: at least 1 and at most `width` ids.
    width: the bucket the chunk is padded to.
  """

  slot: int
  order: int
  start: int
  tokens: Int32[np.ndarray, 'n']
  width: int


def plan(slot: int, start: int, tokens: Int32[np.ndarray, 'n'],
         buckets: Sequence[int]) -> list[PrefillItem]:
  """Cuts a slot's forced tokens into chunks.

  The cut depends on this slot's text alone, so a session's numbers depend on its neighbours only
  by rounding (through the view and the rows that the chunk is computed with).  As long as the text
  exceeds the widest bucket, chunks of that width are cut off; the rest goes into the smallest
  bucket that holds it.

  Args:
    slot: cache row.
    start: tokens that the slot holds.
    tokens: what to append; may be empty.
    buckets: the widths there are.
  """
  widths = sorted(buckets)
  items, done = [], 0
  while done < len(tokens):
    left = len(tokens) - done
    width = next((w for w in widths if w >= left), widths[-1])
    items.append(PrefillItem(slot, len(items), start + done, tokens[done:done + width], width))
    done += width
  return items
