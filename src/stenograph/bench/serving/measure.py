"""One measurement of `bench serving`: an engine, a server or none, and a load, each a process; figures out.

Owns the order in which they start, and that all have ended. Knows no options and prints nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from stenograph.bench.kit.artifact import Measurement
from stenograph.bench.kit.client import address
from stenograph.bench.kit.options import engine_options
from stenograph.bench.kit.processes import Child, Children
from stenograph.bench.kit.reply_shape import ReplyShape
from stenograph.bench.kit.requests import Columns
from stenograph.bench.kit.servers import start_serve, start_standin
from stenograph.bench.serving.figures import kept_columns, serving_figures
from stenograph.bench.serving.load import ServingPlan
from stenograph.bench.serving.mix import MIXES

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
    model: str
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
            engine = engine_options(threads=setup.threads, max_batch=setup.max_batch)
            aimed = msgspec.structs.replace(plan, model=setup.model, engine=engine)
        else:
            host, port = address(_engine_url(children, setup, plan))
            aimed = msgspec.structs.replace(plan, host=host, port=port, sessionless=True)
        measured = _measure(children, aimed, None, note)
    if setup.engine == STANDIN:  # it does not know what it was sent
        for name in ("prompt_tokens", "prompt_tokens_per_s", "cached_share"):
            measured.figures.pop(name, None)
    return measured


def measure_server(setup: Setup, plan: ServingPlan, note: Note) -> Measurement:
    """The load through the server, which is started for it unless one runs already."""
    with Children() as children:
        server, url = (None, setup.url) if setup.url is not None else _start_server(children, setup, plan)
        host, port = address(url)
        return _measure(children, msgspec.structs.replace(plan, host=host, port=port), server, note)


def _start_server(children: Children, setup: Setup, plan: ServingPlan) -> tuple[Child, str]:
    if setup.engine == EMBEDDED:
        sizes = ("--engine-threads", str(setup.threads), "--max-batch", str(setup.max_batch))
        engine: tuple[str, ...] = ("--engine", "embedded", *sizes)
    else:
        engine = ("--engine", "sglang", "--engine-url", _engine_url(children, setup, plan))
    return start_serve(children, (*engine, "--model", setup.model, *setup.flags))


def _engine_url(children: Children, setup: Setup, plan: ServingPlan) -> str:
    """Where the engine is; a stand-in is started, whose one reply is as long as the least that is asked for."""
    if setup.engine_url is not None:
        return setup.engine_url
    least = MIXES[plan.mix].max_tokens.least
    num_tokens = least if plan.max_tokens is None else min(least, plan.max_tokens)
    return start_standin(children, ReplyShape(num_tokens=num_tokens, vocab_size=setup.vocab_size))[1]


def _measure(children: Children, plan: ServingPlan, server: Child | None, note: Note) -> Measurement:
    load, _ = children.start_planned("the load", "stenograph.bench.serving.load", plan)
    warm = load.step("warm")
    before = (load.cpu_s(), 0.0 if server is None else server.cpu_s())
    run = load.step("run", lambda event: note(f"{event['progress']} of {event['of']} chats"))
    after = (load.cpu_s(), 0.0 if server is None else server.cpu_s())
    collected = load.step("collect")
    requests: Columns = collected.pop("requests")
    num_errors = sum(sum(step["errors"].values()) for step in (run, collected))
    figures = serving_figures(run, requests, num_errors)
    if run["num_ok"]:
        figures["load_cpu_ms_per_chat"] = (after[0] - before[0]) * 1e3 / run["num_ok"]
        if server is not None:
            figures["cpu_ms_per_chat"] = (after[1] - before[1]) * 1e3 / run["num_ok"]
    raw: dict[str, Any] = {
        "load": {"rate": plan.rate, "concurrency": None if plan.rate is not None else plan.concurrency},
        "warm": warm,
        "run": run,
        "collect": collected,
        "requests": kept_columns(requests),
    }
    return Measurement(figures=figures, raw=raw)
