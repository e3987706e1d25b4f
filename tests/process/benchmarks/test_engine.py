"""`stenograph bench engine` as a process, beside a real llama.cpp: tiny runs. What it measures is not asserted."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from standins.tiny.llama import write_tiny_folder, write_tiny_gguf

SIZES = ("--batch", "1,3", "--max-tokens", "200", "--prompt-tokens", "120", "--num-prompts", "2")
SESSION = ("--turns", "5", "--turn-tokens", "30", "--reply-tokens", "6")
ROOT = str(Path(__file__).parents[3])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from benchmarks.__main__ import main; sys.exit(main())"
WITHOUT_XLLAMACPP = f"import sys; sys.modules['xllamacpp'] = None; {PROGRAM}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for both engines."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny-llama") / "tiny.gguf")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose replies may be so long that hardly one is whole before all have begun, on a busy machine too."""
    return write_tiny_gguf(tmp_path_factory.mktemp("long-llama") / "tiny.gguf", context=4096)


def command(model: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "engine", "--model", str(model), "--out", "run.json", *arguments]


def bench(model: Path, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(model, *arguments), capture_output=True, text=True, check=False, cwd=cwd)


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_both_engines_decode_and_prefill_the_same_in_turn(long_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    done = bench(long_model, *SIZES, "--max-tokens", "1600", "--beside", "llamacpp", "--repeats", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "run.json").read_text())
    assert [(one["name"], one["sessions"]) for one in artifact["scenarios"]] == [
        ("decode", 1),
        ("decode", 3),
        ("prefill", 1),
    ]
    for result in artifact["scenarios"]:
        assert [len(result["figures"][side]) for side in ("engine", "llamacpp")] == [2, 2]
        rate = f"{result['name']}_tokens_per_cpu_s"
        for mine, other in zip(result["figures"]["engine"], result["figures"]["llamacpp"], strict=True):
            assert mine[f"{result['name']}_over_llamacpp"] == pytest.approx(mine[rate] / other[rate])
    for side in ("engine", "llamacpp"):
        for raw in artifact["scenarios"][0]["raw"][side]:
            assert raw["run"]["num_tokens"] <= 1599  # the first comes with the prompt
        for raw in artifact["scenarios"][2]["raw"][side]:
            assert (raw["requests"]["num_prompt"], raw["requests"]["num_cached"]) == ([120, 120], [0, 0])
    assert done.stderr.index("1 of 2, prefill, embedded") < done.stderr.index("1 of 2, prefill, llama.cpp")
    assert done.stderr.index("2 of 2, prefill, llama.cpp") < done.stderr.index("2 of 2, prefill, embedded")
    (line,) = json_lines(done.stdout)
    assert json.loads(done.stdout.splitlines()[-1]) == line
    assert set(line["figures"]) == {"decode@1", "decode@3", "prefill"}
    assert "embedded / llama.cpp" in done.stdout

    compare = [sys.executable, "-m", "stenograph.cli.main", "bench", "compare", "run.json", "run.json"]
    compared = subprocess.run(compare, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "decode_tokens_per_cpu_s" in json_lines(compared.stdout)[0]["verdicts"]["decode @ 3"]
    assert "NOTE" not in compared.stdout


def test_a_session_finds_its_earlier_turns_only_where_prefixes_are_reused(model: Path, tmp_path: Path) -> None:
    done = bench(model, *SESSION, "--scenario", "reuse", "--repeats", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "run.json").read_text())
    on, off = artifact["scenarios"]
    assert ((on["name"], off["name"]), on["turns"]) == (("reuse on", "reuse off"), 5)
    for warm, cold in zip(on["raw"]["engine"], off["raw"]["engine"], strict=True):
        assert warm["turns"]["num_prompt"] == cold["turns"]["num_prompt"] == [30, 66, 102, 138, 174]
        assert warm["turns"]["num_cached"][0] == 0
        assert all(warm["turns"]["num_cached"][1:])
        assert warm["turns"]["num_cached"] == sorted(warm["turns"]["num_cached"])
        assert cold["turns"]["num_cached"] == [0] * 5
        assert [len(drawn) for drawn in warm["turns"]["drawn"]] == [6] * 5
    needed = {"ttft_first_turn_ms", "ttft_middle_turn_ms", "ttft_last_turn_ms", "session_cpu_s"}
    assert needed | {"session_cpu_over_cold"} <= set(on["figures"]["engine"][0])
    assert needed <= set(off["figures"]["engine"][0])
    assert "the turn in the middle is number 3 of 5" in done.stdout
    assert len(json_lines(done.stdout)) == 1


def test_without_anything_beside_it_the_engine_is_alone(model: Path, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "folder")
    done = bench(folder, *SIZES, "--scenario", "decode", "--repeats", "1", "--warm-up", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama.cpp" not in done.stdout + done.stderr
    assert {name: list(sides) for name, sides in json_lines(done.stdout)[0]["figures"].items()} == {
        "decode@1": ["engine"],
        "decode@3": ["engine"],
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scenario", "decode,speed"), "got 'speed'"),
        (("--batch", "1,0"), "got '0'"),
        (("--max-tokens", "250"), "the model has room for 256"),
        (("--scenario", "reuse"), "the model has room for 256"),
        (("--beside", "llamacpp", "--threads", "2"), "leave --threads at 1"),
        (("--beside", "llamacpp", "--scenario", "reuse"), "nothing beside it"),
        (("--beside", "llamacpp", "--model", "folder"), "needs the weights as a .gguf file"),
        (("--scenario", "decode", "--max-tokens", "1"), "give more --max-tokens"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    model: Path, tmp_path: Path, refused: Callable[..., list[str]], arguments: tuple[str, ...], said: str
) -> None:
    if "--beside" in arguments:
        pytest.importorskip("xllamacpp")
    write_tiny_folder(tmp_path / "folder")
    given = ("--model", str(model), "--out", "run.json", "--prompt-tokens", "20", *arguments)
    assert said in refused("engine", *given)[-1]


def test_where_there_is_no_llamacpp_one_line_says_how_to_get_it(model: Path, tmp_path: Path) -> None:
    absent = [sys.executable, "-c", WITHOUT_XLLAMACPP, *command(model, "--beside", "llamacpp")[3:]]
    done = subprocess.run(absent, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install xllamacpp")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_both_engines(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("xllamacpp")
    endless = (*SIZES, "--beside", "llamacpp", "--scenario", "decode", "--repeats", "100000")
    with subprocess.Popen(command(model, *endless), stderr=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        assert running.stderr is not None
        assert any("1 of 100000" in line for line in running.stderr)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(number)
        rest = running.stderr.read()
        assert running.wait() == 130
    assert "Traceback" not in rest
    assert len(children) == 3  # the engine, and a llama.cpp for each size of batch
    assert not any(os.path.exists(f"/proc/{child}") for child in children)
