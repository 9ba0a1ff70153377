"""Does more continued pretraining give a lower SFT loss and a higher RL reward?

    composer-jax sweep --config=experiments/ablations/cpt_amount.py --workdir=runs/cpt_amount

The first finding of the Composer 2 report (section 3.1, figure 2) at tiny size: three amounts of
the first phase, evenly spaced in log (36k, 107k, 321k tokens), then the same long phase (78k), SFT
and RL for all. The loss is that of held-out demonstrations, the column `sft held-out loss` of the
comparison page.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict
from tiny import composer2

AMOUNTS = {'small': 40, 'medium': 120, 'large': 360}


def get_config() -> ConfigDict:
  """Returns the config that the trials change."""
  return composer2.ablation()


def get_sweep() -> Iterator[dict]:
  """Yields the amounts, in steps."""
  for steps in AMOUNTS.values():
    yield {'cpt.steps': steps, 'cpt.optimizer.warmup_steps': steps // 12}
