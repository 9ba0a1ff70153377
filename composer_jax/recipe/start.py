"""The checkpoint that a run starts from."""

import dataclasses
import pathlib
import sys
from typing import Any

import jax

from composer_jax import models
from composer_jax.checkpoint import hf_import
from composer_jax.data import tokenizer
from composer_jax.errors import UserError
from composer_jax.recipe.schema import Recipe


def check(recipe: Recipe) -> None:
  """Checks from the headers alone that the model has the shape of the checkpoint.

  Raises:
    UserError: there is no checkpoint, it is damaged, a field of `model` differs, or the corpus has
      another tokenizer.
  """
  ours, theirs = recipe.model, hf_import.open_checkpoint(recipe.start).config
  name = ours.different_function(dataclasses.replace(
      theirs, num_nextn_predict_layers=ours.num_nextn_predict_layers,
      max_position_embeddings=ours.max_position_embeddings))
  if name:
    raise UserError(f'config.model.{name}: is {getattr(ours, name)}, and {getattr(theirs, name)} '
                    f'in {recipe.start}')
  _check_tokenizer(recipe)
  if theirs.num_nextn_predict_layers and not recipe.model.num_nextn_predict_layers:
    raise UserError(f'config.model.num_nextn_predict_layers: is 0, and {recipe.start} has an MTP '
                    'layer')


def identity(recipe: Recipe) -> list[str]:
  """Returns what the first stage's fingerprint takes from the checkpoint; empty without one."""
  return [hf_import.open_checkpoint(recipe.start).identity()] if recipe.start else []


def _check_tokenizer(recipe: Recipe) -> None:
  """The ids of a corpus mean nothing to a model that was trained with another tokenizer."""
  theirs = tokenizer.find(pathlib.Path(recipe.start))
  given = pathlib.Path(recipe.data.tokenizer) if recipe.data.tokenizer else None
  if given is not None and given.is_dir() and tokenizer.find(given) is None:
    raise UserError(f'config.data.tokenizer: {given} holds no tokenizer that can be read')
  if theirs is None:
    print(f'warning: {recipe.start} holds no tokenizer, so whether config.data.tokenizer gives the '
          'ids that it was trained with is not checked', file=sys.stderr)
    return
  ours = given / theirs.name if given is not None and given.is_dir() else given
  if ours is None or not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
    raise UserError(f'config.data.tokenizer: is not the tokenizer of {recipe.start} '
                    f'({theirs.name})')


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
