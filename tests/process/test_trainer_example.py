"""The trainer of the examples runs: its policy is rewarded more, and its log-probabilities are the recorded ones."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from standins.tiny.llama import write_tiny_folder
from tests.process.test_serve import EXAMPLES, running

if "TEST_TRAINERS" not in os.environ:  # scripts/test-trainers has it
    pytest.importorskip("torch", reason="torch is an extra; scripts/test-trainers runs this")


@pytest.mark.timeout(600)
def test_the_trainer_of_the_examples_learns_by_the_commands_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fresh folder, with relative paths; the server's port and the number of steps are the test's."""
    program = EXAMPLES / "trainer.py"
    lines = re.findall(r"^    (.+)$", docstring_of(program), re.MULTILINE)
    serve, train = (line.split("#")[0].split() for line in lines)
    assert (serve[:2], train[:2]) == (["stenograph", "serve"], ["python", "examples/trainer.py"])
    flags = {"FOLDER": "model", "WEIGHTS": "weights"}
    write_tiny_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with running(*(flags.get(word, word) for word in serve[2:])) as (url, _):
        command = [sys.executable, str(program), *(flags.get(word, word) for word in train[2:])]
        done = subprocess.run([*command, "--url", url, "--steps", "15"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", done.stdout)]
    distances = [float(found) for found in re.findall(r"at most (\S+) nats", done.stdout)]
    assert len(rewards) == 15
    assert max(distances) <= 1e-4
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def docstring_of(program: Path) -> str:
    """The text at the head of a program."""
    return ast.get_docstring(ast.parse(program.read_text()), clean=False) or ""
