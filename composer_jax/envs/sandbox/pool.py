"""A bounded set of sandboxes that are used again and again."""

import itertools
import time

from composer_jax.envs.sandbox import cgroup
from composer_jax.envs.sandbox.config import SandboxConfig
from composer_jax.envs.sandbox.process import Sandbox, SandboxError
from composer_jax.envs.sandbox.support import Launch, require

_PATIENCE_S = 0.5


class SandboxPool:
  """Up to `size` sandboxes, started when first needed; a context manager.

  Broken sandboxes are replaced. Not for use from several threads at once: every thread makes its
  own pool.

  Attributes:
    size: most sandboxes alive at once.
    started: sandboxes started so far.
    replaced: broken sandboxes that were thrown away.
  """

  def __init__(self, size: int, config: SandboxConfig | None = None):
    """Makes an empty pool.

    Args:
      size: most sandboxes alive at once.
      config: limits of each; default: `SandboxConfig()`.

    Raises:
      InfrastructureError: this machine cannot run sandboxes; says why and what to install.
    """
    self.size, self.config = size, config or SandboxConfig()
    self.started = self.replaced = 0
    self._launch: Launch = require()
    self._spec = self._launch.spec(self.config)
    self._numbers = itertools.count()
    self._idle: list[Sandbox] = []
    self._used: dict[int, Sandbox] = {}
    self._groups: list[cgroup.Group] = []

  def __enter__(self) -> 'SandboxPool':
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  @property
  def tier(self) -> str:
    """What protects the host, as `check_support` says."""
    return self._launch.tier

  @property
  def available(self) -> int:
    """How many more sandboxes may be acquired now."""
    return self.size - len(self._used)

  def acquire(self) -> Sandbox | None:
    """Returns a sandbox that nobody else uses, empty; None while all are in use.

    It may still be starting: `send` anyway.

    Raises:
      SandboxError: a new sandbox could not be started.
    """
    if not self.available:
      return None
    sandbox = self._clean()
    if sandbox is None:
      sandbox = Sandbox(next(self._numbers), self._spec, self.config, self._launch.controllers)
      self.started += 1
    self._used[sandbox.id] = sandbox
    return sandbox

  def _clean(self) -> Sandbox | None:
    """Returns an idle sandbox that has been emptied, or None when one may be started instead."""
    for sandbox in list(self._idle):
      try:
        response = sandbox.poll()
      except SandboxError:
        response = None
      refused = response is not None and not response['ok']  # what is left in it would be inherited
      if not sandbox.alive or sandbox.broken or refused:
        self._idle.remove(sandbox)
        self._discard(sandbox)
        continue
      if response is not None:
        self._idle.remove(sandbox)
        return sandbox
    if len(self._idle) + len(self._used) < self.size:
      return None
    # All are being emptied, which takes a fraction of a millisecond: wait for the first. One that
    # takes long was left in a bad state and is not worth it.
    sandbox = self._idle.pop(0)
    try:
      response = sandbox.wait(_PATIENCE_S)
      if response is not None and response['ok']:
        return sandbox
    except SandboxError:
      pass  # replaced below, like one that is too slow or could not be emptied
    self._discard(sandbox)
    return None

  def release(self, sandbox: Sandbox) -> None:
    """Takes a sandbox back and empties it; one that is broken or still busy is replaced.

    It is emptied now, and not by its next user, who must not suffer from what it may hold.
    """
    del self._used[sandbox.id]
    if sandbox.broken or sandbox.busy:
      self._discard(sandbox)
      return
    try:
      sandbox.send({'op': 'reset', 'files': {}})
    except SandboxError:
      self._discard(sandbox)
    else:
      self._idle.append(sandbox)

  def _discard(self, sandbox: Sandbox) -> None:
    sandbox.kill()
    self.replaced += 1
    self._groups = [g for g in [*self._groups, *sandbox.close()] if not g.remove()]

  def close(self) -> None:
    """Ends all sandboxes, also those in use, and waits until nothing is left of them."""
    sandboxes = [*self._idle, *self._used.values()]
    self._idle, self._used = [], {}
    for sandbox in sandboxes:
      sandbox.kill()
    for sandbox in sandboxes:
      self._groups += sandbox.close()
    self._groups = cgroup.remove_all(self._groups, 2.0, time.sleep)
