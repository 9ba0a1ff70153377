"""What is bound to fail in a recipe, found before hours are spent on the stages before it."""

from composer_jax.envs import taskset
from composer_jax.errors import UserError
from composer_jax.recipe import start
from composer_jax.recipe.schema import FUNCTIONS, SUPERVISED_STAGES, Recipe
from composer_jax.recipe.stages import model_at, rl_task_count
from composer_jax.train.config import StageConfig


def check(recipe: Recipe) -> None:
  """Finds what is bound to fail later, before hours are spent on the stages before it.

  Raises:
    UserError: names the field: a checkpoint to start from that does not fit, a mixture without a
      known source, rows that are too short or too long, MTP without an MTP layer, more tasks than
      there are.
  """
  if not recipe.model.num_moe_layers:
    raise UserError('config.model.first_k_dense_replace: leaves no MoE layer to train')
  if recipe.start:
    start.check(recipe)
  _check_mixtures(recipe)
  _check_lengths(recipe)
  _check_tasks(recipe)
  for name in SUPERVISED_STAGES:
    if getattr(recipe, name).loss.mtp_weight and not recipe.model.num_nextn_predict_layers:
      raise UserError(f'config.{name}.loss.mtp_weight: the model has no MTP layer '
                      '(config.model.num_nextn_predict_layers is 0)')
  ours, trained = recipe.sampler.temperature, recipe.rl.objective.temperature
  if 'rl' in recipe.stages and ours != trained:
    raise UserError(f'config.sampler.temperature: is {ours}, and RL trains on '
                    f'config.rl.objective.temperature {trained}')


def _check_mixtures(recipe: Recipe) -> None:
  known = [*recipe.data.sources, FUNCTIONS]
  for name in ('cpt', 'long_context'):
    if name not in recipe.stages:
      continue
    stage: StageConfig = getattr(recipe, name)
    for source in stage.mixture:
      if source not in known:
        raise UserError(f'config.{name}.mixture.{source}: there is no such source'
                        f' (there are: {", ".join(known)})')
    if not stage.mixture:
      raise UserError(f'config.{name}.mixture: is empty (there are: {", ".join(known)})')
    if min(stage.mixture.values()) < 0 or not any(stage.mixture.values()):
      raise UserError(f'config.{name}.mixture: weights must not be negative, nor all 0')


def _check_lengths(recipe: Recipe) -> None:
  for name in SUPERVISED_STAGES:
    if name not in recipe.stages:
      continue
    length = getattr(recipe, name).seq_len
    positions = model_at(recipe, name).max_position_embeddings
    if length > positions:
      raise UserError(f'config.{name}.seq_len: {length} is longer than the context of the model '
                      f'at this stage, {positions}')
  if 'sft' not in recipe.stages:
    return  # nor is there anything that the sampler would be for
  sampler = recipe.sampler
  if recipe.rl.row_len < sampler.max_len:
    raise UserError(f'config.rl.row_len: {recipe.rl.row_len} is shorter than '
                    f'config.sampler.max_len {sampler.max_len}')
  positions = model_at(recipe, 'rl').max_position_embeddings
  if sampler.max_len > positions:
    raise UserError(f'config.sampler.max_len: {sampler.max_len} is longer than the context of the '
                    f'model after its last stretch, {positions}')
  longest = recipe.tasks.limits.max_tokens
  for where, length in (('sampler.max_len', sampler.max_len), ('sft.seq_len', recipe.sft.seq_len)):
    if length < longest:
      raise UserError(f'config.{where}: {length} is shorter than an episode of '
                      f'config.tasks.{recipe.tasks.level}.limits.max_tokens {longest}')


def _check_tasks(recipe: Recipe) -> None:
  """Levels l1 and l2 have an end."""
  unseen = recipe.traces.heldout if recipe.sft.eval_every else 0
  rl_tasks = rl_task_count(recipe) if recipe.rl.steps else 0
  wanted = [('sft', 'traces.count', 'train', recipe.traces.count),
            ('sft', 'traces.heldout', 'heldout', unseen),
            ('eval_sft', 'eval.tasks', 'heldout', recipe.eval.tasks),
            ('rl', 'rl.steps', 'train', rl_tasks),
            ('eval_rl', 'eval.tasks', 'heldout', recipe.eval.tasks)]
  for stage, field, split, count in wanted:
    there = taskset.available(recipe.tasks, split)
    if stage in recipe.stages and there is not None and count > there:
      raise UserError(f'config.{field}: needs {count} {recipe.tasks.level} tasks of {split}, and '
                      f'there are {there}')
