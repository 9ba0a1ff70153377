import dataclasses
import json
from typing import Any, Literal

import ml_collections
import pytest

from composer_jax.config import as_dict, build, fingerprint, nearest
from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rope:
  factor: float
  mscale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Section:
  steps: int = 10
  lr: float = 1e-3
  name: str = 'adamw'
  schedule: Literal['linear', 'cosine'] = 'linear'
  rope: Rope | None = None
  limit: int | str = 'auto'
  verbose: bool = False
  widths: tuple[int, ...] = (1, 2)
  betas: tuple[float, float] = (0.9, 0.95)
  names: list[str] = dataclasses.field(default_factory=list)
  weights: dict[str, float] = dataclasses.field(default_factory=dict)
  extra: Any = None

  def __post_init__(self):
    if self.steps < 0:
      raise ValueError('steps must not be negative')


@dataclasses.dataclass(frozen=True)
class Config:
  train: Section = Section()
  seed: int = 0


def test_defaults_and_values():
  config = build(Config, {'train': {'steps': 3, 'rope': {'factor': 4}}, 'seed': 7})
  assert config.train.steps == 3 and config.seed == 7
  assert config.train.rope == Rope(4.0) and isinstance(config.train.rope.factor, float)
  assert config.train.schedule == 'linear'


def test_config_dict_gives_the_same():
  mapping = {'train': {'steps': 3, 'widths': (4, 5, 6), 'weights': {'a': 1}}, 'seed': 7}
  assert build(Config, ml_collections.ConfigDict(mapping)) == build(Config, mapping)


@pytest.mark.parametrize(('mapping', 'message'), [
    ({'trian': {}}, r'config\.trian: unknown key \(did you mean train\?\)'),
    ({'train': {'step': 1}}, r'config\.train\.step: unknown key \(did you mean steps\?\)'),
    ({'train': {'qqqq': 1}}, r'config\.train\.qqqq: unknown key \(there are: betas, extra'),
    ({'train': {'rope': {'facto': 1}}}, r'config\.train\.rope\.facto.*did you mean factor'),
    ({'train': {'rope': {}}}, r'config\.train\.rope\.factor: missing'),
    ({'train': {'steps': 'many'}}, r"config\.train\.steps: expected int, got str 'many'"),
    ({'train': {'steps': 1.5}}, r'config\.train\.steps: expected int, got float 1\.5'),
    ({'train': {'steps': True}}, r'config\.train\.steps: expected int, got bool'),
    ({'train': {'steps': None}}, r'config\.train\.steps: expected int, got NoneType'),
    ({'train': {'lr': True}}, r'config\.train\.lr: expected float, got bool'),
    ({'train': {'lr': float('nan')}}, r'config\.train\.lr: .*nan'),
    ({'train': {'verbose': 1}}, r'config\.train\.verbose: expected bool'),
    ({'train': {'name': 3}}, r'config\.train\.name: expected str'),
    ({'train': {'schedule': 'step'}}, r"config\.train\.schedule: 'step' is not one of 'linear'"),
    ({'train': {'widths': 'abc'}}, r'config\.train\.widths: expected a list'),
    ({'train': {'widths': [1, 'x']}}, r'config\.train\.widths\[1\]: expected int'),
    ({'train': {'betas': [0.9]}}, r'config\.train\.betas: expected 2 values, got 1'),
    ({'train': {'weights': {'a': 'x'}}}, r'config\.train\.weights\.a: expected float'),
    ({'train': {'weights': [1]}}, r'config\.train\.weights: expected a mapping'),
    ({'train': 3}, r'config\.train: expected a section, got int'),
    ({'train': {'limit': 1.5}}, r'config\.train\.limit: expected str, got float'),
    ({'train': {'steps': -1}}, r'config\.train: steps must not be negative'),
])
def test_mistakes_are_named(mapping, message):
  with pytest.raises(UserError, match=message) as caught:
    build(Config, mapping)
  assert '\n' not in str(caught.value)


def test_unions():
  assert build(Section, {'limit': 3}).limit == 3
  assert build(Section, {'limit': 'none'}).limit == 'none'
  assert build(Section, {'rope': None}).rope is None


def test_round_trip_through_json():
  config = build(Config, {'train': {'rope': {'factor': 2.0}, 'widths': [3], 'names': ['a'],
                                    'weights': {'b': 2}, 'extra': {'x': [1, {'y': None}]}}})
  again = build(Config, json.loads(json.dumps(as_dict(config))))
  assert again == config
  assert fingerprint(again) == fingerprint(config)


def test_every_field_changes_the_fingerprint():
  changes = {'steps': 11, 'lr': 2e-3, 'name': 'x', 'schedule': 'cosine', 'rope': {'factor': 1.0},
             'limit': 2, 'verbose': True, 'widths': [9], 'betas': [0.1, 0.2], 'names': ['n'],
             'weights': {'w': 1.0}, 'extra': 1}
  assert changes.keys() == {f.name for f in dataclasses.fields(Section)}
  prints = {fingerprint(build(Section, {key: value})) for key, value in changes.items()}
  assert len(prints | {fingerprint(Section())}) == len(changes) + 1


def test_fingerprint_ignores_order_and_container_kind():
  assert fingerprint({'a': 1, 'b': (1, 2)}) == fingerprint({'b': [1, 2], 'a': 1})
  assert len(fingerprint({})) == 12


def test_text_is_a_list_where_one_is_wanted():
  assert build(Section, {'names': 'a, b'}).names == ['a', 'b']
  assert build(Section, {'names': 'a'}).names == ['a']
  with pytest.raises(UserError, match=r"widths\[0\]: expected int, got str '1'"):
    build(Section, {'widths': '1,2'})  # numbers are no text


def test_mappings_have_one_order():
  section = build(Section, {'weights': {'b': 1.0, 'a': 2.0}})
  assert list(section.weights) == ['a', 'b']

  @dataclasses.dataclass(frozen=True)
  class Outer:
    inner: Section = Section(weights={'b': 1.0, 'a': 2.0})
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {'d': 1.0, 'c': 2.0})

  outer = build(Outer, {})
  assert list(outer.inner.weights) == ['a', 'b'] and list(outer.weights) == ['c', 'd']


def test_nearest():
  assert nearest('stpes', ['steps', 'lr']) == ' (did you mean steps?)'
  assert nearest('zzz', ['steps', 'lr']) == ' (there are: lr, steps)'
