"""A filesystem that keeps writes in memory until they are synced, and can lose its power. A program, and its owner.

As a program it mounts, by FUSE (mfusepy), what a folder has of a disk: `names.json`, which says what is where, and a
file for each inode. Only `fsync` of a file puts its bytes there, only `fsync` of its folder its name. `lose SEED` on
standard input ends it at once, as a loss of power does: of what was not synced, each sector of 512 bytes is there or
not, in any order, as SEED says; with SEED 0 nothing of it is. After `lie` it syncs nothing, and says that it has.
"""

import asyncio
import errno
import functools
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SECTOR = 512


class Inode:
    """A file's bytes as they are read, and the writes that a loss of power may undo."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.content = bytearray(place.read_bytes() if place.exists() else b"")
        self.unsynced: list[Write] = []

    def write(self, offset: int, data: bytes) -> None:
        if offset > len(self.content):
            self.content.extend(bytes(offset - len(self.content)))
        self.content[offset : offset + len(data)] = data
        self.unsynced.append((offset, data))

    def truncate(self, size: int) -> None:
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))
        self.unsynced.append((size, None))

    def sync(self) -> None:
        """Everything is on the disk."""
        if self.unsynced or not self.place.exists():
            descriptor = os.open(self.place, os.O_WRONLY | os.O_CREAT)
            apply(descriptor, self.unsynced)
            os.close(descriptor)
            self.unsynced.clear()

    def lose(self, draw: random.Random) -> None:
        """Some sectors of what was not synced have come to the disk."""
        descriptor = os.open(self.place, os.O_WRONLY | os.O_CREAT)
        apply(descriptor, survivors(self.unsynced, draw))
        os.close(descriptor)


Write = tuple[int, bytes | None]
"""Offset and bytes of a write, or the size and None of a truncation."""


def survivors(unsynced: list[Write], draw: random.Random) -> list[Write]:
    """The sectors of 512 bytes that have come to the disk without a sync, in whatever order that happened."""
    share = draw.choice([0.0, 0.5, 0.9, 1.0])
    sectors: list[Write] = []
    for offset, data in unsynced:
        if data is None:
            sectors.append((offset, None))
            continue
        start = 0
        while start < len(data):
            size = SECTOR - (offset + start) % SECTOR
            sectors.append((offset + start, data[start : start + size]))
            start += size
    return [one for one in sectors if draw.random() < share]


def apply(descriptor: int, writes: list[Write]) -> None:
    for offset, data in writes:
        if data is None:
            os.ftruncate(descriptor, offset)
        else:
            os.pwrite(descriptor, data, offset)


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "/"


class Disk:
    """One mounted disk."""

    def __init__(self, process: asyncio.subprocess.Process, mountpoint: Path) -> None:
        self._process = process
        self.path = mountpoint

    def __repr__(self) -> str:
        return f"<Disk at {self.path}>"

    @classmethod
    @asynccontextmanager
    async def mounted(cls, mountpoint: Path, kept: Path) -> AsyncIterator["Disk"]:
        """Mount what a folder has of a disk; at the end the power is lost, if it was not before."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__)), str(mountpoint), str(kept)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        disk = cls(process, mountpoint)
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"mounted\n"
            yield disk
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()
            await asyncio.to_thread(_unmount, mountpoint)

    def lie(self) -> None:
        """From now on nothing is synced, and the disk says that it is."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"lie\n")

    async def lose_power(self, seed: int) -> None:
        """From now on nothing is written, and every call to the disk fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"lose %d\n" % seed)
        await self._process.wait()


