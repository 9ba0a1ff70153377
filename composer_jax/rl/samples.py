"""What RL trains on: one sample per physical token row, with the verdict it earned.

Samples are flat and self-contained. Rows that belong together are found by id (`group_id`,
`logical_id`), never by their order.
"""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.rollout.types import Rollout


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What the environment says about one finished logical rollout.

  Attributes:
    task_id: the task that was worked on.
    correct: task reward in [0, 1], or None when there is no verdict (a failure of the
      infrastructure or of the grader, an abort): such a rollout is left out, never counted as 0.
    stop_reason: why the rollout ended.
    label: class of the task for per-class figures (the mutation class), '' if there is none.
    counts: what the harness counted by name (effort such as `calls`, behaviour such as
      `call_errors`; see `envs.rewards.reward_parts`). Shaping weighs them, metrics average them.
    trace: JSON-able record of turns, calls and results, for the viewer.
  """

  task_id: str
  correct: float | None
  stop_reason: str
  label: str = ''
  counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  trace: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sample:
  """One physical row of a logical rollout.

  Attributes:
    rollout: tokens `[T]` with sampler log-probs, policy versions and routing.
    outcome: the verdict, shared by all rows of the logical rollout.
    group_id: rollouts of the same task prompt that are compared with each other.
    logical_id: the logical rollout; unique over the run.
    segment: number of this row in the logical rollout (0 unless it was cut by a summary).
  """

  rollout: Rollout
  outcome: Outcome
  group_id: str
  logical_id: str
  segment: int = 0

  @property
  def finish_called(self) -> bool:
    """Whether the agent itself ended the rollout."""
    return self.outcome.stop_reason.lower() == 'finished'

  @property
  def trainable(self) -> bool:
    """Whether there is a verdict and at least one sampled token."""
    return self.outcome.correct is not None and bool(np.any(self.rollout.sampled))

  @property
  def oldest_version(self) -> int:
    """Lowest policy version among the sampled tokens."""
    return int(np.min(self.rollout.versions[self.rollout.sampled]))


@dataclasses.dataclass(frozen=True)
class Group:
  """The finished members of one task prompt.

  Attributes:
    ordinal: position of the task in the run's fixed task order.
    samples: rows of the members that have a verdict.
    zero_signal: whether all members are equally good, so that no gradient can come of it.
  """

  ordinal: int
  samples: tuple[Sample, ...]
  zero_signal: bool

  @property
  def oldest_version(self) -> int:
    """Lowest policy version among the group's sampled tokens."""
    return min(s.oldest_version for s in self.samples)


def validate(samples: Sequence[Sample]) -> None:
  """Checks that every token row is well formed and every logical rollout is whole.

  Raises:
    ValueError: arrays of different length, a log-prob or version missing on a sampled token,
      versions that go backwards, routing that is not uint16, or segments that are not 0, 1, ...
  """
  segments: dict[str, list[int]] = {}
  for sample in samples:
    _validate_rollout(sample)
    segments.setdefault(sample.logical_id, []).append(sample.segment)
  for logical, numbers in segments.items():
    if sorted(numbers) != list(range(len(numbers))):
      raise ValueError(f'rollout {logical}: segments {sorted(numbers)}, a part is missing or twice')


def _validate_rollout(sample: Sample) -> None:
  r, name = sample.rollout, sample.logical_id
  length = len(r.tokens)
  for field in ('sampled', 'logprobs', 'versions', 'routing', 'routing_mask'):
    if len(getattr(r, field)) != length:
      raise ValueError(f'rollout {name}: {field} has {len(getattr(r, field))} of {length} tokens')
  if r.routing.dtype != np.uint16:
    raise ValueError(f'rollout {name}: routing is {r.routing.dtype}, expert ids need uint16')
  versions = r.versions[r.sampled]
  if np.any(versions < 0) or np.any(np.diff(versions) < 0):
    raise ValueError(f'rollout {name}: policy versions are missing or go backwards')
  logprobs = r.logprobs[r.sampled]
  if not np.all(np.isfinite(logprobs)) or np.any(logprobs > 1e-4):
    raise ValueError(f'rollout {name}: a sampled token lacks a valid log-prob')


_ARRAYS = tuple(f.name for f in dataclasses.fields(Rollout)
                if f.name in ('tokens', 'sampled', 'logprobs', 'versions', 'routing',
                              'routing_mask'))


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
  """Serialises groups for a checkpoint (NumPy archive with a JSON index; no pickle)."""
  index, arrays, number = [], {}, 0
  for group in groups:
    rows = []
    for sample in group.samples:
      fields = {f.name: getattr(sample.rollout, f.name) for f in dataclasses.fields(Rollout)}
      arrays |= {f'{number}.{name}': fields.pop(name) for name in _ARRAYS}
      fields['failure'] = None  # a sample with a verdict has none
      rows.append({'array': number, 'rollout': fields, 'group_id': sample.group_id,
                   'outcome': dataclasses.asdict(sample.outcome),
                   'logical_id': sample.logical_id, 'segment': sample.segment})
      number += 1
    index.append({'ordinal': group.ordinal, 'zero_signal': group.zero_signal, 'samples': rows})
  stream = io.BytesIO()
  text = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
  np.savez(stream, index=text, **arrays)
  return stream.getvalue()


def groups_from_bytes(data: bytes) -> list[Group]:
  """Inverse of `groups_to_bytes`."""
  with np.load(io.BytesIO(data), allow_pickle=False) as archive:
    groups = []
    for entry in json.loads(archive['index'].tobytes()):
      samples = []
      for row in entry['samples']:
        arrays = {name: archive[f'{row["array"]}.{name}'] for name in _ARRAYS}
        samples.append(Sample(Rollout(**row['rollout'], **arrays), Outcome(**row['outcome']),
                              row['group_id'], row['logical_id'], row['segment']))
      groups.append(Group(entry['ordinal'], tuple(samples), entry['zero_signal']))
  return groups
