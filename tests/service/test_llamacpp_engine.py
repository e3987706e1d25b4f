"""The llama.cpp engine against recorded replies on a real socket: what came is passed on, and what was cut is an error.

What a real llama.cpp does is shown in tests/process/llamacpp; here are the faults that it does not make on demand.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from standins.faults import Answer, Fault, FaultyConnection, HttpRequest, send, send_events
from stenograph.core.errors import ContextLengthExceeded, UpstreamInvalid, UpstreamRefused, UpstreamUnreachable
from stenograph.core.types import Chunk, Finish, FinishReason, Prompt, RequestId, SamplingParams, token_ids
from stenograph.engine.base import EngineState, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import Pieces

RECORDINGS = Path(__file__).parents[1] / "recordings" / "llamacpp"
VOCAB = 49152
IDS = (60, 23, 39614, 1141)
MODELS: Any = {"data": [{"id": "m", "meta": {"n_vocab": VOCAB, "n_ctx": 1024}}]}


def recording(name: str) -> Any:
    return json.loads((RECORDINGS / f"{name}.json").read_text())


STREAM = recording("completion_stream")
EVENTS = [event.removeprefix("data: ").encode() for event in STREAM["response"]["body"].strip().split("\n\n")]
NUM_BYTES = sum(len(b"data: " + event + b"\n\n") for event in EVENTS)


class Recorded:
    """A server that plays `answer` to every generation, or stalls after some events; `was_left` tells of a hang-up."""

    def __init__(self, answer: Answer, *, models: Any = MODELS, stall_after: int | None = None) -> None:
        self.url = ""
        self.prompts: list[list[int]] = []
        self.keys: list[str | None] = []
        self.was_asked = asyncio.Event()
        self.was_left = asyncio.Event()
        self.answer = answer
        self._models = models
        self._stall_after = stall_after
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, connection: FaultyConnection, request: HttpRequest) -> None:
        if request.method == "GET":
            told = self._models if request.path == "/v1/models" else {"status": "ok"}
            await send(connection, Answer(body=json.dumps(told).encode()), self._never)
            return
        assert request.path == "/completion"
        self.prompts.append(json.loads(request.body)["prompt"])
        self.keys.append(request.header("x-smg-routing-key"))
        self.was_asked.set()
        if self.answer.content_type != "text/event-stream":
            await send(connection, self.answer, self._never)
            return
        if not await send_events(connection, self.answer, self._events(), self._never):
            connection.end()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for place, event in enumerate(EVENTS):
                if place == self._stall_after:
                    await self._never()
                yield event
        except asyncio.CancelledError:
            self.was_left.set()
            raise

    async def _never(self) -> None:
        await asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def serving(self, pieces: Pieces | None = None, **options: Any) -> AsyncIterator[HttpEngine]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: FaultyConnection(self.handle, self._tasks), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        engine = HttpEngine(
            HttpEngineOptions(url=self.url),
            LlamaCpp(
                AdapterOptions(**{"model": "m", "vocab_size": VOCAB, **options}), pieces or Pieces([b"?"] * VOCAB)
            ),
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.aclose()
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def stream(**changes: Any) -> Answer:
    return Answer(content_type="text/event-stream", **changes)


def asked(rid: str = "r") -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(rid),
        prompt=Prompt(new_ids=token_ids(STREAM["request"]["json"]["prompt"])),
        params=SamplingParams(temperature=0.0, max_tokens=4),
    )


def ids_of(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(id_ for chunk in chunks for id_ in chunk.ids)


async def test_a_recorded_stream_comes_token_by_token_and_ends_with_its_reason() -> None:
    server = Recorded(stream())
    async with server.serving() as engine:
        assert engine.capabilities.max_context_tokens == 1024
        chunks = [chunk async for chunk in engine.generate(asked())]
    assert [tuple(chunk.ids) for chunk in chunks] == [*((id_,) for id_ in IDS), ()]
    assert chunks[-1].finish == Finish(reason=FinishReason.LENGTH)
    assert server.prompts == [STREAM["request"]["json"]["prompt"]]


async def test_a_session_s_key_is_sent_on() -> None:
    server = Recorded(stream())
    async with server.serving() as engine:
        for key in ("session-1", None):
            async for _ in engine.generate(replace(asked(), affinity_key=key)):
                pass
    assert server.keys == ["session-1", None]


async def test_a_stream_that_is_cut_at_any_byte_is_an_error_after_the_tokens_that_came() -> None:
    ends: list[int] = []
    for event in EVENTS:
        ends.append((ends[-1] if ends else 0) + len(event) + len("data: \n\n"))
    server = Recorded(stream())
    async with server.serving() as engine:
        for cut in range(NUM_BYTES):
            server.answer = stream(cut_at=cut)
            chunks: list[Chunk] = []
            with pytest.raises(UpstreamUnreachable):
                await gather(engine, chunks)
            assert ids_of(chunks) == IDS[: sum(end <= cut for end in ends)], cut
            assert engine.num_running == 0


async def gather(engine: HttpEngine, chunks: list[Chunk]) -> None:
    async for chunk in engine.generate(asked()):
        chunks.append(chunk)


@pytest.mark.parametrize("fault", [Fault.CLOSED, Fault.RESET, Fault.GARBAGE])
async def test_a_server_that_breaks_off_at_once_is_unreachable(fault: Fault) -> None:
    async with Recorded(stream(fault=fault)).serving() as engine:
        with pytest.raises(UpstreamUnreachable):
            await gather(engine, [])


async def test_a_recorded_refusal_goes_to_the_client_byte_for_byte() -> None:
    told = recording("err_malformed_type")["response"]
    body = json.dumps(told["body"], separators=(",", ":")).encode()
    async with Recorded(Answer(status=told["status"], body=body)).serving() as engine:
        with pytest.raises(UpstreamRefused) as caught:
            await gather(engine, [])
        assert engine.health().state is EngineState.READY
    assert (caught.value.engine_status, caught.value.body) == (400, body)


OLDER = "the request exceeds the available context size. try increasing the context size or enable context shift"


@pytest.mark.parametrize("message", [None, OLDER])
async def test_a_recorded_refusal_of_a_long_prompt_has_the_code_that_agents_compact_by(message: str | None) -> None:
    error = recording("err_too_long")["response"]["body"]["error"]
    if message is not None:
        error = {"code": 400, "message": message, "type": "invalid_request_error"}
    body = json.dumps({"error": error}).encode()
    async with Recorded(Answer(status=400, body=body)).serving() as engine:
        with pytest.raises(ContextLengthExceeded) as caught:
            await gather(engine, [])
        assert engine.health().state is EngineState.READY
    num_prompt = asked().prompt.num_tokens
    told = (caught.value.num_prompt_tokens, caught.value.max_context_tokens)
    assert told == ((3000, 1024) if message is None else (num_prompt, num_prompt))


async def test_a_recorded_reply_that_is_no_stream_is_refused() -> None:
    body = json.dumps(recording("completion_token_ids")["response"]["body"]).encode()
    async with Recorded(Answer(body=body)).serving() as engine:
        with pytest.raises(UpstreamInvalid, match="streams"):
            await gather(engine, [])


@pytest.mark.parametrize("num", [0, 1, 4])
async def test_an_abort_of_a_stalled_stream_keeps_the_tokens_that_came_and_hangs_up(num: int) -> None:
    server = Recorded(stream(), stall_after=num)
    async with server.serving() as engine, aclosing(engine.generate(asked())) as chunks:
        taken = [await anext(chunks) for _ in range(num)]
        if not num:
            rest = asyncio.ensure_future(anext(chunks))
            await server.was_asked.wait()
            assert await engine.abort(RequestId("r"))
            taken.append(await rest)
        else:
            assert await engine.abort(RequestId("r"))
        taken += [chunk async for chunk in chunks]
        await server.was_left.wait()
    assert ids_of(taken) == IDS[:num]
    assert taken[-1].finish == Finish(reason=FinishReason.ABORT)


async def test_who_leaves_a_stalled_stream_hangs_up() -> None:
    server = Recorded(stream(), stall_after=2)
    async with server.serving() as engine:
        async with aclosing(engine.generate(asked())) as chunks:
            await anext(chunks)
        await server.was_left.wait()


async def test_without_a_stated_vocabulary_the_servers_is_taken_if_it_has_all_of_the_tokenizers_ids() -> None:
    num_ids = max(IDS)
    known = {"vocab_size": num_ids, "pieces": Pieces([b"?"] * num_ids), "states_vocab_size": False}
    async with Recorded(stream()).serving(**known) as engine:
        assert engine.capabilities.vocab_size == VOCAB
        chunks = [chunk async for chunk in engine.generate(asked())]
    assert tuple(id_ for chunk in chunks for id_ in chunk.ids) == IDS


async def test_without_a_stated_vocabulary_a_server_with_fewer_ids_than_the_tokenizer_is_another_model() -> None:
    num_ids = VOCAB + 1
    known = {"vocab_size": num_ids, "pieces": Pieces([b"?"] * num_ids), "states_vocab_size": False}
    async with Recorded(stream()).serving(**known) as engine:
        assert engine.health().state is EngineState.DOWN
        assert "vocab_agrees" in engine.health().detail


@pytest.mark.parametrize(
    ("models", "detail"),
    [
        ({"data": [{"meta": {"n_vocab": 32000, "n_ctx": 1024}}]}, "vocab_agrees"),
        ({"data": "m"}, "shape"),
    ],
)
async def test_a_server_with_another_model_or_none_is_down_and_says_why(models: Any, detail: str) -> None:
    async with Recorded(stream(), models=models).serving() as engine:
        assert engine.health().state is EngineState.DOWN
        assert detail in engine.health().detail


async def test_a_server_that_does_not_tell_its_context_leaves_it_to_itself() -> None:
    async with Recorded(stream(), models={"data": []}).serving() as engine:
        assert engine.health().state is EngineState.READY
        assert engine.capabilities.max_context_tokens is None
