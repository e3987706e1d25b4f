"""Files written whole or not at all: under another name first, and renamed once they are on the disk."""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from stenograph.core.errors import StartupError

_PART = ".part"
"""Ends the name of a file while it is being written."""


@contextmanager
def new_file(out: Path, *, flag: str = "--out") -> Generator[Path]:
    """The file to write. It gets its name when it is whole, and is gone if it never is. Raises StartupError."""
    check_new(out, flag)
    part = out.with_name(out.name + _PART)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.rename(out)
    except OSError as error:
        raise StartupError(f"{flag}: cannot write {str(out)!r}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def check_new(out: Path, flag: str) -> None:
    """Raise StartupError if the file exists."""
    if out.exists():
        kind = "a folder: name a file in it" if out.is_dir() else "there already: name another file, or remove it"
        raise StartupError(f"{flag}: {str(out)!r} is {kind}")


def check_writable(file: Path, flag: str) -> None:
    """Raise StartupError for an unwritable file: an hour later it would be bad news."""
    try:
        if file.is_dir():
            raise StartupError(f"{flag}: cannot write {str(file)!r}: it is a folder: name a file in it")
        part = _part_of(file)
        part.touch()
        part.unlink()
    except OSError as error:
        raise StartupError(
            f"{flag}: cannot write {str(file)!r}: its folder is not there or not writable ({error.strerror})"
        ) from error


def replace_file(file: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file, in place of an existing one if any, for its owner alone where it `is_private`. Raises OSError; then
    the old one is as it was."""
    part = _part_of(file)
    try:
        write_file(part, (content,), mode=0o600 if is_private else 0o666)
        part.replace(file)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_file(target: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Write a file; it is on the disk on return. A new one has the rights of `mode`, less those taken by the umask."""
    with open(target, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as written:
        written.writelines(pieces)
        written.flush()
        os.fsync(written.fileno())


def _part_of(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}{_PART}")
