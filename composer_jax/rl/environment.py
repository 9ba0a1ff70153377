"""The coding environment as the rollout worker sees it: episodes in, outcomes out."""

from collections.abc import Sequence

from composer_jax.envs.harness import ChatRenderer, Episode, GraderLike
from composer_jax.envs.sandbox import SandboxPool
from composer_jax.envs.types import Task, Trace
from composer_jax.rl.samples import Outcome


class EpisodeEnvironment:
  """Runs `envs.harness.Episode`s in a pool of sandboxes.

  Args:
    tasks: the run's tasks in their fixed order; the ordinal of a group is an index into it.
    pool: sandboxes for episodes; used from the rollout thread only.
    grader: gives verdicts, in sandboxes of its own.
    renderer: encodes the conversation.
  """

  def __init__(self, tasks: Sequence[Task], pool: SandboxPool, grader: GraderLike,
               renderer: ChatRenderer):
    self.num_tasks = len(tasks)
    self._tasks = tasks
    self._pool = pool
    self._grader = grader
    self._renderer = renderer

  def session(self, ordinal: int, member: int) -> Episode | None:
    """Starts an episode, or returns None while all sandboxes are in use."""
    sandbox = self._pool.acquire()
    if sandbox is None:
      return None
    task = self._tasks[ordinal]
    return Episode(task, sandbox, self._grader, self._renderer,
                   group_id=f'{ordinal}:{task.id}', sample_index=member,
                   release=self._pool.release)

  def outcome(self, session: Episode) -> Outcome:
    """Returns the verdict of an episode that is over; its sandbox is already back in the pool."""
    return outcome_of(session.trace(), session.task)


def outcome_of(trace: Trace, task: Task) -> Outcome:
  """Returns the verdict of a trace, with the record of its turns that the report's viewer shows."""
  turns = [{'call': turn.text, 'result': turn.result.text if turn.result else '',
            'error': turn.result.error_class if turn.result else None} for turn in trace.turns]
  return Outcome(
      task_id=trace.task_id, correct=trace.reward, stop_reason=str(trace.stop_reason),
      label=str(task.meta.get('mutation', '')), counts=dict(trace.parts),
      trace={'instruction': trace.instruction, 'files': dict(task.files), 'turns': turns,
             'error': trace.error})
