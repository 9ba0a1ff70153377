"""`api.load` on a finished run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax import api, models
from composer_jax.errors import UserError

TEXT = 'def f(x):\n  return x + 1\n'


@pytest.fixture(scope='module')
def model(smoke_run):
  return api.load(smoke_run)


def test_a_loaded_model_gives_logits(model):
  ids = model.tokenizer.encode(TEXT)
  assert model.tokenizer.decode(ids) == TEXT
  logits = model.forward(model.params, ids).logits
  assert logits.shape == (1, len(ids), model.config.vocab_size)
  assert logits.dtype == jnp.float32
  assert np.isfinite(logits).all()


def test_forward_takes_batches_positions_and_segments(model):
  ids = model.tokenizer.encode(TEXT)[:10]
  tokens = np.asarray([ids + ids, ids + ids])
  segments = np.repeat([[1] * 10 + [2] * 10], 2, axis=0)
  positions = np.repeat([[*range(10)] * 2], 2, axis=0)
  logits = model.forward(model.params, tokens, positions, segments).logits
  assert logits.shape == (2, 20, model.config.vocab_size)
  np.testing.assert_allclose(logits[:, :10], logits[:, 10:], atol=1e-5)  # two equal documents


def test_forward_is_pure_and_traceable(model):
  ids = jnp.asarray(model.tokenizer.encode(TEXT)[:8])

  def loss(params):
    return model.forward(params, ids).logits[0, -1].var()

  trainable, frozen = models.partition(model.params)
  grads = jax.grad(lambda p: loss(models.combine(p, frozen)))(trainable)
  assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize('changes, said', [
    ({'tokens': [[1, 2], [3]]}, 'tokens: are no rows'), ({'tokens': [[[1]]]}, 'not \\[B, S\\]'),
    ({'tokens': [1, 5000]}, 'ids from 1 to 5000'), ({'tokens': [-1, 2]}, 'ids from -1 to 2'),
    ({'segment_ids': [1, 1, 1]}, 'segment_ids: have the shape \\(1, 3\\), tokens \\(1, 2\\)'),
    ({'positions': [0]}, 'positions: have the shape')])
def test_what_does_not_fit_is_named(model, changes, said):
  with pytest.raises(UserError, match=said):
    model.forward(model.params, **({'tokens': [1, 2]} | changes))


def test_segments_may_be_a_list(model):
  packed = model.forward(model.params, [5, 6, 7, 8], segment_ids=[1, 1, 2, 2]).logits
  alone = model.forward(model.params, [7, 8]).logits
  np.testing.assert_allclose(packed[:, 2:], alone, atol=1e-4)


def test_the_last_stage_is_the_default(smoke_run, model):
  newest = api.load(smoke_run, stage='rl')
  assert jax.tree.all(jax.tree.map(np.array_equal, newest.params, model.params))
  sft = api.load(smoke_run, stage='sft')
  assert not jax.tree.all(jax.tree.map(np.array_equal, sft.params, model.params))


@pytest.mark.parametrize(('stage', 'factor'), [('cpt', None), ('long_context', 2.0), ('sft', 2.0)])
def test_a_stage_comes_with_its_own_context(smoke_run, stage, factor):
  config = api.load(smoke_run, stage=stage).config
  assert (config.rope_scaling and config.rope_scaling.factor) == factor
  assert config.max_position_embeddings == 128 * (factor or 1)


def test_dtype(smoke_run, model):
  half = api.load(smoke_run, dtype='bfloat16')
  trainable, frozen = models.partition(half.params)
  assert {leaf.dtype for leaf in jax.tree.leaves(trainable)} == {jnp.dtype('bfloat16')}
  assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {jnp.dtype('float32')}
  ids = model.tokenizer.encode(TEXT)
  logits = half.forward(half.params, ids).logits
  assert logits.dtype == jnp.float32
  assert np.abs(logits - model.forward(model.params, ids).logits).max() < 1.0


@pytest.mark.parametrize(('arguments', 'words'), [
    ({'stage': 'dessert'}, ['dessert', 'rl', 'cpt']),
    ({'stage': 'eval_sft'}, ['eval_sft']),
    ({'dtype': 'float33'}, ['float33']),
    ({'dtype': 'int32'}, ['int32']),
])
def test_what_is_not_there_is_named(smoke_run, arguments, words):
  with pytest.raises(UserError) as caught:
    api.load(smoke_run, **arguments)
  assert all(word in str(caught.value) for word in words)


def test_folders_without_a_model(tmp_path, smoke_run):
  with pytest.raises(UserError, match='holds no run'):
    api.load(tmp_path)
  (tmp_path / 'config.json').write_bytes((smoke_run / 'config.json').read_bytes())
  with pytest.raises(UserError, match='no stage has finished'):
    api.load(tmp_path)
  with pytest.raises(UserError, match='has no parameters'):
    api.load(tmp_path, stage='cpt')


def test_evaluate_finds_its_result(smoke_run):
  assert api.evaluate(smoke_run, 'sft')['tasks'] == 3
  with pytest.raises(UserError, match='sft or rl'):
    api.evaluate(smoke_run, 'cpt')
