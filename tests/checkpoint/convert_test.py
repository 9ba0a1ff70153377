"""Checkpoints in and out: every format, bit for bit where nothing was trained."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from composer_jax import api, files, models
from composer_jax.checkpoint import (
  block_fp8,
  hf_export,
  hf_import,
  names,
  packed_int4,
  quantization,
  safetensors_dir,
  verify,
)
from composer_jax.checkpoint.hf_source import HfSource
from composer_jax.cli import main
from composer_jax.errors import UserError

CONFIG = models.ModelConfig(
    vocab_size=40, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=32,
    intermediate_size=32, moe_intermediate_size=32, n_routed_experts=12, n_shared_experts=1,
    num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    num_nextn_predict_layers=1, rope_scaling=models.RopeScaling(factor=4.0))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensors(config=CONFIG, seed=0):
  """The tensors of a bfloat16 checkpoint with a non-zero correction bias."""
  rng = np.random.default_rng(seed)
  out = {}
  for entry in names.table(config):
    value = rng.standard_normal(entry.shape).astype(np.float32) * 0.2
    bias = entry.key.endswith('e_score_correction_bias')
    out[entry.key] = value if bias else value.astype(BFLOAT16)
    if entry.copy:
      main_key = names.by_leaf(config)[entry.leaf][0].key
      out[entry.key] = out.get(main_key, out[entry.key])
  head = 'lm_head.weight'
  for entry in names.table(config):
    if entry.copy and entry.leaf == 'head':
      out[entry.key] = out[head]
  return out


def quantized(plain, form):
  """The same checkpoint with quantised weights whose scales are not those of absmax."""
  rng, out = np.random.default_rng(1), {}
  for key, value in plain.items():
    if not quantization.is_quantized(key, form):
      out[key] = value
    elif form == 'fp8':
      scale = rng.uniform(1e-3, 2e-3, [-(-size // 128) for size in value.shape]).astype(np.float32)
      weight, scale = block_fp8.encode(value.astype(np.float32), scale)
      out |= {key: weight, f'{key}_scale_inv': scale}
    else:
      scale = rng.uniform(0.15, 0.2, (value.shape[0], value.shape[1] // 32)).astype(BFLOAT16)
      packed, scale = packed_int4.encode(value.astype(np.float32), scale)
      out |= dict(zip(quantization.int4_names(key),
                      (packed, scale, np.array(value.shape, np.int32)), strict=True))
  return out


def save(folder, stored, form='none', config=CONFIG, raw=None, shard_bytes=60_000):
  folder.mkdir(parents=True)
  plan = [(key, value.dtype, value.shape) for key, value in stored.items()]
  with safetensors_dir.TensorWriter(folder, plan, shard_bytes, {'format': 'pt'}) as writer:
    for key, value in stored.items():
      writer.write(key, value)
  raw = dict(config.to_hf() if raw is None else raw)
  if declared := quantization.declare(form):
    raw['quantization_config'] = declared
  (folder / 'config.json').write_text(json.dumps(raw | {'eos_token_id': 7}))
  return folder


def contents(folder):
  found = safetensors_dir.TensorFolder(folder)
  return {key: (info.dtype, info.shape, found.read(key).tobytes())
          for key, info in found.infos.items()}


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A checkpoint in each format."""
  root = tmp_path_factory.mktemp('checkpoints')
  plain = tensors()
  return {form: save(root / form, plain if form == 'none' else quantized(plain, form), form)
          for form in ('none', 'fp8', 'int4')}


@pytest.mark.parametrize('form', ['none', 'fp8', 'int4'])
def test_in_and_out_is_the_same_to_the_byte(folders, form, tmp_path):
  """Through the command line; packed bytes and scales are those of the source."""
  native, out = tmp_path / 'native', tmp_path / 'out'
  export = {'none': 'bfloat16'}.get(form, form)
  assert main.main(['convert', 'import', f'--from={folders[form]}', f'--to={native}']) == 0
  assert main.main(['convert', 'export', f'--from={native}', f'--to={out}', f'--format={export}',
                    '--shard_gb=0.0001']) == 0
  assert contents(out) == contents(folders[form])
  raw = json.loads((out / 'config.json').read_text())
  assert raw['eos_token_id'] == 7 and models.ModelConfig.from_hf(raw) == CONFIG
  assert quantization.parse(raw.get('quantization_config'), 'config.json').form == form


