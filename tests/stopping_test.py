import os
import signal
import threading

import pytest

from composer_jax.stopping import Stopped, sigterm_unwinds, stop_requests

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_stay():
  before = [signal.getsignal(number) for number in SIGNALS]
  yield
  assert [signal.getsignal(number) for number in SIGNALS] == before


def send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', SIGNALS)
def test_a_request_is_seen_and_raised_at_the_end(number):
  looks = []
  with pytest.raises(Stopped) as stop, stop_requests() as asked:
    looks.append(asked())
    send(number)
    looks.append(asked())
  assert looks == [False, True]
  assert stop.value.code == 128 + number and stop.value.signal == number


def test_nobody_asked():
  with stop_requests() as asked:
    assert not asked()


def test_the_second_signal_interrupts():
  with pytest.raises(KeyboardInterrupt), stop_requests():
    send(signal.SIGTERM)
    send(signal.SIGINT)


def test_an_error_of_the_block_is_the_one_to_report():
  with pytest.raises(OSError, match='disk'), stop_requests():
    send(signal.SIGTERM)
    raise OSError('disk')


@pytest.mark.parametrize('context', [stop_requests, sigterm_unwinds])
def test_threads_are_left_alone(context):
  seen = []

  def work():
    with context():
      seen.append(signal.getsignal(signal.SIGTERM))

  before = signal.getsignal(signal.SIGTERM)
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [before]


def test_sigterm_unwinds_the_block():
  closed = []
  with pytest.raises(Stopped) as stop, sigterm_unwinds():
    try:
      send(signal.SIGTERM)
      signal.pause()
    finally:
      closed.append(True)
  assert closed and stop.value.code == 143
