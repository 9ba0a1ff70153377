"""A checkpoint that transformers saved: read with its own logits, written back bit for bit."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hf_golden import grid

from composer_jax import models
from composer_jax.checkpoint import names, safetensors_dir

FOLDER = grid.DATA.parent / 'checkpoint'


@pytest.fixture(scope='module')
def loaded():
  """Returns the config, the tensors by Hugging Face name and the parameters made of them."""
  config = models.ModelConfig.from_hf(json.loads((FOLDER / 'config.json').read_text()))
  folder = safetensors_dir.TensorFolder(FOLDER)
  tensors = {name: folder.read(name) for name in folder.infos}
  return config, tensors, names.from_hf(config, tensors)


def test_a_saved_checkpoint_gives_its_logits(loaded):
  config, _, params = loaded
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
  config, tensors, params = loaded
  out = names.to_hf(config, params)
  plan = [(name, value.dtype, value.shape) for name, value in out.items()]
  with safetensors_dir.TensorWriter(tmp_path, plan, 60_000, {'format': 'pt'}) as writer:
    for name, value in out.items():
      writer.write(name, value)
  back = safetensors_dir.TensorFolder(tmp_path)
  assert set(back.infos) == set(tensors)
  assert len({info.file for info in back.infos.values()}) > 1
  for name, value in tensors.items():
    again = back.read(name)
    assert (again.dtype, again.shape) == (value.dtype, value.shape)
    assert again.tobytes() == value.tobytes(), name


def test_the_saved_weights_are_those_of_the_seed(loaded):
  want = grid.CHECKPOINT.tensors()
  assert set(loaded[1]) == set(want)
  assert all(np.array_equal(loaded[1][name], value) for name, value in want.items())


def test_the_exported_config_reads_back(loaded):
  config = loaded[0]
  assert models.ModelConfig.from_hf(config.to_hf()) == config
