"""`composer-jax data`: corpora."""

import json

from absl import flags

from composer_jax.cli import arguments
from composer_jax.errors import UserError
from composer_jax.files import read_json

HELP = """
usage: composer-jax data build --config=FILE [--config.section.field=value ...] --workdir=DIR
       composer-jax data inspect --workdir=DIR

build    makes the corpus that the config's data section describes, in the workdir of the run
inspect  prints what a built corpus holds: files, bytes, tokens, gzip and xz bits per byte
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_workdir(flag_values)
  arguments.define_dry_run(flag_values)
  arguments.define_json(flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.action({'build': build, 'inspect': inspect})(args)


def build(args: arguments.Arguments) -> None:
  """Builds the corpus: the data stage of a run, and nothing after it."""
  workdir, config = args.workdir(), args.config()
  from composer_jax import api
  results = api.run(config, str(workdir), stages=['data'], dry_run=args.flags.dry_run)
  args.write_json(results)
  print(json.dumps(results, indent=2, default=str))


def inspect(args: arguments.Arguments) -> None:
  """Prints the manifest of a built corpus."""
  args.no_config()
  workdir = args.workdir(must_exist=True)
  for path in (workdir / 'data' / 'manifest.json', workdir / 'manifest.json'):
    if path.exists():
      manifest = read_json(path, 'sources')
      break
  else:
    raise UserError(f'--workdir={workdir}: holds no corpus (run composer-jax data build)')
  args.write_json(manifest)
  print(json.dumps(manifest, indent=2))
