"""A disk below SQLite whose calls can fail, fall short, or be dropped, and that forgets what was not synced: a VFS.

Files are in memory. `FaultyDisk.connect` makes a store's connection to them; `write_out` makes files of what a process
that ends leaves behind, or a loss of power, for the standard library's SQLite to open.
"""

# ruff: noqa: N802  (SQLite calls these names)

import contextlib
import enum
import itertools
import os
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from stenograph.store.folder import RESERVE_NAME

from .power import Write, apply, survivors

POWERSAFE_OVERWRITE = apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE
"""A write harms no byte beside it, as SQLite takes for granted on Linux."""


class Fault(enum.StrEnum):
    """What becomes of a call. `FULL` lasts until the room that a folder keeps has been given up."""

    FAILS = "fails"
    FAILS_FROM_NOW_ON = "fails from now on"
    FULL = "disk full, once"
    FULL_FROM_NOW_ON = "disk full from now on"
    SHORT_READ = "a short read"
    SHORT_WRITE = "a short write, then an error"
    SYNC_FAILS = "a sync that fails"
    SYNC_DROPPED = "a sync that did nothing"
    WRITE_DROPPED = "a write that did nothing"


CALLS: dict[Fault, frozenset[str]] = {
    Fault.FULL: frozenset({"write"}),
    Fault.FULL_FROM_NOW_ON: frozenset({"write"}),
    Fault.SHORT_READ: frozenset({"read"}),
    Fault.SHORT_WRITE: frozenset({"write"}),
    Fault.SYNC_FAILS: frozenset({"sync"}),
    Fault.SYNC_DROPPED: frozenset({"sync"}),
    Fault.WRITE_DROPPED: frozenset({"write", "truncate", "delete"}),
}
"""The calls that a fault can befall; for the others every one."""

_CODES = {
    "open": apsw.SQLITE_CANTOPEN,
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "size": apsw.SQLITE_IOERR_FSTAT,
    "delete": apsw.SQLITE_IOERR_DELETE,
    "exists": apsw.SQLITE_IOERR_ACCESS,
    "lock": apsw.SQLITE_IOERR_LOCK,
}


