"""`stenograph export` writes, without a server, what the server would have given."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from stenograph.cli.main import main
from stenograph.http.app import model_mark
from stenograph.model.files import load_model_files
from stenograph.testing.tiny.llama import write_tiny_folder
from stenograph.trajectory.commits import ModelMark

from .test_durable import Serve, conversation, folder, kept

pytestmark = pytest.mark.timeout(120)

__all__ = ["folder", "kept"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny")


def export(folder: Any, model: Path, out: Path, *more: str) -> int:
    return main(["export", str(folder.path), "--model", str(model), "--family", "smollm2", "--out", str(out), *more])


@pytest.mark.parametrize("kind", ["safetensors", "json", "arrow"])
async def test_every_session_s_samples_are_those_of_the_server_byte_for_byte(
    kept: Serve, folder: Any, model: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, bytes] = {}
    async with kept(mark=model_mark(load_model_files(model))) as live:
        for history in ("strands", "linear", "tree"):
            session = await live.open(history=history, metadata={"n": 1}, group="g")
            messages = await conversation(live, session, turns=["one", "two"])
            live.says("again")
            assert (await live.chat(session, *messages[:-1], seed=9)).status == 200
            await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1})
            told[session] = (await live.call("POST", f"/sessions/{session}/samples", {"format": kind})).body
        assert export(folder, model, tmp_path / "early") == 2
        assert "is held by" in capsys.readouterr().err
    folder.close()
    out = tmp_path / "out"
    assert export(folder, model, out, "--format", kind) == 0
    shown = capsys.readouterr()
    assert shown.out == "3 sessions, 3 samples, 0 sessions without one\n"
    assert "exporting: 100 %" in shown.err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        f"{session}.{kind}": content for session, content in told.items()
    }
    assert export(folder, model, out) == 2
    assert "is not empty" in capsys.readouterr().err


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
    assert export(folder, model, out) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{other}: ")
    assert "another" in lines[0]
    assert lines[1].startswith(f"{damaged}: ")
    assert lines[2:] == ["4 sessions, 1 samples, 1 sessions without one, 2 sessions could not be exported"]
    assert {file.name for file in out.iterdir()} == {f"{failed}.safetensors", f"{whole}.safetensors"}
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
