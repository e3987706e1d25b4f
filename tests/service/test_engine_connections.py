"""A reply is that of the request: what else comes on a kept connection to an engine is nobody's.

That holds over TLS as well.

The stand-in speaks over a raw socket and sends, with each reply, one more that nobody asked for: a valid one, of other
ids, sent at one of the moments in which a client may not look.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from stenograph.core.chat import ChatRequest
from stenograph.core.errors import UpstreamError
from stenograph.core.messages import Message, Role
from stenograph.core.types import Prompt, RequestId, SampledTurn, SamplingParams, token_ids
from stenograph.engine.base import EngineState, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.http.transport import EngineTransport
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import Pieces
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.validate import TurnCollector
from stenograph.engine.vllm.adapter import VLLM

from .tls import server_tls, trusted

__all__ = ["trusted"]

VOCAB = 1000
PROMPT = (1, 2, 3)
TURNS = 20
STRANGE = 999
"""The id that only replies which nobody asked for have."""
CHAT = ChatRequest(messages=(Message(role=Role.USER, content="hi"),), messages_json=b'[{"role":"user","content":"hi"}]')
MODELS = {"data": [{"id": "m", "max_model_len": 4096, "meta": {"n_vocab": VOCAB, "n_ctx": 4096}}]}

Say = Callable[[dict[str, Any], int], tuple[str, bytes]]
"""(what was asked, the id that was drawn) to the content type and body of a reply."""


def sglang_meta(asked: dict[str, Any], id_: int) -> dict[str, Any]:
    return {
        "id": asked["rid"],
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(asked["input_ids"]),
        "completion_tokens": 1,
        "cached_tokens": 0,
        "output_token_logprobs": [[-1.0, id_, None]],
    }


def sglang_chat(asked: dict[str, Any], id_: int) -> tuple[str, bytes]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x"},
        "finish_reason": "length",
        "meta_info": sglang_meta(asked, id_),
    }
    return "application/json", json.dumps({"id": asked["rid"], "choices": [choice]}).encode()


def sglang_generate(asked: dict[str, Any], id_: int) -> tuple[str, bytes]:
    return _whole_or_event(asked, {"text": "", "output_ids": [id_], "meta_info": sglang_meta(asked, id_)})


def vllm_generate(asked: dict[str, Any], id_: int) -> tuple[str, bytes]:
    logprobs = {"content": [{"token_id": id_, "logprob": -1.0, "top_logprobs": []}]}
    choice = {"index": 0, "token_ids": [id_], "logprobs": logprobs, "finish_reason": "length"}
    usage = {"prompt_tokens": len(asked["token_ids"]), "completion_tokens": 1}
    return _whole_or_event(
        asked, {"request_id": f"generate-tokens-{asked['request_id']}", "choices": [choice], "usage": usage}
    )


def lmdeploy_generate(asked: dict[str, Any], id_: int) -> tuple[str, bytes]:
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(asked["input_ids"]),
        "completion_tokens": 1,
        "output_token_logprobs": [[-1.0, id_]],
    }
    return _whole_or_event(asked, {"text": "", "output_ids": [id_], "meta_info": meta})


def llamacpp(asked: dict[str, Any], id_: int) -> tuple[str, bytes]:
    counts = {"tokens_evaluated": len(asked["prompt"]), "tokens_predicted": 1}
    row = {"id": id_, "logprob": -1.0, "top_logprobs": []}
    drawn = {"content": "x", "tokens": [id_], "completion_probabilities": [row], **counts}
    last = {"content": "", "stop": True, "stop_type": "limit", **counts}
    return "text/event-stream", b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in (drawn, last))


def _whole_or_event(asked: dict[str, Any], told: dict[str, Any]) -> tuple[str, bytes]:
    data = json.dumps(told).encode()
    if asked.get("stream"):
        return "text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % data
    return "application/json", data


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An engine: its adapter, how it replies, and whether it has one connection for many requests."""

    adapter: Callable[[], EngineAdapter]
    say: Say
    path: str
    keeps: bool = True
    streams: bool = False


KINDS = {
    "sglang-chat": Kind(
        adapter=lambda: SGLangChat(AdapterOptions(model="m", vocab_size=VOCAB)),
        say=sglang_chat,
        path="/v1/chat/completions",
    ),
    "sglang-generate": Kind(
        adapter=lambda: SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)),
        say=sglang_generate,
        path="/generate",
    ),
    "sglang-stream": Kind(
        adapter=lambda: SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)),
        say=sglang_generate,
        path="/generate",
        streams=True,
    ),
    "vllm": Kind(
        adapter=lambda: VLLM(AdapterOptions(model="m", vocab_size=VOCAB, max_context_tokens=4096)),
        say=vllm_generate,
        path="/inference/v1/generate",
    ),
    "lmdeploy": Kind(
        adapter=lambda: LMDeploy(AdapterOptions(model="m", vocab_size=VOCAB)),
        say=lmdeploy_generate,
        path="/generate",
        keeps=False,
    ),
    "llamacpp": Kind(
        adapter=lambda: LlamaCpp(AdapterOptions(model="m", vocab_size=VOCAB), Pieces([b"?"] * VOCAB)),
        say=llamacpp,
        path="/completion",
        keeps=False,
        streams=True,
    ),
}
OVER_TLS = ("sglang-chat", "vllm", "lmdeploy")
"""Two whose replies name their request, and one whose do not, which is asked over a new connection each time."""
MOMENTS = ("same_segment", "half_with_it", "garbage_with_it", "idle", "before_the_next", "with_the_next")


