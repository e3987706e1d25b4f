"""The instructions of a server per chat, counted by valgrind: a figure that no other load on the machine moves.

    python -m scripts.count_instructions --scenario B --turns 2,12 [--before DIR]

A server is run twice under valgrind's cachegrind, with the scenario's load of few and of more turns; the difference
counts chats alone, without start, warm-up and end. `--before` counts another checkout's server too. Instructions are
of user space: a system call counts none, and what the kernel does is left out. 30 to 50 times as slow as the load.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from benchmarks.kit.options import add_model
from benchmarks.kit.processes import Children
from benchmarks.kit.runner import cached_model
from benchmarks.kit.servers import Checkout, start_standin
from benchmarks.responsiveness.load import Load
from benchmarks.responsiveness.scenarios import Scenario, scenarios_named

ROOT = Path(__file__).parents[1]
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


def count(scenario: Scenario, checkout: Checkout, model: str) -> tuple[int, int]:
    """The instructions of one server from its start to its end, and the chats of its load."""
    with Children() as children, TemporaryDirectory() as folder:
        _, engine_url = start_standin(children, scenario.shape)
        log = Path(folder, "valgrind.log")
        flags = ("--port", "0", "--engine", "sglang", "--engine-url", engine_url, "--model", model)
        server = subprocess.Popen(
            [*VALGRIND, f"--log-file={log}", *checkout.python, "-m", "stenograph.cli.main", "serve", *flags],
            stdout=subprocess.PIPE,
            env={**os.environ, **checkout.environment, "PYTHONHASHSEED": "0"},
        )
        try:
            assert server.stdout is not None
            found = re.search(r"ready at (http://\S+)", server.stdout.readline().decode())
            if found is None:
                raise SystemExit("the server did not start")
            with Load(scenario, found[1]) as load:
                load.step("open")
                run = load.step("run")
            if run["errors"]:
                raise SystemExit(f"chats failed: {run['first_error']}")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        counted = re.search(r"I\s+refs:\s+([\d,]+)", log.read_text())
        assert counted is not None, log.read_text()
        return int(counted[1].replace(",", "")), run["num_ok"]


def per_chat(scenario: Scenario, turns: Sequence[int], checkout: Checkout, model: str) -> float:
    """Instructions per chat between a load of few turns and one of more."""
    (fewer, few), (more, many) = (count(replace(scenario, turns=number), checkout, model) for number in turns)
    return (more - fewer) / (many - few)


def main() -> None:
    parser = argparse.ArgumentParser(prog="count_instructions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", default="B", help="a scenario of `stenograph bench responsiveness`")
    parser.add_argument("--turns", default="2,12", help="turns of each session in the smaller and in the larger load")
    parser.add_argument("--before", type=Path, help="another checkout")
    add_model(parser)
    options = parser.parse_args()
    if which(VALGRIND[0]) is None:
        raise SystemExit("valgrind is missing; on Debian: apt-get install valgrind")
    (scenario,) = scenarios_named(options.scenario)
    turns = [int(number) for number in options.turns.split(",")]
    if len(turns) != 2 or not 0 < turns[0] < turns[1]:
        parser.error("--turns takes two numbers, the smaller one first")
    model = str(cached_model(options.model))
    now = per_chat(scenario, turns, Checkout(ROOT), model)
    sys.stdout.write(f"{scenario.name}: {now:,.0f} instructions per chat\n")
    if options.before is not None:
        before = per_chat(scenario, turns, Checkout(options.before), model)
        sys.stdout.write(f"{scenario.name}: {before:,.0f} before, {now / before:.3f} x\n")


if __name__ == "__main__":
    main()
