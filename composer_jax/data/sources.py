"""Real code that is already on this machine: found, filtered, de-duplicated, split by file."""

import collections
import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator

from composer_jax.data.config import CorpusConfig, SourceConfig
from composer_jax.errors import UserError

_GENERATED = re.compile(
    r'generated (by|from|with|using|file|code|automatically)|auto-?\s?generated|@generated'
    r'|do not (edit|modify)', re.IGNORECASE)
_PERMISSIVE = re.compile(
    r'\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|Unlicense|Zlib|HPND)\b',
    re.IGNORECASE)
_COPYLEFT = re.compile(r'\b(A?GPL|LGPL|GNU|MPL|Mozilla|EUPL|CeCILL|proprietary)', re.IGNORECASE)
_OWN_DISTRIBUTION = 'composer-jax'


@dataclasses.dataclass
class Collected:
  """The texts of one source.

  Attributes:
    train: texts of the train split, in an order given by a hash of their path.
    heldout: texts of the held-out split.
    dropped: reason -> number of files left out.
  """

  train: list[str]
  heldout: list[str]
  dropped: dict[str, int]


def collect(name: str, source: SourceConfig, config: CorpusConfig,
            seen: set[bytes] | None = None) -> Collected:
  """Reads one source.

  Args:
    name: the source's name, for messages.
    source: what to read.
    config: filters and split.
    seen: digests of texts that other sources already gave; this source's digests are added.

  Raises:
    UserError: the folder is missing, unreadable or holds no usable file.
  """
  seen = set() if seen is None else seen
  dropped: collections.Counter[str] = collections.Counter()
  out = Collected([], [], dropped)
  kept = {'train': 0, 'heldout': 0}
  found = list(find(name, source))
  for path in found:
    if source.max_bytes and sum(kept.values()) >= source.max_bytes:
      break
    text, reason = read(path, config)
    if text is None:
      dropped[reason] += 1
      continue
    digest = content_digest(text)
    if digest in seen:
      dropped['duplicate'] += 1
      continue
    seen.add(digest)
    split = split_of(text, config.heldout_fraction)
    size = len(text.encode())
    if split == 'heldout' and config.heldout_bytes and (
        kept['heldout'] + size > config.heldout_bytes):
      dropped['heldout_full'] += 1
      continue
    kept[split] += size
    getattr(out, split).append(text)
  if not out.train:
    raise UserError(_nothing_usable(name, source, len(found), dropped))
  return out


def find(name: str, source: SourceConfig) -> list[pathlib.Path]:
  """Returns the files of a source in an order given by a hash of their path inside it.

  Raises:
    UserError: the folder is missing or unreadable, or there is no file of the wanted kind.
  """
  if source.kind == 'packages':
    pairs = list(_package_files(name, source))
  else:
    stdlib = source.kind == 'stdlib'
    root = pathlib.Path(sysconfig.get_path('stdlib') if stdlib else source.path)
    pairs = list(_folder_files(name, root, source))
  pairs.sort(key=lambda pair: hashlib.sha1(pair[0].encode()).digest())
  if not pairs:
    raise UserError(_nothing_usable(name, source, 0, {}))
  return [path for _, path in pairs]


def read(path: pathlib.Path, config: CorpusConfig) -> tuple[str | None, str]:
  """Returns (text, ''), or (None, the reason for leaving the file out)."""
  try:
    size = path.stat().st_size
    if size < config.min_file_bytes:
      return None, 'small'
    if size > config.max_file_bytes:
      return None, 'large'
    data = path.read_bytes()
  except OSError:
    return None, 'unreadable'
  try:
    text = data.decode('utf-8')
  except UnicodeDecodeError:
    return None, 'not_utf8'
  if '\0' in text:
    return None, 'not_utf8'
  lines = text.splitlines() or ['']
  if len(text) / len(lines) > config.max_mean_line or max(map(len, lines)) > config.max_line:
    return None, 'long_lines'
  if _GENERATED.search(text[:1_000]):
    return None, 'generated'
  return text, ''


def content_digest(text: str) -> bytes:
  """Returns the SHA-1 of the text without any white space: equal for re-indented copies."""
  return hashlib.sha1(''.join(text.split()).encode(errors='surrogatepass')).digest()


def split_of(text: str, heldout_fraction: float) -> str:
  """Returns `heldout` or `train`; a pure function of the text without its white space."""
  # Another part of the hash than the sort keys use; 32 bits of it as a number in [0, 1).
  point = int.from_bytes(content_digest(text)[-4:], 'big') / 2**32
  return 'heldout' if point < heldout_fraction else 'train'


def _folder_files(name: str, root: pathlib.Path,
                  source: SourceConfig) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields (path inside the root, path) of the wanted files; follows no folder links."""
  if not root.is_dir():
    what = 'is not a folder' if root.exists() else 'does not exist'
    raise UserError(f'data source {name}: {root} {what}')

  def fail(error: OSError):
    raise UserError(f'data source {name}: cannot read {error.filename or root} '
                    f'({error.strerror or error})')

  for folder, folders, files in os.walk(root, onerror=fail):
    folders[:] = [f for f in folders if f not in source.skip_folders]
    for file in files:
      if file.endswith(source.suffixes):
        path = pathlib.Path(folder, file)
        yield path.relative_to(root).as_posix(), path


def _package_files(name: str, source: SourceConfig) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields (path inside site-packages, path) of the installed distributions' sources."""
  wanted = {_canonical(p) for p in source.packages}
  skip = set(source.skip_folders)
  taken = set()
  for dist in importlib.metadata.distributions():
    key = _canonical(dist.metadata['Name'] or '')
    # The first one on the path is the one that an import finds.
    if key in taken or key == _OWN_DISTRIBUTION or (wanted and key not in wanted):
      continue
    taken.add(key)
    if source.permissive_only and not is_permissive(dist.metadata):
      continue
    for file in _recorded(dist):
      parts = file.split('/')
      if file.endswith(source.suffixes) and '..' not in parts and not skip & set(parts[:-1]):
        yield file, pathlib.Path(str(dist.locate_file(file)))
  absent = wanted - taken
  if absent:
    raise UserError(f'data source {name}: {sorted(absent)[0]} is not an installed distribution')


def _recorded(dist: importlib.metadata.Distribution) -> Iterable[str]:
  """Returns the file names of RECORD: a few times faster than `dist.files`, which wraps each."""
  record = dist.read_text('RECORD')
  if record is None:
    return [str(file) for file in dist.files or ()]
  return [line.split(',', 1)[0] for line in record.splitlines() if not line.startswith('"')]


def is_permissive(metadata: importlib.metadata.PackageMetadata) -> bool:
  """Returns whether a distribution's metadata names a permissive licence and no other."""
  fields = [metadata.get('License-Expression') or '', (metadata.get('License') or '')[:200]]
  fields += [c for c in metadata.get_all('Classifier') or () if c.startswith('License ::')]
  text = ' '.join(fields)
  return bool(_PERMISSIVE.search(text)) and not _COPYLEFT.search(text)


def _canonical(name: str) -> str:
  return re.sub(r'[-_.]+', '-', name).lower()


def _nothing_usable(name: str, source: SourceConfig, found: int, dropped: dict[str, int]) -> str:
  where = source.path or source.kind
  if not found:
    return f'data source {name}: no {" or ".join(source.suffixes)} file in {where}'
  reasons = ', '.join(f'{count} {reason}' for reason, count in sorted(dropped.items()))
  return f'data source {name}: none of the {found} files in {where} is usable ({reasons})'
