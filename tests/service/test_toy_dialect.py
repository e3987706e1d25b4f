"""A dialect is one file: this one adds its own, and a server speaks it with nothing else changed.

A request is a persona and lines that are said in turns; what it is asked in is a voice, in the path. A reply is one
object, or lines of JSON as they come. Nothing of it looks like OpenAI's: neither ids, nor errors, nor where they point.
"""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from standins.planned_server import ReplyScript
from standins.scripted_engine import Script, ScriptedEngine
from standins.sglang_server import SGLangServer
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatReply, ChatRequest, ReplyOptions, Spelling, StreamPiece
from stenograph.core.errors import ContextLengthExceeded, InvalidRequest, StenographError, UpstreamUnreachable
from stenograph.core.messages import Message, Role
from stenograph.core.types import SamplingParams
from stenograph.dialects.base import Body, Decoded, Incoming, Refusal
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, assistant, running, user

# --- the dialect ----------------------------------------------------------------------------------------------------

JSON_LINES = "application/x-ndjson"


class ToyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a client says: lines by turns, the client's first."""

    lines: list[str]
    persona: str | None = None
    length: int | None = None
    live: bool = False


@dataclass(frozen=True, slots=True)
class ToySpelling:
    """Of a request whose first message is its persona, if it has one."""

    has_persona: bool
    dialect: str = "toy"
    id_prefix: str = "toy:"
    keeps_engine_id: bool = False

    def pointer(self, blame: Blame) -> str | None:
        match blame:
            case Blame(RequestPart.MESSAGES, 0) if self.has_persona:
                return "persona"
            case Blame(RequestPart.MESSAGES, int(index)):
                return f"lines[{index - self.has_persona}]"
            case Blame(RequestPart.MESSAGES | RequestPart.PROMPT):
                return "lines"
            case Blame(RequestPart.MAX_TOKENS):
                return "length"
            case _:
                return None


@dataclass(frozen=True, slots=True)
class ToyWriter:
    """A line for each piece, and one that says how it ended."""

    reply_id: str
    spelling: Spelling
    headers: Sequence[tuple[str, str]] = (("content-type", JSON_LINES),)

    def start(self, prompts: Sequence["array[int]"]) -> bytes:
        return line({"id": self.reply_id})

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes:
        return b"".join(line({"more": piece.delta.content}) for piece in pieces if piece.delta.content)

    def alive(self, prompts: Sequence["array[int]"]) -> bytes:
        return line({"hm": len(prompts[0])})

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        return line({"end": str(replies[0].sampled.finish.reason)})

    def failed(self, error: StenographError) -> bytes:
        return line(oops(error, self.spelling))


@dataclass(frozen=True, slots=True)
class ToyDialect:
    """A request asks for the next line."""

    name: str = "toy"
    paths: tuple[str, ...] = (r"/toy/(?P<voice>\w+)/say",)

    def decode(self, incoming: Incoming) -> Decoded:
        try:
            wire = msgspec.json.decode(incoming.body, type=ToyRequest)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"I do not get it: {error}") from error
        if len(wire.lines) % 2 == 0:
            raise InvalidRequest("The last line is yours.", param=f"lines[{len(wire.lines)}]")
        persona = [] if wire.persona is None else [Message(role=Role.SYSTEM, content=wire.persona)]
        said = [Message(role=(Role.USER, Role.ASSISTANT)[i % 2], content=text) for i, text in enumerate(wire.lines)]
        request = ChatRequest(
            messages=(*persona, *said),
            params=SamplingParams(max_tokens=wire.length),
            said=frozenset(() if wire.length is None else ("max_tokens",)),
            reply=ReplyOptions(stream=wire.live),
            spelling=ToySpelling(has_persona=bool(persona)),
        )
        return request, msgspec.json.encode({"path": f"/toy/{incoming.at['voice']}/say", "model": None})

    def steps(self, incoming: Incoming) -> Iterator[Decoded | None] | None:
        return None

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        said = {"id": reply_id, "line": replies[0].parsed.message.content}
        return Body(content=msgspec.json.encode(said), headers=[("content-type", "application/json")])

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> ToyWriter:
        return ToyWriter(reply_id, spelling)

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        headers = [("content-type", "application/json"), ("toy-oops", error.code)]
        return Refusal(status=error.status, content=msgspec.json.encode(oops(error, spelling)), headers=headers)


@dataclass(frozen=True, slots=True)
class ToyCounter:
    """Asks how long a request would be."""

    name: str = "toy"
    paths: tuple[str, ...] = (r"/toy/(?P<voice>\w+)/measure",)

    def decode(self, incoming: Incoming) -> ChatRequest:
        request, _ = ToyDialect().decode(incoming)
        assert isinstance(request, ChatRequest)
        return request

    def counted(self, num_tokens: int) -> Body:
        return Body(content=msgspec.json.encode({"long": num_tokens}), headers=[("content-type", "application/json")])

    def refusal(self, error: StenographError, spelling: Spelling | None) -> Refusal:
        return ToyDialect().refusal(error, spelling)


