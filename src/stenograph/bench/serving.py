"""`stenograph bench serving`: what do conversations get, through the server and straight at the engine?

For each load (a closed loop of so many clients, an open loop of so many sessions a second) and repeat: the same seeded
conversations at the engine alone, then through the server, or the other way round. Owns the run's options, order and
progress; what a measurement is, is in serving_measure.py.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stenograph.bench.artifact import Artifact, ScenarioResult, write_artifact
from stenograph.bench.measure import Measured
from stenograph.bench.plots import PLOT_NEEDS, can_plot, plot_serving
from stenograph.bench.processes import ChildFailed
from stenograph.bench.report import errors_of, json_line
from stenograph.bench.responsiveness import begin_artifact, cached_model, count, share
from stenograph.bench.serving_load import ServingPlan
from stenograph.bench.serving_measure import EMBEDDED, ENGINES, SGLANG, Note, Setup, measure_direct, measure_server
from stenograph.bench.serving_mix import MIXES, draw_sessions
from stenograph.bench.serving_report import serving_table
from stenograph.core.errors import StartupError
from stenograph.render.model_files import load_model_files

MEASURES: dict[str, Callable[[Setup, ServingPlan, Note], Measured]] = {
    "direct": measure_direct,
    "server": measure_server,
}
SHOWN = {"direct": "straight at the engine", "server": "through the server"}
PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load: `plan` without its target, what it is called, and how much is said; `message_bytes` is a mean."""

    name: str
    title: str
    plan: ServingPlan
    num_chats: int
    message_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--engine", choices=ENGINES, default=EMBEDDED, help="who samples. Default: embedded.")
    parser.add_argument("--engine-url", type=_url, metavar="URL", help="an SGLang that runs; for --engine sglang")
    parser.add_argument("--url", type=_url, help="a server that runs already, instead of one that is started")
    parser.add_argument("--model", default="smollm2-135m", help="the server's model. Default: smollm2-135m.")
    parser.add_argument("--mix", choices=tuple(MIXES), help="what is said. Default: chat if embedded, else agent.")
    parser.add_argument("--num-sessions", type=count, default=32, help="conversations of a load. Default: 32.")
    parser.add_argument("--concurrency", metavar="1,4,16", help="closed loops of so many clients. Default: 4.")
    parser.add_argument("--rate", metavar="0.5,1", help="open loops of so many sessions a second")
    parser.add_argument("--seed", type=int, default=0, help="of conversations and arrivals. Default: 0.")
    parser.add_argument("--max-tokens", type=count, help="the most that a turn asks for; else as the mix has it")
    parser.add_argument("--repeats", type=count, default=3, help="how often each is measured. Default: 3.")
    parser.add_argument("--scale", type=share, default=1.0, help="the share of the sessions. Default: 1.")
    parser.add_argument("--warm-up-sessions", type=count, default=2, help="before each measurement. Default: 2.")
    parser.add_argument("--engine-threads", type=count, default=1, help="BLAS threads of the embedded engine")
    parser.add_argument("--max-batch", type=count, default=16, help="sequences that the embedded engine steps at once")
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="further flags of `serve`")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-serving.json"), metavar="FILE.json", help="the artifact's place"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="latency against load; needs the extra `bench`")


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    try:
        _check(options)
        levels = list(_levels(options))
        setup = _setup(options)
        artifact = begin_artifact("serving", options)
        for level in levels:
            _measure_level(artifact, level, setup, options)
    except (ChildFailed, StartupError, ValueError, OSError) as error:
        sys.stderr.write(f"stenograph: {error}\n")
        return 2
    _show(artifact, options)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if options.plot is not None and not can_plot():
        raise ValueError(f"--plot {PLOT_NEEDS}")
    if options.engine == SGLANG and options.engine_url is None and options.url is None:
        raise ValueError("--engine sglang needs --engine-url, or a running server as --url")
    if options.engine != SGLANG and options.engine_url is not None:
        raise ValueError(f"--engine-url is for --engine sglang, not for {options.engine}")
    if options.url is not None and options.server_flags:
        raise ValueError("--server-flags are for a server that is started, not for one that runs as --url")


