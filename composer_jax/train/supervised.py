"""One supervised stage: objective, optimizer, step and loop put together."""

from pathlib import Path
from typing import Any

import jax

from composer_jax import models
from composer_jax.checkpoint import manager
from composer_jax.config import as_dict
from composer_jax.models.config import ModelConfig
from composer_jax.train.config import StageConfig
from composer_jax.train.loop import Evaluate, Loader, run_loop
from composer_jax.train.losses import make_lm_loss
from composer_jax.train.optimizer import make_optimizer
from composer_jax.train.state import create
from composer_jax.train.step import make_train_step


def train(stage: StageConfig, model_config: ModelConfig, folder: str | Path, *, loader: Loader,
          params: dict[str, Any] | None = None, evaluate: Evaluate | None = None,
          description: str = 'train') -> tuple[dict[str, Any], dict[str, Any]]:
  """Runs one supervised stage and leaves its parameters in `folder/params`.

  Args:
    stage: the settings.
    model_config: the model with this stage's context, see `config.extend_context`.
    folder: the stage's folder; what it holds is continued.
    loader: the batches.
    params: what to start from; fresh ones from `stage.seed` when None.
    evaluate: takes full parameters, returns named figures.
    description: shown beside the progress bar.

  Returns:
    The parameters and the summary of `loop.run_loop`.

  Raises:
    UserError, InfrastructureError, NumericsError: see `loop.run_loop`.
  """
  if params is None:
    params = models.init(model_config, jax.random.key(stage.seed))
  tx = make_optimizer(stage.optimizer, stage.steps)
  step = make_train_step(make_lm_loss(model_config, stage.loss), tx,
                         bias_rate=stage.bias_update_rate, trainable=stage.trainable)
  state, summary = run_loop(stage, folder, state=create(params, tx, stage.trainable), step_fn=step,
                            loader=loader, evaluate=evaluate, description=description)
  params = state.full_params()
  manager.save_params(Path(folder) / 'params', params, {'model': as_dict(model_config)})
  return params, summary
