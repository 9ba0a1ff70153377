"""Reading and writing safetensors, against bytes put together by hand from the public format."""

import errno
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint.safetensors_dir import TensorFolder, TensorWriter
from composer_jax.errors import InfrastructureError, UserError


def _file(header, data=b''):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack('<Q', len(text)) + text + data


def _entry(dtype, shape, start, stop):
  return {'dtype': dtype, 'shape': shape, 'data_offsets': [start, stop]}


def _put(folder, name, header, data=b''):
  folder.mkdir(exist_ok=True)
  (folder / name).write_bytes(_file(header, data))


def _index(folder, placed):
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': placed}))


def _refused(folder, *parts):
  with pytest.raises(UserError) as caught:
    TensorFolder(folder)
  message = str(caught.value)
  assert '\n' not in message
  for part in (str(folder), *parts):
    assert part in message


def test_hand_made_bytes_of_every_dtype(tmp_path):
  cases = [('F64', b'\0\0\0\0\0\0\xf8\x3f', 1.5), ('F32', b'\0\0\xc0\x3f', 1.5),
           ('F16', b'\0\x3e', 1.5), ('BF16', b'\xc0\x3f', 1.5), ('F8_E4M3', b'\x3c', 1.5),
           ('F8_E5M2', b'\x3e', 1.5), ('F8_E8M0', b'\x80', 2), ('I64', b'\xfe' + b'\xff' * 7, -2),
           ('I32', b'\xfe\xff\xff\xff', -2), ('I16', b'\xfe\xff', -2), ('I8', b'\xfe', -2),
           ('U64', b'\x02' + b'\0' * 7, 2), ('U32', b'\x02\0\0\0', 2), ('U16', b'\x02\0', 2),
           ('U8', b'\xfe', 254), ('BOOL', b'\x01', True),
           ('C64', b'\0\0\xc0\x3f\0\0\0\x40', 1.5 + 2j)]
  header, data = {'__metadata__': {'format': 'pt'}}, b''
  for number, (dtype, raw, _) in enumerate(cases):
    header[f'{number}'] = _entry(dtype, [] if number % 2 else [1], len(data), len(data) + len(raw))
    data += raw
  header['none'] = _entry('F32', [0, 4], len(data), len(data))
  _put(tmp_path, 'any.safetensors', header, data)
  folder = TensorFolder(tmp_path)
  assert len(folder.infos) == len(cases) + 1
  assert folder.infos['3'].dtype == ml_dtypes.bfloat16
  assert folder.largest_file_bytes == (tmp_path / 'any.safetensors').stat().st_size
  for number, (_, _, value) in enumerate(cases):
    array = folder.read(str(number))
    assert array.shape == (() if number % 2 else (1,))
    assert array.reshape(()) == value
  assert folder.read('none').shape == (0, 4)


def test_rows_read_only_their_bytes(tmp_path, monkeypatch):
  data = np.arange(24, dtype='<i2')
  _put(tmp_path, 'model.safetensors', {'a': _entry('I16', [6, 4], 0, 48)}, data.tobytes())
  folder = TensorFolder(tmp_path)
  real, read = os.preadv, []
  monkeypatch.setattr(os, 'preadv', lambda fd, buffers, offset: (
      read.append(sum(map(len, buffers))), real(fd, buffers, offset))[1])
  assert folder.read('a', slice(1, 3)).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
  assert folder.read('a', slice(-1, None)).tolist() == [[20, 21, 22, 23]]
  assert folder.read('a', slice(4, 2)).shape == (0, 4)
  assert read == [16, 8]
  with pytest.raises(UserError, match='holds no tensor b'):
    folder.read('b')


def test_a_file_that_shrinks_after_opening_is_no_weight(tmp_path):
  _put(tmp_path, 'model.safetensors', {'a': _entry('U8', [8], 0, 8)}, bytes(8))
  folder = TensorFolder(tmp_path)
  os.truncate(tmp_path / 'model.safetensors', (tmp_path / 'model.safetensors').stat().st_size - 3)
  with pytest.raises(UserError, match='a ends after 5 of 8 bytes'):
    folder.read('a')


