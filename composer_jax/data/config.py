"""What a corpus is made of."""

import dataclasses
from typing import Literal

from composer_jax.config import check_least


@dataclasses.dataclass(frozen=True)
class SourceConfig:
  """One source of real code.

  Attributes:
    kind: `stdlib`, the library of the running interpreter; `packages`, the installed
      distributions' sources; `folder`, the files below `path`.
    path: the folder; for kind `folder` only.
    suffixes: file name endings to take.
    skip_folders: names of folders left out at any depth. Tests are left out by default (our
      choice): half of the standard library is tests.
    max_bytes: stop after so many kept bytes, both splits together; 0 takes everything. Files come
      in an order given by a hash of their path, so a capped source is a sample of all of it.
    packages: for kind `packages`, only these distributions; empty means all of them.
    permissive_only: for kind `packages`, leave out distributions whose metadata names no licence
      of the MIT, BSD, Apache, PSF, ISC, Unlicense, Zlib family.
  """

  kind: Literal['stdlib', 'packages', 'folder']
  path: str = ''
  suffixes: tuple[str, ...] = ('.py',)
  skip_folders: tuple[str, ...] = (
      'test', 'tests', 'testing', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
      '_vendor', 'node_modules')
  max_bytes: int = 4_000_000
  packages: tuple[str, ...] = ()
  permissive_only: bool = True

  def __post_init__(self):
    if self.kind == 'folder' and not self.path:
      raise ValueError('a source of kind folder needs a path')
    if self.kind != 'folder' and self.path:
      raise ValueError(f'path belongs to kind folder, not to kind {self.kind}')
    if self.packages and self.kind != 'packages':
      raise ValueError(f'packages belongs to kind packages, not to kind {self.kind}')
    check_least(self, 0, 'max_bytes')


def _default_sources() -> dict[str, SourceConfig]:
  return {
      'stdlib': SourceConfig(kind='stdlib', max_bytes=4_000_000),
      'packages': SourceConfig(kind='packages', max_bytes=2_000_000),
  }


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
  """A corpus: sources, filters, split and tokenizer. All values are our choice.

  Attributes:
    sources: name -> source; a mixture refers to them by name.
    tokenizer: a tokenizer to use as it is: a Hugging Face folder or one file of it (see
      `tokenizer.load`), such as that of the checkpoint that training starts from. Empty trains one.
      The corpus keeps its own copy; what becomes of the path afterwards does not matter.
    vocab_size: ids of the tokenizer, specials and the 256 bytes included. 512 suits a model below
      one million parameters: the vocabulary is an eighth of it already. With `tokenizer`, the
      vocabulary of the model, which may have more ids than the tokenizer, not fewer.
    tokenizer_bytes: how much text the tokenizer is trained on, over all groups.
    tokenizer_weights: group -> share of `tokenizer_bytes`; a group is a source, an extra source, or
      `samples` (the texts handed in beside the documents). Groups left out weigh 1.
    heldout_fraction: share of the files of each source that training never sees; a file's side
      follows from a hash of its content.
    heldout_bytes: keep at most so many held-out bytes of each source; files beyond it are used on
      neither side. 0 keeps everything.
    min_file_bytes: drop smaller files.
    max_file_bytes: drop larger files.
    max_mean_line: drop files whose mean line is longer (data, minified code).
    max_line: drop files with a longer line.
  """

  sources: dict[str, SourceConfig] = dataclasses.field(default_factory=_default_sources)
  tokenizer: str = ''
  vocab_size: int = 512
  tokenizer_bytes: int = 1_000_000
  tokenizer_weights: dict[str, float] = dataclasses.field(default_factory=dict)
  heldout_fraction: float = 0.05
  heldout_bytes: int = 150_000
  min_file_bytes: int = 200
  max_file_bytes: int = 300_000
  max_mean_line: float = 100.0
  max_line: int = 1_000

  def __post_init__(self):
    if not 0 < self.heldout_fraction < 1:
      raise ValueError('heldout_fraction must lie between 0 and 1')
    check_least(self, 262, 'vocab_size')
    check_least(self, 1, 'tokenizer_bytes', 'max_file_bytes', 'max_mean_line', 'max_line')
    check_least(self, 0, 'min_file_bytes', 'heldout_bytes')
    if any(weight < 0 for weight in self.tokenizer_weights.values()):
      raise ValueError('tokenizer_weights must not be negative')
