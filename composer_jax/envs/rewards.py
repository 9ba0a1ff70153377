"""What an episode is worth, and the counts that shape it.

The task reward is 1 when the hidden cases pass *and* the agent called `finish`, else 0. It is None
where nothing can be said about the agent: a broken sandbox or grader, or a stop from outside.
Length penalties and behaviour rewards (Composer 2 report, section 4.2) are weighted sums of the
parts below; the weights belong to the RL configuration.
"""

import re
from collections.abc import Mapping, Sequence

from composer_jax.envs.tools.registry import NO_CHANGE
from composer_jax.envs.types import FailureClass, StopReason, Task, Turn

EFFORT_PARTS = ('thinking_tokens', 'call_tokens', 'result_tokens', 'final_tokens', 'calls', 'turns')
BEHAVIOUR_PARTS = ('edits', 'call_errors', 'no_change_edits', 'test_runs', 'repeated_edits',
                   'untested_finish')

_NO_VERDICT = {StopReason.ABORTED, StopReason.INFRASTRUCTURE}
_WAYS_OUT = re.compile(
  r'\b(import|importlib|exec|eval|compile|open|globals|vars|getattr|__(?!name__\b|class__\b)\w+__'
  r'|sys|runpy|ctypes|os\s*\.\s*path|posixpath|ntpath|genericpath)\b')


def task_reward(stop: StopReason, hidden_pass: bool | None) -> float | None:
  """Returns 1, 0 or None (no verdict); `hidden_pass` is None when the agent did not finish."""
  if stop in _NO_VERDICT:
    return None
  return float(stop == StopReason.FINISHED and bool(hidden_pass))


def failure_class(stop: StopReason, hidden_pass: bool | None) -> FailureClass | None:
  """Returns who is to blame for a reward that is not 1 (aborts blame nobody)."""
  if stop == StopReason.INFRASTRUCTURE:
    return FailureClass.INFRA
  if stop == StopReason.ABORTED:
    return None
  if stop == StopReason.CRASHED:
    return FailureClass.AGENT
  if stop != StopReason.FINISHED:
    return FailureClass.BUDGET
  return None if hidden_pass else FailureClass.AGENT


def reward_parts(turns: Sequence[Turn], stop: StopReason, hidden_pass: bool | None,
                 prompt_tokens: int) -> dict[str, float]:
  """Returns the named parts of the reward and the counts that shaping may weigh.

  Args:
    turns: the episode's turns.
    stop: why it ended.
    hidden_pass: verdict of the grader, None when it was not asked.
    prompt_tokens: length of the user turn.

  Returns:
    `hidden_tests`, `finished` (0 or 1); the effort that the nonlinear length penalty weighs:
    `thinking_tokens` (0 in this chat format), `call_tokens` (sampled, the final turn excluded),
    `result_tokens` (tool output), `final_tokens` (the `finish` turn), `calls`, `turns`;
    `prompt_tokens`; and behaviour counts: `edits`, `call_errors`, `no_change_edits`, `test_runs`,
    `repeated_edits`, `untested_finish`.
  """
  finished = stop == StopReason.FINISHED
  body = turns[:-1] if finished else turns
  calls = [t for t in turns if t.call is not None]
  tests = [t for t in turns if t.result is not None and t.result.passed is not None]
  texts = [t.text for t in calls if t.call.name == 'edit_file']
  parts = {
    'hidden_tests': float(bool(hidden_pass)),
    'finished': float(finished),
    'thinking_tokens': 0,
    'call_tokens': sum(t.call_span[1] - t.call_span[0] for t in body),
    'result_tokens': sum(t.result_span[1] - t.result_span[0] for t in turns),
    'final_tokens': turns[-1].call_span[1] - turns[-1].call_span[0] if finished else 0,
    'calls': len(calls),
    'turns': len(turns),
    'prompt_tokens': prompt_tokens,
    'edits': len(texts),
    'call_errors': sum(t.call.error is not None or bool(t.result and t.result.error_class)
                       for t in calls),
    'no_change_edits': sum(t.result is not None and t.result.text == NO_CHANGE for t in turns),
    'test_runs': len(tests),
    'repeated_edits': len(texts) - len(set(texts)),
    'untested_finish': float(finished and not (tests and tests[-1].result.passed)),
  }
  return {name: float(value) for name, value in parts.items()}


def contraband(task: Task, files: Mapping[str, str]) -> str:
  """Returns the first added line by which an answer could borrow the original, else ''.

  Only for tasks whose original code is part of every Python (`meta["sealed"]`): there, a repair
  that imports, opens or evaluates its way to the original has repaired nothing.

  Args:
    task: the task.
    files: path -> final text.
  """
  if not task.meta.get('sealed'):
    return ''
  for path, text in files.items():
    known = set(task.files.get(path, '').split('\n'))
    known |= set(task.solution.get(path, '').split('\n'))
    for line in text.split('\n'):
      if line not in known and _WAYS_OUT.search(line):
        return f'{path}: {line.strip()}'[:200]
  return ''
