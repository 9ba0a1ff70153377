"""A progress bar with time left and live numbers on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich import console as rich_console
from rich import progress as rich_progress

LINE_EVERY_S = 5.0  # between two plain lines


class Progress:
  """What `progress` yields: `update` advances and shows numbers."""

  def __init__(self, total: int | None, description: str, initial: int):
    self.total = total
    self.description = description
    self.done = initial
    self.numbers: dict[str, Any] = {}
    self._initial = initial
    self._start = time.monotonic()

  def update(self, n: int = 1, **numbers: Any) -> None:
    """Advances by `n` and remembers the numbers; those not given again stay on screen."""
    self.done += n
    self.numbers.update(numbers)
    self.show()

  def show(self) -> None:
    """Shows the present state."""

  def text(self) -> str:
    """Returns the numbers as `loss 2.31  tokens/s 5120`."""
    return '  '.join(f'{name} {_short(value)}' for name, value in self.numbers.items())

  def elapsed_s(self) -> float:
    """Returns the seconds since the start."""
    return time.monotonic() - self._start

  def left_s(self) -> float | None:
    """Returns the estimated seconds left, None while nothing is known.

    The first fiftieth of the steps says nothing: the first one waits for compilation.
    """
    steps = self.done - self._initial
    if self.total is None or steps <= (self.total - self._initial) // 50:
      return None
    return max(0, self.total - self.done) * self.elapsed_s() / steps


class _Bar(Progress):
  """A rich progress bar."""

  def __init__(self, total, description, initial, bar: rich_progress.Progress):
    super().__init__(total, description, initial)
    self._bar = bar
    self._task = bar.add_task(description, total=total, completed=initial, numbers='', left='')

  def show(self) -> None:
    left = self.left_s()
    self._bar.update(self._task, completed=self.done, numbers=self.text(),
                     left='' if left is None else f'{_clock(left)} left')


class _Lines(Progress):
  """Plain lines at most every `LINE_EVERY_S`, and one at the end."""

  def __init__(self, total, description, initial, file):
    super().__init__(total, description, initial)
    self._file = file
    self._last = -float('inf')
    self._printed: tuple[int, str] | None = None

  def show(self) -> None:
    if time.monotonic() - self._last >= LINE_EVERY_S:
      self.line()

  def line(self) -> None:
    """Prints the state now, unless that was the last thing printed."""
    self._last = time.monotonic()
    total = '' if self.total is None else f'/{self.total}'
    left = self.left_s()
    clock = f'{_clock(self.elapsed_s())} gone'
    clock += '' if left is None else f', {_clock(left)} left'
    if self._printed != (self.done, self.text()):
      print(f'{self.description}: {self.done}{total}  {clock}  {self.text()}'.rstrip(),
            file=self._file, flush=True)
      self._printed = (self.done, self.text())


@contextlib.contextmanager
def progress(total: int | None, description: str, *, initial: int = 0) -> Iterator[Progress]:
  """Shows the progress of a loop on standard error.

  Args:
    total: number of steps, None when unknown.
    description: a few words in front.
    initial: steps that were done before (a resumed run); they do not count for the time left.

  Yields:
    An object whose `update(n=1, **numbers)` advances.
  """
  console = rich_console.Console(stderr=True)
  if not console.is_terminal:
    lines = _Lines(total, description, initial, sys.stderr)
    try:
      yield lines
    finally:
      lines.line()
    return
  bar = rich_progress.Progress(
      rich_progress.TextColumn('{task.description}', markup=False),
      rich_progress.BarColumn(bar_width=24),
      rich_progress.MofNCompleteColumn(),
      rich_progress.TextColumn('{task.fields[left]}', markup=False),
      rich_progress.TextColumn('{task.fields[numbers]}', markup=False),
      console=console, refresh_per_second=4)
  with bar:
    yield _Bar(total, description, initial, bar)


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'


def _short(value: Any) -> str:
  """Formats a number with four significant digits; integers and text as they are."""
  if hasattr(value, 'item'):
    value = value.item()
  return f'{value:.4g}' if isinstance(value, float) else str(value)
