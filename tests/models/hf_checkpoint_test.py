"""A checkpoint that transformers saved: read with its own logits, written back bit for bit."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hf_golden import grid

from composer_jax import models
from composer_jax.checkpoint import hf_export, hf_import, safetensors_dir
from composer_jax.checkpoint.hf_source import HfSource

FOLDER = grid.DATA.parent / 'checkpoint'


@pytest.fixture(scope='module')
def loaded():
  """Returns config and parameters as our importer reads them."""
  source = HfSource(FOLDER)
  return source.config, hf_import.load(source)


def test_a_saved_checkpoint_gives_its_logits(loaded):
  config, params = loaded
  batch, places = grid.CHECKPOINT.batch(packed=True)
  out = jax.jit(models.forward, static_argnums=0,
                compiler_options={'xla_backend_optimization_level': 0})(
      config, params, batch['tokens'], positions=batch['positions'],
      segment_ids=batch['segment_ids'])
  ours, indices = np.asarray(out.logits), np.asarray(out.router.indices)
  with np.load(FOLDER / 'golden.npz') as golden:
    want, routes = golden['logits'], golden['routes']
  got = np.concatenate([ours[place] for place in places])
  assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
  chosen = np.concatenate([indices[:, row, columns] for row, columns in places], axis=1)
  assert np.array_equal(np.sort(chosen, axis=-1), routes)


def test_the_export_is_the_checkpoint_bit_for_bit(loaded, tmp_path):
  saved = safetensors_dir.TensorFolder(FOLDER)
  hf_export.export_folder(hf_export.InMemory(*loaded), tmp_path / 'out', 'float32',
                          shard_bytes=60_000)
  back = safetensors_dir.TensorFolder(tmp_path / 'out')
  assert set(back.infos) == set(saved.infos)
  assert len({info.file for info in back.infos.values()}) > 1
  for name in saved.infos:
    old, new = saved.read(name), back.read(name)
    assert (new.dtype, new.shape) == (old.dtype, old.shape)
    assert new.tobytes() == old.tobytes(), name
  assert HfSource(tmp_path / 'out').config == loaded[0]


def test_the_saved_weights_are_those_of_the_seed():
  saved, want = safetensors_dir.TensorFolder(FOLDER), grid.CHECKPOINT.tensors()
  assert set(saved.infos) == set(want)
  assert all(np.array_equal(saved.read(name), value) for name, value in want.items())
