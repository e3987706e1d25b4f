"""`scripts/rl` on the tiny model: it runs, its log-probabilities are the recorded ones, and its faults are seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stenograph.testing.tiny.llama import write_tiny_folder

if "TEST_TRAINERS" not in os.environ:  # scripts/test-trainers has it
    pytest.importorskip("torch", reason="torch is an extra; scripts/test-trainers runs this")

TRAIN = Path(__file__).parents[2] / "examples" / "rl" / "train.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("drift", ["none", "shift"])
def test_two_steps_on_the_tiny_model(tmp_path: Path, drift: str) -> None:
    model = write_tiny_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    command = [
        sys.executable, str(TRAIN), "--model", str(model), "--family", "smollm2", "--out", str(tmp_path / "out"),
        "--steps", "2", "--prompts", "2", "--group-size", "2", "--episodes", "4", "--cold-steps", "1", "--drift", drift,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    # Each step is sampled by the weights of the one before.
    assert [step["versions"] for step in steps] == [["0"], ["1"]]
    if drift == "none":
        assert max(step["max_distance"] for step in steps) <= 1e-4
        assert max(step["share_outside"] for step in steps) == 0.0
    else:
        assert max(step["max_distance"] for step in steps) > 1e-2
    assert "held-out success after" in done.stdout
