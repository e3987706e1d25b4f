"""A real server on a real socket, around a scripted engine and a tiny tokenizer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.cli.parts import PARTS
from stenograph.cli.settings_table import CommandSettings as Settings
from stenograph.cluster.shared_store import Cluster
from stenograph.core.chat import TurnRequest
from stenograph.core.clock import Clock, SystemClock
from stenograph.core.stages import StageTimes
from stenograph.core.types import Finish, FinishReason
from stenograph.dialects.base import CountDialect, Dialect
from stenograph.engine.base import Engine
from stenograph.http.app import make_app
from stenograph.http.dialects import spoken_by
from stenograph.http.listen import listen
from stenograph.http.loaded_model import make_renderer
from stenograph.http.processes import Processes
from stenograph.http.server import Server, uvicorn_config
from stenograph.model.files import ModelFiles
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.loop_lag import LoopLag
from stenograph.offload.pool import CpuPool
from stenograph.session.admission import Admission
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.session import Session
from stenograph.session.watch import Watch
from stenograph.store.base import SessionStore
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark

END = 2
"""`<|im_end|>`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a plain HTTP client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running server and its insides."""

    url: str
    engine: ScriptedEngine
    renderer: Renderer
    manager: SessionManager
    client: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named.setdefault("content-type", "application/json")
        async with self.client.request(method, self.url + path, data=data, headers=named) as response:
            return Answer(status=response.status, headers=response.headers, body=await response.read())

    async def open(self, **options: Any) -> str:
        answer = await self.call("POST", "/sessions", options)
        assert answer.status == 200, answer.body
        return str(answer.json()["session_id"])

    async def chat(self, session_id: str | None, *messages: dict[str, Any], **fields: Any) -> Answer:
        prefix = "" if session_id is None else f"/sessions/{session_id}"
        return await self.call("POST", f"{prefix}/v1/chat/completions", {"messages": list(messages), **fields})

    def says(self, text: str, *, paused: bool = False, finish: Finish | None = None) -> Script:
        """Plan a reply: the ids of `text` and `<|im_end|>`, or (with another finish) without it."""
        ids = tuple(self.renderer.tokenizer.encode(text))
        if finish is None:
            ids, finish = (*ids, END), Finish(reason=FinishReason.STOP, matched=END)
        script = Script(ids=ids, finish=finish, paused=paused)
        self.engine.plan(script)
        return script


def output_ids(record: dict[str, Any]) -> list[int]:
    """The sampled ids of a record."""
    return [id_ for _, id_, _ in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tiny_files() -> ModelFiles:
    """The files of the model that the tests speak with."""
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=None,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=4096,
        architecture="llama",
    )


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return make_renderer(tiny_files(), "smollm2")


@asynccontextmanager
async def running(
    engine: Engine,
    renderer: Renderer,
    *,
    pool: CpuPool | None = None,
    clock: Clock | None = None,
    slots: BodySlots | None = None,
    also: Sequence[Dialect] = (),
    counters: Sequence[CountDialect] = (),
    store: SessionStore | None = None,
    mark: ModelMark | None = None,
    moe_shape: tuple[int, int] = (2, 2),
    listener: socket.socket | None = None,
    alone: Callable[[Settings], Processes] = lambda _: Processes(),
    beats: bool = False,
    **settings: Any,
) -> AsyncIterator[tuple[str, SessionManager]]:
    """A server around an engine that has been started, on a socket of its own, or on one that is given: its URL, and
    its manager.

    It speaks `also` these dialects, beside those of its settings. With `beats` it measures its event loop's lag.
    """
    pool = pool or CpuPool(2)
    made = Settings(drain_timeout_s=10.0, **settings)
    spoken = spoken_by(made, renderer, "tiny")
    processes = Cluster(made) if store is not None and store.is_shared else alone(made)
    app, manager = make_app(
        made,
        engine=engine,
        renderer=renderer,
        pool=pool,
        model="tiny",
        clock=clock or SystemClock(),
        moe_shape=moe_shape,
        body_slots=slots,
        spoken=replace(spoken, turns=(*spoken.turns, *also), counters=(*spoken.counters, *counters)),
        store=store,
        mark=mark,
        processes=processes,
        parts=PARTS,
    )
    ready = asyncio.Event()
    config = uvicorn_config(app, made, processes)
    server = Server(config, manager=manager, on_ready=ready.set, drain_timeout_s=10.0, processes=processes)
    with listener or listen("127.0.0.1", 0) as listening:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listening]))
            await ready.wait()
            lag = LoopLag(app.metrics.loop_lagged, name_culprits=False)
            if beats:
                lag.start()
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", manager
            lag.close()
            server.should_exit = True
    await app.aclose()
    pool.close()


@pytest.fixture
def serve(renderer: Renderer) -> Callable[..., AbstractAsyncContextManager[Live]]:
    """Start servers with other settings: `async with serve(max_in_flight=1) as live`."""

    @asynccontextmanager
    async def started(**options: Any) -> AsyncIterator[Live]:
        engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
        async with running(engine, renderer, **options) as (url, manager), aiohttp.ClientSession() as client:
            yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)

    return started


@pytest.fixture
async def live(serve: Callable[..., AbstractAsyncContextManager[Live]]) -> AsyncIterator[Live]:
    """A server with default settings."""
    async with serve() as running:
        yield running


def begun(
    manager: SessionManager,
    session: Session | None,
    request: TurnRequest,
    *,
    stages: StageTimes | None = None,
    identity: RequestIdentity | None = None,
) -> Watch:
    """A watch of a request's turns, or of the turn that it repeats. Raises as the manager's `admit` and `begin`."""
    admitted = manager.admit(session, stages=stages or StageTimes(start=0.0), identity=identity)
    if not isinstance(admitted, Admission):
        return admitted
    with admitted:
        return manager.begin(admitted, (request, b"{}"))
