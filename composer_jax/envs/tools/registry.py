"""The tools: each is a generator that yields sandbox requests and returns a `CallResult`.

Being generators they know nothing of processes, waiting or pools; the harness feeds the responses
in whenever they arrive. Result texts are short on purpose: they are context the model pays for.
"""

from collections.abc import Callable, Generator

from composer_jax.envs.tools.edit import apply_edit, split_lines
from composer_jax.envs.types import (
  Call,
  CallErrorClass,
  CallResult,
  Case,
  Request,
  Response,
  Task,
)

ToolRun = Generator[Request, Response, CallResult]

MAX_MATCHES = 20
MAX_SHOWN = 80
NO_CHANGE = 'no change'
PASS = 'pass'


def run(call: Call, task: Task) -> ToolRun:
  """Returns the tool's generator for a parsed call; `finish` is the harness's own business."""
  return _TOOLS[call.name](call, task)


def wire(case: Case) -> dict[str, str]:
  """Returns what may enter a sandbox of a case: everything but the expected value."""
  return {'module': case.module, 'setup': case.setup, 'expr': case.expr}


def _error(kind: CallErrorClass, text: str) -> CallResult:
  return CallResult(f'error: {text}', kind)


def _refused(response: Response) -> CallResult | None:
  """Returns the agent-facing result of a refused request, or None when it was served."""
  if response.get('ok'):
    return None
  kind = response.get('error')
  known = CallErrorClass(kind) if kind in set(CallErrorClass) else CallErrorClass.NOT_ALLOWED
  return _error(known, str(response.get('message', kind))[:MAX_SHOWN])


def _read_file(call: Call, task: Task) -> ToolRun:
  del task
  path = call.arguments['path']
  response = yield {'op': 'read_file', 'path': path}
  if (refused := _refused(response)) is not None:
    return refused
  lines = split_lines(response['text'])
  first = call.arguments.get('first', 1)
  last = min(call.arguments.get('last', len(lines)), len(lines))
  if first > max(len(lines), 1):
    return _error(CallErrorClass.NOT_FOUND, f'no line {first}')
  return CallResult('\n'.join(f'{n}|{lines[n - 1]}' for n in range(first, last + 1)))


def _edit_file(call: Call, task: Task) -> ToolRun:
  arguments = call.arguments
  path = arguments['path']
  if path in task.protected:
    return _error(CallErrorClass.NOT_ALLOWED, 'path not allowed')
  response = yield {'op': 'read_file', 'path': path}
  if (refused := _refused(response)) is not None:
    return refused
  old = response['text']
  new = apply_edit(old, arguments['first'], arguments['last'], arguments['text'],
                   verbatim=arguments['range'])
  if new is None:
    return _error(CallErrorClass.NOT_FOUND, f'no line {arguments["last"]}')
  if split_lines(new) == split_lines(old):
    return CallResult(NO_CHANGE)
  response = yield {'op': 'write_file', 'path': path, 'text': new}
  return _refused(response) or CallResult('ok')


def _search(call: Call, task: Task) -> ToolRun:
  del task
  response = yield {'op': 'search', 'pattern': call.arguments['pattern'], 'limit': MAX_MATCHES}
  if (refused := _refused(response)) is not None:
    return refused
  matches = response['matches']
  if not matches:
    return CallResult('no match')
  return CallResult('\n'.join(f'{path}:{number}|{line.strip()}' for path, number, line in matches))


def _run_tests(call: Call, task: Task) -> ToolRun:
  del call
  response = yield {'op': 'run_cases', 'cases': [wire(c) for c in task.visible],
                    'timeout': task.limits.test_timeout_s}
  if (refused := _refused(response)) is not None:
    return refused
  for case, got in zip(task.visible, response['reprs'], strict=True):
    if got != case.expected_repr:
      text = (f'fail {_short(case.shown or case.expr)} got {_short(got)} '
              f'want {_short(case.expected_repr)}')
      return CallResult(text, passed=False)
  return CallResult(PASS, passed=True)


def _short(text: str) -> str:
  return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN - 3] + '...'


_TOOLS: dict[str, Callable[[Call, Task], ToolRun]] = {
  'read_file': _read_file, 'edit_file': _edit_file, 'search': _search, 'run_tests': _run_tests,
}
TOOL_NAMES = (*_TOOLS, 'finish')
