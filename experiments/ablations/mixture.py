"""What do SFT and RL profit from: pretraining on real code, on code like the tasks', or on both?

    composer-jax sweep --config=experiments/ablations/mixture.py --workdir=runs/mixture

Both pretraining phases take the mixture, and as many rows in every trial; SFT and RL are the same
for all. Bits per byte are measured on every source, also on those that a trial leaves out.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict
from tiny import composer2

IN_DOMAIN = 'functions'


def get_config() -> ConfigDict:
  """Returns the config that the trials change."""
  return composer2.ablation()


def get_sweep() -> Iterator[dict]:
  """Yields real code only (in the demo's proportions), functions only, and the demo's mixture."""
  demo = composer2.get_config().cpt.mixture.to_dict()
  real = {source: weight for source, weight in demo.items() if source != IN_DOMAIN}
  for mixture in (real, {IN_DOMAIN: 1.0}, demo):
    yield {f'{phase}.mixture': mixture for phase in ('cpt', 'long_context')}
