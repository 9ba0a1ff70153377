"""Sandboxes: where the agent's code runs.

`SandboxPool` hands out `Sandbox`es (bubblewrap, one command server inside each; what they answer is
listed at `envs.types.SandboxHandle`), `check_support` says whether this machine can run them.
"""

from composer_jax.envs.sandbox.config import SandboxConfig
from composer_jax.envs.sandbox.pool import SandboxPool
from composer_jax.envs.sandbox.process import Sandbox, SandboxError
from composer_jax.envs.sandbox.server import LATE, safe_repr
from composer_jax.envs.sandbox.support import Support, check_support

__all__ = [
  'LATE',
  'Sandbox',
  'SandboxConfig',
  'SandboxError',
  'SandboxPool',
  'Support',
  'check_support',
  'safe_repr',
]
