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
    tokens: at most `width` ids.
    width: the bucket the chunk is padded to.
    fresh: the slot starts from an empty context with this chunk.
  """

  slot: int
  order: int
  tokens: Int32[np.ndarray, 'n']
  width: int
  fresh: bool


def plan(slot: int, tokens: Int32[np.ndarray, 'n'], fresh: bool,
         buckets: Sequence[int]) -> list[PrefillItem]:
  """Cuts a slot's forced tokens into chunks.

  The cut depends on this slot's text alone, so a session's numbers do not depend on its
  neighbours.  As long as the text exceeds the widest bucket, chunks of that width are cut off; the
  rest goes into the smallest bucket that holds it.  A fresh slot without tokens gets an empty
  chunk, which wipes it.
  """
  widths = sorted(buckets)
  items, start = [], 0
  while start < len(tokens) or (fresh and not items):
    left = len(tokens) - start
    width = next((w for w in widths if w >= left), widths[-1])
    items.append(PrefillItem(slot, len(items), tokens[start:start + width], width,
                             fresh and not items))
    start += width
  return items
