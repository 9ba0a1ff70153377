"""A run that starts from a checkpoint, and gives one back."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from composer_jax import api, models
from composer_jax.checkpoint import hf_export, hf_import, names
from composer_jax.checkpoint.hf_source import HfSource
from composer_jax.cli import main
from composer_jax.data import tokenizer as tokenizer_lib
from composer_jax.errors import UserError
from composer_jax.recipe import start
from composer_jax.recipe.schema import resolve

CONFIG = models.ModelConfig(
    vocab_size=300, hidden_size=16, num_hidden_layers=2, first_k_dense_replace=1,
    intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
    num_attention_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    max_position_embeddings=64)
BIAS = 'model.layers.1.mlp.gate.e_score_correction_bias'


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A Hugging Face folder with a tokenizer that has fewer ids than the model."""
  folder = tmp_path_factory.mktemp('start') / 'hf'
  params = models.init(CONFIG, jax.random.key(3))
  params['moe_layers']['moe']['router']['selection_bias'] = np.array([[.3, -.2, .1, 0]], np.float32)
  hf_export.export_folder(hf_export.InMemory(CONFIG, params), folder, 'float32')
  tokenizer_lib.train(['def f(x):\n    return x + 1\n' * 50], 290).save(folder)
  return folder


def recipe(checkpoint, **changes):
  model = dataclasses.asdict(dataclasses.replace(CONFIG, **changes))
  return resolve({'start': str(checkpoint), 'model': model, 'stages': ['data', 'cpt'],
                  'data': {'vocab_size': model['vocab_size'], 'tokenizer': str(checkpoint)}})


def test_the_checkpoint_is_what_training_starts_from(checkpoint):
  loaded = start.params(recipe(checkpoint, moe_impl='grouped'))
  theirs = api.load(checkpoint).params
  jax.tree.map(np.testing.assert_array_equal, loaded, theirs)
  with_mtp = recipe(checkpoint, num_nextn_predict_layers=1)
  start.check(with_mtp)
  grown = start.params(with_mtp)
  assert grown.pop('mtp').keys() == {'hidden_norm', 'embed_norm', 'project', 'block', 'norm'}
  jax.tree.map(np.testing.assert_array_equal, grown, theirs)
  assert start.params(dataclasses.replace(with_mtp, start='')) is None


def test_a_checkpoint_without_a_tokenizer_is_pointed_out(checkpoint, tmp_path, capsys):
  start.check(recipe(checkpoint))
  assert capsys.readouterr().err == ''
  bare = tmp_path / 'bare'
  shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns('tokenizer.json'))
  with pytest.raises(UserError, match='data.tokenizer: .*bare holds no tokenizer'):
    start.check(recipe(bare))
  data = dataclasses.replace(recipe(bare).data, tokenizer=str(checkpoint))
  start.check(dataclasses.replace(recipe(bare), data=data))
  assert f'warning: {bare} holds no tokenizer' in capsys.readouterr().err


def test_another_shape_is_refused_by_name(checkpoint, tmp_path):
  with pytest.raises(UserError, match='config.model.n_routed_experts: is 8, and 4 in'):
    start.check(recipe(checkpoint, n_routed_experts=8))
  with pytest.raises(UserError, match='holds no config.json'):
    start.check(recipe(tmp_path))
  start.check(recipe(checkpoint, attention='absorbed', moe_impl='dense'))
  ours = recipe(checkpoint)
  for path, said in ('', 'is not the tokenizer of'), (str(tmp_path), '.* holds no tokenizer'):
    with pytest.raises(UserError, match=f'data.tokenizer: {said}'):
      start.check(dataclasses.replace(ours, data=dataclasses.replace(ours.data, tokenizer=path)))


def test_run_and_export(checkpoint, tmp_path, capsys):
  """From the command line: two steps, and the exported biases are those that training moved."""
  run, out = tmp_path / 'run', tmp_path / 'out'
  small = {'cpt.steps': 2, 'cpt.seq_len': 64, 'cpt.batch_size': 2, 'cpt.eval_every': 0,
           'functions.train_documents': 30, 'functions.heldout_documents': 5,
           'data.heldout_bytes': 5000, 'data.heldout_fraction': 0.2}
  assert main.main(['run', f'--config=experiments/checkpoint/cpt.py:{checkpoint}',
                    f'--workdir={run}', "--config.data.sources.stdlib.max_bytes=600000",
                    *(f'--config.{key}={value}' for key, value in small.items())]) == 0
  assert main.main(['convert', 'export', f'--from={run}', f'--to={out}', '--format=float32']) == 0
  for name, config in (('base', CONFIG), ('other', dataclasses.replace(CONFIG, v_head_dim=4))):
    hf_export.export_folder(hf_export.InMemory(config, models.init(config, jax.random.key(0))),
                            tmp_path / f'{name}-hf', 'float32')
    hf_import.import_folder(HfSource(tmp_path / f'{name}-hf'), tmp_path / name)
    code = main.main(['convert', 'export', f'--from={run}', f'--to={tmp_path / "never"}',
                      f'--scales_from={tmp_path / name}', '--dry_run'])
    assert code == (0 if name == 'base' else 2)
  assert 'other: is another model than' in capsys.readouterr().err
  before, after = HfSource(checkpoint), HfSource(out)
  entry = names.by_key(CONFIG)[BIAS]
  old, new = before.tensor(entry), after.tensor(entry)
  assert old.any() and 0 < np.abs(new - old).max() <= 2 * 2e-3 + 1e-6
  assert (out / 'tokenizer.json').read_bytes() == (checkpoint / 'tokenizer.json').read_bytes()
  assert json.loads((run / 'config.json').read_text())['config']['start'] == str(checkpoint)
  assert main.main(['convert', 'verify', f'--from={checkpoint}', f'--to={out}']) == 4
  assert 'the two differ' in capsys.readouterr().err
