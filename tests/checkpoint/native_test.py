"""The parameter store: what it gives back, what survives a kill, and what is never a weight."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from composer_jax.checkpoint import device_pieces
from composer_jax.checkpoint.native import Leaf, ParamStore
from composer_jax.errors import InfrastructureError, UserError

BF16 = ml_dtypes.bfloat16
LEAVES = {
    'embed': Leaf((5, 4), BF16, (2, 3)),  # ragged on both axes
    'moe_layers.experts': Leaf((2, 3, 4, 6), BF16, (1, 1, 4, 3)),
    'norm': Leaf((4,), np.float32, (4,)),
    'one': Leaf((), np.float32, ()),
    'none': Leaf((0, 3), np.float32, (1, 3)),
    'codes': Leaf((3, 4), ml_dtypes.float8_e4m3fn, (3, 4)),
    'side.moe_layers.experts.scale': Leaf((2, 3), np.float32, (1, 3)),
}


@pytest.fixture(scope='module')
def arrays():
  rng = np.random.default_rng(0)
  made = {name: rng.normal(size=leaf.shape).astype(leaf.dtype) for name, leaf in LEAVES.items()}
  made['norm'][:] = 0  # the format's fill value
  return made


def _fill(store, arrays):
  for name in store.leaves:
    for index in store.chunks(name):
      if not store.is_done(name, index):
        store.write(name, index, arrays[name][index])


@pytest.fixture(scope='module')
def made(tmp_path_factory, arrays):
  folder = tmp_path_factory.mktemp('store') / 'params'
  store = ParamStore.create(folder, LEAVES, {'config': {'layers': 2}, 'raw': b'\0\xff'},
                            max_pending_bytes=60)
  _fill(store, arrays)
  store.finish()
  return folder


@pytest.fixture
def copy(made, tmp_path):
  shutil.copytree(made, tmp_path / 'copy')
  return tmp_path / 'copy'


def _same(left, right):
  left, right = np.asarray(left), np.asarray(right)
  return (left.shape, left.dtype, left.tobytes()) == (right.shape, right.dtype, right.tobytes())


def test_what_was_written_is_read(made, arrays):
  store = ParamStore.open(made)
  assert store.meta == {'config': {'layers': 2}, 'raw': b'\0\xff'}
  assert store.leaves == LEAVES
  for name, array in arrays.items():
    assert _same(store.read(name), array)
  part = (slice(1, 5), slice(2, None))
  assert _same(store.read('embed', part), arrays['embed'][part])
  assert _same(store.read('embed', (slice(4, 5),)), arrays['embed'][4:5])
  assert [[(s.start, s.stop) for s in index] for index in store.chunks('embed')] == [
      [(0, 2), (0, 3)], [(0, 2), (3, 4)], [(2, 4), (0, 3)], [(2, 4), (3, 4)],
      [(4, 5), (0, 3)], [(4, 5), (3, 4)]]
  with pytest.raises(UserError, match='holds no nothing'):
    store.read('nothing')


def test_other_zarr_readers_find_it(made, arrays):
  plain = ts.open({'driver': 'zarr3', 'kvstore': f'file://{made}/arrays/moe_layers.experts/'})
  assert _same(plain.result().read().result(), arrays['moe_layers.experts'])


def test_load_nests_parameters_without_the_side_arrays(made, arrays):
  store = ParamStore.open(made)
  params = store.load()
  assert set(params) == {'embed', 'moe_layers', 'norm', 'one', 'none', 'codes'}
  assert _same(params['moe_layers']['experts'], arrays['moe_layers.experts'])
  assert isinstance(params['one'], jax.Array)
  wide = store.load(dtype=np.float32, names=['embed', 'side.moe_layers.experts.scale'])
  assert _same(wide['embed'], arrays['embed'].astype(np.float32))
  assert _same(wide['side']['moe_layers']['experts']['scale'],
               arrays['side.moe_layers.experts.scale'])
  with pytest.raises(UserError, match='holds no nothing'):
    store.load(names=['nothing'])


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from composer_jax.checkpoint import device_pieces
from composer_jax.checkpoint.native import ParamStore
device_pieces.SLAB_BYTES = 24
store = ParamStore.open(sys.argv[1])
mesh = jax.make_mesh((2, 2), ('a', 'b'))
name = 'moe_layers.experts'
read, real = [], store.read
store.read = lambda name, index: read.append(array := real(name, index)) or array
spec = NamedSharding(mesh, P('a', None, None, 'b'))
params = store.load({'moe_layers': {'experts': spec}}, names=[name])
loaded = params['moe_layers']['experts']
assert loaded.sharding == spec
assert np.asarray(loaded).tobytes() == real(name).tobytes()
assert sum(a.size for a in read) == loaded.size and max(a.nbytes for a in read) == 24
del read[:]
loaded = store.load(NamedSharding(mesh, P('a')), names=[name])['moe_layers']['experts']
assert np.asarray(loaded).tobytes() == real(name).tobytes()
assert sum(a.size for a in read) == loaded.size  # not once for each replica
"""


