"""The trainer of the examples runs: its policy is rewarded more, and its log-probabilities are the recorded ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stenograph.testing.tiny.llama import write_tiny_folder
from tests.process.test_serve import EXAMPLES, running

if "TEST_TRAINERS" not in os.environ:  # scripts/test-trainers has it
    pytest.importorskip("torch", reason="torch is an extra; scripts/test-trainers runs this")


@pytest.mark.timeout(300)
def test_the_trainer_of_the_examples_learns_from_the_recorded_tokens(tmp_path: Path) -> None:
    model, weights = write_tiny_folder(tmp_path / "model"), tmp_path / "weights"
    weights.mkdir()
    with running("--model", str(model), "--weights-dir", str(weights)) as (url, _):
        command = [sys.executable, str(EXAMPLES / "trainer.py"), "--url", url, "--model", str(model), "--steps", "15"]
        done = subprocess.run([*command, "--weights-dir", str(weights)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", done.stdout)]
    distances = [float(found) for found in re.findall(r"at most (\S+) nats", done.stdout)]
    assert len(rewards) == 15
    assert max(distances) <= 1e-4
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
