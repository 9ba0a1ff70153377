"""`composer-jax run`: the stages of a config, in order, resumed where the workdir stands."""

import json
import os

from absl import flags

from composer_jax.cli import arguments
from composer_jax.errors import UserError

HELP = """
usage: composer-jax run --config=FILE[:arg] [--config.section.field=value ...] --workdir=DIR
                        [--reuse=OTHER_DIR]

Runs the config's stages in order and writes DIR/results.json and DIR/report.html. The same command
typed again continues what the workdir holds, or finds it done. With --reuse it starts behind the
stages that the run in OTHER_DIR has finished under equal settings.
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_workdir(flag_values)
  arguments.define_dry_run(flag_values)
  arguments.define_json(flag_values)
  flags.DEFINE_list('stages', None, 'Run only these stages, separated by commas.',
                    flag_values=flag_values)
  flags.DEFINE_string('reuse', None, 'Folder of a run whose finished stages are copied where the '
                      'settings are equal.', flag_values=flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_words()
  workdir, config = args.workdir(), args.config()
  from composer_jax import api
  if args.flags.reuse is not None:
    if args.flags.dry_run:
      raise UserError('--reuse copies stages, and --dry_run changes nothing: give one of them')
    if not args.flags.reuse:
      raise UserError('--reuse: names no folder')
    source = os.path.expanduser(args.flags.reuse)  # a shell leaves the ~ of --reuse=~/x alone
    copied = api.reuse(config, str(workdir), source, stages=args.flags.stages)
    print(f'copied from {source}: {", ".join(copied) or "nothing new"}', flush=True)
  results = api.run(config, str(workdir), stages=args.flags.stages, dry_run=args.flags.dry_run)
  args.write_json(results)
  if args.flags.dry_run:
    print(json.dumps(results, indent=2, default=str))
    return
  for line in summary(results):
    print(line)


def summary(results: dict) -> list[str]:
  """Returns the lines that end a run: bits per byte, pass@1 with its interval, time and memory."""
  lines = []
  for name, stage in results.get('stages', {}).items():
    # source by source: the mean over a mixture hides which of them a compressor does better
    found = [f'{source} {row["bits_per_byte"]:.3f} (gzip {row["gzip_bits_per_byte"]:.3f}, '
             f'xz {row["xz_bits_per_byte"]:.3f})'
             for source, row in stage.get('sources', {}).items() if 'bits_per_byte' in row]
    if found:
      lines.append(f'{name}: held-out bits per byte: {"  ".join(found)}')
  for name, row in results.get('eval', {}).items():
    if row['ci95'] is None:
      lines.append(f'eval {name}: no attempt got a verdict  tasks {row["tasks"]}')
      continue
    low, high = row['ci95']
    lines.append(f'eval {name}: pass@1 {row["pass_at_1"]:.3f} [{low:.3f}, {high:.3f}]  '
                 f'tasks {row["tasks"]}')
  if 'wall_s' in results and 'peak_rss_gb' in results:
    lines.append(f'{results["wall_s"]:.0f} s, peak {results["peak_rss_gb"]:.2f} GB')
  return lines
