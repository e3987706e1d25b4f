"""The folder of a store: its lock, its filesystem, and the room kept for a full disk."""

import fcntl
import json
import logging
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from stenograph.core.errors import StartupError

log = logging.getLogger(__name__)

LOCK_NAME = "lock"
FILES = "[0-9a-f][0-9a-f].sqlite3"
"""The names of the files: the two digits are the first of their sessions' ids."""
NUM_FILES = 256
RESERVE_NAME = "reserve"
RESERVE_BYTES = 16 * 2**20
"""Room given up when the disk is full and a session is deleted: SQLite writes before it frees."""

PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""The rights of new files and folders: sessions are of one user, and so are prompts, replies and rewards in them."""
_OTHERS = 0o077

_MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "smb2", "9p", "afs", "ncpfs"})
"""Filesystems with locks and syncs unfit for SQLite. Source: sqlite.org/wal.html, sqlite.org/faq.html#q5."""


class DataFolder:
    """A folder held by this process. `address` is where its server can be reached, for whoever finds it held."""

    def __init__(self, path: Path, *, address: str, mounts: Path = _MOUNTS) -> None:
        """Make the folder if it is not there, and lock it. Raises StartupError. `mounts` is the list of mounted
        filesystems."""
        self.path = path
        try:
            _make(path)
            _check_filesystem(path, mounts)
            keep_private(path / LOCK_NAME)
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        except OSError as error:
            raise StartupError(f"--data-dir: cannot use the folder {str(path)!r}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StartupError(held_message(path)) from error
        text = json.dumps({"pid": os.getpid(), "address": address}).encode()
        os.ftruncate(lock, 0)
        os.pwrite(lock, text, 0)
        self._lock: int | None = lock

    def __repr__(self) -> str:
        return f"<DataFolder {str(self.path)!r}>"

    def file(self, number: int = 0) -> Path:
        """The file of a worker's sessions: their ids begin with its name's two digits."""
        return file_of(self.path, number)

    def numbers(self) -> list[int]:
        """The numbers of the existing files, in order."""
        return [int(path.name[:2], 16) for path in sorted(self.path.glob(FILES))]

    def reserve(self) -> None:
        """Keep room for a full disk, if the disk has it."""
        path = self.path / RESERVE_NAME
        keep_private(path)
        if path.exists() and path.stat().st_size == RESERVE_BYTES:
            return
        with suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)

    def give_up_reserve(self) -> None:
        """Let go of the kept room. Harmless when repeated."""
        (self.path / RESERVE_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder. Harmless when repeated."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _make(path: Path) -> None:
    """Make a folder for its user alone to enter, and those above it, safe from a loss of power: a name is kept once the
    folder around it is synced. Source: fsync(2)."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_private(path)
    for folder in reversed(new):
        with suppress(PermissionError):  # one that may be written, and not read
            above = os.open(folder.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            try:
                os.fsync(above)
            finally:
                os.close(above)


def make_private(folder: Path) -> None:
    """Make a folder for its user alone to enter; an existing one stays as it is. Raises OSError.

    On a filesystem that knows no rights the folder has those of the mount, and the log says so.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(PRIVATE_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        try:
            folder.chmod(PRIVATE_FOLDER)  # whatever the umask
        except OSError as error:
            log.warning(
                "%s cannot be made its user's alone: %s; it has the rights of its mount", folder, error.strerror
            )
    if folder.stat().st_mode & _OTHERS:
        log.info("%s may be entered by other users; the files that are made there are not theirs to read", folder)


def keep_private(file: Path) -> None:
    """Make a file for its user alone to read and write, whatever the umask, or make an existing one so.

    Raises nothing: the next one to open the file learns of its fault.
    """
    with suppress(OSError):
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
        except FileExistsError:
            mode = file.stat().st_mode
            if not stat.S_ISREG(mode) or not mode & _OTHERS:
                return
        file.chmod(PRIVATE)


def file_of(folder: Path, number: int = 0) -> Path:
    """The file of a worker's sessions in a folder."""
    return folder / f"{number:02x}.sqlite3"


@contextmanager
def looked_at(folder: Path) -> Generator[list[Path]]:
    """Hold a folder for looking at it, without changing it; its files. Raises StartupError if it is held or is none."""
    files = sorted(folder.glob(FILES))
    if not files:
        raise StartupError(f"there are no sessions in the folder {str(folder)!r}: it has no file like 00.sqlite3")
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield files  # a backup: nobody has ever served it
        return
    except PermissionError as error:
        raise StartupError(f"the folder {str(folder)!r} is another user's: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise StartupError(held_message(folder)) from error
        yield files
    finally:
        os.close(lock)


def held_message(folder: Path) -> str:
    """The refusal of a folder held by a server, with the server's address."""
    try:
        holder = cast("dict[str, object]", json.loads((folder / LOCK_NAME).read_bytes()))
        who = f"the server at {holder['address']} (process {holder['pid']})"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"the folder {str(folder)!r} is held by {who}: stop it first, or take a backup with POST /backup"


def filesystem_of(device: int, mountinfo: str) -> str:
    """The type of the filesystem with this device number, by the text of /proc/self/mountinfo; "" if it is not there.

    Source: proc_pid_mountinfo(5).
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        if dash and len(parts := before.split()) > 2 and parts[2] == wanted:
            return after.split()[0]
    return ""


def _check_filesystem(path: Path, mounts: Path) -> None:
    """Raise StartupError for a filesystem of the network. Where none can be asked for, nothing is checked."""
    try:
        mountinfo = mounts.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    found = filesystem_of(path.stat().st_dev, mountinfo)
    if found in _NETWORK:
        raise StartupError(
            f"--data-dir: {str(path)!r} lies on {found}, a filesystem of the network, where a database is not safe:"
            " choose a folder on a disk of this machine"
        )
    if found.startswith("fuse"):
        log.warning("--data-dir %s lies on %s: whether what is synced survives is up to it", path, found)