def test_shards_behind_symlinks_as_in_a_cache(tmp_path):
  blobs, folder = tmp_path / 'blobs', tmp_path / 'snapshot'
  _put(blobs, '0a', {'a': _entry('U8', [2], 0, 2)}, b'\1\2')
  _put(blobs, '0b', {'b': _entry('U8', [2], 0, 2)}, b'\3\4')
  folder.mkdir()
  for link, blob in (('m-1.safetensors', '0a'), ('m-2.safetensors', '0b')):
    (folder / link).symlink_to(blobs / blob)
  _index(folder, {'a': 'm-1.safetensors', 'b': 'm-2.safetensors'})
  opened = TensorFolder(folder)
  assert opened.read('b').tolist() == [3, 4]
  assert opened.infos['b'].file.name == 'm-2.safetensors'
  (blobs / '0b').unlink()
  _refused(folder, 'm-2.safetensors', 'is missing', 'symlink that points nowhere', 'download')


GOOD = {'a': _entry('U8', [4], 0, 4), 'b': _entry('BF16', [2], 4, 8)}


@pytest.mark.parametrize(('content', 'parts'), [
    (b'\1\0', ('truncated', '2')),
    (struct.pack('<Q', 5000) + b'{}', ('truncated', 'header needs 5008', '10')),
    (struct.pack('<Q', 2**63) + b'{}', ('truncated',)),
    (_file(b'{"a": '), ('no JSON',)),
    (_file(b'[' * 100_000), ('no JSON',)),
    (_file(b'[]'), ('no JSON object',)),
    (_file(b'{"\xff": 1}'), ('UTF-8',)),
    (_file(GOOD, bytes(7)), ('truncated', 'b is not complete', 'download it again')),
    (_file(GOOD, bytes(9)), ('1 bytes behind',)),
    (_file({'a': _entry('U8', [4], 0, 4), 'b': _entry('U8', [4], 2, 6)}, bytes(6)),
     ('b overlaps',)),
    (_file({'a': _entry('U8', [4], 0, 4), 'b': _entry('U8', [4], 5, 9)}, bytes(9)),
     ('b lies behind a hole',)),
    (_file({'a': _entry('U8', [4], 1, 5)}, bytes(5)), ('a lies behind a hole',)),
    (_file({'a': _entry('F32', [4], 0, 4)}, bytes(4)), ('a is damaged', '16 bytes', 'hold 4')),
    (_file({'a': _entry('F33', [1], 0, 4)}, bytes(4)), ('a has the unknown dtype F33',)),
    (_file({'a': _entry('U8', [-4], 0, 4)}, bytes(4)), ('a is damaged',)),
    (_file({'a': _entry('U8', [True], 0, 1)}, bytes(1)), ('a is damaged',)),
    (_file({'a': _entry('U8', [4], 4, 0)}, bytes(4)), ('a is damaged',)),
    (_file({'a': {'dtype': 'U8'}}), ('a is damaged', 'data_offsets')),
    (_file({'a': 7}), ('a is damaged',)),
    (_file(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
           b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b'1'), ('a twice',)),
])
def test_a_damaged_header_is_one_line(tmp_path, content, parts):
  (tmp_path / 'model.safetensors').write_bytes(content)
  _refused(tmp_path, 'model.safetensors', *parts)


def test_every_truncation_is_noticed(tmp_path):
  whole = _file(GOOD, bytes(8))
  for length in range(len(whole)):
    (tmp_path / 'model.safetensors').write_bytes(whole[:length])
    _refused(tmp_path, 'model.safetensors', 'truncated')


