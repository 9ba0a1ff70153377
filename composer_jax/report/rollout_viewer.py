"""Chooses the rollouts that the page shows and packs them for its viewer.

`stages/STAGE/traces.jsonl` holds one JSON object a line, written by RL and evaluation alike (what
SFT trains on is read by `demonstrations`):

  {"id": str,              unique within the run
   "stage": str, "step": int (the optimizer step that trains on it, 0 in an evaluation),
   "task_id": str, "group_id": str,
   "instruction": str,     what the agent was told
   "files": {path: text},  the workspace it started from
   "reward": float | null, null: no verdict (infrastructure)
   "correct": float | bool,      the verdict, when `reward` has penalties in it
   "reward_parts": {name: float}, "advantage": float,
   "stop_reason": str,
   "turns": [
     {"call": str,         the text that the model wrote
      "result": str,       the tool's answer, "" when there was none
      "error": str | null, class of a failed call
      "tokens": [{"t": str,          text of one token, the model's and the tool's in order
                  "m": 0 | 1 | -1,   loss mask: 1 where the token is trained on (in an evaluation:
                                     where the policy sampled it), 0 for prompts and results, -1
                                     for a demonstration's own tokens that are not to be learnt
                  "lp": float | null,   log-prob that the sampler gave
                  "tlp": float | null,  log-prob that the trainer gave
                  "v": int}]}]}         policy version that sampled it, -1 where none did

Fields that are missing or of another type are shown as absent. Everything in a trace was written by
an agent or a tool: it reaches the page as JSON text without `<`, and the viewer puts it into text
nodes only.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_jax.report import demonstrations

BUDGET_BYTES = 2_500_000  # of all traces on a page
PER_STAGE = 60
FILE_CHARS = 4_000
RESULT_CHARS = 4_000
MAX_TOKENS = 4_000


@dataclasses.dataclass(frozen=True)
class Source:
  """A file of traces.

  Attributes:
    stage: the stage that wrote it.
    path: the file.
    parse: from a line to a trace, or None when the line is no trace.
  """

  stage: str
  path: Path
  parse: Callable[[bytes], dict[str, Any] | None]


def sources(stages: list[tuple[str, Path]], tokenizer_file: Path) -> list[Source]:
  """Returns the files of traces that the stages (name, folder) have."""
  found = []
  for name, path in stages:
    if (path / 'traces.jsonl').exists():
      found.append(Source(name, path / 'traces.jsonl', _parse))
    elif (path / 'demonstrations.jsonl').exists():
      read = demonstrations.reader(tokenizer_file)
      found.append(Source(name, path / 'demonstrations.jsonl', functools.partial(_converted, read)))
  return found


def collect(files: list[Source], budget: int = BUDGET_BYTES
            ) -> tuple[list[dict[str, Any]], dict[str, int], int]:
  """Returns packed traces spread evenly over each stage's file.

  Args:
    files: where the traces are.
    budget: bytes of JSON for all of them.

  Returns:
    The traces, how many each stage has in all, and the number of lines that are no trace.
  """
  packed, totals, bad = [], {}, 0
  for source in files:
    room = budget // len(files)
    spans = _line_spans(source.path)
    totals[source.stage] = len(spans)
    with source.path.open('rb') as file:
      for start, size in _spread(spans, PER_STAGE):
        file.seek(start)
        trace = source.parse(file.read(size))
        if trace is None:
          bad += 1
          continue
        packed_trace = _pack(trace, source.stage)
        room -= len(json.dumps(packed_trace))
        if room < 0:
          break
        packed.append(packed_trace)
  return packed, totals, bad


def as_script(value: Any) -> str:
  """Returns JSON that is safe inside a script element: it holds no `<`, `>` or `&`."""
  text = json.dumps(value, separators=(',', ':'), allow_nan=False)
  return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def _line_spans(path: Path) -> list[tuple[int, int]]:
  """Returns (offset, size) of each complete line."""
  spans, offset = [], 0
  with path.open('rb') as file:
    for line in file:
      if line.endswith(b'\n') and line.strip():
        spans.append((offset, len(line)))
      offset += len(line)
  return spans


def _spread(spans: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
  """Returns at most `limit` spans at even distances, the first and the last among them.

  They come in an order in which any prefix is spread too, since the byte budget may cut it.
  """
  if len(spans) > limit:
    spans = [spans[round(i * (len(spans) - 1) / (limit - 1))] for i in range(limit)]
  return [spans[i] for i in sorted(range(len(spans)), key=_bit_reversed)]


def _bit_reversed(index: int) -> int:
  return int(f'{index:016b}'[::-1], 2)


def _parse(line: bytes) -> dict[str, Any] | None:
  """Returns the trace of one line, None when it is none."""
  try:
    trace = json.loads(line)
  except ValueError:
    return None
  fine = isinstance(trace, dict) and isinstance(trace.get('turns'), list)
  return trace if fine else None


def _converted(read: Callable[[dict[str, Any]], dict[str, Any]], line: bytes
               ) -> dict[str, Any] | None:
  row = demonstrations.parse(line)
  return None if row is None else read(row)


def _pack(trace: dict[str, Any], stage: str) -> dict[str, Any]:
  """Turns a trace into the viewer's compact form."""
  files = trace.get('files') if isinstance(trace.get('files'), dict) else {}
  parts = trace.get('reward_parts') if isinstance(trace.get('reward_parts'), dict) else {}
  return {
      'id': _text(trace.get('id')), 'stage': stage, 'step': _number(trace.get('step')),
      'task': _text(trace.get('task_id')), 'group': _text(trace.get('group_id')),
      'instruction': _text(trace.get('instruction')),
      'files': {str(path): _cut(_text(text), FILE_CHARS) for path, text in files.items()},
      'reward': _number(trace.get('reward')), 'verdict': _verdict(trace),
      'advantage': _number(trace.get('advantage')), 'label': _text(trace.get('label')),
      'parts': {str(name): _number(value) for name, value in parts.items()},
      'stop': _text(trace.get('stop_reason')),
      'turns': [_pack_turn(turn) for turn in trace['turns'] if isinstance(turn, dict)]}


def _verdict(trace: dict[str, Any]) -> str:
  """Returns `solved`, `failed` or `none`."""
  value = trace.get('correct', trace.get('reward'))
  if not isinstance(value, (int, float)):
    return 'none'
  return 'solved' if value > 0 else 'failed'


def _pack_turn(turn: dict[str, Any]) -> dict[str, Any]:
  tokens = turn.get('tokens') if isinstance(turn.get('tokens'), list) else []
  return {
      'call': _text(turn.get('call')), 'result': _cut(_text(turn.get('result')), RESULT_CHARS),
      'error': _text(turn.get('error')),
      'tokens': [[_text(t.get('t')), _mask(t.get('m')), _number(t.get('lp')),
                  _number(t.get('tlp')), _number(t.get('v'))]
                 for t in tokens[:MAX_TOKENS] if isinstance(t, dict)]}


def _mask(value: Any) -> int:
  return int(value) if value in (1, -1) else 0


def _text(value: Any) -> str:
  if value is None:
    return ''
  return value if isinstance(value, str) else json.dumps(value, allow_nan=True)


def _number(value: Any) -> float | int | None:
  """Returns a finite number with six digits, or None."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return None
  if isinstance(value, int):
    return value
  return float(f'{value:.6g}') if abs(value) < float('inf') else None


def _cut(text: str, limit: int) -> str:
  return text if len(text) <= limit else f'{text[:limit]}\n… {len(text) - limit} more characters'
