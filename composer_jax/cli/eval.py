"""`composer-jax eval`: a checkpoint of a run on held-out tasks."""

import json
import sys

from absl import flags

from composer_jax.cli import arguments

HELP = """
usage: composer-jax eval --workdir=DIR [--stage=rl]

Evaluates the final parameters of a stage of a run on the held-out tasks of the run's config, with
the harness, renderer and limits that RL uses. Writes DIR/stages/eval_STAGE and adds the numbers to
DIR/results.json.
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_workdir(flag_values)
  arguments.define_dry_run(flag_values)
  arguments.define_json(flag_values)
  flags.DEFINE_string('stage', 'rl', 'Stage whose final parameters are evaluated.',
                      flag_values=flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_words()
  args.no_config()
  workdir = args.workdir(must_exist=True)
  from composer_jax import api
  if not args.flags.dry_run and 'done' in api.evaluate(
      str(workdir), stage=args.flags.stage, dry_run=True).values():
    print(f'{workdir}: {args.flags.stage} was evaluated before', file=sys.stderr)
  results = api.evaluate(str(workdir), stage=args.flags.stage, dry_run=args.flags.dry_run)
  args.write_json(results)
  print(json.dumps(results, indent=2, default=str))
