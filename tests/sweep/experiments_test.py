"""The sweeps of `experiments/`: every trial is a valid recipe, and differs where it should."""

import pathlib

import pytest

from composer_jax.cli import config_file
from composer_jax.config import as_dict
from composer_jax.recipe import checks, schema, stages
from composer_jax.sweep import trials

FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'experiments'
# File -> number of trials, and the first stage that the trials do not share.
SWEEPS = {'ablations/cpt_amount.py': (3, 'cpt'), 'ablations/length_penalty.py': (5, 'rl'),
          'ablations/mixture.py': (3, 'cpt'), 'ablations/precision.py': (4, 'cpt'),
          'tiny/composer2_seeds.py': (3, 'data')}


def recipes(file):
  """Returns the recipe of every trial."""
  path = FOLDER / file
  planned = trials.expand(
      config_file.load(str(path)), config_file.call_get_sweep(config_file.load_module(path)),
      lambda base, changes: as_dict(schema.resolve(config_file.override(base, changes))))
  return [schema.resolve(trial.config) for trial in planned]


def test_every_sweep_is_listed():
  files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob('*.py')
           if 'def get_sweep' in path.read_text()}
  assert files == SWEEPS.keys()


@pytest.mark.parametrize('file', SWEEPS)
def test_trials_are_valid_and_share_the_stages_before_what_they_change(file):
  found = recipes(file)
  count, first = SWEEPS[file]
  assert len(found) == count
  for recipe in found:
    checks.check(recipe)
  prints = [stages.fingerprints(recipe) for recipe in found]
  differing = [stage for stage in schema.STAGES if len({p[stage] for p in prints}) == count]
  shared = [stage for stage in schema.STAGES if len({p[stage] for p in prints}) == 1]
  assert [*shared, *differing] == list(schema.STAGES) and differing[0] == first


def test_mixtures():
  real, functions, both = (recipe.cpt.mixture for recipe in recipes('ablations/mixture.py'))
  assert real.keys() == {'stdlib', 'packages'} and functions.keys() == {'functions'}
  assert both == schema.resolve(config_file.load(str(FOLDER / 'tiny' / 'composer2.py'))).cpt.mixture
  assert both.keys() == real.keys() | functions.keys()
  assert real['stdlib'] / real['packages'] == both['stdlib'] / both['packages']
  for recipe in recipes('ablations/mixture.py'):
    assert recipe.long_context.mixture == recipe.cpt.mixture
