"""Packing: everything per-token moves together."""

import numpy as np
import pytest

from composer_jax.rl import replay
from composer_jax.rl import samples as samples_lib


def batch_of(fakes, masks, row_len=16, rows=2, seed=0):
  samples = [fakes.sample(logical=str(i), sampled=m, seed=seed + i) for i, m in enumerate(masks)]
  layout = replay.plan([len(m) for m in masks], row_len, rows, -(-len(masks) // rows))
  return samples, layout, replay.build_batch(samples, np.arange(1.0, len(masks) + 1), layout, 9.0,
                                             (2, 2))


def test_hand_written_row(fakes):
  samples, layout, batch = batch_of(fakes, ['..##'], row_len=6, rows=1)
  r = samples[0].rollout
  assert batch.tokens[0, 0].tolist() == [*r.tokens.tolist(), 0, 0]
  assert batch.targets[0, 0].tolist() == [*r.tokens[1:].tolist(), 0, 0, 0]
  assert batch.weights[0, 0].tolist() == [0, 1, 1, 0, 0, 0]
  assert batch.advantages[0, 0].tolist() == [0, 1, 1, 0, 0, 0]
  assert batch.positions[0, 0].tolist() == [0, 1, 2, 3, 0, 0]
  assert batch.segment_ids[0, 0].tolist() == [1, 1, 1, 1, 0, 0]
  assert batch.routing_mask[0, 0].tolist() == [True, True, True, False, False, False]
  np.testing.assert_array_equal(batch.sampler_logprobs[0, 0, 1:3], r.logprobs[2:])
  np.testing.assert_array_equal(batch.routing[0, 0, :4], r.routing)
  assert batch.routing.dtype == np.uint16 and batch.routing.max() > 255


@pytest.mark.parametrize('seed', range(30))
def test_every_array_is_permuted_like_the_tokens(fakes, seed):
  rng = np.random.default_rng(seed)
  masks = [[False, *(rng.random(rng.integers(1, 15)) < 0.5)] for _ in range(rng.integers(1, 20))]
  samples, layout, batch = batch_of(fakes, masks, seed=1000 * seed)
  columns = {name: layout.lift(getattr(batch, name)) for name in (
      'tokens', 'targets', 'weights', 'advantages', 'sampler_logprobs', 'routing', 'routing_mask',
      'positions')}
  for i, sample in enumerate(samples):
    r, n = sample.rollout, len(sample.rollout.tokens)
    np.testing.assert_array_equal(columns['tokens'][i], r.tokens)
    np.testing.assert_array_equal(columns['routing'][i], r.routing)
    np.testing.assert_array_equal(columns['routing_mask'][i], r.routing_mask)
    np.testing.assert_array_equal(columns['positions'][i], np.arange(n))
    where = columns['weights'][i] > 0
    np.testing.assert_array_equal(where[:-1], r.sampled[1:])
    np.testing.assert_array_equal(columns['targets'][i][where], r.tokens[1:][where[:-1]])
    np.testing.assert_array_equal(columns['sampler_logprobs'][i][where], r.logprobs[r.sampled])
    assert np.all(columns['advantages'][i][where] == i + 1)
    assert not columns['advantages'][i][~where].any()
  # one loss owner per sampled token, nothing outside the documents
  assert batch.weights.sum() == sum(s.rollout.sampled.sum() for s in samples)
  assert (batch.segment_ids > 0).sum() == sum(len(m) for m in masks)
  assert not batch.weights[batch.segment_ids == 0].any()
  used = (batch.segment_ids > 0).any(axis=(1, 2))
  assert used.sum() == layout.micro_batches_used and used[:layout.micro_batches_used].all()


def test_wrong_routing_is_refused(fakes):
  sample = fakes.sample()
  layout = replay.plan([len(sample.rollout.tokens)], 16, 1, 1)
  with pytest.raises(ValueError, match='for a model'):
    replay.build_batch([sample], [1.0], layout, 1.0, (3, 2))
  narrow = fakes.rollout('..##')
  narrow = samples_lib.Sample(
      type(narrow)(**{**narrow.__dict__, 'routing': narrow.routing.astype(np.uint8)}),
      sample.outcome, 'g', 'l')
  with pytest.raises(ValueError, match='uint16'):
    replay.build_batch([narrow], [1.0], replay.plan([4], 16, 1, 1), 1.0, (2, 2))
  with pytest.raises(ValueError, match='uint16'):
    samples_lib.validate([narrow])


def test_too_long_and_too_many_are_refused():
  with pytest.raises(ValueError, match='row holds'):
    replay.plan([17], 16, 1, 1)
  with pytest.raises(ValueError, match='rows are needed'):
    replay.plan([16, 16, 16], 16, 2, 1)
