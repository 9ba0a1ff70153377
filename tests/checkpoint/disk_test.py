"""What the checkpoints say, and do not say, of failures."""

import subprocess
import sys

HOOK_UNDER_FIRE = """
import threading
from composer_jax.checkpoint import manager

class Report:
  def __del__(self):
    raise RuntimeError('Event loop is closed')

stop = threading.Event()

def report():
  while not stop.is_set():
    Report()

manager._quiet_orbax()
threads = [threading.Thread(target=report) for _ in range(3)]
for thread in threads:
  thread.start()
for _ in range(30_000):
  with manager._quiet_coroutines():
    pass
stop.set()
for thread in threads:
  thread.join()
"""


def test_reports_from_threads_do_not_meet_a_freed_hook():
  # A hook that was put back while a thread was inside it ended the process (signal 11).
  done = subprocess.run([sys.executable, '-c', HOOK_UNDER_FIRE], stderr=subprocess.DEVNULL,
                        timeout=300)
  assert done.returncode == 0
