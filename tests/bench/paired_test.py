"""Order, warm-ups and arithmetic of paired timing."""

import pytest

from composer_jax.bench import paired


def test_sides_alternate_and_warm_ups_are_dropped():
  order, times = [], {'a': iter(range(10, 20)), 'b': iter(range(100, 110))}

  def side(name):
    def call():
      order.append(name)
      return next(times[name])
    return call

  rounds = []
  got = paired.interleave({'a': side('a'), 'b': side('b')}, 3, warm_ups=2,
                          after_round=lambda: rounds.append(len(order)))
  assert order == list('abbaabbaab')
  assert got == {'a': [12, 13, 14], 'b': [102, 103, 104]}
  assert rounds == [2, 4, 6, 8, 10]


def test_ratio_is_of_pairs_not_of_medians():
  ours, peer = [1.0, 10.0, 3.0, 4.0, 5.0], [2.0, 10.0, 4.0, 16.0, 2.5]
  got = paired.ratio(ours, peer)  # pairs: 0.5, 1, 0.75, 0.25, 2
  assert got['ratio_median'] == 0.75
  assert (got['ratio_q25'], got['ratio_q75'], got['ratio_iqr']) == (0.5, 1.0, 0.5)
  assert got['ratio_min'] == 0.5
  assert paired.text(got) == 'median 0.750 (quartiles 0.500 to 1.000), of the minima 0.500'


def test_summary():
  assert paired.summary([0.25, 0.125, 1.0]) == pytest.approx({'min_ms': 125, 'median_ms': 250})
