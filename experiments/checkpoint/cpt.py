"""Continued pretraining of a checkpoint from Hugging Face on the code of this machine.

    composer-jax run --config=experiments/checkpoint/cpt.py:DIR --workdir=runs/cpt

DIR holds `config.json`, `*.safetensors` and a tokenizer (`tokenizer.json` or `tiktoken.model`), or
is what `composer-jax convert import` made of such a folder. The shape and the tokenizer are the
checkpoint's; rates and sizes are a start for small models.
"""

from ml_collections import ConfigDict

from composer_jax.checkpoint import hf_import
from composer_jax.config import as_dict


def get_config(folder: str = '') -> ConfigDict:
  """Returns the config.

  Args:
    folder: the checkpoint.
  """
  model = hf_import.open_checkpoint(folder or '.').config
  config = ConfigDict()
  config.seed = 0
  config.start = folder
  config.stages = ('data', 'cpt')
  config.model = as_dict(model)
  config.data = {
    'vocab_size': model.vocab_size, 'tokenizer': folder,
    'sources': {'stdlib': {'kind': 'stdlib', 'max_bytes': 4_000_000}}, 'heldout_bytes': 60_000}
  config.cpt = {
    'steps': 100, 'seq_len': min(256, model.max_position_embeddings), 'batch_size': 4,
    'mixture': {'stdlib': 1.0}, 'eval_every': 50, 'eval_max_bytes': 30_000,
    'optimizer': {'lr': 3e-4, 'warmup_steps': 10, 'final_fraction': 0.1}, 'checkpoint_every': 50}
  config.lock()
  return config