def test_load_into_four_devices_reads_each_piece_once_in_slabs(made):
  environment = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
                              'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', SHARDED, str(made)], env=environment,
                        capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(('shape', 'limit'), [((), 1), ((0, 3), 8), ((7,), 8), ((3, 5), 40),
                                              ((3, 5), 17), ((2, 1, 3, 5), 1), ((4, 4), 10**6)])
def test_slabs_cover_an_array_once(shape, limit, monkeypatch):
  monkeypatch.setattr(device_pieces, 'SLAB_BYTES', limit)
  seen = np.zeros(shape, int)
  for slab in device_pieces._slabs(shape, 4):
    assert seen[slab].size * 4 <= max(limit, 4)
    seen[slab] += 1
  assert (seen == 1).all()


def test_any_flipped_bit_of_a_chunk_is_an_error(copy):
  file = copy / 'arrays' / 'embed' / 'c.1.0'
  store = ParamStore.open(copy)
  whole = file.read_bytes()
  assert len(whole) == 2 * 3 * 2 + 4
  for bit in range(8 * len(whole)):
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    with pytest.raises(UserError, match=r'embed is damaged \(.*c\.1\.0.*make the folder again'
                       ) as caught:
      store.read('embed')
    assert '\n' not in str(caught.value)


def test_missing_and_short_chunks_are_noticed_at_opening(copy):
  store = ParamStore.open(copy)
  file = copy / 'arrays' / 'embed' / 'c.2.1'
  os.truncate(file, 5)
  with pytest.raises(UserError, match=r'c\.2\.1: has another size'):
    ParamStore.open(copy)
  with pytest.raises(UserError, match='embed is damaged'):
    store.load()
  file.unlink()
  with pytest.raises(UserError, match=r'c\.2\.1: is missing'):
    ParamStore.open(copy)
  with pytest.raises(UserError, match='embed is damaged'):
    store.read('embed')


def test_descriptions_are_checked(copy, tmp_path):
  file = copy / 'store.json'
  text = file.read_text()
  for changed in (text.replace('"layers": 2', '"layers": 3'), text[:-9], '[]',
                  text.replace('"format": 1', '"format": 9'), text.replace('"crc"', '"src"')):
    file.write_text(changed)
    with pytest.raises(UserError, match=r'store\.json') as caught:
      ParamStore.open(copy)
    assert '\n' not in str(caught.value)
  file.write_text(text)
  array = copy / 'arrays' / 'norm' / 'zarr.json'
  content = json.loads(array.read_text())
  content['codecs'] = content['codecs'][:1]  # no checksum
  for changed in (json.dumps(content), array.read_text().replace('float32', 'int32'), '{'):
    array.write_text(changed)
    with pytest.raises(UserError, match='norm is damaged') as caught:
      ParamStore.open(copy).read('norm')
    assert '\n' not in str(caught.value)
  with pytest.raises(UserError, match='no parameter store'):
    ParamStore.open(tmp_path)


def test_an_unfinished_store_is_continued_only_by_the_same_description(tmp_path, arrays):
  folder = tmp_path / 'params'
  store = ParamStore.create(folder, LEAVES, {'a': 1})
  first = next(store.chunks('embed'))
  store.write('embed', first, arrays['embed'][first])
  store.flush()
  with pytest.raises(ValueError, match='5 chunks of embed were not written'):
    store.finish()
  with pytest.raises(UserError, match='is unfinished'):
    ParamStore.open(folder)
  with pytest.raises(UserError, match=r'another description \(a differ'):
    ParamStore.create(folder, LEAVES, {'a': 2})
  other = LEAVES | {'norm': Leaf((4,), BF16, (4,))}
  with pytest.raises(UserError, match='another description: norm'):
    ParamStore.create(folder, other, {'a': 1})
  again = ParamStore.create(folder, LEAVES, {'a': 1})
  assert [again.is_done('embed', index) for index in again.chunks('embed')] == [True] + [False] * 5
  assert not again.is_done('embed', (slice(None), slice(None)))
  _fill(again, arrays)
  again.finish()
  assert _same(ParamStore.open(folder).read('embed'), arrays['embed'])
  assert ParamStore.create(folder, LEAVES, {'a': 1}).complete
  (tmp_path / 'note.txt').touch()
  with pytest.raises(UserError, match='holds note.txt|holds params'):
    ParamStore.create(tmp_path, LEAVES)
  with pytest.raises(UserError, match='is no folder'):
    ParamStore.create(tmp_path / 'note.txt', LEAVES)