def test_index_and_shards_must_agree(tmp_path):
  _put(tmp_path, 'x.safetensors', {'a': _entry('U8', [1], 0, 1)}, b'1')
  _put(tmp_path, 'y.safetensors', {'b': _entry('U8', [1], 0, 1)}, b'1')
  _index(tmp_path, {'a': 'x.safetensors', 'b': 'y.safetensors'})
  assert set(TensorFolder(tmp_path).infos) == {'a', 'b'}
  _index(tmp_path, {'a': 'x.safetensors', 'b': 'y.safetensors', 'c': 'y.safetensors'})
  _refused(tmp_path, 'names c, which no shard holds')
  _put(tmp_path, 'y.safetensors', {'b': _entry('U8', [1], 0, 1), 'd': _entry('U8', [1], 1, 2)},
       b'12')
  _index(tmp_path, {'a': 'x.safetensors', 'b': 'y.safetensors'})
  _refused(tmp_path, 'y.safetensors', 'holds d, which')
  _put(tmp_path, 'y.safetensors', {'b': _entry('U8', [1], 0, 1), 'a': _entry('U8', [1], 1, 2)},
       b'12')
  _refused(tmp_path, 'a is also in x.safetensors')
  _index(tmp_path, {'a': 'y.safetensors', 'b': 'z.safetensors'})
  _refused(tmp_path, 'z.safetensors', 'is missing')
  for outside in ('../x.safetensors', '/etc/passwd', '..', '', 'a\\b', 3):
    _index(tmp_path, {'a': outside})
    _refused(tmp_path, 'index.json', 'no file name in this folder')
  _index(tmp_path, {'a': 'y.safetensors', 'b': 'x.safetensors'})
  _put(tmp_path, 'y.safetensors', {'b': _entry('U8', [1], 0, 1)}, b'1')
  _refused(tmp_path, 'places a in y.safetensors, it is in x.safetensors')
  for content in (b'{"weight_map": {}}', b'{}', b'nonsense', b'\xff'):
    (tmp_path / 'model.safetensors.index.json').write_bytes(content)
    _refused(tmp_path, 'index.json is damaged')


def test_folders_without_an_index(tmp_path):
  _refused(tmp_path, 'holds no *.safetensors')
  _refused(tmp_path / 'nowhere', 'is no folder')
  _put(tmp_path, 'model-00001-of-00003.safetensors', {'a': _entry('U8', [1], 0, 1)}, b'1')
  _put(tmp_path, 'model-00003-of-00003.safetensors', {'b': _entry('U8', [1], 0, 1)}, b'1')
  _refused(tmp_path, 'shard 2 of 3 is missing')


def _plan(tensors):
  return [(name, array.dtype, array.shape) for name, array in tensors.items()]


@pytest.fixture
def tensors():
  rng = np.random.default_rng(0)
  return {'z.odd': rng.integers(0, 255, (3, 1), np.uint8),
          'a.weight': rng.normal(size=(8, 6)).astype(ml_dtypes.bfloat16),
          'scalar': np.array(3.5, np.float32),
          'empty': np.zeros((0, 5), np.float32),
          'ümlaut': rng.normal(size=(5, 4)),
          'codes': rng.integers(0, 127, (4, 7), np.uint8).view(ml_dtypes.float8_e4m3fn)}


def test_shards_hold_what_was_written_in_the_order_of_the_plan(tmp_path, tensors):
  out = tmp_path / 'new' / 'out'
  with TensorWriter(out, _plan(tensors), 110, {'format': 'pt'}) as writer:
    for name, array in tensors.items():
      if name == 'a.weight':
        writer.write_rows(name, array[:3])
        assert not [p for p in out.iterdir() if not p.name.startswith('.')]
        writer.write_rows(name, array[3:])
      else:
        writer.write(name, np.asfortranarray(array) if array.ndim == 2 else array)
  names = [f'model-0000{i}-of-00003.safetensors' for i in (1, 2, 3)]
  assert sorted(os.listdir(out)) == [*names, 'model.safetensors.index.json']
  index = json.loads((out / 'model.safetensors.index.json').read_text())
  assert index['metadata'] == {'total_size': sum(a.nbytes for a in tensors.values())}
  assert index['weight_map'] == {
      'z.odd': names[0], 'a.weight': names[0], 'scalar': names[0], 'empty': names[0],
      'ümlaut': names[1], 'codes': names[2]}
  opened = TensorFolder(out)
  for name, array in tensors.items():
    assert opened.read(name).tobytes() == array.tobytes()
    assert opened.read(name).dtype == array.dtype
    assert opened.infos[name].start % array.dtype.itemsize == 0
  raw = (out / names[0]).read_bytes()  # parsed here, not by our reader
  length = struct.unpack('<Q', raw[:8])[0]
  assert length % 8 == 0
  header = json.loads(raw[8:8 + length])
  assert header['__metadata__'] == {'format': 'pt'}
  start, stop = header['a.weight']['data_offsets']
  assert raw[8 + length + start:8 + length + stop] == tensors['a.weight'].tobytes()


