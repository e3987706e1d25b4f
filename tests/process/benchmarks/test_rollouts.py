"""`stenograph bench rollouts` as a process: a tiny run, end to end. What it measures is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

from standins.tiny.llama import write_tiny_folder


def test_groups_of_rollouts_end_and_the_run_is_an_artifact(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny-llama")
    flags = ("--groups", "2", "--turns", "1", "--tokens", "4", "--hangs", "0", "--repeats", "2", "--out", "run.json")
    command = [sys.executable, "-m", "stenograph.cli.main", "bench", "rollouts", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 groups whole, ") == 2
    (result,) = json.loads((tmp_path / "run.json").read_text())["scenarios"]
    assert (result["name"], result["sessions"], result["turns"]) == ("rollouts", 16, 1)
    shown = {"client_cpu_ms_per_rollout", "rollouts_per_s", "sessions_left"}
    assert [figures.keys() for figures in result["figures"]["server"]] == [shown, shown]
    assert "| client CPU, ms per rollout" in done.stdout
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["bench"], list(line["figures"]), line["missed"]) == ("rollouts", ["rollouts"], [])
