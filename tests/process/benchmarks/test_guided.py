"""`stenograph bench guided` as a process: tiny runs, end to end. What it measures is not asserted."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from standins.tiny.llama import write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model, tiny: any token may follow any other, so that grammars have much to forbid."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three short prompts, and one that is longer than the model's context."""
    path = tmp_path / "prompts.txt"
    path.write_text("the user asks\nthe assistant answers\nadd one and two\n" + "language " * 300 + "\n")
    return path


def sizes(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--concurrency", "3", "--max-tokens", "16", "--warm-up", "0", "--out", "run.json")


def command(model: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "stenograph.cli.main", "bench", "guided", *sizes(model), *arguments]


def bench(model: Path, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(model, *arguments), capture_output=True, text=True, check=False, cwd=cwd)


def results_of(cwd: Path) -> tuple[Any, Any, Any]:
    """The artifact, its guided and its free result."""
    artifact = json.loads((cwd / "run.json").read_text())
    guided, free = artifact["scenarios"]
    assert (guided["name"], free["name"]) == ("guided", "free")
    return artifact, guided, free


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_guided_and_free_have_the_same_prompts_and_only_the_guided_keep_to_the_grammar(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    done = bench(
        model,
        *("--regex", "[a-c]{4,8}", "--prompts", str(prompts), "--num-prompts", "3", "--repeats", "2"),
        *("--csv", "runs.csv"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    artifact, guided, free = results_of(tmp_path)
    for result in (guided, free):
        assert [figures["answered"] for figures in result["figures"]["engine"]] == [3, 3]
        assert (result["sessions"], result["turns"]) == (3, 3)
        for raw in result["raw"]["engine"]:
            assert sorted(raw["requests"]["prompt"]) == [0, 1, 2]
            assert raw["run"]["num_heartbeats"] > 0
    needed = {"ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms", "engine_cpu_ms_per_token", "loop_lag_max_ms"}
    assert needed <= set(guided["figures"]["engine"][0]) & set(free["figures"]["engine"][0])
    assert {"tpot_p50_over_free", "engine_cpu_over_free"} <= set(guided["figures"]["engine"][0])
    assert guided["figures"]["engine"][0]["satisfied_ended_share"] == 1
    assert free["figures"]["engine"][0]["satisfied_share"] == 0
    assert artifact["arguments"]["checked_by"] == "re.fullmatch"
    assert artifact["arguments"]["shortage"] == ""

    (line,) = json_lines(done.stdout)
    assert done.stdout.endswith("\n")
    assert json.loads(done.stdout.splitlines()[-1]) == line
    assert set(line["figures"]["guided"]["engine"]) >= needed
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [(row["mode"], row["grammar"]) for row in rows] == [
        (mode, "regex [a-c]{4,8}") for mode in ("guided", "free")
    ]
    assert all(float(row[name]) > 0 for row in rows for name in ("elapsed_s", "prompt_tokens", "e2e_p99_ms"))
    assert "1 of 2, guided" in done.stderr
    assert done.stderr.index("2 of 2, free") < done.stderr.index("2 of 2, guided")

    compare = [sys.executable, "-m", "stenograph.cli.main", "bench", "compare", "run.json", "run.json"]
    compared = subprocess.run(compare, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    verdicts = json_lines(compared.stdout)[0]["verdicts"]
    assert "tpot_p50_ms" in verdicts["guided @ 3"]
    assert "tpot_p50_ms" in verdicts["free @ 3"]


def test_without_a_baseline_a_data_set_is_guided_alone_and_each_round_is_a_row_at_once(
    model: Path, tmp_path: Path
) -> None:
    talks = [
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "b"}]} for text in ("it", "I")
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    command_line = [*command(model, "--json-object", "--no-baseline", "--stream-output", "--repeats", "2")]
    command_line += ["--dataset", "sharegpt", "--dataset-path", "talks.json", "--num-prompts", "2", "--top-p", "0.9"]
    command_line += ["--top-k", "20"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "run.json").read_text())
    assert [result["name"] for result in artifact["scenarios"]] == ["guided"]
    rows = list(csv.DictReader(done.stdout.splitlines()[:3]))
    assert [(row["mode"], row["round"], row["answered"], row["top_p"]) for row in rows] == [
        ("guided", "1", "2", "0.9"),
        ("guided", "2", "2", "0.9"),
    ]
    assert "| free" not in done.stdout
    assert set(json_lines(done.stdout)[0]["figures"]) == {"guided"}


def test_random_texts_have_the_lengths_asked_for(model: Path, tmp_path: Path) -> None:
    few = ("--model", str(model), "--concurrency", "2", "--warm-up", "0", "--repeats", "1", "--num-prompts", "3")
    lengths = ("--dataset", "random", "--input-len", "20", "--output-len", "7", "--ignore-eos", "--regex", "[a-z]{40}")
    command_line = [
        sys.executable,
        "-m",
        "stenograph.cli.main",
        "bench",
        "guided",
        *few,
        *lengths,
        "--out",
        "run.json",
    ]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for result in results_of(tmp_path)[1:]:
        requests = result["raw"]["engine"][0]["requests"]
        assert requests["num_completion"] == [7, 7, 7]
        assert max(requests["num_prompt"]) - min(requests["num_prompt"]) <= 2


def test_the_same_seed_draws_the_same_tokens_in_every_round(model: Path, prompts: Path, tmp_path: Path) -> None:
    done = bench(
        model, *("--json-object", "--prompts", str(prompts), "--num-prompts", "3", "--repeats", "2"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for result in results_of(tmp_path)[1:]:
        first, second = (
            sorted(zip(raw["requests"]["prompt"], raw["requests"]["text"], strict=True))
            for raw in result["raw"]["engine"]
        )
        assert first == second


def test_failures_are_counted_apart_and_said_and_too_few_prompts_do_not_stop_it(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    done = bench(
        model, *("--choice", "yes,no", "--prompts", str(prompts), "--num-prompts", "9"), "--repeats", "1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    artifact, guided, free = results_of(tmp_path)
    for result in (guided, free):
        assert result["turns"] == 4
        (figures,) = result["figures"]["engine"]
        assert (figures["answered"], figures["errors"]) == (3, 1)
        assert list(result["raw"]["engine"][0]["run"]["errors"]) == ["400 invalid_request"]
    assert "FAILED guided, 1 times: " in done.stdout
    assert "FAILED free, 1 times: " in done.stdout
    assert artifact["arguments"]["shortage"] == "9 prompts were asked for, there are 4"
    assert "9 prompts were asked for, there are 4" in done.stderr
    texts = guided["raw"]["engine"][0]["requests"]["text"]
    assert set(texts) <= {"yes", "no"}


def test_where_eos_is_ignored_every_free_reply_is_as_long_as_it_may_be(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "letters.gbnf").write_text("root ::= [a-z]{300}\n")
    done = bench(
        model,
        *("--ebnf", "letters.gbnf", "--ignore-eos", "--prompts", str(prompts), "--num-prompts", "3", "--repeats", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    _, guided, free = results_of(tmp_path)
    for result in (guided, free):
        assert result["raw"]["engine"][0]["requests"]["num_completion"] == [16, 16, 16]
    assert "satisfied_share" not in guided["figures"]["engine"][0]
    assert "no second parser of EBNF" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json-schema", "nothing.json"), "nothing.json"),
        (("--choice", "a,,b"), "none is empty"),
        (("--json-object", "--temperature", "-1"), "temperature"),
        (("--json-object", "--prompts", "none.txt"), "none.txt"),
        (("--json-object", "--csv", "other.csv"), "other columns"),
        (("--dataset", "sharegpt"), "--dataset-path"),
        (("--dataset", "sharegpt", "--dataset-path", "other.csv"), "other.csv"),
        (("--input-len", "9"), "--dataset random"),
        (("--output-len", "9"), "give one"),
        (("--dataset", "random", "--prompts", "none.txt"), "give one"),
        (("--json-object", "--top-p", "0"), "top_p"),
        (("--json-object", "--regex", "a"), "not allowed with"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    model: Path, tmp_path: Path, refused: Callable[..., list[str]], arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "other.csv").write_text("a,b\n")
    assert said in refused("guided", *sizes(model), *arguments, "--num-prompts", "2")[-1]


def test_where_nothing_was_answered_the_process_says_so_in_a_line(model: Path, tmp_path: Path) -> None:
    done = bench(model, "--regex", "[a", "--num-prompts", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no guided request was answered" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_engine(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    endless = ("--regex", "[a-z]{200}", "--num-prompts", "2", "--repeats", "100000", "--max-tokens", "100")
    with subprocess.Popen(command(model, *endless), stderr=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        assert running.stderr is not None
        assert any("1 of 100000" in line for line in running.stderr)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(number)
        rest = running.stderr.read()
        assert running.wait() == 130
    assert "Traceback" not in rest
    assert len(children) == 1
    assert not os.path.exists(f"/proc/{children[0]}")
