"""Wall time and memory of a run, sampled while it runs so that a killed run still counts."""

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterable

import psutil

from composer_jax.errors import InfrastructureError, UserError
from composer_jax.files import read_json
from composer_jax.recipe.workdir import write_json


def tree_memory_gb() -> float:
  """Returns the memory of this process and all its children in GB (10^9 bytes).

  Pages shared between processes count once (proportional set size); where the kernel refuses that
  figure for a process of another user, its resident set counts instead.
  """
  total = 0
  process = psutil.Process()
  for member in [process, *process.children(recursive=True)]:
    try:
      total += member.memory_full_info().pss
    except psutil.AccessDenied:
      total += _resident(member)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
      continue
  return total / 1e9


def _resident(member: psutil.Process) -> int:
  try:
    return member.memory_info().rss
  except psutil.Error:
    return 0


def _figures(path: pathlib.Path) -> tuple[float, float] | None:
  """Returns wall seconds and peak GB; None without them, as a damaged clock stops no run."""
  if not path.exists():
    return None
  with contextlib.suppress(UserError):
    figures = read_json(path, 'wall_s', 'peak_rss_gb')
    wall, peak = figures['wall_s'], figures['peak_rss_gb']
    if isinstance(wall, (int, float)) and isinstance(peak, (int, float)):
      return float(wall), float(peak)
  return None


class Monitor:
  """Context manager that keeps `path` up to date with wall seconds and peak memory.

  The file accumulates over the calls that continue one run: `{"wall_s": x, "peak_rss_gb": y}`.

  Args:
    path: the file.
    parts: files of the same form whose sum stands in where `path` is missing or damaged.
    interval_s: seconds between two samples.
  """

  def __init__(self, path: pathlib.Path, parts: Iterable[pathlib.Path] = (),
               interval_s: float = 5.0):
    self._path = path
    self._interval_s = interval_s
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True, name='monitor')
    self._start: float | None = None
    earlier = _figures(path)
    if earlier is None:
      known = [found for part in parts if (found := _figures(part)) is not None]
      earlier = sum(wall for wall, _ in known), max((peak for _, peak in known), default=0.0)
    self._earlier_s, self._peak_gb = earlier

  def __enter__(self) -> 'Monitor':
    self._start = time.monotonic()
    self._thread.start()
    return self

  def __exit__(self, kind: object, *_: object) -> None:
    self._stop.set()
    self._thread.join()
    self._earlier_s, self._start = self.wall_s, None  # what follows is not part of the run
    if kind is None:
      self._sample()
    else:  # the block's own error is the one to report
      self._try_sample()

  @property
  def wall_s(self) -> float:
    """Seconds spent on the run so far, earlier calls included."""
    return self._earlier_s + (time.monotonic() - self._start if self._start is not None else 0.0)

  @property
  def peak_rss_gb(self) -> float:
    """Highest memory of the process tree seen so far, in GB."""
    return self._peak_gb

  def _watch(self) -> None:
    while not self._stop.wait(self._interval_s):
      self._try_sample()

  def _try_sample(self) -> None:
    with contextlib.suppress(InfrastructureError):  # a full disk stops the stage, not its clock
      self._sample()

  def _sample(self) -> None:
    self._peak_gb = max(self._peak_gb, tree_memory_gb())
    write_json(self._path, {'wall_s': round(self.wall_s, 2),
                            'peak_rss_gb': round(self._peak_gb, 4)})