def _levels(options: argparse.Namespace) -> Iterator[Level]:
    """The loads that are asked for. Raises ValueError."""
    options.mix = options.mix or ("chat" if options.engine == EMBEDDED else "agent")
    concurrencies = options.concurrency or ("" if options.rate else "4")
    for text in filter(None, concurrencies.split(",")):
        yield _level(options, "closed", concurrency=_whole(text, "--concurrency"))
    for text in filter(None, (options.rate or "").split(",")):
        rate = _positive(text, "--rate")
        yield _level(options, f"open {rate:g}/s", rate=rate)


def _level(options: argparse.Namespace, name: str, *, concurrency: int = 1, rate: float | None = None) -> Level:
    plan = ServingPlan(
        mix=options.mix,
        seed=options.seed,
        sessions=max(concurrency, round(options.num_sessions * options.scale)),
        max_tokens=options.max_tokens,
        concurrency=concurrency,
        rate=rate,
        warm_up_sessions=options.warm_up_sessions,
    )
    sessions = draw_sessions(MIXES[plan.mix], num=plan.sessions, seed=plan.seed, max_tokens=plan.max_tokens)
    sizes = [len(turn.text) for session in sessions for turn in session.turns]
    return Level(
        name=name,
        title=f"{plan.sessions} conversations of the mix {plan.mix}, seed {plan.seed}",
        plan=plan,
        num_chats=len(sizes),
        message_bytes=round(sum(sizes) / len(sizes)),
    )


def _setup(options: argparse.Namespace) -> Setup:
    path = cached_model(options.model)
    return Setup(
        engine=options.engine,
        model=str(path),
        vocab_size=load_model_files(path).vocab_size,
        url=options.url,
        engine_url=options.engine_url,
        threads=options.engine_threads,
        max_batch=options.max_batch,
        flags=tuple(shlex.split(options.server_flags)),
    )


def _measure_level(artifact: Artifact, level: Level, setup: Setup, options: argparse.Namespace) -> None:
    """All repeats of a load. What is measured is kept at once, whatever happens to the rest."""
    at_once = level.plan.sessions if level.plan.rate is not None else level.plan.concurrency
    result = ScenarioResult(
        name=level.name,
        title=level.title,
        sessions=at_once,
        turns=level.num_chats,
        message_bytes=level.message_bytes,
        goals=[],
        figures={},
    )
    artifact.scenarios.append(result)
    targets = ["direct", "server"] if setup.has_direct else ["server"]
    for repeat in range(options.repeats):
        for target in targets if repeat % 2 == 0 else targets[::-1]:  # what drifts with time falls on both
            begin = f"{_shown(level)}: {repeat + 1} of {options.repeats}, {SHOWN[target]}"
            sys.stderr.write(f"{begin}: {level.num_chats} chats of {level.plan.sessions} sessions\n")
            measured = MEASURES[target](setup, level.plan, _Progress().note)
            result.figures.setdefault(target, []).append(measured.figures)
            result.raw.setdefault(target, []).append(measured.raw)
            write_artifact(options.out, artifact)


def _shown(level: Level) -> str:
    return level.name if level.plan.rate is not None else f"{level.name} loop, {level.plan.concurrency} at once"


class _Progress:
    """Says how far a measurement is, once in a while."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def note(self, text: str) -> None:
        """Say it, if nothing was said for a while."""
        if time.monotonic() - self._said_at >= PROGRESS_S:
            self._said_at = time.monotonic()
            sys.stderr.write(f"  {text}\n")


def _show(artifact: Artifact, options: argparse.Namespace) -> None:
    write = sys.stdout.write
    write(serving_table(artifact) + "\n")
    for line in errors_of(artifact):
        write(f"ERRORS {line}\n")
    if options.plot is not None:
        plot_serving(artifact, options.plot)
    write(f"written to {options.out}\n{json_line(artifact)}\n")
    sys.stdout.flush()


def _url(text: str) -> str:
    """An address that a load can be sent to: plain HTTP, with a port, without a path."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        is_good = False
    if not is_good:
        raise argparse.ArgumentTypeError(f"must be like http://127.0.0.1:8080, got {text}")
    return text.rstrip("/")


def _whole(text: str, option: str) -> int:
    value = _positive(text, option)
    if not value.is_integer():
        raise ValueError(f"{option} takes whole numbers, separated by commas, got {text!r}")
    return int(value)


def _positive(text: str, option: str) -> float:
    """A number of a list. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"{option} takes positive numbers, separated by commas, got {text!r}")
    return value
