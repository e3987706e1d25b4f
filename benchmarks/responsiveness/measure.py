"""One measurement: an engine stand-in or none, a server or none, and a probe, each a process; a load; figures out.

Owns the order of things in a measurement, and what its figures are made of. Knows no scenario's goals and prints
nothing.
"""

import re
import time
import urllib.request
from dataclasses import dataclass, replace

from benchmarks.kit.artifact import Measurement, Raw
from benchmarks.kit.figures import Figures, ratios_between
from benchmarks.kit.processes import CannotMeasure, Child, Children
from benchmarks.kit.runner import in_turn
from benchmarks.kit.servers import Checkout, start_probe, start_serve, start_standin
from benchmarks.responsiveness.load import Load
from benchmarks.responsiveness.scenarios import EARLY_TURNS, NUM_LAST_TURNS, Scenario

WARM_UP_SESSIONS = 8
WARM_UP_TURNS = 2
DIRECT_LEAST_S = 1.0
IDLE_S = 3.0
"""Seconds for which `/health` is probed without a load, for comparison."""
SETTLE_S = 1.0
"""Memory is read so long after the last reply, and after the last delete: the server gives it back within half."""
IDLE_SESSIONS_AT_ONCE = 32
"""Sessions that have their one turn at a time before they are idle."""
OVER_ALONE = {
    "cpu_over_alone": "cpu_ms_per_chat",
    "chat_p50_over_alone": "chat_p50_ms",
    "health_p99_over_alone": "health_p99_ms",
}
"""Figures that are a load's beside idle sessions / the same load's without, by what they are the ratio of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """The command of the server under test; `checkout` is where its source is, None for ours."""

    model: str
    flags: tuple[str, ...] = ()
    checkout: Checkout | None = None


def measure_direct(scenario: Scenario, *, least_s: float) -> Measurement:
    """The same load straight at the engine: what no server can exceed."""
    with Children() as children:
        standin, url = start_standin(children, scenario.shape)
        _warm_up(Load(replace(scenario, sessions=min(scenario.sessions, WARM_UP_SESSIONS)), url, direct=True))
        with Load(scenario, url, direct=True, least_s=least_s) as load:
            load.step("open")
            run, health, spent_s = _run_beside_probe(children, load, url, {"standin": standin})
    figures = _load_figures(run, health)
    _add_cpu(figures, run, spent_s)
    return Measurement(figures=figures, raw={"run": run, "health": health})


def measure_server(scenario: Scenario, command: ServerCommand, *, number: int) -> Measurement:
    """The load through a server that is started for it, warmed up, and ended.

    One beside idle sessions is measured without them too, with another server, in an order that `number` alternates:
    what its figures are over those without is added.
    """
    if not scenario.idle_sessions:
        return _measure_once(scenario, command)
    both = in_turn((replace(scenario, idle_sessions=0), scenario), number)
    measured = {one.idle_sessions: _measure_once(one, command) for one in both}
    figures, without = measured[scenario.idle_sessions].figures, measured[0].figures
    figures |= ratios_between(OVER_ALONE, figures, without)
    figures["errors"] += without["errors"]
    raw = {f"alone_{name}": step for name, step in measured[0].raw.items()}
    return Measurement(figures=figures, raw={**measured[scenario.idle_sessions].raw, **raw, "alone": without})


def _measure_once(scenario: Scenario, command: ServerCommand) -> Measurement:
    with Children() as children:
        standin, server, url = _start_engine_and_server(children, scenario, command)
        sessions, turns = min(scenario.sessions, WARM_UP_SESSIONS), min(scenario.turns, WARM_UP_TURNS)
        _warm_up(Load(replace(scenario, sessions=sessions, turns=turns), url))
        if scenario.idle_sessions:
            _leave_idle(scenario, url)
        with Load(scenario, url) as load:
            return _measure_load(children, load, url, scenario, server, standin)


def _measure_load(
    children: Children,
    load: Load,
    url: str,
    scenario: Scenario,
    server: Child,
    standin: Child | None,
) -> Measurement:
    """The load and what is looked at before, beside and after it."""
    time.sleep(SETTLE_S)  # what starting left is given back by then
    before_kib = server.rss_kib()
    idle = _idle(children, url) if scenario.beside_idle else None
    opened = load.step("open")
    timed = {"": server} | ({} if standin is None else {"standin": standin})
    run, health, spent_s = _run_beside_probe(children, load, url, timed)
    time.sleep(SETTLE_S)
    loaded_kib = server.rss_kib()
    stages = _stages_ms(url)
    deleted = load.step("delete")
    time.sleep(SETTLE_S)
    deleted_kib = server.rss_kib()
    figures = _load_figures(run, health, opened, deleted)
    _add_cpu(figures, run, spent_s)
    _add_idle(figures, idle)
    _add_memory(figures, run, before_kib, loaded_kib, deleted_kib)
    raw: Raw = {"open": opened, "run": run, "delete": deleted, "health": health, "stages_ms": stages}
    if idle is not None:
        raw["idle_health"] = idle
    if scenario.two_rounds:
        second = [load.step(name) for name in ("open", "run")]
        time.sleep(SETTLE_S)
        figures["regrown_kib_per_turn"] = max(0, server.rss_kib() - loaded_kib) / max(1, second[1]["num_ok"])
        figures["errors"] += sum(sum(step["errors"].values()) for step in second)
        raw["second_round"] = second
    return Measurement(figures=figures, raw=raw)


def _warm_up(load: Load) -> None:
    """A whole load that is not measured."""
    with load:
        for name in ("open", "run", "delete"):
            load.step(name)


def _leave_idle(scenario: Scenario, url: str) -> None:
    """Open the idle sessions, with a turn each, and leave them. Raises CannotMeasure if one was refused."""
    num = scenario.idle_sessions
    with Load(replace(scenario, sessions=num, turns=1), url, at_once=IDLE_SESSIONS_AT_ONCE) as load:
        for step in (load.step("open"), load.step("run")):
            if step["num_ok"] not in {0, num} or step["errors"]:
                raise CannotMeasure(f"the sessions that were to be idle failed: {step['first_error']}")


# -- processes


def _start_engine_and_server(
    children: Children, scenario: Scenario, command: ServerCommand
) -> tuple[Child | None, Child, str]:
    """The engine stand-in, None where the embedded engine is part of the load; the server, and its URL."""
    standin = None
    if scenario.guided_tokens:
        sizes = ("--max-batch", str(scenario.sessions), "--step-tokens", str(max(256, 2 * scenario.sessions)))
        engine: tuple[str, ...] = ("--engine", "embedded", *sizes)
    else:
        standin, engine_url = start_standin(children, scenario.shape)
        engine = ("--engine", "sglang", "--engine-url", engine_url)
    flags = (*engine, "--model", command.model, *command.flags)
    return standin, *start_serve(children, flags, checkout=command.checkout)


def _run_beside_probe(
    children: Children, load: Load, url: str, timed: dict[str, Child]
) -> tuple[Raw, Raw, dict[str, float]]:
    """The load's run, what a probe saw meanwhile, and the CPU time that the load and those in `timed` took."""
    clocks = {"load": time.process_time, **{name: child.cpu_s for name, child in timed.items()}}
    probe = start_probe(children, url)
    begun_s = {name: clock() for name, clock in clocks.items()}
    run = load.step("run")
    spent_s = {name: clock() - begun_s[name] for name, clock in clocks.items()}
    return run, probe.step(""), spent_s


def _idle(children: Children, url: str) -> Raw:
    """The report of a probe of a server that does nothing else."""
    probe = start_probe(children, url)
    time.sleep(IDLE_S)
    return probe.step("")


# -- figures


def _load_figures(run: Raw, health: Raw, *others: Raw) -> Figures:
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


def _add_idle(figures: Figures, idle: Raw | None) -> None:
    """`/health` without a load, and how the loaded p99 compares."""
    if idle is None or "p99_ms" not in idle:
        return
    figures["idle_health_p50_ms"], figures["idle_health_p99_ms"] = idle["p50_ms"], idle["p99_ms"]
    if "health_p99_ms" in figures:
        figures["health_p99_over_idle"] = figures["health_p99_ms"] / idle["p99_ms"]


def _add_cpu(figures: Figures, run: Raw, spent_s: dict[str, float]) -> None:
    if run["num_ok"]:
        for name, seconds in spent_s.items():
            figures[f"{name}_cpu_ms_per_chat" if name else "cpu_ms_per_chat"] = seconds * 1e3 / run["num_ok"]


def _add_memory(figures: Figures, run: Raw, before_kib: int, loaded_kib: int, deleted_kib: int) -> None:
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
