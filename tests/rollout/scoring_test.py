"""The trainer's view of a rollout: packed, without cache, with the sampler's routing replayed."""

import jax
import numpy as np
import pytest

from composer_jax import models
from composer_jax.batch import Batch
from composer_jax.rollout import scoring
from composer_jax.rollout.engine import Engine, EngineConfig
from composer_jax.rollout.scheduler import Scheduler

MODEL = models.ModelConfig(
    vocab_size=12, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1,
    intermediate_size=48, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2,
    num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    max_position_embeddings=128, rope_theta=1000.0, initializer_range=0.15)
TEMPERATURE = 0.5


@pytest.fixture(scope='module')
def params():
  return models.init(MODEL, jax.random.key(0))


@pytest.fixture
def rollouts(params, scripted_session):
  rng, done = np.random.default_rng(0), []
  queue = [scripted_session(f's{i}', [rng.integers(2, 12, 9).tolist() for _ in range(3)], wait=1)
           for i in range(6)]
  engine = Engine(MODEL, EngineConfig(slots=4, max_len=64, prefill_buckets=(8,), prefill_tokens=32,
                                      cache_views=(), temperature=TEMPERATURE), end_id=1)
  Scheduler(engine, lambda: (0, params), lambda: queue.pop() if queue else None,
            lambda _, rollout: done.append(rollout), idle_s=0).run()
  return done


def pack(rollouts, length=128):
  """Two rollouts a row; sampler log-probs and routing beside the tokens that they belong to."""
  rows = len(rollouts) // 2
  fields = {name: np.zeros((rows, length), np.int32)
            for name in ('tokens', 'targets', 'positions', 'segment_ids')}
  sampled = np.zeros((rows, length), bool)
  logprobs = np.zeros((rows, length), np.float32)
  routing = np.zeros((2, rows, length, 2), np.uint16)
  mask = np.zeros((rows, length), bool)
  for i, rollout in enumerate(rollouts):
    row, start = i // 2, (i % 2) * 64
    t = len(rollout)
    here = slice(start, start + t)
    fields['tokens'][row, here] = rollout.tokens
    fields['targets'][row, start:start + t - 1] = rollout.tokens[1:]
    fields['positions'][row, here] = np.arange(t)
    fields['segment_ids'][row, here] = i % 2 + 1
    sampled[row, start:start + t - 1] = rollout.sampled[1:]
    logprobs[row, start:start + t - 1] = rollout.logprobs[1:]
    routing[:, row, here] = rollout.routing.transpose(1, 0, 2)
    mask[row, here] = rollout.routing_mask
  batch = Batch(weights=sampled.astype(np.float32), denominator=1.0, **fields)
  return batch, sampled, logprobs, models.Routing(routing, mask)


def test_gap_with_replay_at_equal_weights_is_rounding_only(params, rollouts):
  batch, sampled, logprobs, routing = pack(rollouts)
  assert sampled.sum() == sum(r.num_sampled for r in rollouts) > 50
  scored = scoring.score(MODEL, params, batch, temperature=TEMPERATURE, routing=routing)
  gap = np.abs(np.asarray(scored) - logprobs)[sampled]
  assert gap.max() < 1e-5
  assert np.isfinite(scored).all()
  # the temperature counts: the same tokens scored at 1 are far off
  plain = scoring.score(MODEL, params, batch, routing=routing)
  assert np.abs(np.asarray(plain) - logprobs)[sampled].max() > 0.1


def test_replay_takes_the_recorded_experts_and_not_its_own(params, rollouts):
  batch, sampled, logprobs, routing = pack(rollouts)
  moved = models.Routing((routing.indices + 1) % 6, routing.mask)
  scored = scoring.score(MODEL, params, batch, temperature=TEMPERATURE, routing=moved)
  assert np.abs(np.asarray(scored) - logprobs)[sampled].max() > 1e-3
