"""`stenograph bench soak` as a process: a short run sees every kind of fault and nothing else; a broken one is told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.plan import DECK
from standins.tiny.tokenizer import tiny_tokenizer_json

ROOT = str(Path(__file__).parents[3])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from benchmarks.__main__ import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a configuration: no weights, and no template, so that ours is used."""
    folder = tmp_path_factory.mktemp("tiny-model")
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    config = {"vocab_size": 320, "max_position_embeddings": 2**20, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def soak(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, "soak", "--out", "run.json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def artifact_in(folder: Path) -> Any:
    (result,) = json.loads((folder / "run.json").read_text())["scenarios"]
    return result


@pytest.mark.timeout(600)
def test_a_short_soak_sees_every_kind_of_fault_and_no_error_that_was_not_ordered(model: Path, tmp_path: Path) -> None:
    arguments = ("--duration", "120", "--max-turns", "600", "--clients", "8", "--model", str(model))
    done = soak(*arguments, "--server-flags=--family chatml", "--plot", "run.png", "--log", "log.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = artifact_in(tmp_path)
    raw, (figures,) = result["raw"]["server"][0], result["figures"]["server"]
    assert raw["tally"]["failures"] == []
    assert figures["unexpected"] == figures["unseen_kinds"] == figures["log_tracebacks"] == 0
    assert figures["sessions_left"] == figures["in_flight_left"] == figures["engine_left"] == 0
    assert {card.name for card in DECK} <= raw["tally"]["outcomes"].keys()
    assert raw["tally"]["num_turns"] >= 600
    assert raw["tally"]["num_ids_checked"] > 0
    assert raw["tally"]["outcomes"]["what the session holds"].keys() == {"as the model of it"}
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    line = json.loads(done.stdout.strip().splitlines()[-1])
    assert (line["bench"], line["missed"]) == ("soak", [])
    assert (tmp_path / "log.txt").stat().st_size > 0


@pytest.mark.timeout(600)
def test_an_outcome_that_was_not_ordered_is_printed_with_its_seed_and_ends_in_exit_code_1(
    model: Path, tmp_path: Path
) -> None:
    arguments = ("--duration", "60", "--max-turns", "250", "--clients", "4", "--seed", "11", "--model", str(model))
    done = soak(*arguments, "--server-flags=--family chatml --max-body-bytes 100000", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UNEXPECTED 11." in done.stderr
    assert "413 body_too_large" in done.stderr
    assert "soak.unexpected" in json.loads(done.stdout.strip().splitlines()[-1])["missed"]
