"""Removes secrets from what is shown or written for others: config dumps, reports, logs."""

import re
from collections.abc import Mapping
from typing import Any

MASK = '[redacted]'

# A name gives a secret away when one of these words is its end: `hf_token`, `api_key`; not
# `max_tokens`, `tokenizer`.
_NAME = re.compile(
    r'(^|[_\-.])(token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|'
    r'authorization)$', re.IGNORECASE)
_VALUE = re.compile(
    r'sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|'
    r'AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|'
    r'(?<=Bearer )[\w.~+/-]{8,}=*|(?<=://)[^/\s:@]*:[^/\s:@]+(?=@)|'
    r'-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----')


def redact(value: Any, name: str = '') -> Any:
  """Returns a copy of nested dicts and lists in which secrets are replaced by a mask.

  A text is a secret by its name (`api_key`, `hf_token`, ...) or by its form (a known key pattern, a
  bearer token, a password inside a URL, a private key).

  Args:
    value: JSON-able data.
    name: the key under which the value stands.
  """
  if isinstance(value, Mapping):
    return {key: redact(item, str(key)) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [redact(item, name) for item in value]
  if not isinstance(value, str) or not value:
    return value
  return MASK if _NAME.search(name) else _VALUE.sub(MASK, value)
