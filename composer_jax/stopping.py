"""SIGTERM and SIGINT end a process in good order, with status 128 + signal."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Stopped(SystemExit):
  """A signal has ended the work.

  Attributes:
    signal: which one.
    code: 128 + its number, the status that a shell reports for such an end.
  """

  def __init__(self, number: int):
    super().__init__(128 + number)
    self.signal = signal.Signals(number)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
  """Yields a function that returns whether SIGTERM or SIGINT has asked the block to stop.

  The block looks when it suits it, saves, and ends. A second signal has its ordinary effect.

  Raises:
    Stopped: on leaving the block when it was asked to, even if it did not look any more.
  """
  asked: list[int] = []
  with _on_first((signal.SIGTERM, signal.SIGINT), asked.append):
    yield lambda: bool(asked)
  if asked:
    raise Stopped(asked[0])


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
  """Lets SIGTERM unwind the block as SIGINT does, so that everything open in it is closed.

  A second SIGTERM has its ordinary effect.

  Raises:
    Stopped: wherever the signal found the block.
  """
  def unwind(number: int) -> None:
    raise Stopped(number)

  with _on_first((signal.SIGTERM,), unwind):
    yield


@contextlib.contextmanager
def _on_first(numbers: Sequence[int], act: Callable[[int], None]) -> Iterator[None]:
  """Calls `act` with the first of these signals that comes; handlers are then as before.

  Outside the main thread, where Python allows no handlers, nothing is caught.
  """
  before = {}

  def restore() -> None:
    for number, handler in before.items():
      signal.signal(number, handler)

  def handle(number: int, unused_frame: Any) -> None:
    restore()
    act(number)

  if threading.current_thread() is threading.main_thread():
    for number in numbers:
      before[number] = signal.signal(number, handle)
  try:
    yield
  finally:
    restore()
