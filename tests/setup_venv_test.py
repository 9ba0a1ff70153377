"""`.ci/venv` on machines that are not as one would like, with stand-ins for Python and pip."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Answers the version check with $OK, makes a venv that holds itself, and logs what pip is told;
# `pip install` fails while the file `broken` is there.
STAND_IN = '''#!/bin/bash
case "$1 $2" in
  "-c "*) exit {check} ;;
  "--version "*) echo "Python {version}" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv {version}" >> "{log}" ;;
  "-m pip")
    [ "$3" = install ] || exit 0
    echo "pip ${{@:4}}" >> "{log}"
    [ ! -e "{broken}" ] ;;
esac
'''


class Machine:
  """A folder with the project's script, and a PATH and a HOME of its own."""

  def __init__(self, folder: Path):
    self.project, self.bin, self.home = folder / 'project', folder / 'bin', folder / 'home'
    for path in (self.project / '.ci', self.bin, self.home):
      path.mkdir(parents=True)
    shutil.copy(ROOT / '.ci' / 'venv', self.project / '.ci' / 'venv')
    (self.project / 'setup.py').write_text('one')
    self.log, self.broken = folder / 'log', folder / 'broken'
    for tool in ('bash', 'cat', 'cksum', 'rm', 'touch', 'mkdir', 'cp', 'dirname', 'env'):
      (self.bin / tool).symlink_to(shutil.which(tool))

  def python(self, path: Path, version: str) -> None:
    """Puts a stand-in at a path; versions below 3.12 fail the check."""
    path.parent.mkdir(parents=True, exist_ok=True)
    minor = int(version.split('.')[1])
    path.write_text(STAND_IN.format(check=int(minor < 12), version=version, log=self.log,
                                    broken=self.broken))
    path.chmod(0o755)

  def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs the script."""
    return subprocess.run([self.project / '.ci' / 'venv', *arguments], cwd='/',
                          capture_output=True, text=True, check=False,
                          env={'PATH': str(self.bin), 'HOME': str(self.home), **environment})

  def steps(self) -> list[str]:
    """What has been done since the last call."""
    lines = self.log.read_text().splitlines() if self.log.exists() else []
    self.log.unlink(missing_ok=True)
    return [line.split()[0] + ' ' + line.split()[-1] for line in lines]


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


def test_no_python(machine):
  done = machine.run()
  assert done.returncode != 0 and done.stderr.count('\n') == 1
  assert 'needs Python >= 3.12' in done.stderr and not (machine.project / '.venv').exists()


def test_only_an_older_python(machine):
  machine.python(machine.bin / 'python3', '3.11.7')
  assert 'needs Python >= 3.12' in machine.run().stderr


def test_older_python_first_on_the_path_and_a_shim_that_fails(machine):
  machine.python(machine.bin / 'python3', '3.11.7')
  machine.python(machine.bin / 'python3.12', '3.11.0')  # stands for a shim: there, but failing
  machine.python(machine.bin / 'python3.13', '3.13.0')
  done = machine.run()
  assert done.returncode == 0, done.stderr
  assert machine.steps() == ['venv 3.13.0', 'pip .[dev]']


@pytest.mark.parametrize('where', ['home', 'root'])
def test_python_under_pyenv_only(machine, tmp_path, where):
  root = machine.home / '.pyenv' if where == 'home' else tmp_path / 'elsewhere'
  machine.python(root / 'versions' / '3.11.7' / 'bin' / 'python3', '3.11.7')
  machine.python(root / 'versions' / '3.12.1' / 'bin' / 'python3', '3.12.1')
  machine.python(machine.bin / 'python3', '3.11.7')
  done = machine.run(**({} if where == 'home' else {'PYENV_ROOT': str(root)}))
  assert done.returncode == 0, done.stderr
  assert machine.steps() == ['venv 3.12.1', 'pip .[dev]']


def test_installs_again_only_when_setup_changed(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  assert machine.run().returncode == 0 and machine.steps() == ['venv 3.12.1', 'pip .[dev]']
  assert machine.run().returncode == 0 and machine.steps() == []
  (machine.project / 'setup.py').write_text('two')
  assert machine.run().returncode == 0 and machine.steps() == ['pip .[dev]']


def test_a_moved_project_installs_again(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  machine.run()
  machine.steps()
  moved = machine.project.rename(machine.project.with_name('moved'))
  machine.project = moved
  assert machine.run().returncode == 0 and machine.steps() == ['pip .[dev]']


def test_an_interrupted_install_starts_over(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  machine.broken.touch()
  assert machine.run().returncode != 0
  machine.steps()
  (machine.project / '.venv' / 'half').touch()
  machine.broken.unlink()
  assert machine.run().returncode == 0
  assert machine.steps() == ['venv 3.12.1', 'pip .[dev]']
  assert not (machine.project / '.venv' / 'half').exists()


def test_a_venv_without_python_starts_over(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  (machine.project / '.venv' / 'bin').mkdir(parents=True)
  assert machine.run().returncode == 0
  assert machine.steps() == ['venv 3.12.1', 'pip .[dev]']


def test_a_venv_of_an_older_python_starts_over(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  machine.python(machine.project / '.venv' / 'bin' / 'python', '3.11.7')
  assert machine.run().returncode == 0
  assert machine.steps() == ['venv 3.12.1', 'pip .[dev]']


def test_compilers_are_installed_once_and_only_when_asked_for(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  assert machine.run('aot').returncode == 0
  assert machine.steps() == ['venv 3.12.1', 'pip .[dev]', 'pip libtpu']
  assert machine.run('aot').returncode == 0 and machine.steps() == []


def test_an_interrupted_install_of_the_compilers_starts_over(machine):
  machine.python(machine.bin / 'python3', '3.12.1')
  machine.run()
  machine.steps()
  machine.broken.touch()
  assert machine.run('aot').returncode != 0 and machine.steps() == ['pip libtpu']
  machine.broken.unlink()
  assert machine.run('aot').returncode == 0 and machine.steps() == ['pip libtpu']
  assert machine.run('aot').returncode == 0 and machine.steps() == []
