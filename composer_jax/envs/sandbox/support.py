"""Whether this machine can run sandboxes, found out by running one."""

import dataclasses
import functools
import os
import sys

from composer_jax.envs.sandbox import bwrap, cgroup
from composer_jax.envs.sandbox.config import SandboxConfig
from composer_jax.envs.sandbox.process import Sandbox, SandboxError
from composer_jax.errors import InfrastructureError


@dataclasses.dataclass(frozen=True)
class Support:
  """The answer of `check_support`.

  Attributes:
    ok: a sandbox was started and answered.
    tier: what protects the host, for example `namespaces+seccomp+cgroup-v2`; `none` if not ok.
    reason: one line on why not, or on what is weaker than it could be; may be empty.
    how_to_install: what to do about it; empty when nothing is needed.
    program: the bubblewrap in use.
    start_ms: milliseconds until the probe answered.
  """

  ok: bool
  tier: str
  reason: str = ''
  how_to_install: str = ''
  program: str = ''
  start_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Launch:
  """How sandboxes are started here.

  Attributes:
    program: bubblewrap's path.
    controllers: cgroup controllers in use; empty when only rlimits hold.
    tier: as in `Support`.
  """

  program: str
  controllers: list[cgroup.Controller]
  tier: str

  def spec(self, config: SandboxConfig) -> dict:
    """Returns the launch spec for these limits."""
    return bwrap.launch_spec(self.program, config)


# (sysctl, value that forbids user namespaces, command that allows them)
_SYSCTLS = [
  ('kernel/unprivileged_userns_clone', '0', 'sysctl -w kernel.unprivileged_userns_clone=1'),
  ('user/max_user_namespaces', '0', 'sysctl -w user.max_user_namespaces=10000'),
  (
    'kernel/apparmor_restrict_unprivileged_userns',
    '1',
    'sysctl -w kernel.apparmor_restrict_unprivileged_userns=0',
  ),
]


def _explain(failure: str, program: str) -> tuple[str, str]:
  """Turns what bubblewrap wrote into (reason, what to do)."""
  for name, forbids, command in _SYSCTLS:
    path = f'/proc/sys/{name}'
    if os.path.exists(path):
      with open(path) as file:
        value = file.read().strip()
      if value == forbids:
        return f'user namespaces are disabled ({name.replace("/", ".")} = {value})', command
  if 'PermissionError' in failure or 'execvp' in failure:
    reason = f'the interpreter or bwrap is closed to other users ({failure})'
    return reason, f'chmod -R o+rX {sys.base_prefix} {program}'
  if 'namespace' in failure or 'uid map' in failure or 'Operation not permitted' in failure:
    return (
      f'this container or kernel forbids namespaces ({failure})',
      'start the container with --security-opt seccomp=unconfined --security-opt '
      'systempaths=unconfined --cap-add SYS_ADMIN',
    )
  return failure, bwrap.HOW_TO_INSTALL


@functools.cache
def _probe() -> tuple[Support, Launch | None]:
  if sys.platform != 'linux':
    return Support(False, 'none', f'sandboxes need Linux, this is {sys.platform}'), None
  programs = bwrap.candidates()
  if not programs:
    return Support(False, 'none', 'bubblewrap (bwrap) not found', bwrap.HOW_TO_INSTALL), None
  controllers, failure = cgroup.detect(), ''
  tier = 'namespaces+seccomp'
  if controllers:
    tier += '+cgroup-v' + '/v'.join(sorted({str(c.version) for c in controllers}))
  else:
    tier += '+rlimits'
  config = SandboxConfig()
  for program in programs:
    launch = Launch(program, controllers, tier)
    try:
      sandbox = Sandbox(-1, launch.spec(config), config, controllers)
      try:
        sandbox.wait_ready()
        ready_s = sandbox.start_s
      finally:
        sandbox.close()
    except SandboxError as error:
      failure = failure or str(error).removeprefix('sandbox -1: ')
      continue
    except InfrastructureError as error:
      return Support(False, 'none', str(error)), None
    weaker = '' if controllers else 'no cgroup may be made here: memory is limited per process only'
    return Support(True, tier, weaker, '', program, 1000 * ready_s), launch
  return Support(False, 'none', *_explain(failure, programs[0]), programs[0]), None


def check_support() -> Support:
  """Says whether sandboxes work here, by starting one (once a process; then remembered)."""
  return _probe()[0]


def require() -> Launch:
  """Returns how to start sandboxes here.

  Raises:
    InfrastructureError: they do not work; one line with the reason and the remedy.
  """
  support, launch = _probe()
  if launch is None:
    remedy = f'; try: {support.how_to_install}' if support.how_to_install else ''
    raise InfrastructureError(f'no sandbox support: {support.reason}{remedy}')
  return launch
