"""What general compressors need for the same bytes: the yardstick beside a model's bits per byte.

Bits per byte of a set of files are given twice. *Joined*: all files one after the other in one
stream, so that later files profit from earlier ones; this is the harder one to beat and the figure
that results quote. *Per file*: each file on its own, which is what a model sees that starts every
file without context, but it charges each short file for a container header. Neither compressor was
trained on anything, a model was: the comparison says how much the training is worth.
"""

import dataclasses
import gzip
import lzma
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Baselines:
  """Bits per byte of `gzip -9` and `xz -9` on a set of files.

  Attributes:
    bytes: size of the files together.
    files: their number.
    gzip_bits_per_byte: joined into one stream.
    xz_bits_per_byte: joined into one stream.
    gzip_per_file_bits_per_byte: each file compressed on its own.
    xz_per_file_bits_per_byte: each file compressed on its own.
  """

  bytes: int
  files: int
  gzip_bits_per_byte: float
  xz_bits_per_byte: float
  gzip_per_file_bits_per_byte: float
  xz_per_file_bits_per_byte: float


def baselines(files: Sequence[bytes]) -> Baselines:
  """Compresses the files with gzip level 9 and xz preset 9, container bytes included.

  Raises:
    ValueError: there is not a single byte.
  """
  joined = b''.join(files)
  if not joined:
    raise ValueError('no bytes to compress')
  return Baselines(
      bytes=len(joined),
      files=len(files),
      gzip_bits_per_byte=8 * _gzip(joined) / len(joined),
      xz_bits_per_byte=8 * _xz(joined) / len(joined),
      gzip_per_file_bits_per_byte=8 * sum(map(_gzip, files)) / len(joined),
      xz_per_file_bits_per_byte=8 * sum(map(_xz, files)) / len(joined),
  )


def _gzip(data: bytes) -> int:
  return len(gzip.compress(data, compresslevel=9, mtime=0))


def _xz(data: bytes) -> int:
  # Preset 9 with the dictionary cut to the size of the input: the same bytes come out, without
  # clearing 64 MiB for each small file.
  filters = [{'id': lzma.FILTER_LZMA2, 'preset': 9, 'dict_size': max(4096, len(data))}]
  return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))
