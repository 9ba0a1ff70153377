import jax
import numpy as np
import pytest

from composer_jax import models
from composer_jax.batch import Batch
from composer_jax.evals.perplexity import bits_per_byte, nats_per_token

MODEL = models.ModelConfig(
    vocab_size=16, hidden_size=16, num_hidden_layers=2, intermediate_size=16,
    moe_intermediate_size=8, n_routed_experts=4, num_attention_heads=2, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, initializer_range=0.3)


@pytest.fixture(scope='module')
def params():
  return models.init(MODEL, jax.random.key(0))


def batch_of(seed):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 16, (2, 9))
  segments = np.array([[1] * 4 + [2] * 5, [1] * 6 + [0] * 3])
  positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 0, 0]])
  weights = np.array([[1, 1, 1, 0, 1, 1, 1, 1, 0], [1] * 5 + [0] * 4], np.float32)
  return Batch(tokens, np.roll(tokens, -1, axis=1), weights, positions, segments, 1.0)


def test_a_model_that_knows_nothing_pays_log2_of_the_vocabulary(params):
  blind = {**params, 'head': np.zeros_like(params['head'])}
  assert bits_per_byte(MODEL, blind, [batch_of(0), batch_of(1)], 60) == pytest.approx(
      2 * 12 * 4 / 60, rel=1e-6)


def costs_one_by_one(params, batches):
  """Nats of every token of every document, computed in float64 from rows with one document."""
  forward = jax.jit(lambda tokens, segments: models.forward(
      MODEL, params, tokens, segment_ids=segments).logits)
  for b in batches:
    for row, start, stop in ((0, 0, 4), (0, 4, 9), (1, 0, 6)):
      text = b.tokens[row, start:stop]
      padded = np.pad(text, (0, 9 - len(text)))[None]
      valid = (np.arange(9) < len(text))[None].astype(np.int32)
      logits = np.asarray(forward(padded, valid)[0, :len(text)], np.float64)
      logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      yield -logprobs[np.arange(len(text) - 1), text[1:]]


def test_sums_the_documents_one_by_one(params):
  batches = [batch_of(2), batch_of(3)]
  nats = sum(costs.sum() for costs in costs_one_by_one(params, batches))
  got = bits_per_byte(MODEL, params, batches, 100)
  assert got == pytest.approx(nats / np.log(2) / 100, rel=1e-5)


def test_nats_per_token_is_the_mean_over_the_weighted_targets_of_all_batches(params):
  batches = [batch_of(2), batch_of(3)]
  masks = [np.array([[1, 0, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]], np.float32),
           np.array([[0] * 9, [0, 1, 0, 0, 0, 0, 0, 0, 0]], np.float32)]
  weighted = [b.replace(weights=0.1 * mask) for b, mask in zip(batches, masks, strict=True)]
  places = [mask[row, start:stop - 1] > 0 for mask in masks
            for row, start, stop in ((0, 0, 4), (0, 4, 9), (1, 0, 6))]
  costs = np.concatenate([c[p] for c, p in zip(
      costs_one_by_one(params, batches), places, strict=True)])
  assert len(costs) == 6
  assert nats_per_token(MODEL, params, weighted) == pytest.approx(costs.mean(), rel=1e-5)


def test_nothing_to_measure(params):
  with pytest.raises(ValueError, match='0 targets'):
    bits_per_byte(MODEL, params, [], 10)
  blank = batch_of(0).replace(weights=np.zeros((2, 9), np.float32))
  with pytest.raises(ValueError, match='no target'):
    nats_per_token(MODEL, params, [blank])
