"""Media in a store's file: once each, gone with their last session, found where they are damaged, and backed up."""

import sqlite3
from collections.abc import Iterator
from contextlib import aclosing, closing
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace

from stenograph.cli.store_commands import check_folder
from stenograph.core.errors import StorageUnavailable
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from tests.store_laws import medium, session_id

pytestmark = pytest.mark.timeout(600)

PICTURE = medium(b"a picture" * 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    folder = DataFolder(tmp_path / "data", address="http://here:1")
    yield folder
    folder.close()


def counts(path: Path) -> tuple[int, int]:
    """Number of contents, and of sessions' links to them."""
    with closing(sqlite3.connect(path)) as raw:
        contents = raw.execute("SELECT count(*) FROM media").fetchone()[0]
        return contents, raw.execute("SELECT count(*) FROM session_media").fetchone()[0]


async def test_a_content_is_kept_once_and_goes_with_its_last_session(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)) as store:
        for number in range(3):
            await store.create(session_id(number), b"", at=1.0, ttl_s=None)
            await store.media.put(session_id(number), [PICTURE])
    assert counts(folder.file()) == (1, 3)
    async with aclosing(await SqliteStore.open(folder)) as store:
        await store.delete(session_id(0))
        assert await store.media.get(session_id(1), PICTURE.ref.sha256) == PICTURE
    assert counts(folder.file()) == (1, 2)
    async with aclosing(await SqliteStore.open(folder)) as store:
        for number in (1, 2):
            await store.delete(session_id(number))
    assert counts(folder.file()) == (0, 0)


async def test_media_that_a_session_has_are_not_decoded_again(folder: DataFolder) -> None:
    unreadable, new = replace(PICTURE, base64=b"!"), medium(b"new")
    async with aclosing(await SqliteStore.open(folder)) as store:
        await store.create(session_id(0), b"", at=1.0, ttl_s=None)
        await store.media.put(session_id(0), [PICTURE])
        await store.media.put(session_id(0), [unreadable, new])
        for item in (PICTURE, new):
            assert await store.media.get(session_id(0), item.ref.sha256) == item
    assert counts(folder.file()) == (2, 2)


async def test_a_file_without_media_has_no_tables_for_them(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)) as store:
        await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        assert await store.media.get(session_id(1), PICTURE.ref.sha256) is None
    with closing(sqlite3.connect(folder.file())) as raw:
        assert not raw.execute("SELECT name FROM sqlite_schema WHERE name LIKE '%media%'").fetchall()


async def test_a_backup_has_the_media(folder: DataFolder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    async with aclosing(await SqliteStore.open(folder)) as store:
        await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        await store.media.put(session_id(1), [PICTURE])
        await store.backup(copy / "00.sqlite3")
    assert counts(copy / "00.sqlite3") == (1, 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE media SET body = x'00' || substr(body, 2)", "is damaged"),
        ("DELETE FROM media", "has media that are"),
        ("DROP TRIGGER media_unused; DELETE FROM session_media", "is of no session"),
    ],
)
async def test_check_finds_media_that_are_not_what_they_were(folder: DataFolder, damage: str, said: str) -> None:
    async with aclosing(await SqliteStore.open(folder)) as store:
        await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        await store.media.put(session_id(1), [PICTURE])
    folder.close()
    assert "structure" not in checked(folder.path)
    with closing(sqlite3.connect(folder.file())) as raw:
        raw.executescript(damage)
        raw.commit()
    assert said in checked(folder.path)


def checked(folder: Path) -> str:
    out = StringIO()
    check_folder(folder, out=out, progress=lambda *_: None)
    return out.getvalue()


async def test_a_closed_store_takes_no_media(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)) as store:
        await store.create(session_id(1), b"", at=1.0, ttl_s=None)
    with pytest.raises(StorageUnavailable):
        await store.media.put(session_id(1), [PICTURE])
