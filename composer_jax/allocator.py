"""Keeps the C allocator of a long-running process from handing its memory back after every use.

XLA on CPU allocates the temporary memory of a whole training step as one block and frees it after.
glibc maps such a block anew each time, from one worker thread's arena, and the kernel clears every
page again: a fifth of the time of a small model's step.
"""

import ctypes

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP_BELOW = 2 ** 31 - 1  # bytes; the largest value that fits the argument


def keep_freed_memory() -> bool:
  """Tells glibc to keep freed blocks for the next allocation, for the rest of the process.

  Blocks come from the one heap that can grow without bound, not from mappings of their own, and
  the heap is not cut when its end is free. The process then holds its peak. To be called before
  other threads allocate.

  Returns:
    Whether it took effect: not where the C library is another one, which is left as it is.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):
    return False
  mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
  return bool(mallopt(_M_ARENA_MAX, 1) and mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW)
              and mallopt(_M_TRIM_THRESHOLD, _KEEP_BELOW))
