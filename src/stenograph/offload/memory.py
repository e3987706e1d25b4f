"""Memory that is free, given back to the system.

glibc keeps freed memory for later, and under many threads and sizes that is most of a long-lived server's: of 11.8 KiB
per turn after 10,000 turns of 4 KiB, 1.7 were live (docs/LOG.md). Elsewhere than with glibc this does nothing.
"""

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[], object]:
    try:
        trim = ctypes.CDLL(None).malloc_trim  # releases the GIL while it runs
    except (AttributeError, OSError):
        return lambda: None
    return lambda: trim(0)


_TRIM = _find_trim()


def trim_memory() -> None:
    """Give free memory back. Takes milliseconds to tens of them: call it on a worker."""
    _TRIM()
