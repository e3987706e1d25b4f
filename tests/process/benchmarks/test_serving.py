"""`stenograph bench serving` as a process: tiny runs, end to end. What it measures is not asserted."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.processes import Children
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.servers import start_serve, start_standin
from standins.tiny.llama import write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model, tiny, with room for conversations, and whose replies often end: many a token is an end of turn."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny-llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    ends = [id_ for id_ in range(2, 320) if id_ % 3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def bench(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "stenograph.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def requests_of(result: Any, target: str) -> list[dict[str, Any]]:
    """Requests of the first repeat, in the order of the conversations."""
    columns = result["raw"][target][0]["requests"]
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(columns["turn"]))]
    return sorted(rows, key=lambda row: (row["session"], row["turn"]))


def test_server_and_engine_are_given_the_same_prompts_and_draw_the_same_tokens(model: Path, tmp_path: Path) -> None:
    done = bench(
        *("serving", "--model", str(model), "--num-sessions", "4", "--concurrency", "1", "--max-tokens", "10"),
        *("--repeats", "1", "--warm-up-sessions", "1", "--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "run.json").read_text())
    (result,) = artifact["scenarios"]
    server, direct = requests_of(result, "server"), requests_of(result, "direct")
    assert len(server) == result["turns"] > 4
    facts = ("session", "turn", "num_prompt", "num_completion", "num_cached", "is_cut")
    assert [[row[name] for name in facts] for row in server] == [[row[name] for name in facts] for row in direct]
    num_turns = Counter(row["session"] for row in server)
    goes_on = [not row["is_cut"] and row["turn"] + 1 < num_turns[row["session"]] for row in server]
    assert sum(goes_on) >= 2  # lines are continued, not only begun
    assert all("prefill" in row["stages_ms"] for row in server if not row["is_cut"])
    for target in ("server", "direct"):
        (figures,) = result["figures"][target]
        assert figures["errors"] == 0
        assert {"ttft_p50_ms", "tpot_p90_ms", "itl_p99_ms", "e2e_mean_ms", "ttft_prefill_ms"} <= set(figures)
    assert result["figures"]["server"][0]["ttft_render_ms"] > 0
    assert artifact["arguments"]["seed"] == 0
    assert artifact["machine"]["cores"] >= 1
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert (line["bench"], set(line["figures"]["closed"])) == ("serving", {"server", "direct"})
    assert "TTFT: tokenize (render)" in done.stdout
    assert "through the server" in done.stderr

    compared = bench("compare", "run.json", "run.json", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "ttft_p50_ms" in json.loads(compared.stdout.strip().splitlines()[-1])["verdicts"]["closed @ 1"]


def test_completions_of_sharegpts_file_get_the_same_prompts_and_tokens_from_server_and_engine(
    model: Path, tmp_path: Path
) -> None:
    said = [("human", "the user asks"), ("gpt", "one and two"), ("human", "add one"), ("gpt", "x " * 30)]
    talk = {"conversations": [{"from": who, "value": text} for who, text in said]}
    (tmp_path / "talks.json").write_text(json.dumps([talk] * 5))
    done = bench(
        *("serving", "--model", str(model), "--mix", "sharegpt", "--dataset-path", "talks.json"),
        *("--endpoint", "completions", "--num-sessions", "3", "--concurrency", "1", "--repeats", "1"),
        *("--warm-up-sessions", "1", "--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "run.json").read_text())["scenarios"]
    server, direct = requests_of(result, "server"), requests_of(result, "direct")
    facts = ("session", "turn", "num_prompt", "num_completion", "is_cut")
    assert [[row[name] for name in facts] for row in server] == [[row[name] for name in facts] for row in direct]
    assert len(server) == result["turns"] == 6
    assert max(row["num_completion"] for row in server) <= 15  # as long as what was answered in the file
    for target in ("server", "direct"):
        (figures,) = result["figures"][target]
        assert figures["errors"] == 0
        assert figures["completion_tokens"] == sum(row["num_completion"] for row in requests_of(result, target))


@pytest.mark.parametrize("given", [("--mix", "sharegpt"), ("--mix", "chat", "--dataset-path", "talks.json")])
def test_a_file_and_its_mix_go_together(refused: Callable[..., list[str]], given: tuple[str, ...]) -> None:
    assert "--dataset-path" in refused("serving", *given)[-1]


def test_an_open_loop_with_the_stand_in(model: Path, tmp_path: Path) -> None:
    done = bench(
        *("serving", "--engine", "standin", "--model", str(model), "--mix", "chat", "--num-sessions", "10"),
        *("--scale", "0.5", "--rate", "400", "--repeats", "1", "--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "run.json").read_text())["scenarios"]
    assert (result["name"], result["sessions"]) == ("open 400/s", 5)
    assert [result["figures"][target][0]["errors"] for target in ("direct", "server")] == [0, 0]
    assert len(requests_of(result, "server")) == len(requests_of(result, "direct")) == result["turns"]


@pytest.fixture
def running(model: Path) -> Iterator[tuple[str, str]]:
    """A server with a reply that is longer than some ask for, and its engine."""
    with Children() as children:
        _, engine_url = start_standin(children, ReplyShape(num_tokens=30, vocab_size=320))
        flags = ("--engine", "sglang", "--engine-url", engine_url, "--model", str(model))
        yield start_serve(children, flags)[1], engine_url


def test_a_running_server_is_measured_and_its_errors_are_counted_and_shown(
    running: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    url, _ = running
    done = bench(
        *("serving", "--url", url, "--model", str(model), "--num-sessions", "6", "--repeats", "1"),
        *("--concurrency", "2", "--warm-up-sessions", "1", "--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "run.json").read_text())["scenarios"]
    assert set(result["figures"]) == {"server"}
    run = result["raw"]["server"][0]["run"]
    assert set(run["errors"]) == {"502 upstream_invalid"}
    assert run["num_ok"] + sum(run["errors"].values()) == result["turns"]
    assert "ERRORS closed server, run: {'502 upstream_invalid'" in done.stdout
    assert "max_tokens" in done.stdout  # the first error's body
