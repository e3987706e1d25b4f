"""Works against two automatisms: malloc keeps freed memory, and the garbage collector scans long-lived records.

glibc keeps freed memory for later, and under many threads and sizes that is most of a long-lived server's: of 11.8 KiB
per turn after 10,000 turns of 4 KiB, 1.7 were live (docs/LOG.md). The garbage collector scans all that is kept,
again and again. Without glibc, or without CPython, these functions do nothing.
"""

import ctypes
import gc
from array import array
from collections.abc import Callable
from dataclasses import is_dataclass

from msgspec import Struct


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


class _RecordParts(dict[type[object], bool]):
    """Whether a type is part of records, for the types that were met."""

    def __missing__(self, kind: type[object]) -> bool:
        self[kind] = is_part = is_dataclass(kind) or issubclass(kind, Struct)
        return is_part


_IS_PART = _RecordParts(dict.fromkeys((array, dict, list, tuple), True))


def _find_untrack() -> Callable[[object], object]:
    try:
        untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    except AttributeError:
        return lambda one: None
    untrack.argtypes, untrack.restype = [ctypes.py_object], None
    return untrack


_UNTRACK = _find_untrack()


def untrack(record: object) -> None:
    """Take a record, which must be without cycles, out of what the garbage collector scans.

    That stops the whole process for a microsecond per object: 160 ms where 10,000 turns are kept. A record is what is
    reached through containers, dataclasses and structs; what was untracked before is not entered, so a new one costs
    the same whatever it hangs on. References are counted as ever, and free it. Source: CPython's C API,
    `PyObject_GC_UnTrack`.
    """
    is_tracked = gc.is_tracked
    found = [record] if is_tracked(record) else []  # without a header for the garbage collector it may not be touched
    while found:
        for one in found:
            _UNTRACK(one)
        found = [one for one in filter(is_tracked, gc.get_referents(*found)) if _IS_PART[type(one)]]
