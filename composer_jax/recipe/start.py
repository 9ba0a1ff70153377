"""The checkpoint that a run starts from."""

import dataclasses
from typing import Any

import jax

from composer_jax import models
from composer_jax.checkpoint import hf_import
from composer_jax.errors import UserError
from composer_jax.recipe.schema import Recipe

# How the model is computed or first drawn, and no part of the function that a checkpoint is of.
_FREE = ('moe_impl', 'remat', 'scan_unroll', 'precision', 'initializer_range',
         'num_nextn_predict_layers', 'max_position_embeddings')


def check(recipe: Recipe) -> None:
  """Checks from the headers alone that the model has the shape of the checkpoint.

  Raises:
    UserError: there is no checkpoint, it is damaged, or a field of `model` differs.
  """
  theirs = hf_import.open_checkpoint(recipe.start).config
  for field in dataclasses.fields(recipe.model):
    wanted, have = getattr(theirs, field.name), getattr(recipe.model, field.name)
    if field.name not in _FREE and wanted != have:
      raise UserError(f'config.model.{field.name}: is {have}, and {wanted} in {recipe.start}')
  if theirs.num_nextn_predict_layers and not recipe.model.num_nextn_predict_layers:
    raise UserError(f'config.model.num_nextn_predict_layers: is 0, and {recipe.start} has an MTP '
                    'layer')


def params(recipe: Recipe) -> dict[str, Any] | None:
  """Returns the parameters to start from as float32 masters, None for fresh ones.

  An MTP layer that the model has and the checkpoint has not is drawn from the first stage's seed.

  Raises:
    UserError: the checkpoint is damaged.
  """
  if not recipe.start:
    return None
  source = hf_import.open_checkpoint(recipe.start)
  loaded = hf_import.load(source, dtype='float32')
  if recipe.model.num_nextn_predict_layers and not source.config.num_nextn_predict_layers:
    loaded = models.attach_mtp(recipe.model, loaded, jax.random.key(recipe.cpt.seed))
  return loaded
