"""Turns the demonstrations of SFT, which are kept as token ids, into what the viewer shows."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

# Special tokens of the conversation, see `composer_jax.data.chat`.
CALL, RESULT, END = '<|call|>', '<|result|>', '<|end|>'


_MASK = {True: 1, False: 0, None: -1}  # of `trainable`, in the viewer's terms


def reader(tokenizer_file: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
  """Returns a function from a row of `demonstrations.jsonl` to a trace of `rollout_viewer`.

  A row has `segments` (runs of token ids) and `trainable` (one flag a run), beside `id`, `task_id`,
  `mutation`, `reward` and `stop_reason`.

  Args:
    tokenizer_file: the corpus tokenizer; without it, ids stand for their texts.
  """
  known = tokenizers.Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None

  def text(token: int) -> str:
    if known is None:
      return f'{token} '
    return known.decode([token], skip_special_tokens=False)

  def read(row: dict[str, Any]) -> dict[str, Any]:
    pieces = [(text(token), _MASK[flag])
              for segment, flag in zip(row['segments'], row['trainable'], strict=True)
              for token in segment]
    starts = [i for i, (piece, _) in enumerate(pieces) if piece == CALL] or [len(pieces)]
    bounds = itertools.pairwise([*starts, len(pieces)])
    return {
        'id': row.get('id'), 'step': 0, 'task_id': row.get('task_id'), 'group_id': '',
        'label': row.get('mutation'), 'reward': row.get('reward'),
        'stop_reason': row.get('stop_reason'),
        'instruction': ''.join(piece for piece, _ in pieces[:starts[0]]),
        'turns': [_turn(pieces[start:end]) for start, end in bounds]}

  return read


def parse(line: bytes) -> dict[str, Any] | None:
  """Returns the row of one line, None when it is none."""
  try:
    row = json.loads(line)
  except ValueError:
    return None
  fine = (isinstance(row, dict) and isinstance(row.get('segments'), list)
          and isinstance(row.get('trainable'), list)
          and len(row['segments']) == len(row['trainable']))
  return row if fine else None


def _turn(pieces: list[tuple[str, int]]) -> dict[str, Any]:
  written = ''.join(piece for piece, _ in pieces).removeprefix(CALL)
  call, _, result = written.partition(RESULT)
  return {'call': call.removesuffix(END), 'result': result.removesuffix(END), 'error': None,
          'tokens': [{'t': piece, 'm': mask} for piece, mask in pieces]}
