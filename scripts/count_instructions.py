"""The instructions of a server per chat, counted by valgrind: a figure that no other load on the machine moves.

    python -m scripts.count_instructions --scenario B --turns 2,12 [--before DIR] [--durability commit]

A server is run twice under valgrind's cachegrind, with the scenario's load of few and of more turns; the difference
counts chats alone, without start, warm-up and end. `--before` counts another checkout's server too. With `--durability`
sessions are kept in a folder, and the bytes of a chat in it are counted. Instructions are of user space: a system call
counts none, and what the kernel does is left out. 30 to 50 times as slow as the load.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from benchmarks.kit.options import add_model
from benchmarks.kit.processes import Children
from benchmarks.kit.runner import cached_model
from benchmarks.kit.servers import Checkout, start_standin
from benchmarks.responsiveness.load import Load
from benchmarks.responsiveness.scenarios import Scenario, scenarios_named
from stenograph.store.settings import Durability

ROOT = Path(__file__).parents[1]
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The instructions of one server from its start to its end, the chats of its load, and the bytes kept of them."""

    instructions: int
    chats: int
    kept_bytes: int


def count(scenario: Scenario, checkout: Checkout, model: str, durability: str) -> Count:
    """Run a server once."""
    with Children() as children, TemporaryDirectory() as folder:
        _, engine_url = start_standin(children, scenario.shape)
        log = Path(folder, "valgrind.log")
        kept = Path(folder, "kept")
        flags = ["--port", "0", "--engine", "sglang", "--engine-url", engine_url, "--model", model]
        if durability != Durability.NONE:
            flags += ["--data-dir", str(kept), "--durability", durability]
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
        return Count(
            instructions=int(counted[1].replace(",", "")),
            chats=run["num_ok"],
            kept_bytes=sum(file.stat().st_size for file in kept.glob("*.sqlite3")),
        )


def per_chat(
    scenario: Scenario, turns: Sequence[int], checkout: Checkout, model: str, durability: str
) -> tuple[float, float]:
    """Instructions and kept bytes per chat between a load of few turns and one of more."""
    few, many = (count(replace(scenario, turns=number), checkout, model, durability) for number in turns)
    chats = many.chats - few.chats
    return (many.instructions - few.instructions) / chats, (many.kept_bytes - few.kept_bytes) / chats


def main() -> None:
    parser = argparse.ArgumentParser(prog="count_instructions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", default="B", help="a scenario of `stenograph bench responsiveness`")
    parser.add_argument("--turns", default="2,12", help="turns of each session in the smaller and in the larger load")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--durability", choices=list(Durability), default=Durability.NONE, help="as of `serve`")
    add_model(parser)
    options = parser.parse_args()
    if which(VALGRIND[0]) is None:
        raise SystemExit("valgrind is missing; on Debian: apt-get install valgrind")
    (scenario,) = scenarios_named(options.scenario)
    turns = [int(number) for number in options.turns.split(",")]
    if len(turns) != 2 or not 0 < turns[0] < turns[1]:
        parser.error("--turns takes two numbers, the smaller one first")
    model = str(cached_model(options.model))
    now, kept = per_chat(scenario, turns, Checkout(ROOT), model, options.durability)
    sys.stdout.write(f"{scenario.name}: {now:,.0f} instructions and {kept:,.0f} kept bytes per chat\n")
    if options.before is not None:
        before, kept = per_chat(scenario, turns, Checkout(options.before), model, options.durability)
        sys.stdout.write(f"{scenario.name}: {before:,.0f} and {kept:,.0f} bytes before, {now / before:.3f} x\n")


if __name__ == "__main__":
    main()
