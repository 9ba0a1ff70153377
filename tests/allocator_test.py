"""Freed blocks stay in the process."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from composer_jax import allocator
if sys.argv[1] == 'keep':
  assert allocator.keep_freed_memory()
def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  np.ones(2 ** 23)  # 64 MiB, 16384 pages of 4 KiB
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='another C library')
def test_a_large_block_is_not_mapped_anew():
  faults = {how: int(subprocess.run([sys.executable, '-c', CODE, how], capture_output=True,
                                    text=True, check=True).stdout)
            for how in ('keep', 'default')}
  assert faults['keep'] < 20
