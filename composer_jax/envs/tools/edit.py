"""The line edit, as a pure function: shared by the tool and by whoever wants to predict it."""


def split_lines(text: str) -> list[str]:
  """Returns the lines without their newlines; only a newline ends a line (form feeds do not)."""
  lines = text.split('\n')
  return lines[:-1] if not lines[-1] else lines


def apply_edit(text: str, first: int, last: int, new: str, *, verbatim: bool = False) -> str | None:
  """Replaces lines `first` to `last` (1-based, inclusive) of `text`.

  Args:
    text: file content.
    first: first line; one past the end appends.
    last: last line.
    new: new content. A single line that replaces a single line keeps the old indentation and loses
      its own, so that a small model need not count spaces, and a blank one deletes; anything else
      is taken as it is.
    verbatim: take `new` as it is in any case.

  Returns:
    The new content, or None when there is no such line.
  """
  lines = split_lines(text)
  if first > len(lines) + 1 or last > max(len(lines), first):
    return None
  replacement = split_lines(new)
  if first == last and len(replacement) <= 1 and not verbatim:
    old = lines[first - 1] if first <= len(lines) else ''
    indent = old[:len(old) - len(old.lstrip())]
    replacement = [indent + new.strip()] if new.strip() else []
  lines[first - 1:last] = replacement
  return ''.join(line + '\n' for line in lines)
