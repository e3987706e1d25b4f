"""`scripts/rl experiment`: the order of a list's runs, what a second start does, the shipped list's options."""

import json
import subprocess
import sys
from pathlib import Path

RL = Path(__file__).parents[2] / "examples" / "rl"
LIST = """
[one]
seeds = [0, 1]
options = "--steps 2"
[one.arms]
plain = ""
taught = "--teacher {out}/one/plain-{seed}"
"""
STANDIN = """
import json, sys
from pathlib import Path
log, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--out") + 1])
begun = log.read_text() if log.exists() else ""
log.write_text(begun + json.dumps(sys.argv[2:]) + "\\n")
if len(begun.splitlines()) == 1: sys.exit(3)  # the second run is interrupted
out.mkdir(parents=True)
(out / "summary.json").write_text("{}")
"""
DRIVER = """
import sys
from pathlib import Path
from experiment import listed, run_all
from options import parsed
file, out, *command = sys.argv[1:]
runs = listed(Path(file), Path(out))
print(len(runs), [str(folder) for folder in run_all(runs, parsed, command)])
"""


def driven(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=RL)


def test_a_list_runs_in_order_and_goes_on_with_what_is_not_over(tmp_path: Path) -> None:
    listing, standin, log, out = (tmp_path / name for name in ("list.toml", "train.py", "log", "out"))
    listing.write_text(LIST)
    standin.write_text(STANDIN)
    arguments = (listing, out, sys.executable, standin, log)
    first = driven(*arguments)
    assert first.stdout.splitlines()[-1] == f"4 {[str(out / 'one' / 'taught-0')]}", first.stderr
    names = ["plain-0", "taught-0", "plain-1", "taught-1"]
    ran = [json.loads(line) for line in log.read_text().splitlines()]
    assert [Path(one[-1]).name for one in ran] == names
    taught = ["--steps", "2", "--teacher", str(out / "one/plain-1"), "--seed", "1", "--out", str(out / "one/taught-1")]
    assert ran[3] == taught
    second = driven(*arguments)
    assert second.stdout.splitlines()[-1] == "4 []", second.stderr
    assert [json.loads(line) for line in log.read_text().splitlines()[4:]] == [ran[1]]


def test_a_wrong_option_in_the_last_arm_stops_the_list_before_its_first_run(tmp_path: Path) -> None:
    listing, log = tmp_path / "list.toml", tmp_path / "log"
    (tmp_path / "train.py").write_text(STANDIN)
    listing.write_text(LIST + 'wrong = "--no-such-option"\n')
    done = driven(listing, tmp_path / "out", sys.executable, tmp_path / "train.py", log)
    assert done.returncode == 2
    assert "unrecognized arguments: --no-such-option" in done.stderr
    assert not log.exists()


def test_the_shipped_list_has_options_of_the_parser_and_names_an_unknown_experiment(tmp_path: Path) -> None:
    done = driven(RL / "experiments.toml", tmp_path, "true")  # a command that leaves no summary
    assert done.stdout.splitlines()[-1] == "65 []", done.stderr
    command = [sys.executable, str(RL / "experiment.py"), str(RL / "experiments.toml"), str(tmp_path), "--only", "no"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "has no experiment no: it has exactness, stale, bfloat16, teacher, distillation" in refused.stderr
