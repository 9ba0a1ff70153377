"""`composer-jax convert`: Hugging Face checkpoints, both ways."""

from pathlib import Path
from typing import Any

from absl import flags

from composer_jax.cli import arguments
from composer_jax.errors import NumericsError, UserError
from composer_jax.progress import progress

# The flags that an action has, beside --from and --to.
_FLAGS = {'import': ('dtype', 'dry_run', 'json'),
          'export': ('format', 'stage', 'scales_from', 'shard_gb', 'dry_run', 'json'),
          'verify': ('stage', 'logits', 'all', 'json')}
_LARGEST_GB = 1e6
HELP = """
usage: composer-jax convert import --from=DIR --to=DIR [--dtype=float32|bfloat16]
       composer-jax convert export --from=DIR --to=DIR [--format=bfloat16|float32|fp8|int4]
       composer-jax convert verify --from=DIR --to=DIR [--json=FILE]

import  a Hugging Face checkpoint (DeepSeek-V3, Kimi K2 and K2.5, Moonlight; bfloat16, block FP8 or
        packed INT4) -> a folder of ours, which training starts from; give the same command again to
        continue after a kill
export  an import, the result of a run (--stage), or another Hugging Face checkpoint -> a checkpoint
        that transformers loads; weights that were not trained keep their quantised bytes
verify  compares two folders of any of these kinds: every tensor, and logits on fixed tokens. Exit
        code 4 when they differ by more than their formats explain
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_dry_run(flag_values)
  arguments.define_json(flag_values)

  def text(name: str, default: str | None, description: str) -> None:
    flags.DEFINE_string(name, default, description, flag_values=flag_values)

  text('from', None, 'Folder to read.')
  text('to', None, 'Folder to write; of verify, the second one to read.')
  text('dtype', None, 'import: float32 or bfloat16 for all parameters; default that of the files.')
  text('format', 'bfloat16', 'export: bfloat16, float32, fp8 or int4.')
  text('stage', None, 'of a run folder: cpt, long_context, sft or rl; default the last finished.')
  text('scales_from', None, 'export of a run: an import whose quantisation scales are kept where '
       'they still fit, such as the one that training started from.')
  flags.DEFINE_float('shard_gb', 4.0, 'export: largest file, GB (10^9 bytes).', lower_bound=1e-6,
                     flag_values=flag_values)
  flags.DEFINE_bool('logits', True, 'verify: compare logits too (loads both models in float32).',
                    flag_values=flag_values)
  flags.DEFINE_bool('all', False, 'verify: a line for every tensor instead of every kind.',
                    flag_values=flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_config()
  _only_own_flags(args)
  args.action({'import': import_, 'export': export, 'verify': verify})(args)


def import_(args: arguments.Arguments) -> None:
  """Imports a checkpoint."""
  from composer_jax.checkpoint import hf_import
  from composer_jax.checkpoint.hf_source import HfSource
  if args.flags.dtype not in (None, *hf_import.DTYPES):
    raise UserError(f'--dtype={args.flags.dtype}: can be {", ".join(hf_import.DTYPES)}')
  source, target = HfSource(_from(args)), _to(args)
  hf_import.check_target(target)
  note = check_vocabulary(source.folder, source.config.vocab_size)
  size = hf_import.total_bytes(hf_import.store_leaves(source, args.flags.dtype))
  facts = {'source_gb': source.total_bytes / 1e9, 'parameters_gb': size / 1e9,
           'formats': hf_import.formats(source), 'skipped': source.skipped, 'vocabulary': note}
  _print(facts)
  if not args.flags.dry_run:
    with progress(size, 'import, bytes') as bar:
      hf_import.import_folder(source, target, args.flags.dtype, bar.update)
    print(target)
  args.write_json(facts)


def export(args: arguments.Arguments) -> None:
  """Exports a checkpoint."""
  from composer_jax.checkpoint import hf_export, names
  form = args.flags.format
  if form not in hf_export.FORMATS:
    raise UserError(f'--format={form}: can be {", ".join(hf_export.FORMATS)}')
  shard_gb = args.flags.shard_gb
  if not shard_gb < _LARGEST_GB:
    raise UserError(f'--shard_gb={shard_gb}: must be below {_LARGEST_GB:g}')
  source, files = _open(_from(args), args.flags.stage, args.flags.scales_from)
  target = _to(args)
  hf_export.check_target(target)
  size = sum(hf_export.tensor_bytes(entry, form) for entry in names.table(source.config))
  facts = {'format': form, 'tensors': len(hf_export.plan(source.config, form)),
           'parameters_gb': size / 1e9}
  _print(facts)
  if not args.flags.dry_run:
    with progress(size, 'export, bytes') as bar:
      hf_export.export_folder(source, target, form, files=files, advance=bar.update,
                              shard_bytes=int(shard_gb * 1e9))
    print(target)
  args.write_json(facts)


def verify(args: arguments.Arguments) -> None:
  """Compares two checkpoints."""
  from composer_jax.checkpoint import names
  from composer_jax.checkpoint import verify as verify_lib
  first = _open(_from(args), args.flags.stage)[0]
  second = _open(_to(args), args.flags.stage)[0]
  verify_lib.check_same_shape(first, second)
  with progress(sum(not e.copy for e in names.table(first.config)), 'compare, tensors') as bar:
    results = verify_lib.compare_tensors(first, second, bar.update)
  rows = verify_lib.by_kind(results)
  if args.flags.all:
    shown = [{'kind': r.name, 'formats': '/'.join(r.formats), 'count': 1, 'bit_equal': int(r.equal),
              'max_abs': r.max_abs, 'max_rel': r.max_rel, 'ok': r.ok} for r in results]
  else:
    shown = rows
  _print_table(shown)
  coarse, tolerance = verify_lib.logit_tolerance(results)
  logits = verify_lib.compare_logits(first, second) if args.flags.logits else None
  bad = [r.name for r in results if not r.ok]
  measure = 'median_rel' if tolerance else 'max_rel'
  far = logits is not None and tolerance is not None and not logits[measure] <= tolerance
  equal = sum(r.equal for r in results)
  print(f'tensors: {len(results)}, bit-equal {equal}, outside tolerance {len(bad)}')
  if logits:
    judged = f'not judged ({coarse})' if tolerance is None else f'tolerance {tolerance:g}'
    print(f'logits of {logits["tokens"]} positions: largest difference {logits["max_rel"]:.2e} of '
          f'the largest logit, median {logits["median_rel"]:.2e} ({judged}), '
          f'same best token {logits["argmax_agreement"]:.4f}, KL {logits["kl_nats"]:.2e} nats')
  args.write_json({'tensors': len(results), 'bit_equal': equal, 'outside_tolerance': bad,
                   'kinds': rows, 'logits': logits, 'coarsest_format': coarse,
                   'logit_tolerance': tolerance, 'ok': not bad and not far})
  if bad or far:
    raise NumericsError(f'the two differ: {f"{len(bad)} tensors, first {bad[0]}" if bad else ""}'
                        f'{"logits" if far and not bad else ""}')


def check_vocabulary(folder: Path, vocab_size: int) -> str:
  """Returns a word on how the tokenizer of a checkpoint fits the model, '' without a tokenizer.

  Raises:
    UserError: the tokenizer has ids beyond the model's vocabulary, or its files are damaged.
  """
  from composer_jax.data import tokenizer
  if not tokenizer.find(folder):
    return 'no tokenizer in the folder'
  return tokenizer.check_vocabulary(tokenizer.load(folder), vocab_size)


def _only_own_flags(args: arguments.Arguments) -> None:
  """Refuses a flag that the action would not look at."""
  action = args.words[0] if args.words else None
  for name in sorted({flag for own in _FLAGS.values() for flag in own}):
    if action in _FLAGS and args.flags[name].present and name not in _FLAGS[action]:
      raise UserError(f'convert {action}: has no --{name}')


def _from(args: arguments.Arguments) -> Path:
  if not getattr(args.flags, 'from'):
    raise UserError('convert: --from=DIR is missing')
  path = Path(getattr(args.flags, 'from')).expanduser()
  if not path.is_dir():
    raise UserError(f'--from={path}: there is no such folder')
  return path


def _to(args: arguments.Arguments) -> Path:
  if not args.flags.to:
    raise UserError('convert: --to=DIR is missing')
  return Path(args.flags.to).expanduser()


def _open(folder: Path, stage: str | None, scales_from: str | None = None
          ) -> tuple[Any, Path | None]:
  """Returns a reader of a folder of any kind, and the folder of its tokenizer files."""
  from composer_jax.checkpoint import hf_export, hf_import, names
  if not folder.is_dir():
    raise UserError(f'{folder}: there is no such folder')
  if hf_import.is_imported(folder) or hf_import.is_hugging_face(folder):
    for flag, value in (('stage', stage), ('scales_from', scales_from)):
      if value is not None:
        raise UserError(f'--{flag}={value}: is for a run, and {folder} is a checkpoint')
    return hf_import.open_checkpoint(folder), folder
  from composer_jax import api
  model = api.load(folder, stage=stage)
  if scales_from is None:
    return hf_export.InMemory(model.config, model.params), folder / 'data'
  base = hf_import.Imported(Path(scales_from).expanduser())
  # A run may have stretched the context and added an MTP layer; all else has the same shapes.
  here, there = ({leaf: shape for leaf, shape in names.shapes(config).items()
                  if not leaf.startswith('mtp.')} for config in (model.config, base.config))
  for leaf in sorted(here.keys() | there.keys()):
    if here.get(leaf) != there.get(leaf):
      raise UserError(f'--scales_from={scales_from}: is another model than {folder}: {leaf} is '
                      f'{there.get(leaf)} and {here.get(leaf)}')
  return (hf_export.InMemory(model.config, model.params, base.raw, base.scale), base.folder)


def _print(facts: dict[str, Any]) -> None:
  for key, value in facts.items():
    print(f'{key}: {value:.4g}' if isinstance(value, float) else f'{key}: {value}')


def _print_table(rows: list[dict[str, Any]]) -> None:
  width = max(len(row['kind']) for row in rows)
  print(f'{"tensor":{width}}  {"formats":19}  {"count":>6}  {"bit-equal":>9}  {"max abs":>9}  '
        f'{"max rel":>9}')
  for row in rows:
    print(f'{row["kind"]:{width}}  {row["formats"]:19}  {row["count"]:6}  {row["bit_equal"]:9}  '
          f'{row["max_abs"]:9.2e}  {row["max_rel"]:9.2e}{"" if row["ok"] else "  OUTSIDE"}')
