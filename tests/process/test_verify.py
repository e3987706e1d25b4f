"""`stenograph verify` as a process: its exit code says what was found, and a session is played with a real engine."""

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from standins.planned_server import ReplyScript
from standins.tiny.llama import TEMPLATE, write_tiny_folder
from standins.vllm_server import VLLMServer
from stenograph.core.errors import StartupError
from stenograph.engine.settings import EngineKind, ReplayKind
from stenograph.http.engine_servers import make_adapter
from stenograph.http.settings import Settings
from stenograph.model.files import load_model_files

END = 2


async def verify(*flags: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stenograph.cli.main", "verify", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.weights
@pytest.mark.timeout(600)
async def test_a_model_that_holds_exits_0_with_a_session_of_the_embedded_engine(smollm2_path: Path) -> None:
    code, out, err = await verify("--model", str(smollm2_path), "--engine", "embedded")
    assert code == 0, out + err
    assert "TITO is exact for this model." in out
    assert "live session: embedded in a process of its own" in out
    assert "\ntool result " in out
    assert out.endswith("The session held.\n")
    assert "playing a session: 100 %" in err


@pytest.mark.timeout(600)
async def test_a_session_is_played_with_a_server_at_an_address(tiny: Path) -> None:
    async with VLLMServer(models=[tiny.name]) as server:
        server.plan(*(ReplyScript(ids=(70 + number, END)) for number in range(4)))
        flags = ("--family", "smollm2", "--engine", "vllm", "--engine-url", server.url)
        code, out, err = await verify("--model", str(tiny), *flags)
        asked = [request.json["token_ids"] for request in server.requests]
    assert code == 0, out + err
    assert f"live session: vllm at {server.url}" in out
    assert len(asked) == 5
    assert asked[1] == asked[2]
    for before, after, drawn in ((0, 1, 70), (2, 3, 72), (3, 4, 73)):
        line = [*asked[before], drawn, END]
        assert asked[after][: len(line)] == line


@pytest.mark.timeout(600)
async def test_the_tokenizers_files_alone_are_enough_to_verify_with_an_engine_at_an_address(
    tiny: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    async with VLLMServer(models=[tmp_path.name]) as server:
        server.plan(*(ReplyScript(ids=(70 + number, END)) for number in range(4)))
        flags = ("--family", "smollm2", "--engine", "vllm", "--engine-url", server.url)
        code, out, err = await verify("--model", str(tmp_path), *flags)
    assert code == 0, out + err
    assert out.endswith("The session held.\n")


@pytest.mark.parametrize(("replay", "is_refused"), [("routed_experts", True), ("all", True), ("indexer_topk", False)])
def test_a_replay_whose_shape_no_file_says_is_refused_at_start(
    tiny: Path, tmp_path: Path, replay: str, is_refused: bool
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    files = load_model_files(tmp_path)
    settings = Settings(engine=EngineKind.SGLANG, engine_url=("http://127.0.0.1:9",), replay=ReplayKind(replay))
    with pytest.raises(StartupError, match=r"needs the model's config\.json") if is_refused else nullcontext():
        make_adapter(settings, files)


@pytest.mark.timeout(600)
async def test_a_template_that_rewrites_exits_1_and_plays_nothing(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    tokens = {"chat_template": "{{ messages | length }}" + TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    code, out, _ = await verify("--model", str(folder), "--family", "template", "--engine", "embedded")
    assert code == 1
    assert "TITO is not exact for this model: it is not append-only" in out
    assert "No session was played" in out


@pytest.mark.timeout(600)
async def test_an_unreadable_model_exits_2_in_one_line(tmp_path: Path) -> None:
    code, out, err = await verify("--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("stenograph: ")
    assert len(err.splitlines()) == 1


@pytest.mark.timeout(600)
async def test_an_engine_that_is_away_exits_2_and_is_named_with_the_reason(tiny: Path) -> None:
    async with VLLMServer(models=[tiny.name]) as gone:
        flags = ("--family", "smollm2", "--engine", "vllm", "--engine-url", gone.url)
    code, out, err = await verify("--model", str(tiny), *flags)
    assert code == 2, out + err
    assert "TITO is exact for this model." in out  # what needs no engine was checked
    assert "live session" not in out
    assert err.splitlines()[-1] == (
        f"stenograph: the engine at {gone.url} does not answer: connection refused; start it, or correct --engine-url"
    )


@pytest.mark.timeout(600)
async def test_an_engine_that_goes_away_during_the_session_exits_2(tiny: Path) -> None:
    async with VLLMServer(models=[tiny.name]) as server:
        server.plan(ReplyScript(ids=(70, END)), ReplyScript(status=503, body=b"busy"))
        flags = ("--family", "smollm2", "--engine", "vllm", "--engine-url", server.url)
        code, out, err = await verify("--model", str(tiny), *flags)
    assert code == 2, out + err
    assert out.endswith("The engine failed, so its sessions were not checked.\n")
