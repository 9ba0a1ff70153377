"""The folder that a conversion writes: empty or its own before, one writer at a time."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from composer_jax.checkpoint.disk import disk_errors
from composer_jax.errors import UserError
from composer_jax.files import locked

_LOCK = '.lock'


def check(target: Path, own: Callable[[str], bool]) -> None:
  """Checks that a folder may be written.

  Args:
    target: may be missing.
    own: whether a name in it is what a killed writer of the same kind left, which may stay there.

  Raises:
    UserError: it holds something else, or it or a folder above it is a file.
  """
  above = next(path for path in (target, *target.absolute().parents) if path.exists())
  if not above.is_dir():
    raise UserError(f'{above}: is no folder')
  if above == target:
    for path in sorted(target.iterdir()):
      if path.name != _LOCK and not own(path.name):
        raise UserError(f'{target}: is not empty (holds {path.name}); choose another folder')


@contextlib.contextmanager
def held(target: Path) -> Iterator[None]:
  """Makes a folder and holds it for this process; one that stays empty goes again.

  Raises:
    UserError: another process writes there.
    InfrastructureError: it cannot be made.
  """
  with contextlib.ExitStack() as stack:
    with disk_errors(str(target)):
      made = not target.exists()
      target.mkdir(parents=True, exist_ok=True)
      if made:
        stack.callback(_remove_if_empty, target)
      stack.enter_context(locked(target / _LOCK, f'{target}: another process writes there'))
    yield


def _remove_if_empty(folder: Path) -> None:
  with contextlib.suppress(OSError):
    folder.rmdir()
