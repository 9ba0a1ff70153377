"""The rows of an evaluation on disk, one JSON line per finished sample."""

import json
import pathlib
from typing import Any

from composer_jax.config import fingerprint
from composer_jax.errors import UserError
from composer_jax.files import json_lines, replacing

Row = dict[str, Any]


class RowFile:
  """Appends rows to `rows.jsonl` and finds them again after a restart.

  `evaluation.json` beside it says what is evaluated, so that rows of another model or task list
  are never mixed in.  A line that a crash left unfinished is dropped, and so are attempts that
  ended without a verdict: whoever starts again wants them tried again.

  Args:
    folder: made when it does not exist; None keeps the rows in memory only.
    identity: JSON-able description of everything the rows depend on.

  Raises:
    UserError: the folder belongs to another evaluation.

  Attributes:
    rows: all finished rows.
  """

  def __init__(self, folder: str | pathlib.Path | None, identity: Any):
    self.rows: list[Row] = []
    self._path = None if folder is None else pathlib.Path(folder) / 'rows.jsonl'
    if self._path is None:
      return
    marker, name = self._path.with_name('evaluation.json'), {'fingerprint': fingerprint(identity)}
    if marker.exists():
      if marker.read_text() != json.dumps(name):
        raise UserError(f'{self._path.parent}: holds another evaluation; move it away to start '
                        'this one')
      self.rows = [row for row in json_lines(self._path) if row.get('valid')]
      with replacing(self._path) as file:  # without attempts to make again, and half a line
        file.writelines(json.dumps(row) + '\n' for row in self.rows)
    else:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      # The order keeps a crash harmless: the marker is written last and whole.
      self._path.write_text('')
      with replacing(marker) as file:
        json.dump(name, file)

  def append(self, row: Row) -> None:
    """Adds a row; it has left this process when this returns."""
    self.rows.append(row)
    if self._path is not None:
      with self._path.open('a') as file:
        file.write(json.dumps(row) + '\n')