def oops(error: StenographError, spelling: Spelling | None) -> dict[str, object]:
    where = error.param
    if where is None and spelling is not None and error.blame is not None:
        where = spelling.pointer(error.blame)
    why = f"At most {error.max_context_tokens}." if isinstance(error, ContextLengthExceeded) else error.message
    return {"oops": error.code, "where": where, "why": why}


def line(value: dict[str, object]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


# --- a server that speaks it ----------------------------------------------------------------------------------------


@pytest.fixture
async def live(renderer: Renderer) -> AsyncIterator[Live]:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    async with (
        running(engine, renderer, also=(ToyDialect(),), counters=(ToyCounter(),)) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


async def say(at: Live, session: str | None, *lines: str, headers: dict[str, str] | None = None, **more: Any) -> Answer:
    path = "/toy/low/say" if session is None else f"/sessions/{session}/toy/low/say"
    return await at.call("POST", path, {"lines": lines, **more}, **(headers or {}))


async def records(live: Live, session: str) -> list[dict[str, Any]]:
    return list((await live.call("GET", f"/sessions/{session}")).json()["records"])


async def test_turns_go_on_exactly_and_the_record_has_its_path_and_ids(live: Live) -> None:
    session = await live.open()
    one, two = live.says("fine"), live.says("bye")
    first = await say(live, session, "hello", persona="a pirate")
    second = await say(live, session, "hello", "fine", "so?", persona="a pirate")
    assert [answer.json()["line"] for answer in (first, second)] == ["fine", "bye"]
    kept = await records(live, session)
    assert [record["response"]["id"] for record in kept] == [first.json()["id"], second.json()["id"]]
    assert first.json()["id"] == f"toy:{kept[0]['request_id']}"
    assert {record["path"] for record in kept} == {"/toy/low/say"}
    assert kept[1]["request"]["input_ids"][: len(kept[0]["request"]["input_ids"]) + len(one.ids)] == [
        *kept[0]["request"]["input_ids"],
        *one.ids,
    ]
    sample = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"][0]
    assert sum(sample["loss_mask"]) == len(one.ids) + len(two.ids)


async def test_a_session_goes_on_in_another_dialect(live: Live) -> None:
    """What is known of the one's bytes is not taken for the other's."""
    session = await live.open()
    for text in ("one", "two", "three"):
        live.says(text)
    chat = await live.chat(session, user("a"))
    toy = await say(live, session, "a", "one", "b")
    again = await live.chat(session, user("a"), assistant("one"), user("b"), assistant("two"), user("c"))
    assert (chat.status, toy.json()["line"], again.status) == (200, "two", 200)
    assert [record["path"] for record in await records(live, session)] == [
        "/v1/chat/completions",
        "/toy/low/say",
        "/v1/chat/completions",
    ]


async def test_a_stream_has_its_own_framing(live: Live) -> None:
    live.says("good day")
    answer = await say(live, None, "hello", live=True)
    head, *more, end = map(json.loads, answer.body.splitlines())
    assert answer.headers["content-type"] == JSON_LINES
    assert (head["id"][:4], "".join(one["more"] for one in more), end) == ("toy:", "good day", {"end": "stop"})


async def test_a_stream_that_fails_ends_with_its_own_error(live: Live) -> None:
    ids = tuple(live.renderer.tokenizer.encode("good day"))
    live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("It broke.")))
    answer = await say(live, None, "hello", live=True)
    *_, last = map(json.loads, answer.body.splitlines())
    assert (answer.status, last) == (200, {"oops": "upstream_unreachable", "where": None, "why": "It broke."})


async def test_a_retry_is_answered_with_the_same_reply(live: Live) -> None:
    session = await live.open()
    live.says("fine")
    key = {"idempotency_key": "k"}
    first = await say(live, session, "hello", headers=key)
    again = await say(live, session, "hello", headers=key)
    assert (again.status, again.body, len(live.engine.drawn)) == (200, first.body, 1)
    other = await live.call("POST", f"/sessions/{session}/toy/high/say", {"lines": ["hello"]}, **key)
    assert (other.status, other.json()["oops"]) == (422, "idempotency_mismatch")


