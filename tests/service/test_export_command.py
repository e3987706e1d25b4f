"""`stenograph export` writes, without a server, what the server would have given."""

import json
import resource
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import safetensors.numpy

from standins.tiny.llama import write_tiny_folder
from stenograph.cli.main import main
from stenograph.http.loaded_model import model_mark
from stenograph.model.files import load_model_files
from stenograph.trajectory.commits import ModelMark

from .test_durable import Serve, conversation, folder, kept

pytestmark = pytest.mark.timeout(600)

__all__ = ["folder", "kept"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny")


def export(folder: Any, model: Path, out: Path, *more: str) -> int:
    return main(["export", str(folder.path), "--model", str(model), "--family", "smollm2", "--out", str(out), *more])


def rows_of(content: bytes, kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The samples of a file or an answer, and the rest of it."""
    if kind == "json":
        told = json.loads(content)
        return told.pop("samples"), told
    if kind == "arrow":
        table = pa.ipc.open_stream(content).read_all()
        return table.to_pylist(), {key.decode(): json.loads(text) for key, text in table.schema.metadata.items()}
    tensors = safetensors.numpy.load(content)
    told = json.loads(tensors.pop("_samples_meta").tobytes())
    rows = told.pop("samples")
    for name, values in tensors.items():
        key, _, index = name.partition(".")
        rows[int(index)][key] = (str(values.dtype), values.tolist())
    return rows, told


@pytest.mark.parametrize("kind", ["safetensors", "json", "arrow"])
async def test_every_session_s_samples_are_those_of_the_server(
    kept: Serve, folder: Any, model: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, bytes] = {}
    async with kept(mark=model_mark(load_model_files(model))) as live:
        empty = await live.open()
        given[empty] = (await live.call("POST", f"/sessions/{empty}/samples", {"format": kind})).body
        for number in range(11):  # so that numbers have one digit and two
            session = await live.open(history=("strands", "linear", "tree")[number % 3], metadata={"n": 1}, group="g")
            messages = await conversation(live, session, turns=["one", "two"])
            live.says("again")
            assert (await live.chat(session, *messages[:-1], seed=9)).status == 200
            await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1})
            given[session] = (await live.call("POST", f"/sessions/{session}/samples", {"format": kind})).body
        assert (await live.call("POST", "/backup", {"path": str(tmp_path / "backup")})).status == 200
        assert export(folder, model, tmp_path / "early") == 2
        assert "is held by" in capsys.readouterr().err
    folder.close()
    out = tmp_path / "new" / "out"
    assert export(folder, model, out, "--format", kind) == 0
    shown = capsys.readouterr()
    assert shown.out == "12 sessions, 11 samples, 1 sessions without one\n"
    assert "exporting: 100 %" in shown.err
    assert [file.name for file in out.parent.iterdir()] == ["out"]
    rows, told = rows_of(out.read_bytes(), kind)
    apart = {session: rows_of(content, kind) for session, content in given.items()}
    assert rows == [row for one, _ in apart.values() for row in one]
    assert told["empty_reason"] is None
    for found, (session, (samples, of_session)) in zip(
        told["session_metadata"]["sessions"], apart.items(), strict=True
    ):
        del of_session["session_metadata"]["accumulated_token_ids"]
        assert found == {
            "session_id": session,
            "num_samples": len(samples),
            "empty_reason": of_session["empty_reason"],
            "metadata": of_session["session_metadata"],
        }
    assert main(["check", str(folder.path), "--samples", str(out)]) == 0
    assert capsys.readouterr().out.startswith("11 samples, ")
    flags = ("--model", str(model), "--family", "smollm2", "--format", kind)
    assert main(["export", str(tmp_path / "backup"), *flags, "--out", str(tmp_path / "of_backup")]) == 0
    assert (tmp_path / "of_backup").read_bytes() == out.read_bytes()


async def test_a_file_that_is_there_stays_and_one_that_cannot_be_finished_never_is(
    kept: Serve, folder: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept(mark=model_mark(load_model_files(model))) as live:
        await conversation(live, await live.open(metadata={"long": "x" * 50_000}), turns=["one"])
    folder.close()
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    out.write_bytes(b"mine")
    assert export(folder, model, out) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert export(folder, model, out.parent) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err
    out.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))  # as a disk that becomes full meanwhile
    try:
        assert export(folder, model, out) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "--out: cannot write" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


async def test_what_cannot_be_exported_is_named_and_the_others_are(
    kept: Serve, folder: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kept(mark=ModelMark(name="another", digest=b"another")) as live:
        other = await live.open()
    async with kept(mark=model_mark(load_model_files(model))) as live:
        damaged, failed, whole = [await live.open() for _ in range(3)]
        for session in (damaged, failed, whole):
            await conversation(live, session, turns=["one"])
        await live.call("PUT", f"/sessions/{failed}/outcome", {"verdict": "infra_failed"})
    raw = sqlite3.connect(folder.file(), isolation_level=None)
    raw.execute("UPDATE rows SET body = CAST(replace(body, 'hello', 'hullo') AS BLOB) WHERE session = 2")
    raw.close()
    folder.close()
    out = tmp_path / "out"
    assert export(folder, model, out, "--format", "json") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{other}: ")
    assert "another" in lines[0]
    assert lines[1].startswith(f"{damaged}: ")
    assert lines[2:] == ["4 sessions, 1 samples, 1 sessions without one, 2 sessions could not be exported"]
    rows, told = rows_of(out.read_bytes(), "json")
    assert [row["metadata"]["custody"]["session_id"] for row in rows] == [whole]
    assert [(one["session_id"], one["empty_reason"]) for one in told["session_metadata"]["sessions"]] == [
        (failed, "infra_failed"),
        (whole, None),
    ]
    assert export(folder, model, tmp_path / "failed", "--include-failed", "--format", "json") == 1
    assert "4 sessions, 2 samples, 0 sessions without one" in capsys.readouterr().out


def test_a_folder_without_sessions_or_a_format_that_is_none_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "no"), "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("stenograph: ")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path), "--out", str(tmp_path / "out"), "--format", "csv"])
    assert ended.value.code == 2
