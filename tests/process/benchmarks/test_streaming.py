"""`stenograph bench streaming` as a process: tiny runs, end to end. What it measures is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from standins.tiny.llama import write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny-llama"))


def bench(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "stenograph.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_ways_to_tokenize_are_measured_in_turn_and_compared(model: Path, tmp_path: Path) -> None:
    done = bench(
        *("streaming", "--model", str(model), "--tokenize-workers", "0,2", "--pretok", "--num-requests", "6"),
        *("--prompt-tokens", "40", "--max-tokens", "3", "--warm-up", "1", "--repeats", "2", "--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "run.json").read_text())
    names = ["burst, 0 workers", "burst, 2 workers", "burst, pretok"]
    assert [result["name"] for result in artifact["scenarios"]] == names
    for result in artifact["scenarios"]:
        assert [figures["errors"] for figures in result["figures"]["engine"]] == [0, 0]
        assert {"submit_wall_ms", "add_p99_ms", "ttft_tokenize_ms", "tpot_p50_ms", "itl_p99_ms"} <= set(
            result["figures"]["engine"][0]
        )
        assert [len(raw["requests"]["ttft_ms"]) for raw in result["raw"]["engine"]] == [6, 6]
    assert artifact["arguments"]["num_prompt_tokens"] == 40
    assert artifact["machine"]["cores"] >= 1
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert (line["bench"], list(line["figures"]), line["missed"]) == ("streaming", names, [])
    assert "| add_request p99, ms" in done.stdout
    order = [row.split(", ")[1].split(":")[0] for row in done.stderr.splitlines() if " of 2, " in row]
    assert order == ["0 workers", "2 workers", "pretok", "pretok", "2 workers", "0 workers"]

    compared = bench("compare", "run.json", "run.json", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    verdicts = json.loads(compared.stdout.strip().splitlines()[-1])["verdicts"]
    assert list(verdicts) == [f"{name} @ 6" for name in names]
    assert "add_p99_ms" in verdicts["burst, 0 workers @ 6"]


def test_a_prompt_that_all_share_arrives_at_fixed_times(model: Path, tmp_path: Path) -> None:
    done = bench(
        *("streaming", "--model", str(model), "--tokenize-workers", "1", "--prompts", "shared", "--num-requests", "5"),
        *("--prompt-tokens", "40", "--submit-interval-ms", "2", "--max-tokens", "1", "--repeats", "1"),
        *("--warm-up", "0", "--max-batch", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "bench-streaming.json").read_text())["scenarios"]
    (figures,) = result["figures"]["engine"]
    assert result["name"] == "every 2 ms, 1 workers"
    assert figures["cached_share"] > 0.5
    assert "late_p99_ms" in figures
    assert "tpot_p50_ms" not in figures  # one token each


def test_one_text_repeated_is_prefilled_one_prompt_a_step_and_the_header_has_totals_and_device(
    model: Path, tmp_path: Path
) -> None:
    done = bench(
        *(
            "streaming",
            "--model",
            str(model),
            "--tokenize-workers",
            "1",
            "--prompt",
            "the user asks ",
            "--repeats",
            "1",
        ),
        *("--prompt-repeats", "3", "--prompts", "shared", "--num-requests", "4", "--max-tokens", "2", "--stop-on-eos"),
        *("--no-prefix-cache", "--max-prefill-batch", "1", "--forward", "numpy", "--warm-up", "0"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "bench-streaming.json").read_text())
    (figures,) = artifact["scenarios"][0]["figures"]["engine"]
    num_prompt = round(4 * artifact["arguments"]["num_prompt_tokens"])
    assert (figures["prompt_tokens"], figures["cached_share"], artifact["arguments"]["device"]) == (
        num_prompt,
        0,
        "cpu",
    )
    header = done.stdout.splitlines()[:2]
    assert header[0].startswith("up to 2 tokens each, or the eos of 4 shared prompts of the text given")
    assert header[1].startswith(f"{num_prompt} prompt tokens and ")
    assert header[1].endswith("numpy on cpu, no prefix cache")


def test_an_engine_that_cannot_load_is_said_in_a_line(model: Path, tmp_path: Path) -> None:
    broken = write_tiny_folder(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    done = bench("streaming", "--model", str(broken), "--prompt-tokens", "40", "--repeats", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr
