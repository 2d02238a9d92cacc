"""The host memory of this process."""

from __future__ import annotations

import ctypes

_C_LIBRARY = ctypes.CDLL(None)


def return_free_memory() -> None:
    """Give the heap's free pages back to the system, as far as the C library can (glibc).

    Freed arrays of less than 32 MiB stay with the process otherwise, wherever they lie below one in
    use.
    """
    malloc_trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
