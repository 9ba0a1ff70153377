"""Limits of one sandbox."""

import dataclasses

from composer_jax.config import check_least

# What the command server needs for itself; and agents' code never runs as root.
_LEAST = {'memory_mb': 64, 'address_space_mb': 64, 'processes': 4, 'open_files': 16, 'file_mb': 1,
          'workspace_mb': 1, 'tmp_mb': 1, 'result_kb': 4, 'read_kb': 1, 'uid': 1}


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
  """What one sandbox may use (our choice; sized for small Python repositories).

  Attributes:
    memory_mb: memory of the whole sandbox, files in its tmpfs included. Enforced by a cgroup, where
      the machine allows one; otherwise only the per-process limits below hold.
    address_space_mb: address space of one process (`RLIMIT_AS`).
    processes: processes and threads of the sandbox (`RLIMIT_NPROC`, and the cgroup's `pids.max`).
    open_files: file descriptors of one process.
    file_mb: size of one file.
    workspace_mb: size of the tmpfs on `/workspace`.
    tmp_mb: size of the tmpfs on `/tmp`.
    result_kb: bytes of results that one `run_cases` may return; more is treated as a crash.
    read_kb: files larger than this are not read, edited or searched.
    start_timeout_s: a sandbox that did not report by then is broken.
    reply_timeout_s: a request that was not answered by then (`run_cases`: by then after its own
      timeout) means that the sandbox is broken.
    uid: user and group id inside the sandbox; on the host too when we are root.
  """

  memory_mb: int = 384
  address_space_mb: int = 256
  processes: int = 32
  open_files: int = 64
  file_mb: int = 8
  workspace_mb: int = 16
  tmp_mb: int = 16
  result_kb: int = 256
  read_kb: int = 1024
  start_timeout_s: float = 30.0
  reply_timeout_s: float = 30.0
  uid: int = 61000

  def __post_init__(self):
    for name, least in _LEAST.items():
      check_least(self, least, name)
    if min(self.start_timeout_s, self.reply_timeout_s) <= 0:
      raise ValueError('start_timeout_s and reply_timeout_s must be above 0')
