"""A few attempts of an evaluation, token by token, for the viewer of the report."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from composer_jax.envs.types import Task, Trace
from composer_jax.files import json_lines, replacing
from composer_jax.rl import traces
from composer_jax.rl.environment import outcome_of
from composer_jax.rl.samples import Sample
from composer_jax.rollout.types import Rollout

SHOWN_TASKS = 10  # the first ones of an evaluation; at most two attempts at each are left


def writer(log: traces.TraceLog, stage: str, tasks: Sequence[Task]
           ) -> Callable[[Trace, Rollout], None]:
  """Returns a function that writes the attempts at the first of these tasks.

  It writes all of them, since which attempts will be solved is not known yet; see `thin`.

  Args:
    log: takes the rows.
    stage: the evaluation, part of the ids: several evaluations of a run attempt the same tasks.
    tasks: in the order of the evaluation.
  """
  shown = {task.id: task for task in tasks[:SHOWN_TASKS]}

  def on_trace(trace: Trace, rollout: Rollout) -> None:
    task = shown.get(trace.task_id)
    if task is not None:
      sample = Sample(rollout, outcome_of(trace, task), trace.group_id,
                      f'{stage}/{rollout.session_id}')
      log.append(0, sample, {'correct': trace.reward})

  return on_trace


def thin(path: Path) -> None:
  """Leaves of each task one solved and one failed attempt, whatever the order in which they ended.

  Args:
    path: written by `writer`; doing it twice changes nothing.
  """
  kept: dict[tuple[str, bool], dict[str, Any]] = {}
  for row in json_lines(path):
    key = row['task_id'], row['correct'] == 1
    kept[key] = min(kept.get(key, row), row, key=lambda row: row['id'])
  with replacing(path) as file:
    file.writelines(json.dumps(kept[key]) + '\n' for key in sorted(kept))
