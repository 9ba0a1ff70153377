"""Does a rounded matrix product cost loss? The same 200 steps under every precision policy.

    composer-jax sweep --config=experiments/ablations/precision.py --workdir=runs/precision

The policies of `models.precision.POLICIES`: what the report trains in (section 3.1: MXFP8) and what
its RL stage multiplies (section 6: NVFP4 forward, MXFP8 backward), beside bfloat16 and float32. On
a CPU the rounding is emulated, number for number what the kernels multiply.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict
from tiny import composer2

from composer_jax.models.precision import POLICIES


def get_config() -> ConfigDict:
  """Returns the config that the trials change."""
  config = composer2.get_config()
  with config.unlocked():
    config.stages = ('data', 'cpt')
    config.cpt.steps = 200
    config.cpt.eval_every = 100
    config.model.precision = 'float32'
  return config


def get_sweep() -> Iterator[dict]:
  """Yields the policies."""
  for name in POLICIES:
    yield {'model.precision': name}
