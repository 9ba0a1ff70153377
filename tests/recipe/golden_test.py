"""The golden log-probs: kept once, compared before a run goes on."""

import json
import math
import shutil
import types

import jax
import numpy as np
import pytest

from composer_jax import models
from composer_jax.cli import main
from composer_jax.errors import NumericsError, UserError
from composer_jax.recipe import golden, stages, workdir

CONFIG = models.ModelConfig(
  vocab_size=256, hidden_size=16, num_hidden_layers=2, intermediate_size=16,
  moe_intermediate_size=8, n_routed_experts=4, num_attention_heads=2, kv_lora_rank=8,
  qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, initializer_range=0.3)


@pytest.fixture
def context(tmp_path):
  """A run whose `cpt` is finished, with bytes for tokens."""
  (tmp_path / 'cpt').mkdir()
  (tmp_path / 'cpt' / 'summary.json').write_text('{}')
  weights = models.init(CONFIG, jax.random.key(0))
  return types.SimpleNamespace(
    workdir=tmp_path, folder=lambda stage: tmp_path / stage, model=lambda stage: CONFIG,
    params=lambda stage: weights, weights=weights,
    corpus=types.SimpleNamespace(
      tokenizer=types.SimpleNamespace(encode=lambda text: list(text.encode()))))


@pytest.fixture
def kept(context):
  golden.keep(context)
  return context


def edit(path, change):
  """Applies `change` to the content of the golden file."""
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def test_sixteen_prompts_of_the_first_finished_stage(kept, tmp_path):
  content = json.loads((tmp_path / 'golden.json').read_text())
  assert content['stage'] == 'cpt' and {'jax', 'python', 'device'} <= content['versions'].keys()
  assert len({prompt['text'] for prompt in content['prompts']}) == 16
  for prompt in content['prompts'][::5]:  # alone and unpadded, normalised in float64
    tokens = np.array(prompt['tokens'])
    logits = np.float64(models.forward(CONFIG, kept.weights, tokens[None]).logits[0, :-1])
    expected = logits[np.arange(len(logits)), tokens[1:]] - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(prompt['logprobs'], expected, atol=1e-5)


def test_nothing_to_keep_before_a_stage_has_finished(context, tmp_path):
  (tmp_path / 'cpt' / 'summary.json').unlink()
  golden.require(context)
  assert not (tmp_path / 'golden.json').exists() and golden.compare(context) is None


def test_the_same_numbers_pass_and_stay(kept, tmp_path):
  before = (tmp_path / 'golden.json').read_bytes()
  golden.require(kept)
  golden.keep(kept)
  assert golden.compare(kept).gap == 0 and (tmp_path / 'golden.json').read_bytes() == before


def test_an_altered_number_fails(kept, tmp_path):
  edit(tmp_path / 'golden.json', lambda c: c['prompts'][3]['logprobs'].__setitem__(2, -0.5))
  with pytest.raises(NumericsError, match='the same; remove .*golden.json to go on'):
    golden.require(kept)


@pytest.mark.parametrize('factor', [1.1, np.nan])
def test_altered_parameters_fail(kept, factor):
  kept.weights['norm'] = kept.weights['norm'] * factor
  with pytest.raises(NumericsError, match='log-probs under the parameters of cpt differ by'):
    golden.require(kept)


def test_what_has_changed_is_named(kept, tmp_path):
  def change(content):
    content['versions'] |= {'jax': '0.0.1', 'device': 'abacus'}
    content['prompts'][0]['logprobs'][0] -= 1
  edit(tmp_path / 'golden.json', change)
  with pytest.raises(NumericsError, match=f'1.0e.00 nats.*device was abacus and is .*, '
                                          f'jax was 0.0.1 and is {jax.__version__}'):
    golden.require(kept)


def test_another_tokenizer_fails(kept):
  kept.corpus.tokenizer.encode = lambda text: [*text.encode()][::-1]
  with pytest.raises(NumericsError, match='other tokens'):
    golden.require(kept)


@pytest.mark.parametrize(('change', 'words'), [
  (lambda c: c['prompts'].pop(), '15 prompts, not 16'),
  (lambda c: c['prompts'][1]['logprobs'].pop(), 'one log-prob'),
  (lambda c: c['prompts'][2]['logprobs'].__setitem__(0, math.nan), 'not a finite number'),
  (lambda c: c.pop('versions'), 'versions'),
  (lambda c: c.update(stage='dessert'), 'dessert')])
def test_a_damaged_file_is_named(kept, tmp_path, change, words):
  edit(tmp_path / 'golden.json', change)
  with pytest.raises(UserError, match=f'golden.json.*{words}'):
    golden.require(kept)


def test_both_paths_give_the_same_log_probs(context, monkeypatch):
  assert 0 < golden.paths_gap(context, 'cpt') < golden.PATHS_TOLERANCE
  full = golden._full
  monkeypatch.setattr(golden, '_cached', lambda *arguments: full(*arguments) + 3e-4)
  assert golden.paths_gap(context, 'cpt') == pytest.approx(3e-4, rel=0.05)


@pytest.fixture
def copy_of_smoke_run(smoke_run, tmp_path):
  return shutil.copytree(smoke_run, tmp_path / 'run')


def alter(folder):
  edit(folder / 'golden.json', lambda c: c['prompts'][7]['logprobs'].__setitem__(0, -9.0))


def test_a_run_keeps_them_and_they_hold_in_another_process(smoke_run):
  assert workdir.read_json(smoke_run / 'golden.json')['stage'] == 'cpt'
  golden.require(stages.open_run(smoke_run))


def test_a_continued_run_checks_before_it_works(copy_of_smoke_run, command_line, capsys):
  shutil.rmtree(copy_of_smoke_run / 'stages' / 'eval_rl')
  alter(copy_of_smoke_run)
  assert main.main(['run', command_line.config, f'--workdir={copy_of_smoke_run}']) == 4
  err = capsys.readouterr().err
  assert err.startswith('composer-jax: error: log-probs under the parameters of cpt differ by')
  assert err.count('\n') == 1 and not (copy_of_smoke_run / 'stages' / 'eval_rl').exists()


def test_a_finished_run_is_not_checked(copy_of_smoke_run, command_line):
  alter(copy_of_smoke_run)
  assert main.main(['run', command_line.config, f'--workdir={copy_of_smoke_run}']) == 0


def test_doctor_finds_an_altered_run(copy_of_smoke_run, capsys):
  assert main.main(['doctor', f'--workdir={copy_of_smoke_run}']) == 0
  assert 'log-probs:' in capsys.readouterr().out
  alter(copy_of_smoke_run)
  assert main.main(['doctor', f'--workdir={copy_of_smoke_run}']) == 4
  assert 'parameters of cpt differ' in capsys.readouterr().err
