"""The metrics of a stage: one JSON object a line, each (step, metric) at most once.

A row is `{"step": 12, "loss": 2.31, "heldout/stdlib/bits_per_byte": 1.9}`. Values that JSON has no
number for are written as the strings "NaN", "Infinity" and "-Infinity"; `read` turns them back.
"""

import io
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.files import json_lines, replacing

_NON_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


class MetricsLog:
  """Appends rows to a JSONL file; safe to call from several threads."""

  def __init__(self, path: str | os.PathLike, *, resume_step: int | None = None):
    """Opens the log.

    Args:
      path: the file; its folder is made when missing.
      resume_step: the step whose state was restored. Rows of later steps are dropped, since those
        steps are about to be done again; -1 starts over. None keeps every row.

    A last line that a killed process left unfinished is dropped in any case.
    """
    self.path = Path(path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._last: dict[str, int] = {}
    kept = []
    for row in read(self.path):
      if resume_step is None or row['step'] <= resume_step:
        kept.append(row)
        self._last.update((name, row['step']) for name in row if name != 'step')
    with replacing(self.path) as file:
      file.writelines(_text(row) + '\n' for row in kept)
    self._file = self.path.open('ab', buffering=0)

  def append(self, step: int, **values: Any) -> None:
    """Writes one row.

    Args:
      step: the optimizer step (or another count that only rises within one file).
      **values: numbers (Python, NumPy or JAX scalars), strings or booleans; names may hold slashes
        when passed with `**{...}`.

    Raises:
      ValueError: a metric already has a row at this step or a later one.
    """
    row = {'step': int(step)} | values
    line = _text(row)
    with self._lock:
      for name in values:
        if self._last.get(name, -1) >= row['step']:
          raise ValueError(f'{self.path}: metric {name} at step {row["step"]} '
                           f'after step {self._last[name]}')
      self._last.update(dict.fromkeys(values, row['step']))
      write_line(self._file, line)

  def close(self) -> None:
    """Closes the file; closing twice is harmless."""
    self._file.close()

  def __enter__(self) -> 'MetricsLog':
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()


def write_line(file: io.RawIOBase, line: str) -> None:
  """Appends a line to an unbuffered file: what a full disk refused is not tried again on closing.

  Raises:
    OSError: the line, or the rest of it, was not written.
  """
  data = memoryview((line + '\n').encode())
  while data:
    data = data[file.write(data):]


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the rows of a metrics file in order; [] when there is no file.

  Raises:
    UserError: a line other than the last is not a JSON object with a step.
  """
  path = Path(path)
  if not path.exists():
    return []
  rows = []
  for number, row in enumerate(json_lines(path), 1):
    if not isinstance(row.get('step'), int):
      raise UserError(f'{path}:{number}: is damaged (no step)')
    rows.append({name: _NON_FINITE.get(value, value) if isinstance(value, str) else value
                 for name, value in row.items()})
  return rows


def _text(row: dict[str, Any]) -> str:
  """Returns the row as JSON."""
  return json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False)


def _plain(value: Any) -> bool | int | float | str | None:
  """Turns a scalar of any library into what JSON can hold."""
  if value is None or isinstance(value, (bool, str)):
    return value
  if hasattr(value, 'item'):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'
  if isinstance(value, (bool, int, float)):
    return value
  raise TypeError(f'a metric is one number, string or boolean, not {type(value).__name__}')
