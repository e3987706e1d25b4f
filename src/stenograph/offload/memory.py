"""Works against two automatisms: malloc keeps freed memory, and the garbage collector scans long-lived records.

glibc keeps freed memory for later, and under many threads and sizes this is most of a long-lived server's: of 11.8 KiB
per turn after 10,000 turns of 4 KiB, 1.7 were live (docs/LOG.md). The garbage collector scans all kept records, again
and again. Without glibc, or without CPython, these functions do nothing.
"""

import ctypes
import gc
from collections.abc import Callable, Iterable


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


def _find_untrack() -> Callable[[object], object]:
    try:
        untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    except AttributeError:
        return lambda one: None
    untrack.argtypes, untrack.restype = [ctypes.py_object], None
    return untrack


_UNTRACK = _find_untrack()


def untrack(parts: Iterable[object]) -> None:
    """Take the parts of a record, which must be without cycles, out of the garbage collector's scans.

    A scan stops the whole process for a microsecond per object: 160 ms where 10,000 turns are kept. Objects referred to
    by its parts are left alone. References are counted as ever, and free it. Source: CPython's C API,
    `PyObject_GC_UnTrack`.
    """
    for one in filter(gc.is_tracked, parts):  # another one may have no header for the garbage collector
        _UNTRACK(one)
