"""`stenograph bench render`: what it times is checked first, and what it shows is what it measured."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.__main__ import main as stenograph_bench
from benchmarks.kit.artifact import read_artifact
from benchmarks.render.turn import conversation, turn_work
from standins.tiny.llama import TEMPLATE, write_tiny_folder
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Role
from stenograph.families.load import load_renderer
from stenograph.model.files import load_model_files
from stenograph.text.renderer import Renderer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def renderer_of(folder: Path, family: str) -> Renderer:
    return load_renderer(load_model_files(folder), family).renderer


@pytest.mark.parametrize(("family", "last"), [("smollm2", Role.TOOL), ("template", Role.USER)])
def test_the_conversation_ends_in_a_message_that_is_new(folder: Path, family: str, last: Role) -> None:
    renderer = renderer_of(folder, family)
    messages, tools = conversation(renderer, 8, 200)
    assert [message.role for message in messages] == [Role.SYSTEM, Role.USER, *[Role.ASSISTANT, last] * 3]
    assert bool(tools) is (last is Role.TOOL)
    renderer.check_messages(messages, tools)


@pytest.mark.parametrize("family", ["smollm2", "template"])
def test_the_bridge_is_of_the_new_message_however_long_the_conversation(folder: Path, family: str) -> None:
    renderer = renderer_of(folder, family)
    short, long = (turn_work(renderer, *conversation(renderer, num, 200)) for num in (4, 24))
    assert long.num_prompt > 4 * short.num_prompt
    assert long.num_bridged < 1.2 * short.num_bridged
    assert short.num_reply > 20
    assert all(call() is not None for call in long.timed.values())


def test_a_template_that_writes_a_line_otherwise_is_not_timed(folder: Path, tmp_path: Path) -> None:
    tokens = {"chat_template": "{{ messages | length }}" + TEMPLATE, "eos_token": "<|im_end|>"}
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    renderer = renderer_of(tmp_path, "template")
    with pytest.raises(UnrenderableMessage, match="append-only"):
        turn_work(renderer, *conversation(renderer, 4, 50))


def test_a_run_is_a_table_a_line_of_json_and_an_artifact(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    options = ["--messages", "4,8", "--message-bytes", "80", "--calls", "2", "--repeats", "2"]
    assert main(["render", "--model", str(folder), *options, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| 4 messages" in shown
    assert "render of all messages, over bridge and parse" in shown
    line = json.loads(shown.splitlines()[-1])
    artifact = read_artifact(out)
    assert line["bench"] == artifact.bench == "render"
    for result in artifact.scenarios:
        assert len(result.figures["text"]) == 2
        median = line["figures"][result.name]["text"]
        assert {"bridge_ms", "parse_ms", "rerender_ms", "rerender_over_turn", "line_tokens"} <= median.keys()


def test_runs_are_compared_by_every_figure(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outs = [tmp_path / "before.json", tmp_path / "after.json"]
    options = ["--messages", "4", "--message-bytes", "80", "--calls", "2", "--repeats", "2"]
    for out, family in zip(outs, ("smollm2", "template"), strict=True):
        assert main(["render", "--model", str(folder), *options, "--family", family, "--out", str(out)]) == 0
    capsys.readouterr()
    assert stenograph_bench(["compare", *map(str, outs)]) == 0
    shown = capsys.readouterr().out
    assert "bridge to the new message, CPU ms" in shown
    assert "different --family: smollm2 and template" in shown


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["render", "--model", str(tmp_path), "--out", str(tmp_path / "r.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("lengths", ["3", "8,9", "2", "x"])
def test_a_conversation_without_a_reply_and_a_new_message_is_refused(lengths: str) -> None:
    with pytest.raises(SystemExit):
        main(["render", "--messages", lengths])
