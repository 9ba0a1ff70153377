"""Finds the verb, runs it, and turns expected errors into one line and an exit code."""

import errno
import importlib
import signal
import sys
from collections.abc import Sequence

from absl import flags

from composer_jax import allocator
from composer_jax.cli.arguments import Arguments, help_text
from composer_jax.config import nearest
from composer_jax.errors import ComposerError, InfrastructureError, UserError
from composer_jax.stopping import Stopped, sigterm_unwinds

# A verb is a module of this package with HELP (first line: what it does), define_flags(flag_values)
# and main(arguments).
VERBS = {
    'run': 'run the stages of a config in order, continuing what the workdir holds',
    'data': 'build or inspect a corpus',
    'eval': 'evaluate a checkpoint of a run on held-out tasks',
    'sweep': 'run the trials of a sweep file and compare them on one page',
    'convert': 'import, export or verify Hugging Face checkpoints',
    'report': 'turn a workdir into one self-contained HTML page',
    'bench': 'time a training step or a kernel beside a peer',
    'doctor': 'show versions, devices, sandbox support, free disk; check log-probs',
}
LATER = {
    'plan': 'compile a step ahead of time for a named topology',
    'tasks': 'build, validate or list tasks',
    'serve': 'OpenAI-compatible endpoint over the rollout engine',
    'agent': 'run the trained agent on a folder',
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# a path that the user named, or put there, cannot be used
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EROFS,
              errno.ENAMETOOLONG)


def overview() -> str:
  """Returns the list of verbs."""
  width = max(map(len, VERBS | LATER))
  lines = ['usage: composer-jax VERB [--config=FILE] [--config.section.field=value] '
           '[--workdir=DIR] ...', '']
  lines += [f'  {verb:{width}}  {text}' for verb, text in VERBS.items()]
  lines += ['', 'comes later:']
  lines += [f'  {verb:{width}}  {text}' for verb, text in LATER.items()]
  return '\n'.join([*lines, '', '`composer-jax VERB --help` shows the flags of a verb.'])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command line.

  Args:
    argv: arguments without the program's name; `sys.argv[1:]` by default.

  Returns:
    The exit code: 0 done, 2 user error, 3 the machine is at fault, 4 numerics, 130 interrupted, 143
    terminated. Any other exception is a fault of ours and keeps its traceback.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    with sigterm_unwinds():
      return _dispatch(argv)
  except ComposerError as error:
    return _fail(str(error), error.exit_code)
  except flags.Error as error:
    return _fail(str(error), UserError.exit_code)
  except KeyboardInterrupt:
    return _stopped(Stopped(signal.SIGINT))
  except Stopped as stop:
    return _stopped(stop)
  except OSError as error:
    if error.errno in _DISK_FULL:
      return _fail(f'disk full: {error.filename or error}', InfrastructureError.exit_code)
    if error.errno in _NO_ACCESS and error.filename:
      return _fail(f'{error.filename}: {error.strerror or error}', UserError.exit_code)
    raise


def console() -> None:
  """Entry point of the console script."""
  allocator.keep_freed_memory()
  sys.exit(main())


def _dispatch(argv: list[str]) -> int:
  if not argv or argv[0] in ('-h', '--help', '--helpfull', 'help'):
    print(overview())
    return 0 if argv else UserError.exit_code
  verb, rest = argv[0], argv[1:]
  if verb in LATER:
    raise UserError(f'{verb}: comes later; there are: {", ".join(VERBS)}')
  if verb not in VERBS:
    hint = nearest(verb, VERBS) if verb[:1] != '-' else ''
    there_are = '' if 'there are' in hint else f'; there are: {", ".join(VERBS)}'
    raise UserError(f'unknown verb {verb}{hint}{there_are}')
  module = importlib.import_module(f'composer_jax.cli.{verb}')
  flag_values = flags.FlagValues()
  module.define_flags(flag_values)
  if any(argument in ('-h', '--help', '--helpfull') for argument in rest):
    print(help_text(verb, module.HELP, flag_values))
    return 0
  module.main(Arguments.parse(verb, rest, flag_values))
  return 0


def _stopped(stop: Stopped) -> int:
  print(f'composer-jax: stopped by {stop.signal.name}; the same command continues',
        file=sys.stderr, flush=True)
  return stop.code


def _fail(message: str, exit_code: int) -> int:
  print(f'composer-jax: error: {" ".join(message.split())}', file=sys.stderr, flush=True)
  return exit_code
