import jax
import numpy as np
import pytest

from composer_jax import models
from composer_jax.batch import Batch


@pytest.fixture(autouse=True, scope='module')
def quick_compilation():
  """XLA's optimisations cost three quarters of the time here and are not what is tested."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='session')
def model_config():
  return models.ModelConfig(
      vocab_size=32, hidden_size=16, num_hidden_layers=1, first_k_dense_replace=0,
      intermediate_size=16, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
      num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
      max_position_embeddings=32, num_nextn_predict_layers=1, initializer_range=0.3)


@pytest.fixture(scope='session')
def params(model_config):
  return models.init(model_config, jax.random.key(3))


@pytest.fixture(scope='session')
def make_batch():
  """Returns a function that packs documents of very different lengths into rows."""
  def make(rows, length, seed=0, vocab=32):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab, (rows, length)).astype(np.int32)
    targets = np.zeros_like(tokens)
    weights = np.zeros((rows, length), np.float32)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    for r in range(rows):
      start, number = 0, 0
      end_of_row = rng.integers(3, length + 1)  # the rest is padding
      while start < end_of_row:
        stop = min(start + rng.integers(1, 9), end_of_row)
        number += 1
        segments[r, start:stop] = number
        positions[r, start:stop] = np.arange(stop - start)
        targets[r, start:stop - 1] = tokens[r, start + 1:stop]
        weights[r, start:stop - 1] = rng.choice([0.0, 0.1, 1.0], stop - 1 - start)
        start = stop
    tokens[segments == 0] = 0
    return Batch(tokens, targets, weights, positions, segments, np.float32(weights.sum()))
  return make
