"""Sweeps with a runner that writes results instead of training."""

import json
import multiprocessing
import os

import pytest

from composer_jax.cli import config_file
from composer_jax.errors import InfrastructureError, UserError
from composer_jax.recipe.workdir import exclusive
from composer_jax.sweep import runner, trials

BASE = {'rl': {'q': 1.0, 'steps': 5}, 'seed': 0}


def _resolve(config, overrides):
  for key in overrides:
    if key not in ('rl.q', 'rl.steps', 'seed'):
      raise UserError(f'config.{key}: unknown key')
  return config_file.override(config, overrides)


def _expand(*sweep):
  return trials.expand(BASE, sweep, _resolve)


class Fake:
  """A runner that records its calls and fails where it is told to."""

  def __init__(self, fail=()):
    self.calls, self.adopted, self.fail = [], [], set(fail)

  def run(self, config_path, folder):
    config = json.loads(config_path.read_text())
    self.calls.append(config)
    if config['seed'] in self.fail:
      return 1, 'boom on line 3\n'
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps({'config': config}))
    (folder / 'results.json').write_text(json.dumps({
        'stages': {}, 'wall_s': 1.0,
        'eval': {'rl': {'pass_at_1': 0.5, 'ci95': [0.4, 0.6], 'tasks': 3}}}))
    return 0, ''

  def adopt(self, config, folder, siblings):
    self.adopted.append((config['seed'], folder.name, sorted(p.name for p in siblings)))


def _sweep(planned, workdir, fake):
  return runner.run_sweep(planned, workdir, fake.run, fake.adopt)


def test_sixteen_trials_two_of_them_equal():
  sweep = [{'seed': n} for n in range(15)] + [{'seed': 3}]
  with pytest.raises(UserError, match=r'trials 4 and 16 are equal: seed=3 and seed=3'):
    _expand(*sweep)
  assert len({trial.id for trial in _expand(*sweep[:15])}) == 15


def test_equal_by_content_not_by_wording():
  with pytest.raises(UserError, match=r'equal: \(base config\) and rl\.q=1\.0'):
    _expand({}, {'rl.q': 1.0})


def test_ids_do_not_depend_on_order():
  first, second = _expand({'seed': 1, 'rl.q': 2.0}), _expand({'rl.q': 2.0, 'seed': 1})
  assert first[0].id == second[0].id and len(first[0].id) == 12


def test_mistakes_are_known_before_the_first_trial():
  with pytest.raises(UserError, match=r'trial 2: config\.rl\.qq: unknown key'):
    _expand({'seed': 1}, {'rl.qq': 1})
  with pytest.raises(UserError, match='no trials'):
    _expand()


def test_runs_every_trial_in_a_folder_of_its_own(tmp_path):
  planned, fake = _expand(*({'seed': n} for n in range(4))), Fake()
  outcome = _sweep(planned, tmp_path / 's', fake)
  assert outcome == {'finished': [t.id for t in planned], 'failed': [], 'skipped': []}
  assert [c['seed'] for c in fake.calls] == [0, 1, 2, 3]
  folders = [p.name for p in (tmp_path / 's' / 'trials').iterdir() if p.is_dir()]
  assert sorted(folders) == sorted(t.id for t in planned)
  page = (tmp_path / 's' / 'report.html').read_text()
  assert all(t.id in page for t in planned) and '0.400 – 0.600' in page


def test_offers_the_stages_of_trials_before(tmp_path):
  planned, fake = _expand(*({'seed': n} for n in range(3))), Fake()
  _sweep(planned, tmp_path / 's', fake)
  ids = [t.id for t in planned]
  assert fake.adopted == [(0, ids[0], []), (1, ids[1], ids[:1]), (2, ids[2], sorted(ids[:2]))]


