"""Fakes for the RL tests: hand-made rollouts, and an environment without sandboxes."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from composer_jax import models
from composer_jax.envs.rewards import EFFORT_PARTS
from composer_jax.rl.samples import Outcome, Sample
from composer_jax.rollout.session import Status
from composer_jax.rollout.types import Rollout

LAYERS, TOP_K = 2, 2


class Fakes:
  """Builders used by several tests."""

  @staticmethod
  def rollout(sampled, seed=0, version=0, **changes) -> Rollout:
    """Returns a random rollout with the given mask (list of bool or string of . and #)."""
    if isinstance(sampled, str):
      sampled = [c == '#' for c in sampled]
    rng = np.random.default_rng(seed)
    mask = np.array(sampled, bool)
    n = len(mask)
    fields = {
        'session_id': f's{seed}', 'group_id': 'g', 'tokens': rng.integers(2, 60, n, np.int32),
        'sampled': mask,
        'logprobs': np.where(mask, -rng.exponential(1.0, n), 0).astype(np.float32),
        'versions': np.where(mask, version, -1).astype(np.int32),
        'routing': rng.integers(0, 384, (n, LAYERS, TOP_K)).astype(np.uint16),
        'routing_mask': np.arange(n) < n - 1}
    return Rollout(**{**fields, **changes})

  @classmethod
  def sample(cls, correct=1.0, group='g', logical='l', sampled='...###..##', seed=0, version=0,
             segment=0, stop='finished', **counts) -> Sample:
    full = {**dict.fromkeys(EFFORT_PARTS, 0.0), **counts}
    return Sample(cls.rollout(sampled, seed, version),
                  Outcome(f'task-{group}', correct, stop, counts=full), group, logical, segment)


class FakeSession:
  """Two turns of at most five tokens; right when the first sampled token is even."""

  def __init__(self, ordinal: int, member: int):
    self.group_id = f'{ordinal}'
    self.id = f'{ordinal}/{member}'
    self.ordinal = ordinal
    rng = np.random.default_rng(ordinal)
    self._pending = rng.integers(2, 60, 3 + ordinal % 5).tolist()
    self.sampled: list[int] = []
    self.turns = 0
    self.aborted = None

  def poll(self):
    return Status.DONE if self.turns == 2 or self.aborted else Status.READY

  def next_tokens(self):
    return self._pending

  def max_new_tokens(self):
    return 5

  def deliver(self, tokens, ended):
    self.sampled += tokens
    self.turns += 1
    self._pending = [7, 8, 9]

  def abort(self, reason):
    self.aborted = reason


class FakeEnvironment:
  """Tasks without sandboxes; records how often each ordinal was started."""

  def __init__(self, num_tasks=10_000, reward=None):
    self.num_tasks = num_tasks
    self._reward = reward or (lambda session: float(session.sampled[0] % 2 == 0))
    self.started: list[tuple[int, int]] = []

  def session(self, ordinal, member):
    self.started.append((ordinal, member))
    return FakeSession(ordinal, member)

  def outcome(self, session):
    correct = None if session.aborted else self._reward(session)
    counts = {**dict.fromkeys(EFFORT_PARTS, 0.0), 'calls': 2.0, 'turns': 2.0, 'edits': 1.0}
    return Outcome(f'task-{session.ordinal}', correct,
                   'aborted' if session.aborted else 'finished', label=f'c{session.ordinal % 2}',
                   counts=counts, trace={'instruction': 'say an even token', 'turns': []})


@pytest.fixture(scope='module')
def compilation_cache(tmp_path_factory):
  """Lets runs of the same stage share their compiled steps."""
  names = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs',
           'jax_persistent_cache_min_entry_size_bytes')
  before = {name: getattr(jax.config, name) for name in names}
  values = (str(tmp_path_factory.mktemp('xla')), 0.0, -1)
  for name, value in zip(names, values, strict=True):
    jax.config.update(name, value)
  jax_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  jax_cache.reset_cache()


@pytest.fixture(scope='session')
def fakes():
  return Fakes


@pytest.fixture
def make_environment():
  return FakeEnvironment


@pytest.fixture(scope='session')
def model_config():
  return models.ModelConfig(
      vocab_size=64, hidden_size=32, num_hidden_layers=2, first_k_dense_replace=1,
      intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
      num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
      max_position_embeddings=64, initializer_range=0.2)


@pytest.fixture(scope='session')
def params(model_config):
  return models.init(model_config, jax.random.key(0))
