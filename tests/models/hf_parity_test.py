"""Our model against `transformers` on random weights: logits, routes and every gradient.

The golden data and the script that makes them are in `hf_golden/`. There every document was run
alone; here they lie in a padded batch, one a row or several.
"""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hf_golden import grid, weights

from composer_jax import models
from composer_jax.checkpoint import names
from composer_jax.models import rope

CASES = {case.name: case for case in grid.CASES}
MOE = [name for name, case in CASES.items() if name != 'all_dense']
# Compiling the backward pass is what takes the time, so that of the grouped matmul is left to the
# cases that differ in what it sees: experts, choices, shared experts, groups.
GROUPED_GRADIENTS = ('deepseek_v3_like', 'kimi_k2_5_like', 'moonlight_like',
                     'many_experts_in_groups', 'one_expert', 'one_of_groups')
RUNS = ([(name, 'dense', True) for name in CASES]
        + [(name, 'grouped', name in GROUPED_GRADIENTS) for name in MOE])
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
BIAS = 'e_score_correction_bias'


@functools.cache
def _golden(name):
  """Returns the data of a case, the gradients by Hugging Face name."""
  with np.load(grid.DATA / f'{name}.npz') as data:
    golden = dict(data)
  flat, golden['gradients'] = golden['gradients'], {}
  for key, shape in weights.shapes(CASES[name].text).items():
    if not key.endswith(BIAS):
      size = int(np.prod(shape))
      golden['gradients'][key], flat = flat[:size].reshape(shape), flat[size:]
  assert flat.size == 0
  return golden


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _run(config, with_gradients, params, batch):
  def loss(params):
    out = models.forward(config, params, batch['tokens'], positions=batch['positions'],
                         segment_ids=batch['segment_ids'])
    return (out.logits * batch['cotangent']).sum(), (out.logits, out.router)
  if not with_gradients:
    return *loss(params)[1], None
  (_, (logits, router)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
  return logits, router, gradients


def _gather(array, places):
  """Returns the documents' part of `[..., B, S, X]`, one after the other."""
  return np.concatenate([array[..., row, columns, :] for row, columns in places], axis=-2)


@pytest.mark.parametrize('name, impl, with_gradients', RUNS)
def test_logits_routes_and_gradients(name, impl, with_gradients):
  case, golden = CASES[name], _golden(name)
  config = models.ModelConfig.from_hf(case.config, moe_impl=impl)
  params = names.from_hf(config, case.tensors())
  for packed in (False, True):
    batch, places = case.batch(packed)
    logits, router, gradients = jax.tree.map(
        np.asarray, _run(config, with_gradients, params, batch))
    error = np.abs(_gather(logits, places) - golden['logits']).max()
    assert error <= 1e-4 * np.abs(golden['logits']).max()
    if name in MOE:
      _check_routes(config, router, places, golden)
    if with_gradients:
      _check_gradients(names.to_hf(config, gradients), golden['gradients'])


def _check_routes(config, router, places, golden):
  """The same experts everywhere; a near-tie, where they might differ, does not occur."""
  assert golden['margins'].min() > 5 * grid.TIE
  assert np.array_equal(np.sort(_gather(router.indices, places), axis=-1), golden['routes'])
  counts = [np.bincount(layer.ravel(), minlength=config.n_routed_experts)
            for layer in golden['routes']]
  assert np.array_equal(router.counts, counts)  # without the padding


def _check_gradients(ours, golden):
  """Per tensor, the largest difference over the largest entry of transformers' gradient.

  An expert that no token chose has the gradient 0 there, and exactly that is asked for here.
  """
  assert {key for key in ours if not key.endswith(BIAS)} == set(golden)
  for key, value in ours.items():
    if key.endswith(BIAS):
      assert not value.any(), key
      continue
    assert value.shape == golden[key].shape
    assert np.abs(value - golden[key]).max() <= 1e-3 * np.abs(golden[key]).max(), key


@pytest.mark.parametrize('name', CASES)
def test_multiplier_and_softmax_scale(name):
  config, golden = models.ModelConfig.from_hf(CASES[name].config), _golden(name)
  assert rope.frequencies(config)[1] == pytest.approx(float(golden['multiplier']), rel=1e-14)
  assert rope.softmax_scale(config) == pytest.approx(float(golden['softmax_scale']), rel=1e-14)


def test_frequencies_to_the_last_bit():
  """One unit in the last place is how far the powers of two math libraries may be apart."""
  with np.load(grid.DATA / 'ropes.npz') as golden:
    for name, changes in grid.ROPES.items():
      config = models.ModelConfig.from_hf(grid.Case(name, changes).text)
      ours = np.append(*rope.frequencies(config)).astype(np.float32)
      np.testing.assert_array_max_ulp(ours, golden[name], maxulp=1)


def test_mscale_without_mscale_all_dim_is_deepseeks():
  """DeepSeek's code divides by 1 then, 0.7 * 0.1 * ln 4 + 1; transformers leaves out the 0.7."""
  text = CASES['tied'].text
  scaling = {'type': 'yarn', 'factor': 4, 'original_max_position_embeddings': 16, 'mscale': 0.7}
  config = models.ModelConfig.from_hf(text | {'rope_scaling': scaling})
  assert rope.frequencies(config)[1] == pytest.approx(1.0970406, abs=1e-7)
  assert rope.softmax_scale(config) == 0.25


def test_the_grid_covers_every_option():
  texts = [case.text for case in grid.CASES]

  def values(key):
    return {text[key] for text in texts}

  assert len(texts) >= 12 and {1, 8} <= values('num_experts_per_tok')
  assert values('norm_topk_prob') == values('tie_word_embeddings') == {True, False}
  assert None in values('q_lora_rank') and values('n_shared_experts') == {1, 2}
  assert {text['first_k_dense_replace'] / text['num_hidden_layers'] for text in texts} >= {0, 1}
  assert {0, 1, 2} <= values('first_k_dense_replace') and max(values('n_routed_experts')) > 32
  assert any(1 < text['topk_group'] < text['n_group'] for text in texts)
  assert any(1 < text['topk_group'] == text['n_group'] for text in texts)
  assert any(text['v_head_dim'] != text['qk_nope_head_dim'] for text in texts)
  for case in grid.CASES:
    if scaling := case.text['rope_scaling']:
      last = max(document.positions.max() for document in case.documents())
      original = scaling['original_max_position_embeddings']
      assert last >= original * (scaling['factor'] if case.name.endswith('past') else 1), case.name
