"""The folder and the file of a store: what they may lie on, how they are brought up to date, and room used again."""

import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing
from itertools import chain
from pathlib import Path, PosixPath
from typing import Any

import pytest

from stenograph.core.errors import StartupError
from stenograph.core.types import SessionId
from stenograph.store import queries
from stenograph.store.database import MIGRATIONS, Database, FileConnection
from stenograph.store.folder import DataFolder, file_of, make_private
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore
from tests.store_laws import appended, session_id

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    folder = DataFolder(tmp_path / "data", address="")
    yield folder
    folder.close()


def mounted(tmp_path: Path, kind: str) -> Path:
    """A table of mounts in which the folder lies on that filesystem."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(f"30 22 {os.major(device)}:{os.minor(device)} / /mnt rw - {kind} x rw\n")
    return mounts


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p"])
def test_a_folder_on_a_filesystem_of_the_network_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(StartupError, match=f"lies on {kind}, a filesystem of the network"):
        DataFolder(tmp_path / "data", address="", mounts=mounted(tmp_path, kind))


@pytest.mark.parametrize(("kind", "warned"), [("fuse.sshfs", True), ("fuseblk", True), ("ext4", False)])
def test_a_folder_on_fuse_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        DataFolder(tmp_path / "data", address="", mounts=mounted(tmp_path, kind)).close()
    assert (f"lies on {kind}" in caplog.text) == warned


def rights_in(path: Path) -> dict[str, int]:
    """The rights of a folder and of all that is in it, by their paths."""
    return {file.name: file.stat().st_mode & 0o777 for file in (path, *path.rglob("*"))}


@pytest.fixture(params=[0o000, 0o022, 0o777], ids="umask {0:03o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
async def test_what_is_kept_and_what_is_copied_is_its_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    path, copy = tmp_path / "data", tmp_path / "copy"
    with closing(DataFolder(path, address="")) as folder:
        for number in (0, 1):
            async with aclosing(await SqliteStore.open(folder, number=number)) as store:
                await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
                make_private(copy)
                await store.backup(file_of(copy, number))
                names = {"lock", "reserve", "00.sqlite3", f"{number:02x}.sqlite3-wal"}
                assert names <= rights_in(path).keys()
                assert set(rights_in(path).values()) == {0o700, 0o600}
                assert {mode for name, mode in rights_in(path).items() if name != "data"} == {0o600}
    assert rights_in(copy) == {"copy": 0o700, "00.sqlite3": 0o600, "01.sqlite3": 0o600}


class WithoutRights(PosixPath):
    """A path on a filesystem that refuses chmod(2), as FAT and some network filesystems do."""

    def chmod(self, mode: int, *, follow_symlinks: bool = True) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(self))


def test_a_folder_on_a_filesystem_without_rights_is_used_and_the_log_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), closing(DataFolder(WithoutRights(tmp_path / "data"), address="")) as folder:
        assert folder.path.is_dir()
    assert "data cannot be made its user's alone: Operation not permitted" in caplog.text


async def test_files_that_others_could_read_are_closed_and_the_folder_is_left_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data"
    with closing(DataFolder(path, address="")) as folder:
        store = await SqliteStore.open(folder)
        await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
        shutil.copytree(path, tmp_path / "left")  # as a kill leaves it
        await store.aclose()
    left = tmp_path / "left"
    left.chmod(0o755)
    for file in left.iterdir():
        file.chmod(0o644)
    assert {"00.sqlite3", "00.sqlite3-wal", "lock", "reserve"} <= rights_in(left).keys()
    with caplog.at_level(logging.INFO), closing(DataFolder(left, address="")) as folder:
        async with aclosing(await SqliteStore.open(folder)) as store:
            assert await store.load(session_id(1)) is not None
            rights = rights_in(left)
    assert rights.pop("left") == 0o755
    assert set(rights.values()) == {0o600}
    assert "may be entered by other users" in caplog.text


async def test_the_room_of_deleted_sessions_is_used_again(folder: DataFolder) -> None:
    sizes: list[int] = []
    for round_ in range(4):
        async with aclosing(await SqliteStore.open(folder)) as store:
            ids = [session_id(100 * round_ + number) for number in range(20)]
            for id_ in ids:
                tail = await store.create(id_, b"opening", at=1.0, ttl_s=None)
                await appended(store, tail, bytes(20_000))
            for id_ in ids:
                assert await store.delete(id_)
        sizes.append(folder.file().stat().st_size)
    assert sizes[0] > 20 * 20_000
    assert max(sizes[1:]) <= 1.1 * sizes[0], sizes


# --- a schema that is older -------------------------------------------------------------------------------------------

NEWEST = len(MIGRATIONS)
"""The schema of today."""

LATER = (*MIGRATIONS, ("ALTER TABLE sessions ADD COLUMN note TEXT", "UPDATE sessions SET note = 'from ' || id"))


class FailsAt:
    """A connection whose statement of that number fails, before it takes place."""

    def __init__(self, path: Path, number: int) -> None:
        self._sqlite = FileConnection(path)
        self._left = number

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        self._left -= 1
        if self._left == 0:
            raise sqlite3.OperationalError("disk I/O error")
        return self._sqlite.run(sql, parameters)

    def backup(self, path: Path, meanwhile: Any) -> None:
        self._sqlite.backup(path, meanwhile)

    def close(self) -> None:
        self._sqlite.close()


def schema_of(path: Path) -> tuple[int, list[tuple[Any, ...]]]:
    with closing(sqlite3.connect(path)) as raw:
        columns = raw.execute("SELECT * FROM sessions ORDER BY number").fetchall()
        return raw.execute("PRAGMA user_version").fetchone()[0], columns


async def test_an_older_file_is_brought_up_to_date_whole_or_not_at_all(folder: DataFolder) -> None:
    path = folder.file()
    async with aclosing(await SqliteStore.open(folder)) as store:
        for number in range(3):
            await appended(store, await store.create(session_id(number), b"opening", at=1.0, ttl_s=None), b"row")
    before = schema_of(path)
    num_failed = 0
    for number in range(1, 100):
        connection = FailsAt(path, number)
        try:
            database = Database(path, durability=Durability.COMMIT, connect=lambda _, c=connection: c, migrations=LATER)
        except StartupError:
            num_failed += 1
            assert schema_of(path)[0] in (NEWEST, NEWEST + 1)
            if schema_of(path)[0] == NEWEST:
                assert schema_of(path) == before
                continue
        else:
            database.close()
        break
    assert num_failed > len(list(chain.from_iterable(LATER[NEWEST:])))
    version, sessions = schema_of(path)
    assert version == NEWEST + 1
    assert sessions == [(*row, f"from {row[1]}") for row in before[1]]
    with closing(Database(path, durability=Durability.COMMIT, migrations=LATER)) as newer:
        stored = queries.read(newer, SessionId(session_id(1)))
        assert stored is not None
        assert len(stored.rows) == 2
    with pytest.raises(StartupError, match=f"schema {NEWEST + 1}, and this server knows {NEWEST}"):
        await SqliteStore.open(folder)


async def test_a_file_of_another_schema_is_not_looked_at(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)):
        pass
    with pytest.raises(
        StartupError, match=f"schema {NEWEST}, and this command knows {NEWEST + 1}: start a server on the folder"
    ):
        Database(folder.file(), durability=None, migrations=LATER)