class Content:
    """A file's bytes as they are read, and as they are on the disk but for the writes that were not synced."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.synced = bytearray()
        self.unsynced: list[Write] = []

    def write(self, offset: int, data: bytes) -> None:
        self.now.extend(bytes(max(0, offset - len(self.now))))
        self.now[offset : offset + len(data)] = data
        self.unsynced.append((offset, data))

    def truncate(self, size: int) -> None:
        del self.now[size:]
        self.now.extend(bytes(size - len(self.now)))
        self.unsynced.append((size, None))

    def sync(self) -> None:
        self.synced = bytearray(self.now)
        self.unsynced.clear()


@dataclass(slots=True)
class FaultyDisk:
    """`fault` befalls the call number `at` (from 1) of those that it can, None: there is none. `folder` is the store's:
    the room that it keeps is what a full disk has."""

    folder: Path
    fault: Fault | None = None
    at: int = 0
    num_calls: int = 0
    hit: str = ""
    """The call that it befell."""
    was_opened: bool = False
    """Whether a store was opened on it."""

    def __post_init__(self) -> None:
        self.files: dict[str, Content] = {}

    files: dict[str, Content] = None  # type: ignore[assignment]

    def connect(self, path: Path) -> "ApswConnection":
        """A connection to the file of this name."""
        return ApswConnection(path, self)

    def strike(self, fault: Fault, at: int) -> None:
        """From now on, count the calls, and let the fault befall that one."""
        self.fault, self.at, self.num_calls = fault, at, 0

    def befallen(self, call: str) -> Fault | None:
        """Count a call; what becomes of it. Raises what SQLite takes for an error of the disk."""
        fault = self.fault
        if fault is None or call not in CALLS.get(fault, _CODES):
            return None
        self.num_calls += 1
        lasts = fault in (Fault.FAILS_FROM_NOW_ON, Fault.FULL_FROM_NOW_ON)
        if self.num_calls < self.at or (self.num_calls > self.at and not lasts):
            return None
        is_full = fault in (Fault.FULL, Fault.FULL_FROM_NOW_ON)
        if is_full and lasts and not (self.folder / RESERVE_NAME).exists():
            return None
        self.hit = self.hit or call
        if is_full:
            raise _full()
        if fault in (Fault.FAILS, Fault.FAILS_FROM_NOW_ON, Fault.SYNC_FAILS):
            raise _error(call)
        return fault

    def write_out(self, folder: Path, draw: random.Random | None = None) -> Path:
        """Make files of all that was written; with `draw` of what was synced, and of the rest as it says."""
        folder.mkdir()
        for path, content in self.files.items():
            place = folder / Path(path).name
            place.write_bytes(content.now if draw is None else content.synced)
            if draw is not None:
                descriptor = os.open(place, os.O_WRONLY)
                apply(descriptor, survivors(content.unsynced, draw))
                os.close(descriptor)
        return folder


def _full() -> apsw.Error:
    error = apsw.FullError("injected")
    error.extendedresult = apsw.SQLITE_FULL
    return error


def _error(call: str) -> apsw.Error:
    code = _CODES[call]
    error = apsw.CantOpenError("injected") if code == apsw.SQLITE_CANTOPEN else apsw.IOError("injected")
    error.extendedresult = code
    return error


class _File:
    """An open file, by the names that SQLite calls."""

    def __init__(self, disk: FaultyDisk, content: Content) -> None:
        self._disk = disk
        self._content = content

    def xRead(self, amount: int, offset: int) -> bytes:
        fault = self._disk.befallen("read")
        found = bytes(self._content.now[offset : offset + amount])
        return found[: len(found) // 2] if fault is Fault.SHORT_READ else found

    def xWrite(self, data: bytes, offset: int) -> None:
        fault = self._disk.befallen("write")
        if fault is Fault.SHORT_WRITE:
            self._content.write(offset, bytes(data)[: len(data) // 2])
            raise _error("write")
        if fault is not Fault.WRITE_DROPPED:
            self._content.write(offset, bytes(data))

    def xTruncate(self, size: int) -> None:
        if self._disk.befallen("truncate") is not Fault.WRITE_DROPPED:
            self._content.truncate(size)

    def xSync(self, flags: int) -> None:
        if self._disk.befallen("sync") is not Fault.SYNC_DROPPED:
            self._content.sync()

    def xFileSize(self) -> int:
        self._disk.befallen("size")
        return len(self._content.now)

    def xLock(self, level: int) -> None:
        self._disk.befallen("lock")

    def xUnlock(self, level: int) -> None:
        return

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return POWERSAFE_OVERWRITE

    def xClose(self) -> None:
        return


class _Vfs(apsw.VFS):
    """The filesystem of one connection."""

    numbers = itertools.count(1)

    def __init__(self, disk: FaultyDisk) -> None:
        self.name = f"faulty-{next(self.numbers)}"
        self._disk = disk
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._disk.befallen("open")
        flags[1] = flags[0]
        return _File(self._disk, self._disk.files.setdefault(path, Content()))

    def xDelete(self, filename: str, syncs_folder: bool) -> None:
        if self._disk.befallen("delete") is Fault.WRITE_DROPPED:
            return
        if self._disk.files.pop(filename, None) is None:
            error = apsw.IOError("there is no such file")
            error.extendedresult = apsw.SQLITE_IOERR_DELETE_NOENT
            raise error

    def xAccess(self, pathname: str, flags: int) -> bool:
        self._disk.befallen("exists")
        return pathname in self._disk.files

    def xFullPathname(self, name: str) -> str:
        return name


class ApswConnection:
    """A store's connection by apsw, on a faulty disk or (None) a real one."""

    def __init__(self, path: Path, disk: FaultyDisk | None = None) -> None:
        self._vfs = None if disk is None else _Vfs(disk)
        self._sqlite = _translated(
            lambda: apsw.Connection(str(path), vfs=None if self._vfs is None else self._vfs.name)
        )

    def __repr__(self) -> str:
        return "<ApswConnection>"

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return _translated(lambda: list(self._sqlite.execute(sql, parameters)))  # type: ignore[arg-type]

    def is_in_place(self) -> bool:
        return True

    def backup(self, path: Path, meanwhile: Callable[[], None]) -> None:
        raise NotImplementedError("nothing here backs up")

    def close(self) -> None:
        with contextlib.suppress(apsw.Error):  # as the standard library does
            self._sqlite.close()
        if self._vfs is not None:
            self._vfs.unregister()


def _translated(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except apsw.Error as error:
        made = sqlite3.OperationalError(str(error))
        made.sqlite_errorcode = getattr(error, "extendedresult", 0) or getattr(error, "result", 0)
        raise made from error