def test_one_shard_needs_no_index(tmp_path, tensors):
  with TensorWriter(tmp_path, _plan(tensors), 10**6, {}) as writer:
    for name, array in tensors.items():
      writer.write(name, array)
  assert os.listdir(tmp_path) == ['model.safetensors']
  assert set(TensorFolder(tmp_path).infos) == set(tensors)
  with pytest.raises(UserError, match='holds model.safetensors already'):
    TensorWriter(tmp_path, _plan(tensors), 10**6, {})


def test_leaving_early_leaves_nothing(tmp_path, tensors):
  with pytest.raises(KeyboardInterrupt), TensorWriter(tmp_path, _plan(tensors), 20, {}) as writer:
    writer.write('z.odd', tensors['z.odd'])
    writer.write('a.weight', tensors['a.weight'])
    writer.write('scalar', tensors['scalar'])
    raise KeyboardInterrupt
  assert os.listdir(tmp_path) == []
  with pytest.raises(ValueError, match='a.weight was not written'):
    with TensorWriter(tmp_path, _plan(tensors), 20, {}) as writer:
      writer.write('z.odd', tensors['z.odd'])
  assert os.listdir(tmp_path) == []
  (tmp_path / '.model-00001-of-00009.safetensors.draft').write_bytes(b'of a killed writer')
  with TensorWriter(tmp_path, [('a', np.uint8, (1,))], 20, {}) as writer:
    writer.write('a', np.ones(1, np.uint8))
  assert os.listdir(tmp_path) == ['model.safetensors']


def test_the_plan_is_binding(tmp_path, tensors):
  plan = _plan(tensors)
  for wrong in ([], plan + plan[:1], [('a', np.complex128, (1,))], [('__metadata__', np.int8, ())]):
    with pytest.raises(ValueError, match='plan'):
      TensorWriter(tmp_path, wrong, 20, {})
  writer = TensorWriter(tmp_path, plan, 20, {})
  array = tensors['z.odd']
  for name, wrong in (('scalar', tensors['scalar']), ('z.odd', array.astype(np.int8)),
                      ('z.odd', array[:2]), ('z.odd', array.T)):
    with pytest.raises(ValueError, match='not what the plan says'):
      writer.write(name, wrong)
  writer.write_rows('z.odd', array[:2])
  with pytest.raises(ValueError, match='2 rows written'):
    writer.write('z.odd', array)
  with pytest.raises(ValueError, match='has 3 rows, not 4'):
    writer.write_rows('z.odd', array[:2])
  writer.__exit__(None, RuntimeError(), None)
  assert os.listdir(tmp_path) == []


def test_a_full_disk_is_the_machines_fault_and_leaves_nothing(tmp_path, tensors, monkeypatch):
  real, budget = os.pwrite, [500]

  def pwrite(descriptor, data, offset):
    budget[0] -= len(data)
    if budget[0] < 0:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(descriptor, data, offset)

  monkeypatch.setattr(os, 'pwrite', pwrite)
  with pytest.raises(InfrastructureError, match='the disk is full'):
    with TensorWriter(tmp_path, _plan(tensors), 1, {}) as writer:
      for name, array in tensors.items():
        writer.write(name, array)
  assert os.listdir(tmp_path) == []
