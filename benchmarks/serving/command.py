"""`stenograph bench serving`: what do conversations get, through the server and straight at the engine?

For each load (a closed loop of so many clients, an open loop of so many sessions a second) and repeat: the same seeded
conversations at the engine alone, then through the server, or the other way round. Owns the run's options, order and
progress; what a measurement is, is in measure.py.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.kit.artifact import Artifact, Measurement, ScenarioResult, write_artifact
from benchmarks.kit.options import add_artifact, add_model, add_plot, check_plot, count, numbers, positive, share
from benchmarks.kit.report import errors_of
from benchmarks.kit.runner import ProgressNotes, begin_artifact, cached_model, in_turn, say, show
from benchmarks.serving.figures import serving_table
from benchmarks.serving.load import ServingPlan
from benchmarks.serving.measure import EMBEDDED, ENGINES, SGLANG, Note, Setup, measure_direct, measure_server
from benchmarks.serving.mix import CHAT, COMPLETIONS, MIXES, SHAREGPT
from stenograph.model.files import load_model_files

MEASURES: dict[str, Callable[[Setup, ServingPlan, Note], Measurement]] = {
    "direct": measure_direct,
    "server": measure_server,
}
SHOWN = {"direct": "straight at the engine", "server": "through the server"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add = parser.add_argument
    add("--engine", choices=ENGINES, default=EMBEDDED, help="the engine that samples. Default: embedded.")
    add("--engine-url", type=_url, metavar="URL", help="an SGLang that runs; for --engine sglang")
    add("--url", type=_url, help="a server that runs already, instead of one that is started")
    add_model(parser)
    add("--mix", choices=tuple(MIXES), help="what is said. Default: chat if embedded, else agent.")
    add("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's file, for --mix sharegpt")
    add("--endpoint", choices=(CHAT, COMPLETIONS), default=CHAT, help="what turns are. Default: chat.")
    add("--num-sessions", type=count, default=32, help="conversations of a load. Default: 32.")
    add("--concurrency", metavar="1,4,16", help="closed loops of so many clients. Default: 4.")
    add("--rate", metavar="0.5,1", help="open loops of so many sessions a second")
    add("--seed", type=int, default=0, help="of conversations and arrivals. Default: 0.")
    add("--max-tokens", type=count, help="the most that a turn asks for; else as the mix has it")
    add_artifact(parser, "serving", repeats=3)
    add("--scale", type=share, default=1.0, help="the share of the sessions. Default: 1.")
    add("--warm-up-sessions", type=count, default=2, help="before each measurement. Default: 2.")
    add("--engine-threads", type=count, default=1, help="BLAS threads of the embedded engine")
    add("--max-batch", type=count, default=16, help="sequences that the embedded engine steps at once")
    add("--server-flags", default="", metavar="FLAGS", help="further flags of `serve`")
    add_plot(parser, "latency against load")


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    check_plot(options)
    _check(options)
    levels = list(_levels(options))
    setup = _setup(options)
    artifact = begin_artifact("serving", options)
    for plan, result in levels:
        artifact.scenarios.append(result)
        _measure_level(artifact, plan, result, setup, options)
    return show(artifact, options, serving_table(artifact), *errors_of(artifact))


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if options.engine == SGLANG and options.engine_url is None and options.url is None:
        raise ValueError("--engine sglang needs --engine-url, or a running server as --url")
    if options.engine != SGLANG and options.engine_url is not None:
        raise ValueError(f"--engine-url is for --engine sglang, not for {options.engine}")
    if (options.mix == SHAREGPT) != (options.dataset_path is not None):
        raise ValueError("--mix sharegpt needs its file as --dataset-path, and no other mix has one")
    if options.url is not None and options.server_flags:
        raise ValueError("--server-flags are for a server that is started, not for one that runs as --url")


def _levels(options: argparse.Namespace) -> Iterator[tuple[ServingPlan, ScenarioResult]]:
    """The loads that are asked for, without their target, and their empty results. Raises ValueError."""
    options.mix = options.mix or ("chat" if options.engine == EMBEDDED else "agent")
    concurrencies = options.concurrency or ("" if options.rate else "4")
    for concurrency in numbers("--concurrency", concurrencies, count):
        yield _level(options, "closed", concurrency=concurrency)
    for rate in numbers("--rate", options.rate, positive):
        yield _level(options, f"open {rate:g}/s", rate=rate)


def _level(
    options: argparse.Namespace, name: str, *, concurrency: int = 1, rate: float | None = None
) -> tuple[ServingPlan, ScenarioResult]:
    plan = ServingPlan(
        mix=options.mix,
        seed=options.seed,
        dataset_path=options.dataset_path,
        endpoint=options.endpoint,
        sessions=max(concurrency, round(options.num_sessions * options.scale)),
        max_tokens=options.max_tokens,
        concurrency=concurrency,
        rate=rate,
        warm_up_sessions=options.warm_up_sessions,
    )
    sessions = plan.sampled(plan.sessions, plan.seed)
    sizes = [len(turn.text) for session in sessions for turn in session.turns]
    return plan, ScenarioResult(
        name=name,
        title=f"{plan.sessions} conversations of the mix {plan.mix}, seed {plan.seed}, to {plan.endpoint}",
        sessions=concurrency if rate is None else plan.sessions,
        turns=len(sizes),
        message_bytes=round(sum(sizes) / len(sizes)),
    )


def _setup(options: argparse.Namespace) -> Setup:
    path = cached_model(options.model, weights=options.engine == EMBEDDED)
    return Setup(
        engine=options.engine,
        model=path,
        vocab_size=load_model_files(path).vocab_size,
        url=options.url,
        engine_url=options.engine_url,
        threads=options.engine_threads,
        max_batch=options.max_batch,
        flags=tuple(shlex.split(options.server_flags)),
    )


def _measure_level(
    artifact: Artifact, plan: ServingPlan, result: ScenarioResult, setup: Setup, options: argparse.Namespace
) -> None:
    """All repeats of a load. What is measured is kept at once, whatever happens to the rest."""
    load = result.name if plan.rate is not None else f"{result.name} loop, {plan.concurrency} at once"
    targets = ["direct", "server"] if setup.has_direct else ["server"]
    for repeat in range(options.repeats):
        for target in in_turn(targets, repeat):
            begin = f"{load}: {repeat + 1} of {options.repeats}, {SHOWN[target]}"
            say(f"{begin}: {result.turns} chats of {plan.sessions} sessions")
            result.keep(target, MEASURES[target](setup, plan, ProgressNotes().note))
            write_artifact(options.out, artifact)


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