class Engine:
    """The server. What it sends unasked is the reply to the request before, with an id that was never drawn."""

    def __init__(self, kind: Kind, moment: str) -> None:
        self._kind = kind
        self._moment = moment
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._debts: dict[asyncio.StreamWriter, bytes] = {}
        self.num_used = 0
        """Connections on which a generation was asked for."""

    async def start(self, scheme: str) -> str:
        tls = server_tls() if scheme == "https" else None
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    def speak(self) -> None:
        """Send what is owed on idle connections, without a turn of the loop in between."""
        for writer, owed in self._debts.items():
            if not writer.is_closing():
                writer.write(owed)
        self._debts.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        has_generated = False
        try:
            while True:
                method, path, body = await _request(reader)
                asked = json.loads(body or b"{}")
                if path != self._kind.path or not any(asked.get(name) for name in ("input_ids", "prompt", "token_ids")):
                    writer.write(_probe(method, path))
                    continue
                self.num_used += not has_generated
                has_generated = True
                self._generate(writer, asked)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _generate(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        mine, strange = _http(*self._kind.say(asked, 5)), _http(*self._kind.say(asked, STRANGE))
        match self._moment:
            case "same_segment":
                writer.write(mine + strange)
            case "half_with_it":
                writer.write(mine + strange[: len(strange) // 2])
                self._debts[writer] = strange[len(strange) // 2 :]
            case "garbage_with_it":
                writer.write(mine + b"}}garbage")
            case "with_the_next":
                writer.write(self._debts.pop(writer, b"") + mine)
                self._debts[writer] = strange
            case _:
                writer.write(mine)
                self._debts[writer] = strange


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    method, path, _ = head.split(" ", 2)
    length = next((line for line in head.lower().split("\r\n") if line.startswith("content-length:")), "x:0")
    return method, path, await reader.readexactly(int(length.partition(":")[2]))


def _http(content_type: str, body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _probe(method: str, path: str) -> bytes:
    """What a server of any kind answers that is asked what it is."""
    if path == "/v1/models":
        return _http("application/json", json.dumps(MODELS).encode())
    if path == "/openapi.json":
        return _http("application/json", b"{}", "404 Not Found")
    if method == "GET" and "abort" in path:
        return _http("application/json", b"{}", "405 Method Not Allowed")
    if method == "POST" and path != "/abort_request":
        return _http("application/json", b"{}", "400 Bad Request")
    return _http("application/json", b"{}")


@asynccontextmanager
async def connected(kind: Kind, moment: str, scheme: str = "http") -> AsyncIterator[tuple[Engine, HttpEngine]]:
    server = Engine(kind, moment)
    engine = HttpEngine(HttpEngineOptions(url=await server.start(scheme), probe_pause_s=3600.0), kind.adapter())
    await engine.start()
    assert engine.health().state is EngineState.READY, engine.health().detail
    try:
        yield server, engine
    finally:
        await engine.aclose()
        await server.aclose()


async def drawn(engine: HttpEngine, number: int, *, streams: bool) -> SampledTurn:
    of = GenerateRequest(
        request_id=RequestId(f"r-{number}"),
        prompt=Prompt(new_ids=token_ids(PROMPT)),
        params=SamplingParams(max_tokens=1),
        chat=CHAT if engine.capabilities.parses else None,
        streams=streams,
    )
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=1, num_prompt=len(PROMPT))
    async for chunk in engine.generate(of):
        collector.add(chunk)
    return collector.result()


async def some_passes() -> None:
    """Let the loop take in what lies in the sockets."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("scheme", "name"), [*(("http", name) for name in KINDS), *(("https", name) for name in OVER_TLS)]
)
async def test_a_reply_that_nobody_asked_for_is_never_a_turn_s(scheme: str, name: str, moment: str) -> None:
    kind = KINDS[name]
    async with connected(kind, moment, scheme) as (server, engine):
        seen: list[object] = []
        for number in range(TURNS):
            try:
                seen.append(list((await drawn(engine, number, streams=kind.streams)).ids))
            except UpstreamError as error:
                seen.append(error.code)
            if moment in ("idle", "half_with_it"):
                server.speak()
                await some_passes()
            elif moment == "before_the_next":
                server.speak()
    assert all(one in ([5], "upstream_invalid", "upstream_unreachable") for one in seen), seen
    if not kind.keeps or moment in ("same_segment", "half_with_it", "idle", "before_the_next"):
        assert seen == [[5]] * TURNS or moment == "garbage_with_it", "a new connection is as good as the first"
    if moment == "with_the_next" and kind.keeps and not kind.streams:
        assert seen.count("upstream_invalid") == TURNS // 2, seen
        assert seen.count([5]) == TURNS // 2, seen


@pytest.mark.parametrize("name", KINDS)
async def test_a_connection_is_used_again_where_a_reply_names_its_request(name: str) -> None:
    kind = KINDS[name]
    async with connected(kind, "quiet") as (server, engine):
        for number in range(TURNS):
            assert list((await drawn(engine, number, streams=kind.streams)).ids) == [5]
        assert server.num_used <= (2 if kind.keeps and not kind.streams else TURNS)
        assert kind.keeps or server.num_used == TURNS


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_bytes_on_an_idle_connection_close_it_at_once(scheme: str) -> None:
    ended = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await _request(reader)
        writer.write(_http("application/json", b"{}"))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        ended.set()
        writer.close()

    tls = server_tls() if scheme == "https" else None
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    transport = EngineTransport(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}", 5.0)
    transport.open()
    try:
        assert await transport.post("/", b"{}", (), lambda http: http.body) == b"{}"
        writers[0].write(b"H")
        await ended.wait()
    finally:
        await transport.aclose()
        server.close()
