"""`stenograph bench soak`: does the server stay as it is under a mixed load with faults, for as long as one likes?

A server, an engine that does what each request orders (`standins.ordered_engine`, a process of its own), the
load, and a probe of `/health`. Owns the run's options, processes, progress and verdict; what the clients do is drawn in
plan.py, what they hold it against is in model.py.
"""

import argparse
import shlex
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kit.artifact import Measurement, ScenarioResult, write_artifact
from benchmarks.kit.conversation import Messages
from benchmarks.kit.figures import Figures, Goal
from benchmarks.kit.options import add_model, add_out, add_plot, check_plot, count
from benchmarks.kit.processes import Child, Children
from benchmarks.kit.report import table
from benchmarks.kit.runner import ProgressNotes, begin_artifact, cached_model, say, show
from benchmarks.kit.servers import start_probe, start_serve
from benchmarks.responsiveness.report import responsiveness_table
from benchmarks.soak.figures import Moment, ServerMetrics, flat_goals, growth, lag_figures, read_metrics
from benchmarks.soak.load import SoakPlan
from benchmarks.soak.plan import DECK, NUM_REPLIES
from benchmarks.soak.tally import SoakTally
from standins.ordered_engine import OrderedReply
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

REQUEST_TIMEOUT_S = 10.0
ABORT_GRACE_S = 3.0
"""So short that turns which nobody ends do not hold a client for long."""
SETTLE_S = 30.0
"""Time after the load in which all is given back, idle connections to the engine included."""
FDS_LEFT = 4
PROGRESS_S = 10.0
GOALS = (
    ("unexpected", 0.0),
    ("log_tracebacks", 0.0),
    ("health_failures", 0.0),
    ("sessions_left", 0.0),
    ("in_flight_left", 0.0),
    ("engine_left", 0.0),
    ("fds_left", float(FDS_LEFT)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """A run: figures, the server once a second, and what came of everything."""

    figures: Figures
    moments: list[Moment]
    tally: SoakTally
    health: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--duration", type=count, default=1800, metavar="S", help="seconds of load. Default: 1800.")
    parser.add_argument("--max-turns", type=count, default=10**6, metavar="N", help="and no more turns. Default: 10^6.")
    parser.add_argument("--clients", type=count, default=32, help="sessions at once. Default: 32.")
    parser.add_argument("--seed", type=int, default=0, help="of sessions and faults. Default: 0.")
    add_model(parser)
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="further flags of `serve`")
    add_out(parser, "soak")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the server's log goes; else nowhere")
    add_plot(parser, "memory over time")


def run(options: argparse.Namespace) -> int:
    """Load it, and write down; returns the exit code: 1 if anything was not as it must be."""
    check_plot(options)
    soaked = _soak(options)
    goals = [*GOALS, *flat_goals(soaked.moments, soaked.figures)]
    artifact = begin_artifact("soak", options)
    artifact.scenarios.append(_result(soaked, goals, options))
    write_artifact(options.out, artifact)
    is_short = "rss_growth_mib" not in dict(goals)
    short = "The run is too short to judge whether memory is flat." if is_short else ""
    show(artifact, options, f"{outcomes_table(soaked.tally)}\n", responsiveness_table(artifact), short)
    missed = [
        figure for figure, value in goals if not Goal(figure=figure, value=value).is_reached(soaked.figures[figure])
    ]
    return 1 if missed else 0


def outcomes_table(tally: SoakTally) -> str:
    """Everything that was done, what came of it, how often."""
    rows = [["what was done", "what came of it", "times"]]
    for name, seen in sorted(tally.outcomes.items()):
        for index, (outcome, times) in enumerate(sorted(seen.items())):
            rows.append(["" if index else name, outcome, f"{times:,}"])
    return table(rows)


def _result(soaked: Soaked, goals: list[tuple[str, float]], options: argparse.Namespace) -> ScenarioResult:
    raw = {
        "moments": [list(msgspec.structs.astuple(moment)) for moment in soaked.moments],
        "tally": msgspec.to_builtins(soaked.tally),
        "health": soaked.health,
    }
    result = ScenarioResult(
        name="soak",
        title="mixed load with faults",
        sessions=options.clients,
        turns=soaked.tally.num_turns,
        goals=goals,
    )
    result.keep("server", Measurement(figures=soaked.figures, raw=raw))
    return result


def _soak(options: argparse.Namespace) -> Soaked:
    """Raises ChildFailed."""
    path = cached_model(options.model, weights=False)
    replies = _replies(path)
    with Children() as children:
        replies_json = msgspec.json.encode(replies).decode()
        engine = ["standins.ordered_engine", "--replies", replies_json]
        engine_url = children.start("the engine stand-in", engine).event()["url"]
        times = ("--request-timeout", f"{REQUEST_TIMEOUT_S:g}", "--abort-grace", f"{ABORT_GRACE_S:g}")
        flags = ("--engine", "sglang", "--engine-url", engine_url, "--model", str(path), *times)
        server, url = start_serve(children, (*flags, *shlex.split(options.server_flags)))
        before, fds_before = _metrics(url), server.num_open_files()
        probe = start_probe(children, url)
        plan = SoakPlan(
            server=url,
            engine=engine_url,
            replies=replies,
            seed=options.seed,
            clients=options.clients,
            duration_s=options.duration,
            max_turns=options.max_turns,
        )
        load = children.start("the load", ["benchmarks.soak.load", msgspec.json.encode(plan).decode()])
        cpu_s = server.cpu_s()
        moments, tally, seconds = _watched(load, server, options)
        cpu_s = server.cpu_s() - cpu_s
        health = probe.step("")
        figures: Figures = {
            "num_turns": tally.num_turns,
            "turns_per_s": tally.num_turns / seconds,
            "cpu_ms_per_turn": 1e3 * cpu_s / max(1, tally.num_turns),
            "unexpected": tally.num_failures,
            "unseen_kinds": len({card.name for card in DECK} - tally.outcomes.keys()),
            **growth(moments),
            **{f"health_{name}": health[name] for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms") if name in health},
            "health_failures": health["num_failures"],
        }
        if "p99_ms" in health["lateness"]:
            figures["probe_late_p99_ms"] = health["lateness"]["p99_ms"]
        left, after = _settled(server, url, engine_url, fds_before)
        figures |= left | lag_figures(before, after)
        figures["rss_end_mib"] = server.rss_kib() / 1024
        log = server.written()
        figures["log_tracebacks"] = log.count(b"Traceback (most recent call last)")
        if options.log is not None:
            options.log.write_bytes(log)
    return Soaked(figures=figures, moments=moments, tally=tally, health=health)


def _replies(model: Path) -> tuple[OrderedReply, ...]:
    """The replies that the engine can be ordered to give, each the ids of its own text: no drift is due to us."""
    files = load_model_files(model)
    tokenizer = Tokenizer(files.tokenizer_json)
    texts = list(Messages(num_bytes=1200, num_messages=NUM_REPLIES).texts(NUM_REPLIES))
    cut = [text[: 30 + 45 * index].strip() for index, text in enumerate(texts)]
    return tuple(OrderedReply(text=text, ids=(*tokenizer.encode(text), files.eos_token_ids[0])) for text in cut)


def _watched(load: Child, server: Child, options: argparse.Namespace) -> tuple[list[Moment], SoakTally, float]:
    """Look at the server whenever the load reports, until it is done."""
    moments: list[Moment] = []
    progress = ProgressNotes(PROGRESS_S)
    while not (event := load.event())["done"]:
        _tell(event["failures"])
        moment = Moment(event["seconds"], event["num_turns"], server.rss_kib(), server.num_open_files())
        if not event["over"]:
            moments.append(moment)
        progress.note(
            f"{moment.seconds:.0f} of {options.duration} s: {moment.num_turns} turns, {event['num_sessions']}"
            f" sessions, {moment.rss_kib / 1024:.0f} MiB, {moment.num_fds} files, {event['num_failures']} unexpected"
        )
    _tell(event["failures"])
    return moments, msgspec.convert(event["tally"], SoakTally), event["seconds"]


def _tell(failures: list[str]) -> None:
    """At once: whoever watches a run of half an hour wants to know."""
    for failure in failures:
        say(f"UNEXPECTED {failure}")


def _settled(server: Child, url: str, engine_url: str, fds_before: int) -> tuple[Figures, ServerMetrics]:
    """All that is still held once it is as little as it was, or at the end of the time for that."""
    until = time.monotonic() + SETTLE_S
    while True:
        metrics = _metrics(url)
        left: Figures = {
            "sessions_left": metrics.num_sessions,
            "in_flight_left": metrics.num_in_flight,
            "engine_left": msgspec.json.decode(_got(f"{engine_url}/soak/state"))["running"],
            "fds_left": server.num_open_files() - fds_before,
        }
        is_settled = left["fds_left"] <= FDS_LEFT and not any(left[name] for name in left if name != "fds_left")
        if is_settled or time.monotonic() >= until:
            return left, metrics
        time.sleep(0.5)


def _metrics(url: str) -> ServerMetrics:
    return read_metrics(_got(f"{url}/metrics").decode())


def _got(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        body: bytes = response.read()
    return body
