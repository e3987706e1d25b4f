"""One measurement: an engine stand-in, a server or none, a load and a probe, each a process; figures out.

Owns the order of things in a measurement, and what its figures are made of. Knows no scenario's goals and prints
nothing.
"""

import contextlib
import os
import re
import signal
import time
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from stenograph.bench.figures import Figures
from stenograph.bench.load import LoadPlan
from stenograph.bench.probe import ProbePlan
from stenograph.bench.processes import Child, ChildFailed, Children
from stenograph.bench.reply_shape import ReplyShape
from stenograph.bench.sampler import read_collapsed
from stenograph.bench.scenarios import EARLY_TURNS, NUM_LAST_TURNS, Scenario
from stenograph.bench.stage_cpu import stage_cpu

WARM_UP_SESSIONS = 8
WARM_UP_TURNS = 2
DIRECT_LEAST_S = 1.0
SETTLE_S = 1.0
"""How long after the last reply, and after the last delete, memory is read: the server gives it back within half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one repeat, and what they were made of, for the artifact."""

    figures: Figures
    raw: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How the server under test is started; `profile` names a file for what its sampler saw."""

    model: str
    flags: tuple[str, ...] = ()
    profile: str | None = None


def measure_direct(scenario: Scenario, shape: ReplyShape, *, message_bytes: int, least_s: float) -> Measured:
    """The same load straight at the engine: what no server can exceed."""
    with Children() as children:
        standin, url = start_standin(children, shape)
        plan = _plan(url, scenario, shape, message_bytes, direct=True, least_s=least_s)
        _run_plan(msgspec.structs.replace(plan, sessions=min(plan.sessions, WARM_UP_SESSIONS), least_s=0.0))
        load = _start_load(children, plan)
        _step(load, "open")
        probe = start_probe(children, url)
        cpu = (standin.cpu_s(), load.cpu_s())
        run = _step(load, "run")
        spent = (standin.cpu_s() - cpu[0], load.cpu_s() - cpu[1])
        health = stop_probe(probe)
    figures = _load_figures(run, health)
    _add_cpu(figures, run, {"standin": spent[0], "load": spent[1]})
    return Measured(figures=figures, raw={"run": run, "health": health})


def measure_server(scenario: Scenario, shape: ReplyShape, command: ServerCommand, *, message_bytes: int) -> Measured:
    """The load through a server that is started for it, warmed up, and ended."""
    with Children() as children:
        standin, engine_url = start_standin(children, shape)
        server, url = _start_server(children, command, engine_url)
        plan = _plan(url, scenario, shape, message_bytes)
        _run_plan(
            msgspec.structs.replace(
                plan, sessions=min(plan.sessions, WARM_UP_SESSIONS), turns=min(plan.turns, WARM_UP_TURNS)
            )
        )
        time.sleep(SETTLE_S)  # what starting left is given back by then
        before_kib = server.rss_kib()
        load = _start_load(children, plan)
        opened = _step(load, "open")
        probe = start_probe(children, url)
        with _sampled(server, command):
            cpu = (server.cpu_s(), standin.cpu_s(), load.cpu_s())
            run = _step(load, "run")
        spent = (server.cpu_s() - cpu[0], standin.cpu_s() - cpu[1], load.cpu_s() - cpu[2])
        health = stop_probe(probe)
        time.sleep(SETTLE_S)
        loaded_kib = server.rss_kib()
        stages = _stages_ms(url)
        deleted = _step(load, "delete")
        time.sleep(SETTLE_S)
        deleted_kib = server.rss_kib()
        figures = _load_figures(run, health, opened, deleted)
        _add_cpu(figures, run, {"": spent[0], "standin": spent[1], "load": spent[2]})
        _add_memory(figures, run, before_kib, loaded_kib, deleted_kib)
        raw: dict[str, Any] = {"open": opened, "run": run, "delete": deleted, "health": health, "stages_ms": stages}
        if scenario.two_rounds:
            second = [_step(load, name) for name in ("open", "run")]
            time.sleep(SETTLE_S)
            figures["regrown_kib_per_turn"] = max(0, server.rss_kib() - loaded_kib) / max(1, second[1]["num_ok"])
            figures["errors"] += sum(sum(step["errors"].values()) for step in second)
            raw["second_round"] = second
    if command.profile is not None and run["num_ok"]:  # written when the server ended
        stacks = read_collapsed(Path(command.profile).read_text())
        figures.update(stage_cpu(stacks, num_chats=run["num_ok"]))
    return Measured(figures=figures, raw=raw)


def tokens_per_byte(command: ServerCommand, shape: ReplyShape, text: str) -> float:
    """How many tokens the model makes of a byte of `text`, as the server counts them."""
    with Children() as children:
        _, engine_url = start_standin(children, shape)
        _, url = _start_server(children, command, engine_url)
        body = msgspec.json.encode({"prompt": text})
        with urllib.request.urlopen(urllib.request.Request(f"{url}/tokenize", data=body, method="POST")) as response:
            count: int = msgspec.json.decode(response.read())["count"]
    return count / len(text.encode())


# -- processes


def start_standin(children: Children, shape: ReplyShape) -> tuple[Child, str]:
    """An engine stand-in, and its URL."""
    shape_json = msgspec.json.encode(shape).decode()
    child = children.start(
        "the engine stand-in", ["stenograph.bench.standin", "--shape", shape_json, "--until-stdin-closes"]
    )
    return child, child.event()["url"]


def _start_server(children: Children, command: ServerCommand, engine_url: str) -> tuple[Child, str]:
    engine = ("--engine", "sglang", "--engine-url", engine_url, "--model", command.model)
    return start_serve(children, (*engine, *command.flags), profile=command.profile)


def start_serve(children: Children, flags: Sequence[str], *, profile: str | None = None) -> tuple[Child, str]:
    """A server whose settings are its flags alone, and its URL. Raises ChildFailed where it does not start."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("STENOGRAPH_") or name == "STENOGRAPH_CACHE"
    }
    profiled = [] if profile is None else ["stenograph.bench.sampler", profile]
    serve = [*profiled, "stenograph.cli.main", "serve", "--port", "0", *flags]
    child = children.start("the server", serve, environment=environment)
    line = child.line()
    found = re.search(r"ready at (http://\S+)", line)
    if found is None:
        raise ChildFailed(f"the server said {line!r}: {child.stderr_tail()}")
    return child, found[1]


