"""The engine against a plain forward pass over each finished sequence."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from composer_jax import models
from composer_jax.errors import UserError
from composer_jax.rollout import engine as engine_lib
from composer_jax.rollout.engine import Engine, EngineConfig
from composer_jax.rollout.scheduler import Scheduler
from composer_jax.rollout.ticks import SlotRequest

END = 1
VOCAB = 12
MODEL = models.ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1,
    intermediate_size=48, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2,
    num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    max_position_embeddings=128, rope_theta=1000.0, initializer_range=0.15)
CONFIG = EngineConfig(slots=5, max_len=64, prefill_buckets=(4, 8), prefill_tokens=16,
                      decode_chunk=4, cache_views=(32,))


@pytest.fixture(scope='module')
def params():
  return models.init(MODEL, jax.random.key(0))


@pytest.fixture(scope='module')
def other_params():
  return models.init(MODEL, jax.random.key(9))


def play(params, sessions, config=CONFIG, version=lambda: 0, training=True, engine=None):
  """Runs sessions to their end; returns rollouts by session id."""
  engine = engine or Engine(MODEL, config, END)
  queue, done = list(sessions), {}

  def weights():
    v = version()
    return v, params[v] if isinstance(params, list) else params

  def keep(session, rollout):
    assert session.id not in done
    done[session.id] = rollout

  Scheduler(engine, weights, lambda: queue.pop(0) if queue else None, keep, idle_s=0,
            training=training).run()
  return done


def reference(params, tokens, temperature=1.0):
  """float64 log-softmax of a forward pass without cache, and its routing [T, L, K]."""
  padded = np.zeros((1, 64), np.int32)
  padded[0, :len(tokens)] = tokens
  out = forward(params, padded, (np.arange(64) < len(tokens))[None].astype(np.int32))
  logits = np.asarray(out.logits[0, :len(tokens)], np.float64) / (temperature or 1.0)
  top = logits.max(-1, keepdims=True)
  logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  return logprobs, np.asarray(out.router.indices[:, 0, :len(tokens)]).transpose(1, 0, 2)


@jax.jit
def forward(params, tokens, segment_ids):
  return models.forward(MODEL, params, tokens, segment_ids=segment_ids)


def random_texts(rng, turns, longest):
  return [rng.integers(2, VOCAB, rng.integers(1, longest)).tolist() for _ in range(turns)]


def conversations(make, count=9, seed=0):
  rng = np.random.default_rng(seed)
  return [make(f's{i}', random_texts(rng, rng.integers(1, 4), 20), budget=int(rng.integers(1, 9)),
               wait=int(rng.integers(0, 3))) for i in range(count)]


@pytest.mark.parametrize('temperature', [0.0, 0.5, 1.0, 2.0])
def test_equals_a_full_forward(params, scripted_session, temperature):
  """Chunked prefill, several turns, turns over several ticks, slots used again: 12 over 5 slots."""
  config = dataclasses.replace(CONFIG, temperature=temperature)
  sessions = conversations(scripted_session, 12)
  rollouts = play(params, sessions, config, training=temperature > 0)
  assert len(rollouts) == 12
  assert max(len(r) for r in rollouts.values()) > 40, 'both cache views are used'
  chosen_by_argmax = 0
  for session in sessions:
    rollout = rollouts[session.id]
    tokens = rollout.tokens
    spoken = [t for turn in session.turns for t in turn]
    assert tokens[rollout.sampled].tolist() == spoken
    logprobs, routing = reference(params, tokens, temperature)
    where = np.flatnonzero(rollout.sampled)
    np.testing.assert_allclose(
        rollout.logprobs[where], logprobs[where - 1, tokens[where]], atol=1e-5, rtol=0)
    best = logprobs[where - 1].argmax(-1)
    chosen_by_argmax += (best == tokens[where]).mean()
    if temperature == 0:
      np.testing.assert_array_equal(best, tokens[where])
    # every token but the last has the experts that a full forward chooses
    assert rollout.routing_mask.tolist() == [True] * (len(tokens) - 1) + [False]
    assert rollout.routing.dtype == np.uint16
    np.testing.assert_array_equal(np.sort(rollout.routing[:-1]), np.sort(routing[:-1]))
    assert (rollout.logprobs[~rollout.sampled] == 0).all()
    assert (rollout.versions == np.where(rollout.sampled, 0, -1)).all()
  if temperature:
    assert chosen_by_argmax < len(sessions), 'sampling is not the arg-max'


def test_slot_neighbours_and_tick_size_do_not_matter(params, scripted_session):
  alone = {}
  for i in range(9):
    session = conversations(scripted_session)[i]
    alone |= play(params, [session])
  together = play(params, conversations(scripted_session))
  reverse = play(params, conversations(scripted_session)[::-1])
  long_ticks = play(params, conversations(scripted_session),
                    dataclasses.replace(CONFIG, decode_chunk=16, cache_views=()))
  for id, rollout in alone.items():
    for other in (together[id], reverse[id], long_ticks[id]):
      np.testing.assert_array_equal(rollout.tokens, other.tokens)
      np.testing.assert_allclose(rollout.logprobs, other.logprobs, atol=1e-5)


def test_a_used_slot_leaks_nothing_to_the_bit(params, scripted_session):
  def probe():
    return scripted_session('probe', [[2], [3, 4, 5]], budget=6)

  fresh = play(params, [probe()])['probe']
  engine, rng = Engine(MODEL, CONFIG, END), np.random.default_rng(3)
  play(params, [scripted_session(f'before{i}', random_texts(rng, 3, 20)) for i in range(20)],
       engine=engine)
  assert np.stack(engine._latent).any(axis=(0, 2, 3)).all(), 'all slots were used'
  used = play(params, [probe()], engine=engine)['probe']
  for name in ('tokens', 'logprobs', 'routing'):
    np.testing.assert_array_equal(getattr(fresh, name), getattr(used, name))


def test_group_members_differ_and_are_reproducible(params, scripted_session):
  def group(seed):
    sessions = [scripted_session(f'task/{i}', [[3, 4]], budget=12) for i in range(8)]
    return play(params, sessions, dataclasses.replace(CONFIG, seed=seed))

  def texts(rollouts):
    return {id: tuple(r.tokens.tolist()) for id, r in rollouts.items()}

  first = texts(group(0))
  assert len(set(first.values())) >= 6
  assert first == texts(group(0))
  assert first != texts(group(1))


def test_weight_swap_keeps_the_cache_and_tags_the_tokens(params, other_params, scripted_session):
  ticks = iter(range(1000))
  sessions = [scripted_session(f's{i}', [[2, 3, 4]] * 3, budget=7, wait=1) for i in range(5)]
  sessions.append(scripted_session('late', [[2, 3, 4]], budget=7))
  rollouts = play([params, other_params], sessions, version=lambda: int(next(ticks) >= 2))
  mixed = 0
  for rollout in rollouts.values():
    versions = rollout.versions[rollout.sampled]
    assert (np.diff(versions) >= 0).all()
    mixed += len(set(versions.tolist())) == 2
  assert mixed >= 3
  # A session that starts after the swap never meets what the old weights left in the cache ...
  late = rollouts['late']
  where = np.flatnonzero(late.sampled)
  assert (late.versions[where] == 1).all()
  np.testing.assert_allclose(
      late.logprobs[where], reference(other_params, late.tokens)[0][where - 1, late.tokens[where]],
      atol=1e-5)
  # ... while a running one keeps its old entries: the documented policy, told by the versions.
  kept = next(r for r in rollouts.values() if len(set(r.versions[r.sampled].tolist())) == 2)
  new = np.flatnonzero(kept.sampled & (kept.versions == 1))
  recomputed = reference(other_params, kept.tokens)[0][new - 1, kept.tokens[new]]
  assert np.abs(kept.logprobs[new] - recomputed).max() > 1e-3


def test_cuts_at_budget_and_window(params, scripted_session):
  sessions = [scripted_session(f's{i}', [[2, 3] * 9] * 9, budget=60) for i in range(6)]
  rollouts = play(params, sessions)
  for session in sessions:
    rollout = rollouts[session.id]
    assert len(rollout) <= 64
    assert session.aborted == rollout.aborted == 'context_full'
    if not session.ended[-1]:
      assert len(rollout) == 64
    logprobs, _ = reference(params, rollout.tokens)
    where = np.flatnonzero(rollout.sampled)
    np.testing.assert_allclose(
        rollout.logprobs[where], logprobs[where - 1, rollout.tokens[where]], atol=1e-5)


def test_nothing_is_compiled_twice(params, scripted_session):
  play(params, conversations(scripted_session))
  before = (engine_lib._prefill._cache_size(), engine_lib._decode._cache_size())
  play(params, conversations(scripted_session, seed=5))
  assert before == (engine_lib._prefill._cache_size(), engine_lib._decode._cache_size())


def test_the_first_tokens_are_distributed_as_the_softmax(params, scripted_session):
  sessions = [scripted_session(f'draw{i}', [[2, 5, 7]], budget=1) for i in range(3000)]
  config = dataclasses.replace(CONFIG, temperature=1.5)
  rollouts = play(params, sessions, config)
  counts = np.bincount([r.tokens[-1] for r in rollouts.values()], minlength=VOCAB)
  expected = np.exp(reference(params, [2, 5, 7], 1.5)[0][-1]) * len(sessions)
  kept = expected > 5
  pooled = [np.append(x[kept], x[~kept].sum() + 1e-9) for x in (counts, expected)]
  assert stats.chisquare(pooled[0], pooled[1], sum_check=False).pvalue > 1e-3


def test_bad_requests(params):
  engine = Engine(MODEL, CONFIG, END)
  with pytest.raises(ValueError, match='outgrow'):
    engine.tick(params, [SlotRequest(0, [2] * 60, 6, 's')])
  with pytest.raises(ValueError, match='at least one token'):
    engine.tick(params, [SlotRequest(0, [], 6, 's')])
  with pytest.raises(UserError, match='outside the vocabulary'):
    Engine(MODEL, CONFIG, VOCAB)
  for bad in ({'slots': 0}, {'temperature': -1.0}, {'prefill_tokens': 4}):
    with pytest.raises(ValueError):
      dataclasses.replace(CONFIG, **bad)