def why_not() -> str | None:
    """The reason for which there can be no such disk here; None if there can."""
    probe = subprocess.run([sys.executable, "-c", "import mfusepy"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"needs mfusepy and libfuse3 (Debian: libfuse3-3): {probe.stderr.strip().splitlines()[-1]}"
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "needs /dev/fuse"


def _unmount(mountpoint: Path) -> None:
    for command in (["umount", "-l"], ["fusermount3", "-u", "-z"]):
        try:
            if not subprocess.run([*command, str(mountpoint)], capture_output=True, check=False).returncode:
                return
        except FileNotFoundError:
            continue


def _mount(mountpoint: Path, kept: Path) -> None:
    for folder in (mountpoint, kept):
        folder.mkdir(exist_ok=True)
    import mfusepy  # noqa: PLC0415  -- only this program needs it, and it fails without its library

    held = threading.RLock()

    def whole(change: Callable[..., T]) -> Callable[..., T]:
        """A change takes place whole before the power is lost, or not at all."""

        @functools.wraps(change)
        def held_change(*args: Any) -> T:
            with held:
                return change(*args)

        return held_change

    class Volatile(mfusepy.Operations):  # type: ignore[misc, name-defined, unused-ignore]
        """Paths are keys; a folder is None."""

        use_ns = True

        def __init__(self) -> None:
            self.names_file = kept / "names.json"
            found = json.loads(self.names_file.read_text()) if self.names_file.exists() else {}
            self.kept_names: dict[str, str | None] = found | {"/": None}
            lost = [path for path in self.kept_names if _folder(path) not in self.kept_names]
            for path in lost:  # whose folder has no name
                del self.kept_names[path]
            self.names: dict[str, Inode | None] = {
                path: None if place is None else Inode(kept / place) for path, place in self.kept_names.items()
            }
            self.num_made = 1 + max((int(one.name) for one in kept.iterdir() if one.name.isdecimal()), default=0)
            self.open_files: dict[int, Inode] = {}
            self.modes: dict[str, int] = {}
            self.lies = False

        def init(self, path: str) -> None:
            os.write(1, b"mounted\n")

        def write_names(self, folder: str) -> None:
            """The names in one folder are on the disk."""
            known = {path: inode for path, inode in self.names.items() if _folder(path) == folder}
            gone = [path for path in self.kept_names if _folder(path) == folder and path not in known]
            for path in gone:
                del self.kept_names[path]
            for path, inode in known.items():
                self.kept_names[path] = None if inode is None else inode.place.name
                if inode is not None and not inode.place.exists():
                    inode.place.touch()
            self.names_file.with_suffix(".new").write_text(json.dumps(self.kept_names))
            self.names_file.with_suffix(".new").replace(self.names_file)

        def lose(self, seed: int) -> None:
            if seed:
                draw = random.Random(seed)
                for folder in [path for path, inode in self.names.items() if inode is None]:
                    if draw.random() < 0.5:
                        self.write_names(folder)
                for inode in self.names.values():
                    if inode is not None:
                        inode.lose(draw)

        # -- what SQLite and a server's folder need

        def _found(self, path: str) -> Inode | None:
            if path not in self.names:
                raise OSError(errno.ENOENT, "")
            return self.names[path]

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            inode = self.open_files[fh] if fh in self.open_files else self._found(path)
            kind = stat.S_IFDIR if inode is None else stat.S_IFREG
            kind |= self.modes.get(path, 0o755 if inode is None else 0o644)
            size = 0 if inode is None else len(inode.content)
            return {"st_mode": kind, "st_size": size, "st_nlink": 1, "st_blocks": -(-size // 512)}

        def chmod(self, path: str, mode: int) -> None:
            self._found(path)
            self.modes[path] = stat.S_IMODE(mode)

        def readdir(self, path: str, fh: int) -> list[str]:
            prefix = path.rstrip("/") + "/"
            below = (name.removeprefix(prefix) for name in self.names if name.startswith(prefix) and name != "/")
            return [".", "..", *(name for name in below if name and "/" not in name)]

        @whole
        def mkdir(self, path: str, mode: int) -> None:
            self.names[path] = None

        @whole
        def create(self, path: str, mode: int, fi: object = None) -> int:
            self.num_made += 1
            self.names[path] = Inode(kept / str(self.num_made))
            return self.open(path, 0)

        def open(self, path: str, flags: int) -> int:
            inode = self._found(path)
            assert inode is not None
            handle = 1 + max(self.open_files, default=0)
            self.open_files[handle] = inode
            return handle

        def release(self, path: str, fh: int) -> None:
            self.open_files.pop(fh, None)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return bytes(self.open_files[fh].content[offset : offset + size])

        @whole
        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            self.open_files[fh].write(offset, bytes(data))
            return len(data)

        @whole
        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            inode = self.open_files[fh] if fh in self.open_files else self._found(path)
            assert inode is not None
            inode.truncate(length)

        @whole
        def unlink(self, path: str) -> None:
            self._found(path)
            del self.names[path]

        @whole
        def fsync(self, path: str, datasync: int, fh: int) -> None:
            if not self.lies:
                self.open_files[fh].sync()

        @whole
        def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
            if not self.lies:
                self.write_names(path)

        def flush(self, path: str, fh: int) -> None:
            return

        def statfs(self, path: str) -> dict[str, int]:
            return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 2**24, "f_bavail": 2**23, "f_bfree": 2**23}

    disk = Volatile()

    def obey() -> None:
        for line in sys.stdin:
            order, _, seed = line.strip().partition(" ")
            with held:
                if order == "lie":
                    disk.lies = True
                    continue
                disk.lose(int(seed))
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=obey, daemon=True).start()
    mfusepy.FUSE(disk, str(mountpoint), foreground=True, nothreads=True)


if __name__ == "__main__":
    _mount(Path(sys.argv[1]), Path(sys.argv[2]))
