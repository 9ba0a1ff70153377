import numpy as np
import pytest

from composer_jax.rollout.prefill import plan


@pytest.mark.parametrize('length, widths', [
    (1, [8]), (8, [8]), (9, [32]), (32, [32]), (33, [32, 8]), (73, [32, 32, 32]), (0, [])])
def test_cut_into_buckets(length, widths):
  tokens = np.arange(length)
  items = plan(3, 100, tokens, (32, 8))
  assert [item.width for item in items] == widths
  assert [item.order for item in items] == list(range(len(widths)))
  assert np.concatenate([*(item.tokens for item in items), []]).tolist() == tokens.tolist()
  assert all(item.slot == 3 and item.start == 100 + item.tokens[0] for item in items)