def _start_load(children: Children, plan: LoadPlan) -> Child:
    child = children.start("the load", ["stenograph.bench.load", msgspec.json.encode(plan).decode()])
    child.event()
    return child


def start_probe(children: Children, url: str) -> Child:
    """A probe that asks `/health` from now on."""
    host, port = address(url)
    plan = msgspec.json.encode(ProbePlan(host=host, port=port)).decode()
    child = children.start("the probe", ["stenograph.bench.probe", plan])
    child.event()
    return child


def _plan(
    url: str, scenario: Scenario, shape: ReplyShape, message_bytes: int, *, direct: bool = False, least_s: float = 0.0
) -> LoadPlan:
    host, port = address(url)
    return LoadPlan(
        host=host,
        port=port,
        sessions=scenario.sessions,
        turns=scenario.turns,
        message_bytes=message_bytes,
        shape=shape,
        prompts=scenario.prompts,
        direct=direct,
        least_s=least_s,
    )


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL that has both."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _step(load: Child, name: str) -> dict[str, Any]:
    load.tell(name)
    return load.event()


@contextlib.contextmanager
def _sampled(server: Child, command: ServerCommand) -> Generator[None]:
    """Look where the server's CPU goes while inside, if that was asked for."""
    if command.profile is not None:
        server.signal(signal.SIGUSR2)
    yield
    if command.profile is not None:
        server.signal(signal.SIGUSR2)


def stop_probe(probe: Child) -> dict[str, Any]:
    """What it saw."""
    probe.tell("")
    return probe.event()


def _run_plan(plan: LoadPlan) -> None:
    """A whole load whose figures nobody wants."""
    with Children() as children:
        load = _start_load(children, plan)
        for name in ("open", "run", "delete"):
            _step(load, name)


# -- figures


def _load_figures(run: dict[str, Any], health: dict[str, Any], *others: dict[str, Any]) -> Figures:
    figures: Figures = {"chats_per_s": run["num_ok"] / run["seconds"]}
    latency = run["latency"]
    if latency:
        figures["chat_p50_ms"], figures["chat_p99_ms"] = latency["p50_ms"], latency["p99_ms"]
        figures["chat_p99_over_p50"] = latency["p99_ms"] / latency["p50_ms"]
    by_turn: list[float] = run["by_turn_ms"]
    if len(by_turn) >= EARLY_TURNS.stop + NUM_LAST_TURNS:
        early, last = sorted(by_turn[EARLY_TURNS]), sorted(by_turn[-NUM_LAST_TURNS:])
        figures["early_turn_ms"], figures["last_turn_ms"] = early[len(early) // 2], last[len(last) // 2]
        figures["last_over_early_turn"] = figures["last_turn_ms"] / figures["early_turn_ms"]
    for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms"):
        if name in health:
            figures[f"health_{name}"] = health[name]
    if "p99_ms" in health["lateness"]:
        figures["probe_late_p99_ms"] = health["lateness"]["p99_ms"]
    figures["health_failures"] = health["num_failures"]
    figures["errors"] = sum(sum(step["errors"].values()) for step in (run, *others))
    return figures


def _add_cpu(figures: Figures, run: dict[str, Any], spent_s: dict[str, float]) -> None:
    if run["num_ok"]:
        for name, seconds in spent_s.items():
            figures[f"{name}_cpu_ms_per_chat" if name else "cpu_ms_per_chat"] = seconds * 1e3 / run["num_ok"]


def _add_memory(figures: Figures, run: dict[str, Any], before_kib: int, loaded_kib: int, deleted_kib: int) -> None:
    figures["rss_before_mib"], figures["rss_loaded_mib"] = before_kib / 1024, loaded_kib / 1024
    figures["rss_deleted_mib"] = deleted_kib / 1024
    if run["num_ok"]:
        figures["kept_kib_per_turn"] = (loaded_kib - before_kib) / run["num_ok"]
    if loaded_kib > before_kib:
        figures["given_back_share"] = (loaded_kib - deleted_kib) / (loaded_kib - before_kib)


_STAGE = re.compile(r'^stenograph_stage_seconds_(sum|count)\{stage="(\w+)"\} (\S+)$', re.MULTILINE)


def _stages_ms(url: str) -> dict[str, float]:
    """Mean time of each stage of a turn, by the server's own clock; waiting included."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found = {(stage, kind): float(value) for kind, stage, value in _STAGE.findall(text)}
    stages = dict.fromkeys(stage for stage, _ in found)
    return {stage: 1e3 * found[stage, "sum"] / found[stage, "count"] for stage in stages if found[stage, "count"]}
