"""The whole server before llama.cpp: what a turn that its engine broke leaves of a session, which is nothing.

A real llama.cpp does not break its word on demand: a stand-in does, in the words that were recorded of it.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from standins.faults import Answer, Fault
from standins.planned_server import AskedRequest, PlannedServer, Play, ReplyScript
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import pieces_of
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

VOCAB = 320


class LlamaCppStandIn(PlannedServer):
    """`/completion`, streamed: an event for each token, and one that says why it ended."""

    def __init__(self) -> None:
        super().__init__(unplanned=ReplyScript(ids=(END,)), answers=None, routes=None, remembers=True)

    def _is_generation(self, asked: AskedRequest, path: str) -> bool:
        return (asked.method, path) == ("POST", "/completion")

    def id_of(self, asked: AskedRequest) -> str:
        return ""

    def _answer(self, asked: AskedRequest, path: str) -> Answer:
        told = {"data": [{"meta": {"n_vocab": VOCAB, "n_ctx": 4096}}]} if path == "/v1/models" else {"status": "ok"}
        return Answer(body=json.dumps(told).encode())

    def _whole(self, play: Play, path: str) -> dict[str, Any]:
        raise AssertionError("only streams are asked for")

    def _parts(
        self, play: Play, path: str, *, num_sent: int, num_drawn: int, finish: str | None
    ) -> Sequence[dict[str, Any]]:
        parts = [self._part(play, place) for place in range(num_sent, num_drawn)]
        if finish is not None:
            end = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "stopping_word": ""}
            parts.append({**end, **_counts(play, num_drawn), "timings/cache_n": 0})
        return parts

    def _part(self, play: Play, place: int) -> dict[str, Any]:
        row = {"id": play.ids[place], "token": "", "bytes": [], "logprob": play.logprobs[place], "top_logprobs": []}
        event = {"index": 0, "content": "", "tokens": [play.ids[place]], "stop": False, "id_slot": -1}
        return {**event, **_counts(play, place + 1), "completion_probabilities": [row]}

    def _refusal(self, script: ReplyScript, path: str) -> dict[str, Any]:
        return {"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}


def _counts(play: Play, num_drawn: int) -> dict[str, int]:
    return {"tokens_predicted": num_drawn, "tokens_evaluated": len(play.asked.json["prompt"])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A server, the stand-in behind it, and a plain client."""

    url: str
    stand_in: LlamaCppStandIn
    renderer: Renderer
    client: aiohttp.ClientSession

    def script(self, text: str, **options: Any) -> ReplyScript:
        """A reply of this text that ends with `<|im_end|>`."""
        return ReplyScript(ids=(*self.renderer.tokenizer.encode(text), END), **options)

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        async with self.client.post(self.url + path, json=body) as response:
            return response.status, await response.text()

    async def open(self) -> str:
        return str(json.loads((await self.post("/sessions", {}))[1])["session_id"])

    async def records(self, session: str) -> list[Any]:
        async with self.client.get(f"{self.url}/sessions/{session}") as response:
            return list((await response.json())["records"])

    async def check_usable(self, session: str) -> None:
        """Nothing was committed, and the next turn is."""
        assert await self.records(session) == []
        self.stand_in.plan(self.script("yes"))
        status, answer = await self.post(f"/sessions/{session}/v1/chat/completions", {"messages": [user("hi")]})
        assert status == 200, answer
        assert json.loads(answer)["choices"][0]["message"]["content"] == "yes"
        assert len(await self.records(session)) == 1


@pytest.fixture
async def rig(renderer: Renderer) -> AsyncIterator[Rig]:
    pieces = pieces_of(tiny_tokenizer_json(VOCAB), VOCAB)
    async with LlamaCppStandIn() as stand_in:
        adapter = LlamaCpp(AdapterOptions(model="tiny", vocab_size=VOCAB), pieces)
        engine = HttpEngine(HttpEngineOptions(url=stand_in.url), adapter)
        await engine.start()
        try:
            async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:
                yield Rig(url=url, stand_in=stand_in, renderer=renderer, client=client)
        finally:
            await engine.aclose()


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("upstream_unreachable", {"fault": Fault.CLOSED}),
    ("upstream_unreachable", {"fault": Fault.RESET}),
    ("upstream_unreachable", {"fault": Fault.GARBAGE}),
    ("upstream_unreachable", {"cut_at": 100}),
    ("upstream_invalid", {"edit": lambda part: part.pop("completion_probabilities", None)}),
    ("upstream_invalid", {"edit": lambda part: part.update(tokens=[VOCAB])}),
    ("upstream_invalid", {"edit": lambda part: part.update(tokens_evaluated=1)}),
    ("upstream_invalid", {"edit": lambda part: part.update(tokens_predicted=1)}),
]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("code", "options"), FAULTS)
async def test_a_turn_that_llama_cpp_broke_is_502_and_leaves_the_session_as_it_was(
    rig: Rig, code: str, options: dict[str, Any], streamed: bool
) -> None:
    session = await rig.open()
    rig.stand_in.plan(rig.script("no", **options))
    body = {"messages": [user("hi")], "stream": streamed}
    status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
    assert status == 502 or (streamed and '"error"' in answer), answer
    assert code in answer
    assert "[DONE]" not in answer
    await rig.check_usable(session)


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_error_of_llama_cpp_s_in_its_stream_commits_nothing(rig: Rig, streamed: bool) -> None:
    session = await rig.open()
    rig.stand_in.plan(rig.script("no", error_event=True))
    body = {"messages": [user("hi")], "stream": streamed}
    status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
    assert status == 500 or (streamed and '"error"' in answer), answer
    assert "Context size has been exceeded." in answer
    await rig.check_usable(session)


def with_schema(schema: Any, *, streamed: bool = False) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return {"messages": [user("hi")], "stream": streamed, "response_format": form}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_reply_that_ignored_its_schema_is_502_and_is_not_committed(rig: Rig, streamed: bool) -> None:
    session = await rig.open()
    rig.stand_in.plan(rig.script("Sure!"))
    body = with_schema({"type": "object"}, streamed=streamed)
    status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
    assert status == 502 or (streamed and '"error"' in answer), answer
    assert "grammar_held" in answer
    assert "[DONE]" not in answer
    await rig.check_usable(session)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_schema_that_llama_cpp_could_not_compile_is_400_and_never_gets_there(rig: Rig, streamed: bool) -> None:
    session = await rig.open()
    body = with_schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}, streamed=streamed)
    status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
    assert (status, rig.stand_in.requests) == (400, []), answer
    assert "#/$defs/missing" in answer
    await rig.check_usable(session)
