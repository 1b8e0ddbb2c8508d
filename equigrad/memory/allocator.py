"""What becomes of freed memory."""

import ctypes
from contextlib import suppress


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory instead of returning it to the system after every large tensor.

    Otherwise each big activation costs its page faults again in every step. Only glibc knows these options; elsewhere
    this does nothing.
    """
    trim_threshold, mmap_threshold = -1, -3
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)