def test_resume_skips_finished_and_retries_failed(tmp_path):
  planned = _expand(*({'seed': n} for n in range(4)))
  fake = Fake(fail=[1])
  with pytest.raises(InfrastructureError, match=f'1 of 4 trials failed .{planned[1].id}'):
    _sweep(planned, tmp_path / 's', fake)
  assert len(fake.calls) == 4  # a failure does not stop the others
  record = json.loads((tmp_path / 's' / 'sweep.json').read_text())['trials']
  assert [t['status'] for t in record] == ['finished', 'failed', 'finished', 'finished']
  assert 'exit code 1' in record[1]['error'] and 'boom on line 3' in record[1]['error']
  assert 'boom on line 3' in (tmp_path / 's' / 'report.html').read_text()

  again = Fake()
  outcome = _sweep(planned, tmp_path / 's', again)
  assert [c['seed'] for c in again.calls] == [1]
  assert outcome['finished'] == [planned[1].id] and len(outcome['skipped']) == 3
  record = json.loads((tmp_path / 's' / 'sweep.json').read_text())['trials']
  assert record[1] == planned[1].as_json() | {'status': 'finished', 'error': None}


def test_a_trial_whose_results_are_gone_runs_again(tmp_path):
  planned = _expand({'seed': 1})
  _sweep(planned, tmp_path / 's', Fake())
  (tmp_path / 's' / 'trials' / planned[0].id / 'results.json').unlink()
  fake = Fake()
  _sweep(planned, tmp_path / 's', fake)
  assert len(fake.calls) == 1


def test_a_longer_sweep_keeps_the_former_trials(tmp_path):
  _sweep(_expand({'seed': 1}), tmp_path / 's', Fake())
  fake = Fake()
  _sweep(_expand({'seed': 1}, {'seed': 2}), tmp_path / 's', fake)
  assert [c['seed'] for c in fake.calls] == [2]


@pytest.mark.parametrize('code', [130, 143, -2, -15])  # 143: a stage that saved after SIGTERM
def test_interruption_stops_the_sweep(tmp_path, code):
  calls = []
  def interrupted(config_path, folder):
    calls.append(folder)
    return code, ''
  with pytest.raises(KeyboardInterrupt):
    runner.run_sweep(_expand({'seed': 1}, {'seed': 2}), tmp_path / 's', interrupted, Fake().adopt)
  assert len(calls) == 1
  record = json.loads((tmp_path / 's' / 'sweep.json').read_text())['trials']
  assert record[0]['status'] == 'planned'


def test_one_sweep_at_a_time_in_a_folder(tmp_path):
  (tmp_path / 's').mkdir()
  with exclusive(tmp_path / 's'):
    with pytest.raises(UserError, match='another process is running there'):
      _sweep(_expand({'seed': 1}), tmp_path / 's', Fake())


def _try_lock(folder, queue):
  try:
    runner.run_sweep(_expand({'seed': 1}), folder, Fake().run, Fake().adopt)
    queue.put('ran')
  except UserError as error:
    queue.put(str(error))
  finally:
    queue.close()


def test_the_lock_holds_between_processes(tmp_path):
  (tmp_path / 's').mkdir()
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  with exclusive(tmp_path / 's'):
    process = context.Process(target=_try_lock, args=(tmp_path / 's', queue))
    process.start()
    assert 'another process' in queue.get(timeout=60)
    process.join()


def test_not_in_the_folder_of_a_run(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(UserError, match='folder of a run'):
    _sweep(_expand({'seed': 1}), tmp_path, Fake())
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='is not a folder'):
    _sweep(_expand({'seed': 1}), tmp_path / 'file', Fake())


def test_a_subprocess_reports_its_code_and_its_last_lines(tmp_path, capsys):
  config = tmp_path / 'c.json'
  config.write_text('not json')
  code, tail = runner.run_in_subprocess(config, tmp_path / 'w')
  assert code == 2 and 'is not JSON' in tail
  assert 'is not JSON' in capsys.readouterr().err
  assert not os.path.exists(tmp_path / 'w')
