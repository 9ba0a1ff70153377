"""The demo with longer RL on three seeds: do mean and best-of-8 both rise?

    composer-jax sweep --config=experiments/tiny/composer2_seeds.py --workdir=runs/seeds

A seed changes everything that is drawn: documents, tasks, demonstrations, initial parameters, the
order of the data, sampling. The held-out evaluation tasks are the same for all. Run it as
`composer-jax run` to get seed 0 alone.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict
from tiny import composer2


def get_config() -> ConfigDict:
  """Returns the demo's config with less SFT and more RL."""
  config = composer2.get_config()
  config.sft.update(composer2.sft(steps=280))
  config.rl.update(composer2.rl(steps=160, lr=3e-4, warmup_steps=20, kl_coefficient=0.05))
  config.rl.behaviour = {}
  return config


def get_sweep() -> Iterator[dict]:
  """Yields one trial a seed."""
  for seed in range(3):
    yield {'seed': seed} | {f'{section}.seed': seed for section in
                            ('cpt', 'long_context', 'sft', 'sampler')}
