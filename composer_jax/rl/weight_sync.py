"""Hands new policy weights from the trainer to the sampler, in one process.

The trainer donates its buffers to the next step, so the sampler must own a copy; and a sampler that
silently runs in another precision than the trainer is a known way to ruin the gradient, so dtypes
and shapes are pinned by a manifest.
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp


def manifest(params: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
  """Returns `{path: (dtype, shape)}` of every leaf."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): (str(leaf.dtype), tuple(leaf.shape))
          for path, leaf in leaves}


class WeightSync:
  """The latest published (version, params); safe to use from two threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self._current: tuple[int, Any] | None = None
    self._manifest: dict[str, tuple[str, tuple[int, ...]]] | None = None

  def publish(self, version: int, params: Any) -> None:
    """Copies `params` and makes the copy the current policy.

    Returns only when the copy exists, so the caller may donate `params` right after.

    Args:
      version: number of optimizer steps behind these weights; must grow from call to call.
      params: the full parameter tree, frozen leaves included.

    Raises:
      ValueError: the version does not grow, or dtype, shape or name of a leaf changed.
    """
    found = manifest(params)
    if self._manifest is not None and found != self._manifest:
      changed = sorted(k for k in found.keys() | self._manifest.keys()
                       if found.get(k) != self._manifest.get(k))
      key = changed[0]
      raise ValueError(f'weights of version {version} differ from the manifest at {key}: '
                       f'{self._manifest.get(key)} became {found.get(key)}')
    copy = jax.block_until_ready(jax.tree.map(lambda x: jnp.array(x, copy=True), params))
    with self._lock:
      if self._current is not None and version <= self._current[0]:
        raise ValueError(f'version {version} was published after {self._current[0]}')
      self._manifest = found
      self._current = (version, copy)

  def current(self) -> tuple[int, Any]:
    """Returns the latest (version, params).

    Raises:
      RuntimeError: nothing has been published yet.
    """
    with self._lock:
      if self._current is None:
        raise RuntimeError('no weights have been published')
      return self._current
