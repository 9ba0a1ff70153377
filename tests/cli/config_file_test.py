import json

import ml_collections
import pytest

from composer_jax.cli import config_file
from composer_jax.errors import UserError

CONFIG = '''
import ml_collections
import sibling

def get_config(arg=""):
  c = ml_collections.ConfigDict()
  c.name = "base"
  c.size = arg or sibling.SIZE
  c.rl = ml_collections.ConfigDict({"lr": 0.1, "steps": 5, "on": True, "reference": None})
  c.rl.stages = ("cpt", "sft")
  c.copy_of_lr = c.rl.get_ref("lr")
  return c.lock()
'''


@pytest.fixture
def spec(tmp_path):
  (tmp_path / 'sibling.py').write_text('SIZE = "small"\n')
  (tmp_path / 'base.py').write_text(CONFIG)
  return str(tmp_path / 'base.py')


def test_plain(spec):
  config = config_file.load(spec)
  assert config == {'name': 'base', 'size': 'small', 'copy_of_lr': 0.1,
                    'rl': {'lr': 0.1, 'steps': 5, 'on': True, 'reference': None,
                           'stages': ['cpt', 'sft']}}


def test_argument(spec):
  assert config_file.load(f'{spec}:large')['size'] == 'large'


def test_overrides_keep_their_kind_and_references_follow(spec):
  config = config_file.load(spec, [
      ('name', '007'), ('rl.lr', '3e-4'), ('rl.steps', '9'), ('rl.on', 'false'),
      ('rl.reference', 'sft'), ('rl.stages', 'cpt,rl'), ('rl.new.deep', '[1, 2]')])
  assert config['name'] == '007' and config['copy_of_lr'] == config['rl']['lr'] == 3e-4
  assert config['rl'] == {'lr': 3e-4, 'steps': 9, 'on': False, 'reference': 'sft',
                          'stages': ['cpt', 'rl'], 'new': {'deep': [1, 2]}}


def test_every_override_round_trips_through_json(spec, tmp_path):
  config = config_file.load(spec, [('rl.steps', '9'), ('rl.reference', "'12'"), ('name', 'a=b:c')])
  assert config['rl']['reference'] == '12' and config['name'] == 'a=b:c'
  (tmp_path / 'plain.json').write_text(json.dumps(config))
  (tmp_path / 'run.json').write_text(json.dumps({'config': config, 'fingerprint': 'x',
                                                 'version': {}}))
  assert config_file.load(str(tmp_path / 'plain.json')) == config
  assert config_file.load(str(tmp_path / 'run.json')) == config


@pytest.mark.parametrize(('text', 'current', 'value'), [
    ('1', 2, 1), ('1.5', 2, 1.5), ('x', 2, 'x'), ('True', False, True), ('none', 1, None),
    ('None', 'a', None), ('none', 'a', 'none'), ('[1]', None, [1]), ('3', [1], [3]),
    ('a', ('b',), ['a']), ('1e3', 1.0, 1000.0), ('', 'a', ''), ("{'a': 1}", None, {'a': 1}),
    ('1 +', 1, '1 +'), ('__import__("os")', None, '__import__("os")')])
def test_parse_value(text, current, value):
  got = config_file.parse_value(text, current)
  assert got == value and type(got) is type(value)


@pytest.mark.parametrize(('key', 'text', 'message'), [
    ('rl', '3', 'is a section; set one of its fields'), ('name.x', '1', 'is a value'),
    ('rl..x', '1', 'section.field')])
def test_bad_overrides(spec, key, text, message):
  with pytest.raises(UserError, match=message):
    config_file.load(spec, [(key, text)])


@pytest.mark.parametrize(('source', 'message'), [
    ('x = 1', r'has no get_config'),
    ('def get_config():\n  return {}', 'returned dict'),
    ('def get_config():\n  return 1 / 0', r'bad\.py:2: ZeroDivisionError'),
    ('import no_such_module_here', r'bad\.py:1: ModuleNotFoundError'),
    ('def get_config(:', r'bad\.py:1: SyntaxError')])
def test_bad_files(tmp_path, source, message):
  (tmp_path / 'bad.py').write_text(source)
  with pytest.raises(UserError, match=message):
    config_file.load(str(tmp_path / 'bad.py'))


def test_argument_that_is_not_taken(tmp_path):
  (tmp_path / 'c.py').write_text('def get_config():\n  pass')
  with pytest.raises(UserError, match='takes no argument'):
    config_file.load(f'{tmp_path}/c.py:x')


def test_bad_json(tmp_path):
  (tmp_path / 'c.json').write_text('{')
  with pytest.raises(UserError, match='is not JSON'):
    config_file.load(str(tmp_path / 'c.json'))


def test_override_of_a_plain_config():
  base = {'rl': {'lr': 0.1, 'q': None}}
  changed = config_file.override(base, {'rl.lr': 0.2, 'rl.q': {'a': 1}, 'seed': 3})
  assert changed == {'rl': {'lr': 0.2, 'q': {'a': 1}}, 'seed': 3}
  assert base == {'rl': {'lr': 0.1, 'q': None}}
  assert not isinstance(changed['rl'], ml_collections.ConfigDict)


def test_a_mapping_replaces_a_whole_section():
  base = {'cpt': {'steps': 9, 'mixture': {'code': 0.6, 'functions': 0.4}}}
  changed = config_file.override(base, {'cpt.mixture': {'code': 1.0}})
  assert changed == {'cpt': {'steps': 9, 'mixture': {'code': 1.0}}}
  assert base['cpt']['mixture'] == {'code': 0.6, 'functions': 0.4}


def test_imports_from_a_folder_beside_its_own(tmp_path):
  (tmp_path / 'base_configs').mkdir()
  (tmp_path / 'base_configs' / 'small.py').write_text('SIZE = 3\n')
  (tmp_path / 'ablations').mkdir()
  (tmp_path / 'ablations' / 'a.py').write_text(
      'import ml_collections\nfrom base_configs import small\n'
      'def get_config():\n  return ml_collections.ConfigDict({"size": small.SIZE})\n'
      'def get_sweep():\n  for n in (1, 2):\n    yield {"size": n}\n')
  path = tmp_path / 'ablations' / 'a.py'
  assert config_file.load(str(path)) == {'size': 3}
  assert config_file.call_get_sweep(config_file.load_module(path)) == [{'size': 1}, {'size': 2}]


@pytest.mark.parametrize(('source', 'message'), [
    ('x = 1', 'has no get_sweep'), ('def get_sweep():\n  yield 1 / 0', r's\.py:2: ZeroDivision'),
    ('def get_sweep():\n  return [("a", 1)]', 'yields dicts of overrides'),
    ('def get_sweep():\n  return [{3: 3}]', 'yields dicts of overrides')])
def test_bad_sweeps(tmp_path, source, message):
  (tmp_path / 's.py').write_text(source)
  with pytest.raises(UserError, match=message):
    config_file.call_get_sweep(config_file.load_module(tmp_path / 's.py'))
