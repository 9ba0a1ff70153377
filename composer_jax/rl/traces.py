"""A sample of rollouts on disk, complete enough to look at token by token."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.files import json_lines, replacing
from composer_jax.metrics import write_line
from composer_jax.rl.samples import Group, Sample


def choose(groups: Sequence[Group], number: int) -> set[str]:
  """Returns logical ids of the best and the worst member of the first groups with a signal."""
  chosen: set[str] = set()
  for group in [g for g in groups if not g.zero_signal][:number]:
    ranked = sorted(group.samples, key=lambda s: (s.outcome.correct, s.logical_id))
    chosen |= {ranked[0].logical_id, ranked[-1].logical_id}
  return chosen


class TraceLog:
  """Appends rollouts to a JSONL file; rows of steps that are done again are dropped on opening.

  A row is what `report.rollout_viewer` shows: `id`, `step`, `task_id`, `group_id`, `instruction`,
  `files`, `reward` with its `reward_parts`, `stop_reason`, and `turns`, each with `call`, `result`,
  `error` and `tokens`: per token `t` text, `m` loss mask, `lp` sampler and `tlp` trainer log-prob,
  `rlp` that of the reference policy, `v` version. Also `label`, `segment` and `advantage`. What
  nobody has computed is left out.
  """

  def __init__(self, path: Path, *, resume_step: int,
               decode: Callable[[Sequence[int]], str] | None):
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [row for row in (json_lines(path) if path.exists() else ())
            if row.get('step', 0) <= resume_step]
    with replacing(path) as file:
      file.writelines(json.dumps(row) + '\n' for row in kept)
    self._file = path.open('ab', buffering=0)
    self._decode = decode or (lambda ids: ' '.join(map(str, ids)))

  def append(self, step: int, sample: Sample, parts: Mapping[str, float], *,
             advantage: float | None = None, trainer_logprobs: np.ndarray | None = None,
             reference_logprobs: np.ndarray | None = None) -> None:
    """Writes one row.

    Args:
      step: the step that trains on the sample; 0 where none does.
      sample: the row.
      parts: named reward parts.
      advantage: of the row.
      trainer_logprobs: of the sampled tokens in order, before the update.
      reference_logprobs: likewise, of the reference policy.
    """
    rollout, outcome = sample.rollout, sample.outcome
    row: dict[str, Any] = {
        'id': sample.logical_id, 'step': step, 'task_id': outcome.task_id,
        'group_id': sample.group_id, 'segment': sample.segment, 'label': outcome.label,
        'stop_reason': outcome.stop_reason, 'correct': outcome.correct,
        'reward': sum(parts.values()), 'reward_parts': dict(parts), **outcome.trace}
    if advantage is not None:
      row['advantage'] = advantage
    logprobs = {'lp': rollout.logprobs[rollout.sampled], 'tlp': trainer_logprobs,
                'rlp': reference_logprobs}
    columns = {name: _spread(rollout.sampled, values) for name, values in logprobs.items()
               if values is not None}
    tokens = [{'t': self._decode([token]), 'm': int(mask), 'v': version,
               **{name: column[i] for name, column in columns.items()}}
              for i, (token, mask, version) in enumerate(zip(
                  rollout.tokens.tolist(), rollout.sampled, rollout.versions.tolist(),
                  strict=True))]
    spans = _turns(rollout.sampled)
    turns = list(outcome.trace.get('turns', ()))
    turns += [{}] * (len(spans) - len(turns))  # an environment may record less than the tokens do
    row['turns'] = [{**turn, 'tokens': tokens[start:end]}
                    for turn, (start, end) in zip(turns, spans, strict=False)]
    write_line(self._file, json.dumps(row))

  def __enter__(self) -> 'TraceLog':
    return self

  def __exit__(self, *unused: Any) -> None:
    self._file.close()


def _turns(sampled: np.ndarray) -> list[tuple[int, int]]:
  """Returns [start, end) of each turn: a run of sampled tokens and what was appended after it."""
  before = np.concatenate([[False], sampled[:-1]])
  starts = np.flatnonzero(sampled & ~before).tolist()
  return list(zip(starts, [*starts[1:], len(sampled)], strict=True))


def _spread(sampled: np.ndarray, values: np.ndarray) -> list[float | None]:
  """Returns one entry per token: the value where it was sampled, None elsewhere."""
  out: list[float | None] = [None] * len(sampled)
  for index, value in zip(np.flatnonzero(sampled).tolist(), values.tolist(), strict=True):
    out[index] = round(value, 6)
  return out
