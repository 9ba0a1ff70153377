"""Chooses an op's backend: an explicit name never falls back, "auto" says once what it took."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.kernels import platform as platform_lib

_logger = logging.getLogger(__name__)
_announced: set[tuple[str, str]] = set()


@dataclasses.dataclass(frozen=True)
class Backend:
  """One implementation of an op.

  Attributes:
    name: what `impl=` calls it.
    functions: the plain functions that the op's `api.py` wires into its custom_vjp.
    obstacle: returns why this backend cannot run here, or None when it can.
    platforms: platforms for which "auto" may take it.
    refuses: returns why this backend cannot take a problem, or None when it can; gets what
      `choose` is given.
  """

  name: str
  functions: Any
  obstacle: Callable[[], str | None]
  platforms: tuple[str, ...]
  refuses: Callable[..., str | None] = lambda **_: None


def choose(op: str, backends: Sequence[Backend], impl: str, **problem: Any) -> Backend:
  """Returns the backend for `impl`, or the first usable one for this platform under "auto".

  Args:
    op: name of the op, for messages.
    backends: candidates, best first.
    impl: "auto" or a backend's name.
    **problem: what `Backend.refuses` decides by.

  Raises:
    ValueError: no such backend, or the named one (or, under "auto", every one) cannot run here or
      cannot take the problem.
  """
  platform = platform_lib.family()
  if impl == 'auto':
    refused = []
    for backend in backends:
      reason = (backend.obstacle() or backend.refuses(**problem)
                if platform in backend.platforms else f'not chosen automatically on {platform}')
      if reason is None:
        _announce(op, backend.name, refused)
        return backend
      refused.append(f'{backend.name}: {reason}')
    raise ValueError(f'{op}: no usable backend ({"; ".join(refused)})')
  for backend in backends:
    if backend.name == impl:
      reason = backend.obstacle()
      if reason is not None:
        raise ValueError(f'{op}: impl {impl!r} cannot run here: {reason}')
      if (reason := backend.refuses(**problem)) is not None:
        raise ValueError(f'{op}: impl {impl!r} cannot do this: {reason}')
      return backend
  raise ValueError(f'{op}: unknown impl {impl!r} (there are: '
                   f'{", ".join(["auto"] + [b.name for b in backends])})')


def _announce(op: str, name: str, refused: list[str]) -> None:
  if (op, name) not in _announced:
    _announced.add((op, name))
    _logger.info('%s: using %s%s', op, name, f' ({"; ".join(refused)})' if refused else '')
