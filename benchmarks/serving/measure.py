"""One measurement of `bench serving`: an engine, a server or none, and a load; figures out.

Owns the order in which they start, and that all have ended. Knows no options and prints nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.artifact import Measurement, Raw
from benchmarks.kit.client import address
from benchmarks.kit.options import engine_options
from benchmarks.kit.processes import Child, Children
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.servers import start_serve, start_standin
from benchmarks.kit.steps import new_runner, nothing_collected
from benchmarks.serving.engine import EngineTarget
from benchmarks.serving.figures import kept_columns, serving_figures
from benchmarks.serving.http import HttpTarget
from benchmarks.serving.load import ServingLoad, ServingPlan, Talked, Target
from benchmarks.serving.mix import MIXES
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files

EMBEDDED, SGLANG, STANDIN = "embedded", "sglang", "standin"
ENGINES = (EMBEDDED, SGLANG, STANDIN)

Note = Callable[[str], None]
"""Takes a line of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The server and engine under test. `url` is a server that runs already; `engine_url` an SGLang that does.

    `threads` and `max_batch` are the embedded engine's; `flags` are further ones of `serve`.
    """

    engine: str
    model: Path
    vocab_size: int
    url: str | None = None
    engine_url: str | None = None
    threads: int = 1
    max_batch: int = 16
    flags: tuple[str, ...] = ()

    @property
    def has_direct(self) -> bool:
        """Whether there is an engine to drive without the server: that of a running server is not known."""
        return self.url is None or self.engine_url is not None


def measure_direct(setup: Setup, plan: ServingPlan, note: Note) -> Measurement:
    """The load straight at the engine."""
    with Children() as children:
        if setup.engine == EMBEDDED and setup.engine_url is None:
            engine = EmbeddedEngine(setup.model, engine_options(threads=setup.threads, max_batch=setup.max_batch))
            renderer = make_renderer(load_model_files(setup.model), "auto")
            target: Target = EngineTarget(engine, renderer, endpoint=plan.endpoint)
        else:
            url = _engine_url(children, setup, plan)
            target = HttpTarget(*address(url), sessionless=True, endpoint=plan.endpoint)
        measured = _measure(plan, target, None, note)
    if setup.engine == STANDIN:  # it does not know what it was sent
        for name in ("prompt_tokens", "prompt_tokens_per_s", "cached_share"):
            measured.figures.pop(name, None)
    return measured


def measure_server(setup: Setup, plan: ServingPlan, note: Note) -> Measurement:
    """The load through the server, which is started for it unless one runs already."""
    with Children() as children:
        server, url = (None, setup.url) if setup.url is not None else _start_server(children, setup, plan)
        target = HttpTarget(*address(url), sessionless=False, endpoint=plan.endpoint)
        return _measure(plan, target, server, note)


def _start_server(children: Children, setup: Setup, plan: ServingPlan) -> tuple[Child, str]:
    if setup.engine == EMBEDDED:
        sizes = ("--engine-threads", str(setup.threads), "--max-batch", str(setup.max_batch))
        engine: tuple[str, ...] = ("--engine", "embedded", *sizes)
    else:
        engine = ("--engine", "sglang", "--engine-url", _engine_url(children, setup, plan))
    return start_serve(children, (*engine, "--model", str(setup.model), *setup.flags))


def _engine_url(children: Children, setup: Setup, plan: ServingPlan) -> str:
    """Where the engine is; a stand-in is started, whose one reply is as long as the least that is asked for."""
    if setup.engine_url is not None:
        return setup.engine_url
    least = MIXES[plan.mix].max_tokens.least
    num_tokens = least if plan.max_tokens is None else min(least, plan.max_tokens)
    return start_standin(children, ReplyShape(num_tokens=num_tokens, vocab_size=setup.vocab_size))[1]


def _measure(plan: ServingPlan, target: Target, server: Child | None, note: Note) -> Measurement:
    with new_runner() as runner, nothing_collected():
        return runner.run(_run_load(plan, target, server, note))


async def _run_load(plan: ServingPlan, target: Target, server: Child | None, note: Note) -> Measurement:
    try:
        await target.start()
        load = ServingLoad(plan, target, note=note)
        warm = await load.warm_up()
        begun_s = (time.process_time(), 0.0 if server is None else server.cpu_s())
        talked = await load.run()
        ended_s = (time.process_time(), 0.0 if server is None else server.cpu_s())
        collected = Talked(heard=talked.heard)
        await load.collect(collected)
    finally:
        await target.aclose()
    run, requests = talked.report("run"), talked.columns()
    num_errors = talked.failures.by_kind.total() + collected.failures.by_kind.total()
    figures = serving_figures(run, requests, num_errors)
    if run["num_ok"]:
        figures["load_cpu_ms_per_chat"] = (ended_s[0] - begun_s[0]) * 1e3 / run["num_ok"]
        if server is not None:
            figures["cpu_ms_per_chat"] = (ended_s[1] - begun_s[1]) * 1e3 / run["num_ok"]
    raw: Raw = {
        "load": {"rate": plan.rate, "concurrency": None if plan.rate is not None else plan.concurrency},
        "warm": warm.report("warm"),
        "run": run,
        "collect": collected.report("collect"),
        "requests": kept_columns(requests),
    }
    return Measurement(figures=figures, raw=raw)
