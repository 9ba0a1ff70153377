import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.checkpoint import leaves, manager
from composer_jax.errors import InfrastructureError, UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """A tree with every kind of node that a training state has."""

  params: dict
  opt_state: tuple
  step: jax.Array


def make_state(seed):
  a, b = jax.random.split(jax.random.key(seed))
  params = {'layers': {'w': jax.random.normal(a, (50, 40)), 'bias': jnp.zeros((2, 8))},
            'half': jax.random.normal(b, (7,), jnp.bfloat16)}
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 9)))
  grads = jax.tree.map(jnp.ones_like, params)
  _, opt_state = tx.update(grads, tx.init(params), params)
  return State(params, opt_state, jnp.asarray(seed, jnp.int32))


def difference(a, b):
  """Returns the names of leaves whose dtype, shape or bytes differ."""
  a, b = leaves.flatten(a), leaves.flatten(b)
  def content(x):
    return (x.dtype, x.shape, np.asarray(x).tobytes())
  return [k for k in a.keys() | b.keys()
          if k not in a or k not in b or content(a[k]) != content(b[k])]


CURSOR = {'count': 3, 'raw': b'\x00\xff', 'ids': np.arange(5, dtype=np.uint16), 'name': 'ä',
          'nested': [{'x': None, 'y': 1e-30}]}


@pytest.fixture(scope='module')
def two_checkpoints(tmp_path_factory):
  """Checkpoints 1 and 2 of different states."""
  folder = tmp_path_factory.mktemp('two')
  with manager.CheckpointManager(folder, max_to_keep=2) as m:
    for step in (0, 1, 2):
      m.save(step, make_state(step), loader_state={'at': step}, extra=CURSOR)
  return folder


def test_nothing_is_lost_between_saving_and_loading(two_checkpoints):
  with manager.CheckpointManager(two_checkpoints) as m:
    assert m.steps() == [1, 2]  # the oldest went
    restored = m.restore_latest(make_state(5))
  assert difference(restored.state, make_state(2)) == []
  assert jax.tree.structure(restored.state) == jax.tree.structure(make_state(2))
  assert restored.step == 2 and restored.loader_state == {'at': 2}
  ids = restored.extra.pop('ids')
  assert ids.dtype == np.uint16 and ids.tolist() == [0, 1, 2, 3, 4]
  assert restored.extra == {k: v for k, v in CURSOR.items() if k != 'ids'}


def test_empty_folder(tmp_path):
  with manager.CheckpointManager(tmp_path / 'new') as m:
    assert m.steps() == [] and m.restore_latest(make_state(0)) is None


def test_listing_while_the_writer_deletes(two_checkpoints, tmp_path):
  folder, over = tmp_path / 'run', threading.Event()
  shutil.copytree(two_checkpoints, folder)

  def come_and_go():
    while not over.is_set():
      shutil.copytree(folder / '2', folder / 'new.orbax-checkpoint-tmp')
      os.rename(folder / 'new.orbax-checkpoint-tmp', folder / '0')
      shutil.rmtree(folder / '0')

  with manager.CheckpointManager(folder) as m:
    writer = threading.Thread(target=come_and_go)
    writer.start()
    try:
      seen = [m.steps() for _ in range(300)]
    finally:
      over.set()
      writer.join()
  assert all(steps[-2:] == [1, 2] for steps in seen)


def test_training_may_go_on_during_the_save(tmp_path):
  update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  with manager.CheckpointManager(tmp_path) as m:
    for step in range(3):
      state = jax.tree.map(jnp.array, make_state(step))
      m.save(step, state)
      for _ in range(20):
        state = update(state)
      jax.block_until_ready(state)
    assert difference(m.restore_latest(make_state(5)).state, make_state(2)) == []


def files_of(folder):
  return sorted(p for p in folder.rglob('*') if p.is_file())


