"""The folder and the file of a store: what they may lie on, how they are brought up to date, and room used again."""

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.errors import StartupError
from stenograph.core.types import SessionId
from stenograph.store.database import MIGRATIONS, Database, FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore
from stenograph.testing.suite.store_laws import appended, session_id

pytestmark = pytest.mark.timeout(60)


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
            assert schema_of(path)[0] in (1, 2)
            if schema_of(path)[0] == 1:
                assert schema_of(path) == before
                continue
        else:
            database.close()
        break
    assert num_failed > len(list(chain.from_iterable(LATER[1:])))
    version, sessions = schema_of(path)
    assert version == 2
    assert sessions == [(*row, f"from {row[1]}") for row in before[1]]
    with closing(Database(path, durability=Durability.COMMIT, migrations=LATER)) as newer:
        stored = newer.read(SessionId(session_id(1)))
        assert stored is not None
        assert len(stored.rows) == 2
    with pytest.raises(StartupError, match="schema 2, and this server knows 1"):
        await SqliteStore.open(folder)


async def test_a_file_of_another_schema_is_not_looked_at(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)):
        pass
    with pytest.raises(StartupError, match="schema 1, and this command knows 2: start a server on the folder"):
        Database(folder.file(), durability=None, migrations=LATER)
