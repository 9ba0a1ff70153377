"""Command lines: absl flags, plus `--config=FILE[:arg]` and `--config.section.field=value`."""

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from composer_jax.cli import config_file
from composer_jax.config import nearest
from composer_jax.errors import UserError
from composer_jax.recipe.workdir import write_json


@dataclasses.dataclass(frozen=True)
class Arguments:
  """One parsed command line.

  Attributes:
    verb: the verb, for messages.
    flags: the verb's own flags.
    words: what is neither a flag nor a flag's value.
    config_spec: `FILE[:arg]` of --config, or None.
    overrides: (`section.field`, text) in the order given.
  """

  verb: str
  flags: flags.FlagValues
  words: list[str]
  config_spec: str | None
  overrides: list[tuple[str, str]]

  @classmethod
  def parse(cls, verb: str, argv: list[str], flag_values: flags.FlagValues) -> 'Arguments':
    """Parses the arguments after the verb.

    Raises:
      UserError: a --config flag without a value, or one that this verb does not have.
      flags.Error: any other flag is wrong.
    """
    spec, overrides, rest = None, [], []
    queue = list(argv)
    while queue:
      argument = queue.pop(0)
      name, equals, value = argument.lstrip('-').partition('=')
      if not argument.startswith('-') or not (name == 'config' or name.startswith('config.')):
        rest.append(argument)
        continue
      if not equals:
        if not queue or queue[0].startswith('--'):
          raise UserError(f'--{name} needs a value: --{name}=...')
        value = queue.pop(0)
      if name == 'config':
        spec = value
      else:
        overrides.append((name.removeprefix('config.'), value))
    words = flag_values([f'composer-jax {verb}', *rest])[1:]
    return cls(verb, flag_values, words, spec, overrides)

  def config(self) -> dict[str, Any]:
    """Loads the config file and applies the overrides.

    Raises:
      UserError: no --config, or the file is missing or wrong.
    """
    if self.config_spec is None:
      raise UserError(f'{self.verb}: --config=FILE is missing')
    return config_file.load(self.config_spec, self.overrides)

  def no_config(self) -> None:
    """Refuses --config on a verb that reads the config from the workdir."""
    if self.config_spec is not None or self.overrides:
      raise UserError(f'{self.verb}: takes no --config; it reads the one of the workdir')

  def workdir(self, *, must_exist: bool = False) -> Path:
    """Returns --workdir.

    Raises:
      UserError: it is missing, or is no folder where there has to be one.
    """
    if not self.flags.workdir:
      raise UserError(f'{self.verb}: --workdir=DIR is missing')
    path = Path(self.flags.workdir).expanduser()
    if must_exist and not path.is_dir():
      raise UserError(f'--workdir={path}: there is no such folder')
    return path

  def no_words(self) -> None:
    """Refuses positional arguments."""
    if self.words:
      raise UserError(f'{self.verb}: does not take the argument {self.words[0]!r}')

  def action(self, actions: dict[str, Callable[['Arguments'], None]]) -> Callable:
    """Returns the function that the one positional argument names.

    Raises:
      UserError: there is none, more than one, or an unknown one.
    """
    if len(self.words) != 1:
      raise UserError(f'{self.verb}: needs one of {", ".join(actions)}')
    if self.words[0] not in actions:
      raise UserError(f'{self.verb} {self.words[0]}: unknown{nearest(self.words[0], actions)}')
    return actions[self.words[0]]

  def write_json(self, value: Any) -> None:
    """Writes what was printed to --json=FILE, when that was given.

    Raises:
      InfrastructureError: the file cannot be written.
    """
    if self.flags.json:
      write_json(Path(self.flags.json).expanduser(), value)


def define_workdir(flag_values: flags.FlagValues) -> None:
  """Defines --workdir."""
  flags.DEFINE_string('workdir', None, 'Folder of the run.', flag_values=flag_values)


def define_dry_run(flag_values: flags.FlagValues) -> None:
  """Defines --dry_run."""
  flags.DEFINE_bool('dry_run', False, 'Check everything and say what would be done.',
                    flag_values=flag_values)


def define_json(flag_values: flags.FlagValues) -> None:
  """Defines --json."""
  flags.DEFINE_string('json', None, 'Also write what is printed to this JSON file.',
                      flag_values=flag_values)


def help_text(verb: str, text: str, flag_values: flags.FlagValues) -> str:
  """Returns what `composer-jax VERB --help` prints."""
  lines = [text.strip(), '', f'Flags of composer-jax {verb}:']
  own = [flag_values[name] for name in flag_values if flag_values[name].name == name]
  for flag in sorted({flag.name: flag for flag in own}.values(), key=lambda f: f.name):
    default = '' if flag.default is None else f' (default: {flag.default})'
    lines += textwrap.wrap(f'--{flag.name}: {flag.help}{default}', 98, initial_indent='  ',
                           subsequent_indent='      ')
  return '\n'.join(lines)
