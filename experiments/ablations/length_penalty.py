"""How does the curvature of the length penalty act (Composer 2 report, section 4.2)?

    composer-jax sweep --config=experiments/ablations/length_penalty.py --workdir=runs/penalty

`q` bends C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)): 0 is linear, 1 logarithmic, and above 1 it
saturates at 1 / (k (q - 1)). All trials charge the same for the shortest successful episode, so
that they differ in curvature and not in strength. Pretraining and SFT are done once and shared.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict
from tiny import composer2

from composer_jax.rl.shaping import length_penalty

K = 0.3
SHORTEST = 5.0  # effort of read, edit, test, finish: four calls and their tokens
CHARGE = 0.05  # of the reward, for the shortest episode


def get_config() -> ConfigDict:
  """Returns the config that the trials change."""
  return composer2.ablation()


def get_sweep() -> Iterator[dict]:
  """Yields no penalty, then growing curvature."""
  yield {'rl.length_penalty.weight': 0.0}
  for q in (0.0, 0.5, 1.0, 2.0):
    yield {'rl.length_penalty.weight': round(CHARGE / float(length_penalty(SHORTEST, K, q)), 5),
           'rl.length_penalty.k': K, 'rl.length_penalty.q': q}
