"""From the text of a model's turn to a `Call`. Never raises, never evaluates: errors are data.

The formats:
  read_file [path][:first[-last]]
  edit_file [path:]N|new line           keeps the old line's indentation
  edit_file [path:]N-M|new text         replaces lines N to M, text taken as it is; empty deletes
  search text
  run_tests
  finish
"""

import posixpath
import re
from collections.abc import Collection

from composer_jax.envs.types import Call, CallErrorClass

_CALL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]{0,63})(?:[ \t]+(.*)|\s*)\Z', re.DOTALL)
_LINES = re.compile(r'([0-9]{1,6})(?:-([0-9]{1,6}))?\Z')
_PATH = re.compile(r'[A-Za-z0-9_.\-]+(?:/[A-Za-z0-9_.\-]+)*\Z')

MAX_PATH = 200
MAX_SEARCH = 200
MAX_EDIT = 20_000

USAGE = {
  'read_file': 'read_file [path][:first-last]',
  'edit_file': 'edit_file [path:]N|text',
  'search': 'search text',
  'run_tests': 'run_tests',
  'finish': 'finish',
}


def parse(text: str, tools: Collection[str], entry: str) -> Call:
  """Returns the call that `text` spells.

  Args:
    text: a model's turn, without its end token; any string at all.
    tools: names of the tools that exist in this task.
    entry: the path meant when the call names none.

  Returns:
    A call; when it cannot be carried out, one whose `error` and `message` say why.
  """
  match = _CALL.match(text)
  if match is None:
    return Call('', error=CallErrorClass.UNKNOWN_TOOL, message='unknown tool')
  name, rest = match.group(1), match.group(2) or ''
  if name not in tools or name not in _PARSERS:
    return Call(name, error=CallErrorClass.UNKNOWN_TOOL, message='unknown tool')
  return _PARSERS[name](name, rest, entry)


def _bad(name: str) -> Call:
  return Call(name, error=CallErrorClass.BAD_ARGUMENTS, message=f'use {USAGE[name]}')


def _place(name: str, place: str, entry: str, lines_needed: bool) -> Call:
  """Parses `[path][:lines]` (or bare `lines` when they are needed)."""
  path, colon, lines = place.strip().rpartition(':')
  if not colon and lines_needed:
    path = ''
  elif not colon:
    path, lines = lines, ''
  arguments: dict[str, str | int] = {'path': path.strip() or entry}
  if lines or lines_needed:
    match = _LINES.match(lines.strip())
    if match is None:
      return _bad(name)
    first = int(match.group(1))
    last = int(match.group(2) or first)
    if not 1 <= first <= last:
      return _bad(name)
    arguments |= {'first': first, 'last': last, 'range': match.group(2) is not None}
  return _checked_path(name, arguments)


def _checked_path(name: str, arguments: dict[str, str | int]) -> Call:
  path = arguments['path']
  if len(path) > MAX_PATH or not _PATH.match(path) or '..' in path.split('/'):
    return Call(name, error=CallErrorClass.NOT_ALLOWED, message='path not allowed')
  return Call(name, arguments | {'path': posixpath.normpath(path)})  # one spelling for one file


def _read_file(name: str, rest: str, entry: str) -> Call:
  return _place(name, rest, entry, lines_needed=False)


def _edit_file(name: str, rest: str, entry: str) -> Call:
  place, bar, text = rest.partition('|')
  if not bar or len(text) > MAX_EDIT or '\0' in text:
    return _bad(name)
  call = _place(name, place, entry, lines_needed=True)
  if call.error is None:
    call.arguments['text'] = text
  return call


def _search(name: str, rest: str, entry: str) -> Call:
  del entry
  pattern = rest.strip()
  if not pattern or '\n' in pattern or '\0' in pattern or len(pattern) > MAX_SEARCH:
    return _bad(name)
  return Call(name, {'pattern': pattern})


def _bare(name: str, rest: str, entry: str) -> Call:
  del entry
  return _bad(name) if rest.strip() else Call(name)


_PARSERS = {'read_file': _read_file, 'edit_file': _edit_file, 'search': _search,
            'run_tests': _bare, 'finish': _bare}
