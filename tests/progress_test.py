import pytest

from composer_jax import progress as progress_lib


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(progress_lib.time, 'monotonic', lambda: now[0])
  return now


def test_plain_lines_at_most_every_five_seconds(clock, capsys):
  with progress_lib.progress(100, 'cpt') as bar:
    for _ in range(100):
      clock[0] += 0.25
      bar.update(loss=2.34567, tokens=12)
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 6  # at 0.25, 5.25, ... 20.25 seconds, and at the end
  assert lines[-1] == 'cpt: 100/100  0:25 gone, 0:00 left  loss 2.346  tokens 12'


def test_time_left_counts_only_steps_done_now(clock):
  with progress_lib.progress(100, 'cpt', initial=50) as bar:
    clock[0] += 10
    bar.update(5)
    assert bar.done == 55
    assert bar.left_s() == pytest.approx(45 * 10 / 5)


def test_the_first_of_many_steps_tells_no_time_left(clock):
  with progress_lib.progress(100, 'cpt') as bar:
    clock[0] += 20
    bar.update(2)
    assert bar.left_s() is None
    bar.update(1)
    assert bar.left_s() == pytest.approx(97 * 20 / 3)


def test_the_end_is_shown_once(clock, capsys):
  with progress_lib.progress(1, 'x') as bar:
    bar.update()
  assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_end_is_shown_after_an_error(clock, capsys):
  with pytest.raises(RuntimeError), progress_lib.progress(10, 'x') as bar:
    bar.update()
    clock[0] += 1
    bar.update()
    raise RuntimeError
  assert capsys.readouterr().err.splitlines()[-1].startswith('x: 2/10')


def test_unknown_total(clock, capsys):
  with progress_lib.progress(None, 'files') as bar:
    clock[0] += 3
    bar.update(7)
  assert capsys.readouterr().err == 'files: 7  0:03 gone\n'
