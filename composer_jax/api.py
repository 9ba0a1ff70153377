"""What notebooks and scripts use: run a config, evaluate a run, load a model.

    from composer_jax import api
    m = api.load('runs/tiny')
    logits = m.forward(m.params, m.tokenizer.encode('def f(x):')).logits
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax import models
from composer_jax.checkpoint import hf_import
from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.recipe import runner, stages
from composer_jax.recipe.schema import TRAINING_STAGES

_DTYPES = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True)
class Model:
  """A model ready to use.

  Attributes:
    config: its shape.
    params: nested dict of arrays.
    tokenizer: text to ids and back; None for a checkpoint without tokenizer files.
    forward: pure function `forward(params, tokens, positions=None, segment_ids=None)`; `tokens`
      is `[B, S]` int32 (a plain list of ids is one row), as are positions and segments, the
      result's `.logits` is `[B, S, V]` float32. Shapes that do not fit and ids outside of the
      vocabulary raise UserError.
  """

  config: ModelConfig
  params: dict[str, Any]
  tokenizer: Tokenizer | None
  forward: Callable[..., models.ForwardOut]


def load(folder: str | pathlib.Path, dtype: str = 'float32', stage: str | None = None) -> Model:
  """Loads a model from a run folder, a Hugging Face checkpoint, or an import of one.

  Args:
    folder: a run folder, of which at least one training stage is finished; a folder with
      `config.json` and `*.safetensors`; or what `composer-jax convert import` wrote.
    dtype: of the parameters, `float32`, `bfloat16` or `float16`; the router's selection bias stays
      float32.
    stage: of a run: `cpt`, `long_context`, `sft` or `rl`; default the last finished one.

  Raises:
    UserError: no run, no such stage, an unknown dtype, or a checkpoint that is damaged or of
      another family.
  """
  folder = pathlib.Path(folder)
  if dtype not in _DTYPES:
    raise UserError(f'dtype {dtype!r}: can be {", ".join(_DTYPES)}')
  if hf_import.is_imported(folder) or hf_import.is_hugging_face(folder):
    return _load_checkpoint(folder, dtype, stage)
  context = stages.open_run(folder)
  found = [s for s in reversed(TRAINING_STAGES) if (context.folder(s) / 'params').exists()]
  if stage is not None and stage not in found:
    raise UserError(f'{folder}: stage {stage} has no parameters '
                    f'(there are: {", ".join(found) or "none yet"})')
  if not found:
    raise UserError(f'{folder}: no stage has finished')
  config = context.model(stage or found[0])
  trainable, frozen = models.partition(context.params(stage or found[0]))
  trainable = jax.tree.map(lambda x: jnp.asarray(x, dtype), trainable)
  return Model(config, models.combine(trainable, frozen), context.corpus.tokenizer,
               _forward(config))


def _load_checkpoint(folder: pathlib.Path, dtype: str, stage: str | None) -> Model:
  if stage is not None:
    raise UserError(f'{folder}: is a checkpoint and has no stages')
  source = hf_import.open_checkpoint(folder)
  tokenizer = None
  if tokenizer_lib.find(folder):
    tokenizer = tokenizer_lib.load(folder)
    tokenizer_lib.check_vocabulary(tokenizer, source.config.vocab_size)
  return Model(source.config, hf_import.load(source, dtype=dtype), tokenizer,
               _forward(source.config))


def _forward(config: ModelConfig) -> Callable[..., models.ForwardOut]:
  compiled = jax.jit(lambda params, tokens, positions, segment_ids: models.forward(
    config, params, tokens, positions=positions, segment_ids=segment_ids))

  def forward(params, tokens, positions=None, segment_ids=None) -> models.ForwardOut:
    """Returns the logits of every position; see `Model.forward`."""
    tokens = _rows('tokens', tokens)
    if positions is not None:
      positions = _rows('positions', positions, tokens.shape)
    if segment_ids is not None:
      segment_ids = _rows('segment_ids', segment_ids, tokens.shape)
    if not isinstance(tokens, jax.core.Tracer) and tokens.size:
      least, most = int(tokens.min()), int(tokens.max())
      if least < 0 or most >= config.vocab_size:
        raise UserError(f'tokens: ids from {least} to {most}, and the vocabulary has '
                        f'{config.vocab_size}')
    return compiled(params, tokens, positions, segment_ids)

  return forward


def _rows(name: str, ids: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
  """Returns ids as `[B, S]`; one row may come without its first axis."""
  try:
    rows = jnp.atleast_2d(jnp.asarray(ids, jnp.int32))
  except (TypeError, ValueError) as error:
    raise UserError(f'{name}: are no rows of equal length of integers ({error})') from error
  if rows.ndim != 2 or shape not in (None, rows.shape):
    raise UserError(f'{name}: have the shape {rows.shape}, '
                    f'{"not [B, S]" if shape is None else f"tokens {shape}"}')
  return rows


def run(config: Mapping[str, Any], workdir: str | pathlib.Path, *,
        stages: Sequence[str] | None = None, dry_run: bool = False) -> dict[str, Any]:
  """Runs a config's stages in order, continuing what the folder already holds.

  Args:
    config: nested mapping of sections (a dict or a ConfigDict), see `recipe.schema.Recipe`.
    workdir: the run folder; made when missing.
    stages: run just these of the config's stages.
    dry_run: change nothing, and return what would be done.

  Returns:
    The contents of `workdir/results.json`.

  Raises:
    composer_jax.errors.ComposerError: with one clear line.
  """
  return runner.run(config, workdir, only=stages, dry_run=dry_run)


def reuse(config: Mapping[str, Any], workdir: str | pathlib.Path,
          source: str | pathlib.Path, *, stages: Sequence[str] | None = None) -> list[str]:
  """Copies into a run folder the stages that another run has finished under equal settings.

  `run` then starts behind them: two runs that differ in RL only need one SFT policy.

  Args:
    config: of the run that is to come, as for `run`.
    workdir: its folder; made when missing.
    source: the folder of the other run.
    stages: copy at most these.

  Returns:
    The names of the copied stages; none when all were there before.

  Raises:
    composer_jax.errors.ComposerError: with one clear line, as when nothing there fits.
  """
  return runner.reuse(config, workdir, source, only=stages)


def evaluate(workdir: str | pathlib.Path, stage: str = 'rl', *,
             dry_run: bool = False) -> dict[str, Any]:
  """Evaluates the final parameters of a finished stage (`sft` or `rl`) on held-out tasks.

  Returns:
    pass@1 with its interval, best-of-k, tokens and calls a task; added to `results.json`.
  """
  return runner.evaluate(workdir, stage, dry_run=dry_run)
