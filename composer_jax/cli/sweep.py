"""`composer-jax sweep`: many runs of one config, compared on one page."""

from absl import flags

from composer_jax.cli import arguments, config_file
from composer_jax.config import as_dict
from composer_jax.sweep import runner, trials

HELP = """
usage: composer-jax sweep --config=FILE[:arg] [--config.section.field=value ...] --workdir=DIR
                          [--plan]

FILE has get_config() (the base config) and get_sweep(), a generator of override dicts
{"section.field": value, ...}, one a trial. Each trial runs in DIR/trials/HASH, HASH being that of
its resolved config; equal trials are refused. Finished trials are skipped, failed ones tried again.
Ends with DIR/report.html, one page that compares the trials.
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_workdir(flag_values)
  arguments.define_json(flag_values)
  flags.DEFINE_bool('plan', False, 'Print the trials and run nothing.', flag_values=flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_words()
  base = args.config()
  module = config_file.load_module(config_file.split(args.config_spec)[0])
  planned = trials.expand(base, config_file.call_get_sweep(module), _resolve)
  if not args.flags.plan:
    workdir = args.workdir()
  for trial in planned:
    print(f'{trial.id}  {trial.label}')
  if args.flags.plan:
    args.write_json([trial.as_json() for trial in planned])
    return
  from composer_jax.recipe.runner import adopt_stages
  outcome = runner.run_sweep(planned, workdir, runner.run_in_subprocess, adopt_stages)
  args.write_json(outcome)
  print(workdir / 'report.html')


def _resolve(config: dict, overrides: dict) -> dict:
  """Applies one trial's overrides and checks the result as `run` would."""
  from composer_jax.recipe import checks, schema
  recipe = schema.resolve(config_file.override(config, overrides))
  checks.check(recipe)
  return as_dict(recipe)
