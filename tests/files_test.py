import errno
import os
import subprocess
import sys
import threading

import pytest

from composer_jax.errors import UserError
from composer_jax.files import json_lines, replacing


def test_lines_without_the_half_one_of_a_killed_writer(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"a": "\u2028"}\n{"a": 2}\n{"a"')
  assert json_lines(path) == [{'a': '\u2028'}, {'a': 2}]
  for line in ('[1]', 'garbage', '', '\udc80'):
    path.write_text('{"a": 1}\n' + line + '\n{"a": 2}\n', errors='surrogateescape')
    with pytest.raises(UserError, match=r'rows.jsonl:2: is damaged'):
      json_lines(path)


def test_content_takes_the_place_when_the_block_ends(tmp_path):
  path = tmp_path / 'page.html'
  path.write_text('old')
  with replacing(path) as stream:
    stream.write('né')
    assert path.read_text() == 'old'
  assert path.read_bytes() == 'né'.encode()
  with replacing(path, 'wb') as stream:
    stream.write(b'\xff')
  assert path.read_bytes() == b'\xff'
  assert os.listdir(tmp_path) == ['page.html']


@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, 'full'), ValueError(),
                                   KeyboardInterrupt()])
def test_a_block_that_raises_changes_nothing(tmp_path, error):
  path = tmp_path / 'rows.jsonl'
  path.write_text('old')
  with pytest.raises(type(error)), replacing(path) as stream:
    stream.write('new')
    raise error
  assert path.read_text() == 'old' and os.listdir(tmp_path) == ['rows.jsonl']


def test_the_draft_of_a_killed_process_is_removed(tmp_path):
  path = tmp_path / 'state.json'
  gone = subprocess.run([sys.executable, '-c', f"""
import os
from composer_jax.files import replacing
with replacing({str(path)!r}) as stream:
  stream.write('half')
  stream.flush()
  os.kill(os.getpid(), 9)
"""])
  assert gone.returncode == -9 and len(os.listdir(tmp_path)) == 1 and not path.exists()
  living = tmp_path / f'.state.json.{os.getppid()}.tmp'
  living.write_text('of another process')
  with replacing(path) as stream:
    stream.write('whole')
  assert sorted(os.listdir(tmp_path)) == [living.name, 'state.json']


def test_readers_see_whole_files(tmp_path):
  path = tmp_path / 'state.json'
  path.write_text('0' * 50_000)
  stop = threading.Event()

  def write():
    for number in range(1, 60):
      with replacing(path) as stream:
        stream.write(str(number % 10) * 50_000)
    stop.set()

  writer = threading.Thread(target=write)
  writer.start()
  while not stop.is_set():
    text = path.read_text()
    assert len(text) == 50_000 and len(set(text)) == 1
  writer.join()
