import numpy as np
import pytest

from composer_jax.rollout.prefill import plan


@pytest.mark.parametrize('length, widths', [
    (1, [8]), (8, [8]), (9, [32]), (32, [32]), (33, [32, 8]), (73, [32, 32, 32]), (0, [])])
def test_cut_into_buckets(length, widths):
  tokens = np.arange(length)
  items = plan(3, tokens, False, (32, 8))
  assert [item.width for item in items] == widths
  assert [item.order for item in items] == list(range(len(widths)))
  assert np.concatenate([*(item.tokens for item in items), []]).tolist() == tokens.tolist()
  assert all(item.slot == 3 and not item.fresh for item in items)


def test_only_the_first_chunk_wipes_and_an_empty_fresh_slot_is_wiped_too():
  assert [item.fresh for item in plan(0, np.arange(40), True, (8, 32))] == [True, False]
  (item,) = plan(0, np.arange(0), True, (8, 32))
  assert item.fresh and len(item.tokens) == 0