@pytest.mark.parametrize(('source', 'form'), [
    ('none', 'fp8'), ('none', 'int4'), ('none', 'float32'), ('fp8', 'bfloat16'), ('fp8', 'int4'),
    ('int4', 'fp8'), ('int4', 'bfloat16')])
def test_every_format_from_every_other(folders, source, form, tmp_path, capsys):
  out, report = tmp_path / 'out', tmp_path / 'report.json'
  assert main.main(['convert', 'export', f'--from={folders[source]}', f'--to={out}',
                    f'--format={form}']) == 0
  assert main.main(['convert', 'verify', f'--from={folders[source]}', f'--to={out}', '--nologits',
                    f'--json={report}']) == 0
  facts = json.loads(report.read_text())
  assert facts['ok'] and facts['outside_tolerance'] == []
  bias = next(row for row in facts['kinds'] if row['kind'].endswith('correction_bias'))
  assert bias['count'] == bias['bit_equal'] == 3
  assert any('gate_proj' in line for line in capsys.readouterr().out.splitlines())


def test_verify_shows_a_changed_weight_and_logits(folders, tmp_path, capsys):
  changed = tensors()
  key = 'model.layers.2.mlp.experts.11.down_proj.weight'
  changed[key] = changed[key].copy()
  changed[key][3, 5] += BFLOAT16.type(0.5)
  other = save(tmp_path / 'other', changed)
  command = ['convert', 'verify', f'--from={folders["none"]}', f'--to={other}', '--all']
  assert main.main(command) == 4
  shown = capsys.readouterr()
  assert f'1 tensors, first {key}' in shown.err and 'logits of 128 positions' in shown.out
  assert main.main(['convert', 'verify', f'--from={folders["none"]}',
                    f'--to={folders["none"]}']) == 0
  assert 'largest difference 0.00e+00' in capsys.readouterr().out


def test_logits_are_judged_by_most_positions(folders, monkeypatch):
  """A choice of another expert by a rounded weight moves a few positions far."""
  sides = [HfSource(folders['none'])] * 2
  logits = np.random.default_rng(0).standard_normal((2, 64, 8)).astype(np.float32)
  moved = logits + 1e-3
  moved[0, 5:9] += 3
  answers = iter((logits, moved))
  monkeypatch.setattr(verify.jax, 'jit', lambda _: lambda params: next(answers))
  monkeypatch.setattr(verify.hf_import, 'load', lambda *_, **__: None)
  found = verify.compare_logits(*sides)
  assert found['max_rel'] > 0.4 and found['median_rel'] < 1e-3


def test_the_same_import_again_brings_what_was_added(folders, tmp_path):
  source = tmp_path / 'source'
  shutil.copytree(folders['none'], source)
  command = ['convert', 'import', f'--from={source}', f'--to={tmp_path / "native"}']
  assert main.main(command) == 0
  (source / 'special_tokens_map.json').write_text('{}')
  assert main.main(command) == 0
  assert (tmp_path / 'native' / 'special_tokens_map.json').read_text() == '{}'


def test_kimi_k2_5_wrapper(tmp_path):
  """Prefixed names, vision tensors beside, quantisation declared in the text part."""
  config = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
  plain = tensors(config)
  stored = {f'language_model.{key}': value for key, value in quantized(plain, 'int4').items()}
  vision = {'vision_tower.patch_embed.proj.weight': np.zeros((3, 3), BFLOAT16),
            'mm_projector.linear_1.bias': np.zeros(3, BFLOAT16)}
  raw = {'model_type': 'kimi_k25', 'vision_config': {}, 'media_placeholder_token_id': 3,
         'text_config': config.to_hf() | {'quantization_config': quantization.declare('int4')}}
  folder = save(tmp_path / 'kimi', stored | vision, raw=raw)
  source = HfSource(folder)
  assert source.skipped == {'vision': 2} and source.quantization == 'int4'
  hf_export.export_folder(source, tmp_path / 'out', 'int4', files=folder)
  assert contents(tmp_path / 'out') == {
      key.removeprefix('language_model.'): value for key, value in contents(folder).items()
      if key.startswith('language_model.')}
  strange = save(tmp_path / 'strange', stored | {'audio.weight': np.zeros(2, BFLOAT16)}, raw=raw)
  with pytest.raises(UserError, match='1 tensors belong to nothing in this model: audio.weight'):
    HfSource(strange)