async def test_errors_have_its_shape_and_point_into_its_requests(live: Live) -> None:
    async def refused(answer: Answer) -> tuple[int, str, str | None]:
        assert answer.headers["toy-oops"] == answer.json()["oops"]
        return answer.status, answer.json()["oops"], answer.json()["where"]

    session = await live.open(history="linear")
    live.says("one")
    live.says("two")
    await say(live, session, "a", persona="p")
    await say(live, session, "a", "one", "b", persona="p")
    lines = ("a", "one", "b", "two", "c")
    assert await refused(await say(live, session, *lines, persona="q")) == (400, "history_mismatch", "persona")
    assert await refused(await say(live, session, "z", *lines[1:], persona="p")) == (
        400,
        "history_mismatch",
        "lines[0]",
    )
    assert await refused(await say(live, None, "a", "b")) == (400, "invalid_request", "lines[2]")
    assert await refused(await say(live, None, "x" * 5000)) == (400, "context_length_exceeded", "lines")
    assert await refused(await say(live, None, "x", length=5000)) == (400, "context_length_exceeded", "length")
    assert await refused(await say(live, "none", "x")) == (404, "session_not_found", None)
    assert await refused(await live.call("GET", "/toy/low/say")) == (405, "method_not_allowed", None)
    assert (await live.call("POST", "/toy/say", {})).json()["error"]["code"] == "route_not_found"


async def measure(at: Live, session: str | None, *lines: str, **more: Any) -> Answer:
    path = "/toy/low/measure" if session is None else f"/sessions/{session}/toy/low/measure"
    return await at.call("POST", path, {"lines": lines, **more})


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
async def test_a_prompt_is_counted_at_any_time_as_its_turn_will_have_it(live: Live, history: str) -> None:
    session = await live.open(history=history)
    counted: list[int] = []
    lines = ["hello"]
    for text in ("one", "two"):
        counted.append((await measure(live, session, *lines, persona="p")).json()["long"])
        live.says(text)
        await say(live, session, *lines, persona="p")
        lines += [text, "so?"]
    live.says("three", paused=True)
    running_turn = asyncio.create_task(say(live, session, *lines, persona="p"))
    await live.engine.begun(3)
    during = await measure(live, session, *lines, persona="p")
    beside = await measure(live, session, "other")
    live.engine.step(100)
    await running_turn
    counted.append(during.json()["long"])
    prompts = [len(record["request"]["input_ids"]) for record in await records(live, session)]
    assert (counted, beside.status, len(live.engine.requests)) == (prompts, 200, 3)
    assert len(live.manager.sessions.get(session).strands.kept) == 1
    rows = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    found = [
        (row["path"], row["prompt_tokens"], row["sampled_tokens"], row["turn"])
        for row in rows
        if "measure" in row["path"]
    ]
    assert found == [("/toy/low/measure", one, 0, None) for one in (*counted, beside.json()["long"])]


async def test_what_a_session_would_refuse_is_counted_by_itself(live: Live) -> None:
    """A client that counts a conversation with its last reply, or another one, has a use for the number."""
    session = await live.open(history="linear")
    for text, lines in (("one", ["a"]), ("two", ["a", "one", "b"])):
        live.says(text)
        await say(live, session, *lines)
    apart = (await measure(live, None, "z", "one", "b")).json()["long"]
    assert (await measure(live, session, "z", "one", "b")).json()["long"] == apart


async def test_a_count_has_its_dialect_s_errors(live: Live) -> None:
    session = await live.open()
    refused = await measure(live, session, "a", "b")
    assert (refused.status, refused.json()["where"]) == (400, "lines[2]")
    assert (await measure(live, "none", "a")).json()["oops"] == "session_not_found"
    assert (await live.call("GET", "/toy/low/measure")).json()["oops"] == "method_not_allowed"
    (row,) = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert (row["status"], row["error"]) == (400, "invalid_request")


@asynccontextmanager
async def before_sglang(renderer: Renderer) -> AsyncIterator[tuple[str, SGLangServer]]:
    encode = renderer.tokenizer.encode
    async with SGLangServer(encode=lambda text: list(encode(text)), stop_id=END) as sglang:
        wire = SGLangChat(AdapterOptions(model="tiny", vocab_size=renderer.tokenizer.vocab_size))
        engine = HttpEngine(HttpEngineOptions(url=sglang.url), wire)
        await engine.start()
        try:
            async with running(engine, renderer, also=(ToyDialect(),)) as (url, _):
                yield url, sglang
        finally:
            await engine.aclose()


async def test_a_reply_that_the_engine_wrote_for_openai_s_clients_is_written_anew(renderer: Renderer) -> None:
    async with before_sglang(renderer) as (url, sglang), aiohttp.ClientSession() as client:
        ids = (*renderer.tokenizer.encode("fine"), END)
        sglang.plan(ReplyScript(ids=ids, text="fine", matched=END))
        async with client.post(f"{url}/toy/low/say", json={"lines": ["hello"]}) as answer:
            said = await answer.json()
    assert (said["line"], said["id"][:4], sorted(said)) == ("fine", "toy:", ["id", "line"])
