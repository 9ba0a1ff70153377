"""`composer-jax report`: one HTML page from a workdir."""

from absl import flags

from composer_jax.cli import arguments

HELP = """
usage: composer-jax report --workdir=DIR

Writes DIR/report.html, one self-contained page: curves of every stage, the eval table and the
rollout viewer; for the folder of a sweep, the comparison of its trials. A run that is not finished
can be looked at too.
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_workdir(flag_values)
  arguments.define_json(flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_words()
  args.no_config()
  workdir = args.workdir(must_exist=True)
  from composer_jax.report import comparison, page
  build = comparison.build if (workdir / comparison.SWEEP_FILE).exists() else page.build
  path = build(workdir)
  args.write_json({'report': str(path), 'size_bytes': path.stat().st_size})
  print(path)