def test_layers_that_are_declared_and_not_there(tmp_path):
  """transformers declares one MTP layer in each config it writes, and writes none."""
  plain = {key: value for key, value in tensors().items() if 'model.layers.3.' not in key}
  source = HfSource(save(tmp_path / 'plain', plain))
  assert source.config.num_nextn_predict_layers == 0
  some = plain | {'model.layers.3.enorm.weight': np.ones(32, BFLOAT16)}
  with pytest.raises(UserError, match='tensors are missing: model.layers.3.hnorm.weight'):
    HfSource(save(tmp_path / 'some', some))


def test_loading_onto_devices_is_importing(folders, tmp_path):
  """8 simulated devices, experts and widths split: the same parameters, from both kinds."""
  hf_import.import_folder(HfSource(folders['int4']), tmp_path / 'native')
  program = f'''
import jax, numpy as np
from composer_jax import models
from composer_jax.checkpoint import hf_import, leaves
from composer_jax.checkpoint.hf_source import HfSource
from composer_jax.sharding import mesh, rules
devices = mesh.make_mesh(mesh.MeshConfig(fsdp=2, expert=4))
for source in HfSource({str(folders['int4'])!r}), hf_import.Imported({str(tmp_path / 'native')!r}):
  where = rules.shardings(models.logical_axes(source.config), devices)
  split = leaves.flatten(hf_import.load(source, where))
  whole = leaves.flatten(hf_import.load(source))
  for name, leaf in whole.items():
    assert split[name].dtype == leaf.dtype
    np.testing.assert_array_equal(np.asarray(split[name]), np.asarray(leaf), name)
  up = split['moe_layers.moe.experts_gate_up']
  assert up.addressable_shards[0].data.shape == (2, 3, 16, 64), up.addressable_shards[0].data.shape
'''
  environment = {'XLA_FLAGS': '--xla_force_host_platform_device_count=8', 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', program], env=os.environ | environment,
                        capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr


def test_an_import_goes_on_after_a_kill(folders, tmp_path):
  """A copy dies in the middle; the same call writes only what is missing, and the same bytes."""
  source, reads = HfSource(folders['fp8']), []

  def dies(size):
    reads.append(size)
    if len(reads) == 100:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    hf_import.import_folder(source, tmp_path / 'cut', advance=dies)
  for use in (hf_import.Imported, api.load):
    with pytest.raises(UserError, match='is unfinished; give the command that made it again'):
      use(tmp_path / 'cut')
  again = HfSource(folders['fp8'])
  read, seen = again.read, []
  again.read = lambda leaf, index: seen.append(leaf) or read(leaf, index)
  cut = hf_import.import_folder(again, tmp_path / 'cut')
  whole = hf_import.import_folder(source, tmp_path / 'whole')
  total = len([entry for entry in names.table(CONFIG) if not entry.copy])
  assert 0 < len(seen) <= total - 80
  for name in whole.store.leaves:
    np.testing.assert_array_equal(cut.store.read(name), whole.store.read(name))


def test_an_import_never_mixes_two_checkpoints(folders, tmp_path):
  other = save(tmp_path / 'other', tensors(seed=5))
  hf_import.import_folder(HfSource(folders['none']), tmp_path / 'native')
  with pytest.raises(UserError, match='native'):
    hf_import.import_folder(HfSource(other), tmp_path / 'native')


def test_the_identity_sees_every_tensor_and_no_division_into_files(folders, tmp_path):
  plain = tensors()
  before = HfSource(folders['none']).identity()
  assert HfSource(save(tmp_path / 'one', plain, shard_bytes=10**9)).identity() == before
  seen = {before}
  for number, entry in enumerate(e for e in names.table(CONFIG) if e.in_axes == 0 and not e.copy):
    changed = plain | {entry.key: plain[entry.key] + plain[entry.key].dtype.type(1)}
    for copy in names.table(CONFIG):  # of the embedding
      if copy.copy and copy.leaf == entry.leaf:
        changed[copy.key] = changed[entry.key]
    seen.add(HfSource(save(tmp_path / str(number), changed)).identity())
  assert len(seen) == number + 2


def test_int4_exports_declare_what_stays_plain():
  ignored = quantization.declare('int4')['ignore']
  for entry in names.table(CONFIG):
    linear = entry.key.removesuffix('.weight')
    if entry.in_axes and not linear.endswith('mlp.gate'):
      stays = any(re.match(rule[3:], linear) if rule[:3] == 're:' else rule == linear
                  for rule in ignored)
      assert stays != quantization.is_quantized(entry.key, 'int4'), entry.key


def test_trained_weights_keep_their_bias_and_get_fresh_scales(folders, tmp_path):
  """Correction biases through import, a change, export; groups that grew get another scale."""
  source = HfSource(folders['int4'])
  params = hf_import.load(source, dtype='float32')
  bias = np.asarray(params['moe_layers']['moe']['router']['selection_bias'])
  assert bias.any()
  experts = np.asarray(params['moe_layers']['moe']['experts_down']).copy()
  experts[0, 3] *= 3.0
  params['moe_layers']['moe']['experts_down'] = experts
  trained = hf_export.InMemory(CONFIG, params, scales=source.scale)
  hf_export.export_folder(trained, tmp_path / 'out', 'int4')
  before, after = contents(folders['int4']), contents(tmp_path / 'out')
  grown = {f'model.layers.1.mlp.experts.3.down_proj.weight_{part}' for part in ('packed', 'scale')}
  assert {key for key in before if before[key] != after[key]} <= grown
  back = HfSource(tmp_path / 'out').read('moe_layers.moe.experts_down',
                                         tuple(slice(0, size) for size in experts.shape))
  step = np.abs(experts).max() / 7
  assert np.abs(back.astype(np.float32) - experts).max() <= step


def test_api_load(folders):
  model = api.load(folders['none'], dtype='bfloat16')
  assert model.tokenizer is None and model.config == CONFIG
  assert model.params['embed'].dtype == BFLOAT16
  assert model.params['moe_layers']['moe']['router']['selection_bias'].dtype == np.float32
  assert model.forward(model.params, [1, 2, 3]).logits.shape == (1, 3, 40)
  with pytest.raises(UserError, match='has no stages'):
    api.load(folders['none'], stage='cpt')


@pytest.mark.parametrize('convert', [
    lambda source, target: hf_import.import_folder(source, target),
    lambda source, target: hf_export.export_folder(source, target, 'bfloat16')])
def test_one_writer_at_a_time(convert, folders, tmp_path):
  source, target = HfSource(folders['none']), tmp_path / 'out'
  target.mkdir()
  with files.locked(target / '.lock', ''):
    with pytest.raises(UserError, match='out: another process writes there'):
      convert(source, target)
  assert list(target.iterdir()) == []
  convert(source, target)
  assert not (target / '.lock').exists()


def test_exports_go_into_links_and_the_present_folder(folders, tmp_path, monkeypatch):
  source = HfSource(folders['none'])
  for name in ('real', 'here'):
    (tmp_path / name).mkdir()
  (tmp_path / 'link').symlink_to('real')
  hf_export.export_folder(source, tmp_path / 'link', 'bfloat16')
  monkeypatch.chdir(tmp_path / 'here')
  hf_export.export_folder(source, '.', 'bfloat16')
  assert (tmp_path / 'link').is_symlink()
  assert contents('.') == contents(tmp_path / 'real') == contents(folders['none'])


def test_an_export_that_was_killed_gives_way_to_the_next(folders, tmp_path, monkeypatch):
  """Also one that was killed while its files took their places; strangers' files stay."""
  source, target = HfSource(folders['none']), tmp_path / 'out'
  with monkeypatch.context() as patch:
    patch.setattr(hf_export.shutil, 'rmtree', lambda *_, **__: None)  # a kill cleans nothing up
    patch.setattr(hf_export, 'fsync_folder', lambda folder: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
      hf_export.export_folder(source, target, 'fp8', shard_bytes=10**5)
  left = {path.name for path in target.iterdir()}
  assert {'.draft', safetensors_dir.INDEX} < left and 'config.json' not in left
  (target / 'mine.txt').write_text('')
  with pytest.raises(UserError, match='is not empty'):
    hf_export.export_folder(source, target, 'bfloat16')
  (target / 'mine.txt').unlink()
  hf_export.export_folder(source, target, 'bfloat16')
  assert contents(target) == contents(folders['none'])
  assert {path.name for path in target.iterdir()} == {'config.json', safetensors_dir.SINGLE}


def test_an_import_killed_before_its_store_begins_goes_on(folders, tmp_path):
  (tmp_path / 'cut' / hf_import.STORE).mkdir(parents=True)
  source, sizes = HfSource(folders['none']), []
  for _ in range(2):  # and a whole one is whole at once
    hf_import.import_folder(source, tmp_path / 'cut', advance=sizes.append)
  total = hf_import.total_bytes(hf_import.store_leaves(source))
  assert sum(sizes[:-1]) == sizes[-1] == total


def test_a_weight_beyond_the_format_is_named(tmp_path):
  plain = {key: value.astype(np.float32) for key, value in tensors().items()}
  plain[Q_B] = plain[Q_B].copy()
  plain[Q_B][0, 0] = 3.4e38
  source = HfSource(save(tmp_path / 'large', plain))
  with pytest.raises(UserError, match=f'{Q_B}: holds weights that are not finite in bfloat16'):
    hf_import.import_folder(source, tmp_path / 'out', 'bfloat16')


def test_fresh_fp8_scales_are_powers_of_two_where_the_source_has_such(folders, tmp_path):
  """DeepSeek-V3.1 declares `scale_fmt` ue8m0."""
  declared = quantization.declare('fp8', power_of_two=True)
  source = HfSource(folders['none'])
  source.raw = source.raw | {'quantization_config': declared}
  hf_export.export_folder(source, tmp_path / 'out', 'fp8')
  raw = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert raw['quantization_config'] == declared
  stored = safetensors_dir.TensorFolder(tmp_path / 'out')
  scale, weight = stored.read(f'{Q_B}_scale_inv'), stored.read(Q_B).astype(np.float32)
  assert (np.frexp(scale)[0] == 0.5).all() and 224 < np.abs(weight).max() <= 448


@pytest.mark.parametrize('form', ['fp8', 'int4'])
def test_verify_finds_what_no_rounding_explains(form, folders, tmp_path):
  """Scales that are 5% too large, rows in another order, one weight that is a step off."""
  key = 'model.layers.2.mlp.experts.3.up_proj.weight'
  names_of = {'fp8': (key, f'{key}_scale_inv'), 'int4': quantization.int4_names(key)[:2]}
  weight, scale = names_of[form]
  good = quantized(tensors(), form)
  step = good | {weight: good[weight].copy()}
  step[weight].reshape(-1).view(np.uint8)[7] ^= 8  # the next code, or the next octave
  bad = {'gain': good | {scale: (good[scale] * 1.05).astype(good[scale].dtype)},
         'order': good | {weight: good[weight][::-1].copy()}, 'step': step}
  plain = HfSource(folders['none'])
  for name, stored in bad.items():
    results = verify.compare_tensors(plain, HfSource(save(tmp_path / name, stored, form)))
    assert [result.name for result in results if not result.ok] == [key], name


def _truncate(folder):
  path = sorted(folder.glob('*.safetensors'))[1]
  path.write_bytes(path.read_bytes()[:-10])


def _drop_shard(folder):
  sorted(folder.glob('*.safetensors'))[0].unlink()


def _header(folder):
  path = sorted(folder.glob('*.safetensors'))[0]
  path.write_bytes(b'\xff' * 8 + path.read_bytes()[8:])


def _config(**changes):
  def change(folder):
    raw = json.loads((folder / 'config.json').read_text()) | changes
    (folder / 'config.json').write_text(json.dumps(raw))
  return change


def _tensor(key, make):
  def change(folder):
    stored = tensors()
    stored[key] = make(stored[key])
    shutil.rmtree(folder)
    save(folder, stored)
  return change


def _poison(value):
  value = value.copy()
  value[1, 2] = np.nan
  return value


Q_B = 'model.layers.1.self_attn.q_b_proj.weight'
BAD = {
    'truncated': (_truncate, 'truncated'),
    'missing shard': (_drop_shard, 'is missing; download it again'),
    'header': (_header, 'header'),
    'no json': (lambda folder: (folder / 'config.json').write_text('{'), 'is damaged'),
    'other family': (_config(model_type='llama'), "model_type 'llama' is another family"),
    'unknown field': (_config(index_topk=4), 'field index_topk is not implemented'),
    'vocabulary': (_config(vocab_size=48), 'has shape [40, 32], the config needs [48, 32]'),
    'more experts': (_config(n_routed_experts=13), 'tensors are missing: model.layers.1.mlp.exp'),
    'fewer layers': (_config(num_hidden_layers=2), 'tensors'),
    'quantization': (_config(quantization_config={'quant_method': 'gptq'}), "'gptq' is not impl"),
    'block size': (_config(quantization_config={'quant_method': 'fp8',
                                                'weight_block_size': [64, 64]}), '[64, 64]'),
    'NaN': (_tensor(Q_B, _poison), f'{Q_B} holds NaN or infinity'),
    'integers': (_tensor(Q_B, lambda value: value.astype(np.int32)), f'{Q_B} is int32'),
    'shape': (_tensor(Q_B, lambda value: value[:-1]), f'{Q_B} has shape [23, 32]'),
    'mixed dtypes': (_tensor(Q_B, lambda value: value.astype(np.float32)), 'several dtypes'),
    'another head': (_tensor('model.layers.3.shared_head.head.weight', lambda value: value[::-1]),
                     'differs from the main model'),
    'tokenizer': (lambda folder: (folder / 'tokenizer.json').write_text('{}'), 'tokenizer.json'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_input_is_one_line_and_leaves_nothing_that_looks_whole(name, folders, tmp_path, capsys):
  damage, message = BAD[name]
  folder = tmp_path / 'bad'
  shutil.copytree(folders['none'], folder)
  damage(folder)
  target = tmp_path / 'out'
  assert main.main(['convert', 'import', f'--from={folder}', f'--to={target}']) == 2
  error = capsys.readouterr().err.strip().splitlines()
  assert message in error[-1] and error[-1].startswith('composer-jax: error: ')
  assert not any(line.startswith('composer-jax: error') for line in error[:-1])
  if target.exists():
    with pytest.raises(UserError, match='unfinished'):
      hf_import.Imported(target)
  assert main.main(['convert', 'export', f'--from={folder}', f'--to={tmp_path / "hf"}']) in (0, 2)
  assert (tmp_path / 'hf').exists() == (name == 'tokenizer')
  assert [path.name for path in tmp_path.iterdir() if path.name.endswith('.draft')] == []


def test_usage_errors(folders, tmp_path, capsys):
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'x').write_text('')
  source = f'--from={folders["none"]}'
  for command, message in (
      (['import', f'--to={tmp_path / "a"}'], '--from=DIR is missing'),
      (['import', source], '--to=DIR is missing'),
      (['import', source, f'--to={tmp_path / "full"}'], 'is not empty'),
      (['import', source, f'--to={tmp_path / "a"}', '--dtype=int8'], '--dtype=int8: can be'),
      (['import', source, f'--to={tmp_path / "full" / "x"}'], 'full/x: is no folder'),
      (['import', source, f'--to={tmp_path / "full"}', '--dry_run'], 'is not empty'),
      (['import', source, f'--to={tmp_path / "a"}', '--format=fp8'], 'import: has no --format'),
      (['export', source, f'--to={tmp_path / "a"}', '--dtype=float32'], 'export: has no --dtype'),
      (['verify', source, f'--to={tmp_path / "a"}', '--dry_run'], 'verify: has no --dry_run'),
      (['export', source, f'--to={tmp_path / "full" / "x" / "y"}'], 'full/x: is no folder'),
      (['export', source, f'--to={tmp_path / "a"}', '--shard_gb=inf'], '--shard_gb=inf: must be'),
      (['export', source, f'--to={tmp_path / "a"}', '--shard_gb=nan'], '--shard_gb=nan: must be'),
      (['export', source, f'--to={tmp_path / "a"}', '--stage=cpt'], '--stage=cpt: is for a run'),
      (['export', source, f'--to={tmp_path / "a"}', '--scales_from=b'], '--scales_from=b: is for'),
      (['export', source, f'--to={tmp_path / "full"}'], 'is not empty'),
      (['export', source, f'--to={tmp_path / "a"}', '--format=gguf'], '--format=gguf: can be'),
      (['verify', source, f'--to={tmp_path / "none"}'], 'there is no such folder'),
      (['verify', source, f'--to={tmp_path / "full"}'], 'holds no run'),
      (['frobnicate', source], 'unknown')):
    assert main.main(['convert', *command]) == 2
    assert message in capsys.readouterr().err
  assert not (tmp_path / 'a').exists()
