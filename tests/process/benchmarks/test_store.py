"""`stenograph bench store` as a process: a tiny run, end to end. What it measures is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

from standins.tiny.llama import write_tiny_folder


def test_copies_of_a_session_get_their_turns_and_the_run_is_an_artifact(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny-llama")
    flags = ("--sessions", "12", "--turns", "3", "--touches", "50", "--repeats", "2", "--out", "run.json")
    command = [sys.executable, "-m", "stenograph.cli.main", "bench", "store", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a turn of 6 sessions; 2 of 2" in done.stderr, "each repeat has sessions of its own"
    (result,) = json.loads((tmp_path / "run.json").read_text())["scenarios"]
    assert (result["name"], result["sessions"], result["turns"]) == ("touch", 12, 3)
    shown = {"ready_s", "first_turn_ms", "cold_turn_p99_ms", "warm_turn_p50_ms", "touch_p50_ms", "rss_most_mib"}
    assert [shown - figures.keys() for figures in result["figures"]["server"]] == [set(), set()]
    assert "| turn of a session that is on disk alone p99, ms" in done.stdout
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["bench"], list(line["figures"]), line["missed"]) == ("store", ["touch"], [])
