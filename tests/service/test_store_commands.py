"""`inspect`, `check` and `POST /backup`: what was kept is shown, and a byte that changed is found."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stenograph.cli.main import main
from stenograph.store.look import log_faults

from .conftest import Live
from .test_durable import Serve, conversation, folder, kept

NUM_FLIPS = int(os.environ.get("FLIPS", "60"))
"""Bytes that are changed, one at a time; `scripts/test-flips` sets 1,000."""

pytestmark = pytest.mark.timeout(120 + NUM_FLIPS)

__all__ = ["folder", "kept"]  # fixtures


async def some_sessions(live: Live) -> list[str]:
    sessions = [await live.open(metadata={"n": n}) for n in range(3)]
    for session in sessions:
        await conversation(live, session, turns=["one", "two", "three"])
    return sessions


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


async def test_a_folder_is_listed_and_checked_without_a_change(
    kept: Serve, folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept() as live:
        sessions = await some_sessions(live)
        for command in (["check"], ["inspect"]):
            assert main([*command, str(folder.path)]) == 2
            assert "is held by" in capsys.readouterr().err
        # As a kill would leave it, with everything still in the log.
        shutil.copytree(folder.path, tmp_path / "copy")
    copy = tmp_path / "copy"
    before = files_of(copy)
    assert len(before["00.sqlite3-wal"]) > 10_000
    assert main(["check", str(copy)]) == 0
    assert capsys.readouterr().out == "3 sessions, 12 rows: whole\n"
    assert main(["inspect", str(copy)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == sessions
    assert all(" 3 " in line and line.endswith("tiny") for line in listed[1:])
    assert main(["inspect", str(copy), sessions[0]]) == 0
    turns = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in turns[1:]] == ["one", "two", "three"]
    assert main(["inspect", str(copy), "0" * 32]) == 2
    assert "there is no session" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert files_of(copy) == before


def in_read_only_mount(folder: Path, at: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command where a folder is mounted read-only: root may write wherever the filesystem can be written."""
    at.mkdir(exist_ok=True)
    mounts = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2 && exec "$@"'
    outer = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c", mounts, "sh", str(folder), str(at)]
    probe = subprocess.run([*outer, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"nothing can be mounted here: {probe.stderr.strip()}")
    return subprocess.run([*outer, *command], capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to mount a folder read-only")
@pytest.mark.parametrize("has_log", [True, False])
async def test_a_folder_that_cannot_be_written_is_looked_at_with_all_that_its_log_has(
    kept: Serve, folder: Any, tmp_path: Path, has_log: bool
) -> None:
    copy = tmp_path / "copy"
    async with kept() as live:
        sessions = await some_sessions(live)
        if has_log:  # as a kill would leave it
            shutil.copytree(folder.path, copy)
    if not has_log:
        shutil.copytree(folder.path, copy)
    before, mount = files_of(copy), tmp_path / "mount"
    assert ("00.sqlite3-wal" in before) is has_log
    cli = (sys.executable, "-m", "stenograph.cli.main")
    touched = in_read_only_mount(copy, mount, "touch", str(mount / "new"))
    assert "Read-only file system" in touched.stderr
    checked = in_read_only_mount(copy, mount, *cli, "check", str(mount))
    assert (checked.returncode, checked.stdout) == (0, "3 sessions, 12 rows: whole\n"), checked.stderr
    listed = in_read_only_mount(copy, mount, *cli, "inspect", str(mount))
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == sessions, listed.stderr
    turns = in_read_only_mount(copy, mount, *cli, "inspect", str(mount), sessions[2])
    assert [line.split()[-1] for line in turns.stdout.splitlines()[1:]] == ["one", "two", "three"]
    assert files_of(copy) == before


def test_a_file_without_a_schema_has_one_message_in_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a server leaves it that was killed at its first start."""
    (tmp_path / "00.sqlite3").write_bytes(b"")
    said: set[str] = set()
    for command in (["check"], ["inspect"], ["export", "--out", str(tmp_path / "out")]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 2
        said.add(capsys.readouterr().err)
    (message,) = said
    assert "has no sessions: a server that made it ended before it wrote anything" in message
    raw = sqlite3.connect(tmp_path / "00.sqlite3")
    raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    for command in ("check", "inspect"):
        assert main([command, str(tmp_path)]) == 2
        assert "is a database of another program" in capsys.readouterr().err


async def test_a_backup_is_a_folder_that_is_whole_and_that_a_server_goes_on_with(
    kept: Serve, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept() as live:
        await some_sessions(live)
        answer = await live.call("POST", "/backup", {"path": str(tmp_path / "backup")})
        assert answer.status == 200, answer.body
        assert answer.json()["bytes"] == (tmp_path / "backup" / "00.sqlite3").stat().st_size
        again = await live.call("POST", "/backup", {"path": str(tmp_path / "backup")})
        assert (again.status, again.json()["error"]["param"]) == (400, "/path")
        assert (await live.call("POST", "/backup", {})).status == 400
        for path in ("a\0b", "\0", str(tmp_path / "x\0"), "x" * 5000, str(tmp_path / "backup" / "00.sqlite3" / "x")):
            refused = await live.call("POST", "/backup", {"path": path})
            assert (refused.status, refused.json()["error"]["param"]) == (400, "/path"), path[:20]
        assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
        assert [file.stat().st_mode & 0o777 for file in (tmp_path / "backup").iterdir()] == [0o600]
    assert main(["check", str(tmp_path / "backup")]) == 0
    assert capsys.readouterr().out == "3 sessions, 12 rows: whole\n"
    async with kept(api_key=("secret",)) as live:
        refused = await live.call("POST", "/backup", {"path": "x"}, authorization="Bearer secret")
        assert (refused.status, refused.json()["error"]["code"]) == (403, "forbidden")
    async with serve() as live:
        assert (await live.call("POST", "/backup", {"path": "x"})).status == 404


def content_of(path: Path) -> list[Any]:
    """Everything that the file says, as SQL has it, but for counters of SQLite's own."""
    raw = sqlite3.connect(path / "00.sqlite3")
    try:
        tables = ("sessions", "rows", "sqlite_schema")
        found = [raw.execute(f"SELECT * FROM {table}").fetchall() for table in tables]
        pragmas = ("user_version", "application_id", "journal_mode")
        return [*found, *(raw.execute(f"PRAGMA {name}").fetchall() for name in pragmas)]
    finally:
        raw.close()


@pytest.mark.parametrize("name", ["00.sqlite3", "00.sqlite3-wal"])
async def test_one_changed_byte_is_found_or_was_in_free_space(
    kept: Serve, folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    copy = tmp_path / "copy"
    async with kept() as live:
        sessions = await some_sessions(live)
        for number, session in enumerate(sessions):
            outcome = {"reward": number / 2, "verdict": "agent_failed", "detail": "x" * 50}
            assert (await live.call("PUT", f"/sessions/{session}/outcome", outcome)).status == 200
        options = {"metadata": {"k": ["v"] * 12_000}, "ttl_s": 900}
        assert (await live.call("POST", "/sessions", options, idempotency_key="a key")).status == 200
        if name.endswith("-wal"):
            shutil.copytree(folder.path, copy)
        else:
            await live.call("DELETE", f"/sessions/{sessions[1]}")  # leaves free pages
    if not copy.exists():
        shutil.copytree(folder.path, copy)
    looked = tmp_path / "looked"
    shutil.copytree(copy, looked)
    whole, before = content_of(looked), (copy / name).read_bytes()
    chosen, num_found = random.Random(name), 0
    for _ in range(NUM_FLIPS):
        changed = bytearray(before)
        changed[chosen.randrange(len(before))] ^= chosen.randrange(1, 256)
        (copy / name).write_bytes(changed)
        if main(["check", str(copy)]) == 0:
            shutil.copytree(copy, looked, dirs_exist_ok=True)
            assert content_of(looked) == whole, "a change that matters was not found"
        else:
            num_found += 1
    capsys.readouterr()
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {NUM_FLIPS} bytes changed, {num_found} found, the others said nothing\n")
    assert num_found > NUM_FLIPS / 8
    (copy / name).write_bytes(before)
    assert main(["check", str(copy)]) == 0


def test_a_log_that_ends_within_a_transaction_is_no_damage_and_one_behind_damage_is(tmp_path: Path) -> None:
    raw = sqlite3.connect(tmp_path / "a.sqlite3", isolation_level=None)
    raw.execute("PRAGMA journal_mode = WAL")
    raw.execute("CREATE TABLE t (x)")
    for number in range(20):
        raw.execute("INSERT INTO t VALUES (?)", (f"{number}" * 500,))
    log = tmp_path / "a.sqlite3-wal"
    whole = log.read_bytes()
    raw.close()
    for content in (whole, whole[:-1], whole[: len(whole) // 2], whole[:20], b""):
        log.write_bytes(content)
        assert log_faults(log) == []
    log.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    (fault,) = log_faults(log)
    assert "transactions stand behind the damage" in fault
    frame = len(whole) - 24 - 4096  # the last one: a changed salt is not that of an earlier log, which has two others
    log.write_bytes(whole[: frame + 10] + b"?" + whole[frame + 11 :])
    assert log_faults(log) == ["log: a.sqlite3-wal is damaged, and 1 transactions stand behind the damage"]
    log.write_bytes(whole[: frame + 8] + b"?" * 8 + whole[frame + 16 :])
    assert log_faults(log) == []
    log.write_bytes(whole[:10] + b"?" + whole[11:])
    assert log_faults(log) == ["log: the head of a.sqlite3-wal is damaged"]


async def test_a_session_that_cannot_be_read_is_named_and_the_others_are_listed(
    kept: Serve, folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept() as live:
        sessions = await some_sessions(live)
    raw = sqlite3.connect(folder.file(), isolation_level=None)
    raw.execute("DELETE FROM rows WHERE session = 1 AND seq = 2")
    raw.execute("DELETE FROM sessions WHERE number = 3")
    raw.close()
    shutil.copytree(folder.path, tmp_path / "copy")
    assert main(["check", str(tmp_path / "copy")]) == 1
    out = capsys.readouterr().out
    assert f"Session {sessions[0]} is damaged on disk, in row 3: row 2 is missing, row 3 follows" in out
    assert "session number 3 is gone, but 3 rows of it are there" in out
    assert "2 sessions, 4 rows: 2 faults" in out