def test_write_refuses_what_does_not_fit(tmp_path, arrays, made):
  store = ParamStore.create(tmp_path / 'params', LEAVES)
  embed = arrays['embed']
  for index in ((slice(0, 1), slice(0, 3)), (slice(0, 2), slice(1, 3)), (slice(0, 3), slice(0, 3))):
    with pytest.raises(ValueError, match='cuts through chunks'):
      store.write('embed', index, embed[index])
  with pytest.raises(ValueError, match='does not fit'):
    store.write('embed', (slice(0, 2), slice(0, 3)), embed[:2, :3].astype(np.float32))
  with pytest.raises(ValueError, match='does not fit'):
    store.write('embed', (slice(0, 2), slice(0, 3)), embed[:1, :3])
  with pytest.raises(ValueError, match='is complete'):
    ParamStore.open(made).write('one', (), arrays['one'])
  for shape, chunks in (((4,), (5,)), ((4,), (0,)), ((4, 4), (4,))):
    with pytest.raises(ValueError, match='cannot have chunks'):
      Leaf(shape, np.float32, chunks)


def test_the_array_may_change_after_write(tmp_path):
  store = ParamStore.create(tmp_path / 'params', {'a': Leaf((4, 2**18), np.float32, (1, 2**18))})
  buffer = np.empty((1, 2**18), np.float32)
  for index in store.chunks('a'):
    buffer[:] = index[0].start
    store.write('a', index, buffer)
  buffer[:] = -1
  store.finish()
  assert (store.read('a') == np.arange(4)[:, None]).all()


WRITER = """
import sys, time
import numpy as np
from composer_jax.checkpoint.native import Leaf, ParamStore
store = ParamStore.create(sys.argv[1], {'a': Leaf((120, 2**14), np.float32, (1, 2**14))})
for index in store.chunks('a'):
  store.write('a', index, np.full((1, 2**14), index[0].start + 1, np.float32))
  store.flush()
  time.sleep(0.02)
"""


def test_after_kill_9_the_chunks_that_count_as_done_are_whole(tmp_path):
  folder = tmp_path / 'params'
  process = subprocess.Popen([sys.executable, '-c', WRITER, str(folder)])
  whole = 4 * 2**14 + 4
  end = time.monotonic() + 60
  while not any(path.stat().st_size == whole for path in folder.glob('arrays/a/c.*.0')):
    assert time.monotonic() < end and process.poll() is None
  process.send_signal(signal.SIGKILL)
  process.wait()
  (folder / 'arrays' / 'a' / 'c.119.0.__lock').write_bytes(b'half')
  store = ParamStore.create(folder, {'a': Leaf((120, 2**14), np.float32, (1, 2**14))})
  assert not list(folder.glob('arrays/a/*lock*'))
  done = [index for index in store.chunks('a') if store.is_done('a', index)]
  assert 0 < len(done) < 120
  for index in done:
    assert (store.read('a', index) == index[0].start + 1).all()
  missing = next(index for index in store.chunks('a') if not store.is_done('a', index))
  with pytest.raises(UserError, match='a is damaged'):
    store.read('a', missing)
  for index in store.chunks('a'):
    if not store.is_done('a', index):
      store.write('a', index, np.full((1, 2**14), index[0].start + 1, np.float32))
  store.finish()
  assert (ParamStore.open(folder).read('a')[:, 7] == np.arange(120) + 1).all()


def test_a_full_disk_is_the_machines_fault(tmp_path, arrays):
  resource = pytest.importorskip('resource')
  store = ParamStore.create(tmp_path / 'params', {'a': Leaf((4, 2**16), np.float32, (1, 2**16))})
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
  try:
    with pytest.raises(InfrastructureError, match='was not written'):
      for index in store.chunks('a'):
        store.write('a', index, np.zeros((1, 2**16), np.float32))
      store.flush()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  again = ParamStore.create(tmp_path / 'params', store.leaves)
  done = [index for index in again.chunks('a') if again.is_done('a', index)]
  assert len(done) < 4  # some were still on their way when there was room again
  assert not any(again.read('a', index).any() for index in done)
