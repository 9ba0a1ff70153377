"""Which versions a run, or a question about this machine, has to do with."""

import importlib.metadata
import platform
from collections.abc import Iterable

_SHAPING = ('composer-jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
            'tokenizers', 'tiktoken')


def of_run() -> dict[str, str]:
  """Returns the versions of Python and of the packages that shape a run."""
  return installed(_SHAPING)


def installed(distributions: Iterable[str]) -> dict[str, str]:
  """Returns the version of Python and of each distribution, or `not installed`."""
  found = {'python': platform.python_version()}
  for name in distributions:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'not installed'
  return found
