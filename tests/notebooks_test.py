"""The notebooks run from top to bottom on a finished run."""

import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'notebooks'
NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))


def test_there_are_three():
  assert [path.name for path in NOTEBOOKS] == [
      '01_model_tour.ipynb', '02_one_token.ipynb', '03_reading_a_run.ipynb']


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert not any(cell.outputs or cell.execution_count for cell in code)
  assert code[0].source.startswith('RUN = ')


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, smoke_run, command_line, monkeypatch):
  for name in ('JAX_PLATFORMS', 'XLA_FLAGS'):
    monkeypatch.setenv(name, command_line.environment[name])
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(smoke_run / '.xla'))
  notebook = nbformat.read(path, as_version=4)
  first = next(cell for cell in notebook.cells if cell.cell_type == 'code')
  first.source = f'RUN = {str(smoke_run)!r}'
  client = nbclient.NotebookClient(notebook, timeout=300, kernel_name='python3',
                                   resources={'metadata': {'path': str(FOLDER)}})
  client.execute()
  outputs = [o for cell in notebook.cells if cell.cell_type == 'code' for o in cell.outputs]
  assert not [o for o in outputs if o.output_type == 'error']
  warnings = [o.text for o in outputs if o.output_type == 'stream' and o.name == 'stderr']
  assert not warnings
