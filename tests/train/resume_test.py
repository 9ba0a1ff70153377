"""A run killed without warning, then started again, ends with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

from composer_jax import metrics
from composer_jax.checkpoint.manager import load_params

PROGRAM = '''
import sys
import jax
import numpy as np

folder, cache = sys.argv[1:]
jax.config.update('jax_compilation_cache_dir', cache)
jax.config.update('jax_disable_most_optimizations', True)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)

from composer_jax import models
from composer_jax.data.loader import Loader
from composer_jax.data.rows import DocumentSequences, Rows
from composer_jax.train import optimizer, supervised
from composer_jax.train.config import StageConfig

model = models.ModelConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, first_k_dense_replace=0,
    moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=2,
    kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    max_position_embeddings=32)
rng = np.random.default_rng(0)
rows = {}
for name in ('a', 'b'):
  offsets = np.concatenate([[0], np.cumsum(rng.integers(2, 30, 40))])
  tokens = rng.integers(1, 32, offsets[-1]).astype(np.uint16)
  rows[name] = Rows(DocumentSequences(tokens, offsets, 0), 16, 0)
loader = Loader(rows, {'a': 0.7, 'b': 0.3}, 4, seed=1)
stage = StageConfig(steps=150, batch_size=4, seq_len=16, accumulate=2, log_every=5, eval_every=40,
                    checkpoint_every=10, optimizer=optimizer.OptimizerConfig(warmup_steps=10))
supervised.train(stage, model, folder, loader=loader,
                 evaluate=lambda params: {'norm': (params['embed'] ** 2).sum()})
'''


def start(folder, cache):
  return subprocess.Popen([sys.executable, '-c', PROGRAM, str(folder), str(cache)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=os.environ | {'JAX_PLATFORMS': 'cpu'})


def last_step(folder):
  return max((row['step'] for row in metrics.read(folder / 'metrics.jsonl')), default=-1)


def kill_at(process, folder, step, delay):
  """Kills `delay` seconds after the run has logged `step`."""
  while process.poll() is None and last_step(folder) < step:
    time.sleep(0.01)
  time.sleep(delay)
  process.send_signal(signal.SIGKILL)
  process.communicate()


def flat(tree, prefix=''):
  for name, leaf in tree.items():
    if isinstance(leaf, dict):
      yield from flat(leaf, f'{prefix}{name}.')
    else:
      yield prefix + name, np.asarray(leaf)


def test_killed_run_ends_with_the_same_bits(tmp_path):
  whole = start(tmp_path / 'whole', tmp_path / 'cache')
  output = whole.communicate()[0]
  assert whole.returncode == 0, output
  seed = time.time_ns()  # a new moment in every run; shown when the test fails
  moment = random.Random(seed)
  kill_at(start(tmp_path / 'killed', tmp_path / 'cache'), tmp_path / 'killed',
          step=moment.randrange(0, 130), delay=moment.uniform(0, 0.2))
  done = start(tmp_path / 'killed', tmp_path / 'cache')
  output = done.communicate()[0]
  assert done.returncode == 0, (seed, output)

  want, got = (dict(flat(load_params(tmp_path / name / 'params')[0]))
               for name in ('whole', 'killed'))
  assert want.keys() == got.keys()
  assert [name for name in want if want[name].tobytes() != got[name].tobytes()] == [], seed

  def rows(name):
    return [{k: v for k, v in row.items() if k != 'tokens_per_s'}
            for row in metrics.read(tmp_path / name / 'metrics.jsonl')]
  assert rows('whole') == rows('killed'), seed