def damage(path, kind):
  data = bytearray(path.read_bytes())
  if kind == 'flip':
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
  elif kind == 'truncate':
    path.write_bytes(data[:len(data) // 2])
  else:
    path.unlink()


@pytest.mark.parametrize('kind', ['flip', 'truncate', 'remove'])
def test_damage_never_gives_wrong_weights(two_checkpoints, tmp_path, capsys, kind):
  """Each file in turn: either it did not matter, or the previous checkpoint is used."""
  fell_back = 0
  files = [f for f in files_of(two_checkpoints / '2') if kind == 'flip' or f.stat().st_size > 400]
  for file in files:
    shutil.copytree(two_checkpoints, tmp_path / 'copy')
    damage(tmp_path / 'copy' / file.relative_to(two_checkpoints), kind)
    with manager.CheckpointManager(tmp_path / 'copy') as m:
      restored = m.restore_latest(make_state(5))
      assert difference(restored.state, make_state(restored.step)) == [], file
      assert restored.loader_state == {'at': restored.step}
      if restored.step == 1:
        fell_back += 1
        assert m.steps() == [1]  # so that step 2 can be saved again
    shutil.rmtree(tmp_path / 'copy')
  assert fell_back >= 1
  warnings = capsys.readouterr().err
  assert warnings.count('is damaged') == warnings.count('\n') == fell_back


def test_step_is_saved_again_after_damage(two_checkpoints, tmp_path):
  shutil.copytree(two_checkpoints, tmp_path / 'copy')
  damage(max(files_of(tmp_path / 'copy' / '2'), key=lambda f: f.stat().st_size), 'flip')
  with manager.CheckpointManager(tmp_path / 'copy') as m:
    assert m.restore_latest(make_state(5)).step == 1
    m.save(2, make_state(8))
    assert difference(m.restore_latest(make_state(5)).state, make_state(8)) == []


def test_no_good_checkpoint_is_an_error_and_not_a_fresh_start(two_checkpoints, tmp_path):
  shutil.copytree(two_checkpoints, tmp_path / 'copy')
  for step in '12':
    damage(tmp_path / 'copy' / step / 'meta' / 'metadata', 'truncate')
  with manager.CheckpointManager(tmp_path / 'copy') as m:
    with pytest.raises(InfrastructureError, match='none of the checkpoints'):
      m.restore_latest(make_state(5))
    assert m.steps() == [1, 2]


def test_interrupted_save_is_ignored_and_removed(two_checkpoints, tmp_path):
  shutil.copytree(two_checkpoints, tmp_path / 'copy')
  shutil.copytree(tmp_path / 'copy' / '2', tmp_path / 'copy' / '3.orbax-checkpoint-tmp')
  with manager.CheckpointManager(tmp_path / 'copy') as m:
    assert m.steps() == [1, 2]
    assert not list((tmp_path / 'copy').glob('*tmp*'))


def test_checkpoint_of_another_model(two_checkpoints):
  state = make_state(0)
  with manager.CheckpointManager(two_checkpoints) as m:
    with pytest.raises(UserError, match=r'params.step2 is only in the config'):
      m.restore_latest(dataclasses.replace(state, params=state.params | {'step2': jnp.ones(2)}))
    with pytest.raises(UserError, match=r'params.half is bfloat16\[7\], .* needs float32\[7\]'):
      m.restore_latest(dataclasses.replace(state, params=state.params | {'half': jnp.ones(7)}))
    assert m.steps() == [1, 2]


@contextlib.contextmanager
def small_disk(path, kilobytes):
  path.mkdir()
  done = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={kilobytes}k', 'tmpfs', path],
                        capture_output=True, check=False)
  if done.returncode:
    pytest.skip('may not mount a file system here')
  try:
    yield
  finally:
    subprocess.run(['umount', path], check=True)


def test_real_full_disk(tmp_path):
  def big(seed):
    return {'x': jax.random.normal(jax.random.key(seed), (300_000,))}  # 1.1 MB, incompressible

  if not shutil.which('mount') or os.geteuid():
    pytest.skip('may not mount a file system here')
  with small_disk(tmp_path / 'disk', 2000):
    m = manager.CheckpointManager(tmp_path / 'disk' / 'checkpoints')
    m.save(1, big(1), extra={'n': 1})
    m.wait()
    with pytest.raises(InfrastructureError, match='the disk is full; checkpoint 1 is intact') as e:
      m.save(2, big(2))
      m.wait()
    assert len(str(e.value).splitlines()) == 1
    assert difference(m.restore_latest(big(0)).state, big(1)) == []
    assert not list((tmp_path / 'disk' / 'checkpoints').glob('*tmp*'))  # room for others
    m.save(2, {'x': jnp.zeros(300_000)})  # fits: the same step can be saved after all
    m.close()
    assert m.steps() == [1, 2]
    with pytest.raises(InfrastructureError, match='the disk is full'):
      manager.save_params(tmp_path / 'disk' / 'params', big(3))


@pytest.mark.parametrize('where', ['save', 'wait_until_finished'])
@pytest.mark.parametrize('error', [
    OSError(errno.ENOSPC, 'No space left on device'), OSError(errno.EDQUOT, 'Quota exceeded'),
    ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']"),
    RuntimeError('background thread')])
def test_failures_of_the_writer(tmp_path, monkeypatch, where, error):
  with manager.CheckpointManager(tmp_path) as m:
    m.save(1, make_state(1))
    m.wait()
  m = manager.CheckpointManager(tmp_path)

  def fail(*args, **kwargs):
    raise error

  monkeypatch.setattr(m._manager, where, fail)
  kind = RuntimeError if isinstance(error, RuntimeError) else InfrastructureError
  text = 'background thread' if kind is RuntimeError else 'disk is full; checkpoint 1 is intact'
  with pytest.raises(kind, match=text):
    m.save(2, make_state(2))
    m.wait()
  monkeypatch.undo()
  assert difference(m.restore_latest(make_state(5)).state, make_state(1)) == []
  m.close()


def test_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(InfrastructureError, match='Not a directory'):
    manager.CheckpointManager(tmp_path / 'file' / 'checkpoints')


def test_params_round_trip_and_replacement(tmp_path):
  for seed in (1, 2):  # the second replaces the first
    manager.save_params(tmp_path / 'params', make_state(seed).params, {'model': {'d': seed}})
  params, meta = manager.load_params(tmp_path / 'params')
  assert difference(params, make_state(2).params) == []
  assert meta == {'model': {'d': 2}}


def test_params_missing_or_damaged(tmp_path):
  with pytest.raises(UserError, match='holds no parameters'):
    manager.load_params(tmp_path / 'nothing')
  manager.save_params(tmp_path / 'params', make_state(1).params)
  damage(max(files_of(tmp_path / 'params'), key=lambda f: f.stat().st_size), 'flip')
  with pytest.raises(InfrastructureError, match='damaged parameters'):
    manager.load_params(tmp_path / 'params')


def test_what_json_cannot_hold_is_refused():
  with pytest.raises(TypeError):
    leaves.to_json({'x': object()})
  with pytest.raises(TypeError):
    leaves.to_json({1: 'x'})
