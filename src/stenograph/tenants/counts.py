"""Counts by tenant for all workers of a server: each writes a file of its own, mapped by all.

A row has the tenant's tag and four counts. Nothing is locked: each row has one writer.
"""

import contextlib
import mmap
import os
from pathlib import Path

IN_FLIGHT, SAMPLED, STORED, SESSIONS = 1, 2, 3, 4
_COLUMNS = 5
_ROWS = 4096
"""Most tenants of a worker's life."""
_BYTES = _ROWS * _COLUMNS * 8


class TenantCounts:
    """The counts of this process, and the sums of those of the others."""

    def __init__(self, folder: Path | None, number: int) -> None:
        """All workers have their files in `folder`; None: there are no others."""
        self._folder = folder
        self._own_name = f"counts-{number}"
        self._own = memoryview(bytearray(_BYTES)) if folder is None else _mapped(folder / self._own_name)
        self._own[:] = bytes(_BYTES)
        self._own = self._own.cast("q")
        self._rows: dict[str, int] = {}
        self._others: dict[str, memoryview] = {}

    def __repr__(self) -> str:
        return f"<TenantCounts of {len(self._rows)} tenants, {len(self._others)} other processes>"

    def own(self, tag: str, column: int) -> int:
        """A count of this process."""
        return self._own[self._row(tag) + column]

    def add(self, tag: str, column: int, num: int) -> None:
        """Add to a count of this process."""
        self._own[self._row(tag) + column] += num

    def put(self, tag: str, column: int, num: int) -> None:
        """Set a count of this process."""
        self._own[self._row(tag) + column] = num

    def of_all(self, tag: str, column: int) -> int:
        """The sum of a count of all processes."""
        return self.own(tag, column) + sum(_found(counts, int(tag, 16), column) for counts in self._others.values())

    def find_others(self) -> None:
        """Map the files of new workers."""
        if self._folder is None:
            return
        for path in self._folder.glob("counts-*"):
            if path.name != self._own_name and path.name not in self._others:
                with contextlib.suppress(OSError):
                    self._others[path.name] = _mapped(path).cast("q")

    def _row(self, tag: str) -> int:
        """The place of a tenant's row."""
        if tag not in self._rows:
            at = self._rows[tag] = (len(self._rows) % _ROWS) * _COLUMNS
            self._own[at : at + _COLUMNS] = memoryview(bytearray(_COLUMNS * 8)).cast("q")
            self._own[at] = int(tag, 16)
        return self._rows[tag]


def _found(counts: memoryview, tag: int, column: int) -> int:
    for at in range(0, len(counts), _COLUMNS):
        if counts[at] == tag:
            return int(counts[at + column])
        if counts[at] == 0:
            break
    return 0


def _mapped(path: Path) -> memoryview:
    """A file of counts, made if it is not there, and never made shorter: others have it mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < _BYTES:
            os.ftruncate(descriptor, _BYTES)
        return memoryview(mmap.mmap(descriptor, _BYTES))
    finally:
        os.close(descriptor)
