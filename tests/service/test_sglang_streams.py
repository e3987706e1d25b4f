"""Chats that an SGLang streams: text as it is sampled, one exact record at the end, and whole replies where needed."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from standins.faults import Answer as Response
from standins.planned_server import AskedRequest, ReplyScript
from standins.sglang_server import SERVER_INFO
from stenograph.engine.settings import ReplayKind

from .conftest import END, assistant, output_ids, user
from .test_sglang_chat import Connect, Rig, connect  # noqa: F401 - a fixture

WAY = "/v1/chat/completions"


@pytest.fixture
async def rig(connect: Connect) -> AsyncIterator[Rig]:  # noqa: F811 - the fixture
    async with connect(server_info=SERVER_INFO) as running_rig:
        yield running_rig


@dataclass
class Stream:
    """A client's stream as it reads it."""

    reply: aiohttp.ClientResponse
    events: list[Any] = field(default_factory=list[Any])

    async def next(self) -> Any:
        """The next event; "[DONE]" as that, None at the end."""
        async for line in self.reply.content:
            text = line.decode().strip()
            if text.startswith("data: "):
                data = text.removeprefix("data: ")
                self.events.append(data if data == "[DONE]" else json.loads(data))
                return self.events[-1]
        return None

    async def until(self, text: str) -> None:
        """Read until the message so far ends in this."""
        while not self.text.endswith(text):
            assert await self.next() is not None

    async def rest(self) -> None:
        while await self.next() is not None:
            pass

    @property
    def choices(self) -> list[Any]:
        return [event["choices"][0] for event in self.events if isinstance(event, dict) and event.get("choices")]

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content") or "" for choice in self.choices)


@asynccontextmanager
async def streaming(rig: Rig, session: str, *messages: dict[str, Any], **fields: Any) -> AsyncIterator[Stream]:
    body = {"messages": list(messages), "stream": True, **fields}
    async with rig.client.post(f"{rig.url}/sessions/{session}{WAY}", json=body) as reply:
        assert reply.status == 200
        yield Stream(reply)


def sampled(rig: Rig, text: str, **options: Any) -> ReplyScript:
    """A reply whose text is that of its ids, token by token."""
    return replace(rig.script(text, **options), text=None)


async def test_text_comes_as_it_is_sampled_and_the_end_once_the_turn_is_kept(rig: Rig) -> None:
    session = await rig.open()
    num_drawn = len(rig.renderer.tokenizer.encode("Naïve ☃"))
    script = sampled(rig, "Naïve ☃ and more", reasoning="hm", num_drawn=num_drawn, paused=True, num_cached=2)
    rig.sglang.plan(script)
    async with streaming(rig, session, user("hi"), logprobs=True, return_token_ids=True) as stream:
        await rig.sglang.held(1)
        await stream.until("Naïve ☃")  # nothing more is sampled until it is released
        assert await rig.records(session) == []
        assert all(choice["finish_reason"] is None for choice in stream.choices)
        rig.sglang.release()
        await stream.until("more")
        while not stream.choices[-1]["finish_reason"]:
            assert await stream.next() is not None
        (record,) = await rig.records(session)
        await stream.rest()
    assert stream.events[-1] == "[DONE]"
    assert stream.text == "Naïve ☃ and more"
    assert "".join(choice["delta"].get("reasoning_content") or "" for choice in stream.choices) == "hm"
    assert {event["id"] for event in stream.events[:-1]} == {rig.sglang.requests[0].json["rid"]}
    assert [id_ for choice in stream.choices for id_ in choice.get("token_ids") or ()] == list(script.ids)
    rows = [row for choice in stream.choices for row in (choice["logprobs"] or {"content": ()})["content"]]
    assert [row["logprob"] for row in rows] == [-(at + 1) / 8 for at in range(len(script.ids))]
    assert output_ids(record) == list(script.ids)
    assert record["weight_versions"] == [{"version": "default", "start": 0, "end": len(script.ids)}]
    assert await rig.metric("stenograph_ttft_seconds_count") == "1.0"


async def test_the_record_is_that_of_the_whole_reply_and_the_next_turn_goes_on_from_it(rig: Rig) -> None:
    kept = []
    for stream in (False, True):
        session = await rig.open()
        call = ("call_7", "f", '{"a": 1.0}')
        rig.sglang.plan(rig.script("Hello", reasoning="why", tool_calls=(call,), num_cached=1))
        answer = await rig.chat(session, user("hi"), stream=stream)
        assert answer.status == 200
        replayed = {**assistant("Hello"), "reasoning_content": "why"}
        replayed["tool_calls"] = [{"id": call[0], "type": "function", "function": {"name": "f", "arguments": call[2]}}]
        result = {"role": "tool", "tool_call_id": "call_7", "content": "done"}
        assert (await rig.chat(session, user("hi"), replayed, result, stream=stream)).status == 200
        records = await rig.records(session)
        for record in records:
            choice = record["response"]["choices"][0]
            del choice["meta_info"]["id"]
            # A whole reply with calls does not say which token ended it.
            del choice["stop_reason"], choice["meta_info"]["finish_reason"]["matched"]
        kept.append([(one["response"]["choices"][0], one["request"]["input_ids"]) for one in records])
    assert [asked.json.get("stream", False) for asked in rig.sglang.requests] == [False, False, True, True]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2


@pytest.mark.parametrize(
    ("way", "asked"),
    [
        ("messages", {"model": "m", "max_tokens": 64, "messages": [user("hi")]}),
        ("responses", {"model": "m", "input": "hi"}),
    ],
)
async def test_other_protocols_stream_what_sglang_streams(rig: Rig, way: str, asked: dict[str, Any]) -> None:
    call = ("call_7", "f", '{"a": 1.0}')
    script = sampled(rig, "Hello there", reasoning="why", tool_calls=(call,), paused=True, num_drawn=4)
    rig.sglang.plan(script)
    session = await rig.open()
    body = {**asked, "stream": True}
    async with rig.client.post(f"{rig.url}/sessions/{session}/v1/{way}", json=body) as reply:
        assert reply.status == 200, await reply.text()
        came = b""
        while b"why" not in came:  # before the rest is sampled
            came += await reply.content.readany()
        rig.sglang.release()
        came += await reply.content.read()
    assert rig.sglang.requests[0].json["stream"] is True
    assert came.count(b'"name":"f"') >= 1
    assert b"error" not in came.replace(b'"error":null', b"")
    (record,) = await rig.records(session)
    message = record["response"]["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello there", "why")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": call[2]}
    assert output_ids(record) == list(script.ids)


async def test_an_aborted_stream_is_kept_with_what_was_sampled(rig: Rig) -> None:
    session = await rig.open()
    script = sampled(rig, "partial", paused=True, num_drawn=3)
    rig.sglang.plan(script)
    async with streaming(rig, session, user("hi")) as stream:
        await rig.sglang.held(1)
        await stream.until(rig.renderer.tokenizer.decode(script.ids[:3]))
        assert (await rig.call("POST", f"/sessions/{session}/abort")).json() == {"aborted": 1}
        await stream.rest()
    assert stream.choices[-1]["finish_reason"] == "abort"
    (record,) = await rig.records(session)
    assert (record["status"], output_ids(record)) == ("aborted", list(script.ids[:3]))


async def test_a_hang_up_within_a_stream_aborts_it_and_keeps_nothing(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(sampled(rig, "never", paused=True, num_drawn=2))
    async with streaming(rig, session, user("hi")) as stream:
        await rig.sglang.held(1)
        assert await stream.next() is not None
        stream.reply.close()
    await rig.sglang.left(1)
    await rig.sglang.aborted(1)
    assert rig.sglang.aborts == [rig.sglang.requests[0].json["rid"]]
    assert (await rig.chat(session, user("hi"), stream=True)).status == 200
    assert len(await rig.records(session)) == 1


@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_stream_that_breaks_off_or_lies_ends_in_an_error_and_leaves_nothing(rig: Rig, is_cut: bool) -> None:
    def without_logprobs(event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            choice["logprobs"] = None

    session = await rig.open()
    script = sampled(rig, "Hello")
    rig.sglang.plan(replace(script, cut_at=900) if is_cut else replace(script, edit=without_logprobs))
    async with streaming(rig, session, user("hi")) as stream:
        await stream.rest()
    assert stream.text
    error = stream.events[-1]["error"]
    assert error["code"] == ("upstream_unreachable" if is_cut else "upstream_invalid")
    assert is_cut or "count_agrees" in error["message"]
    assert await rig.records(session) == []


async def test_weights_that_change_within_a_stream_are_claimed_for_no_token_and_then_replies_come_whole(
    rig: Rig,
) -> None:
    session = await rig.open()
    rig.sglang.weight_version = "w-1"
    rig.sglang.plan(sampled(rig, "first and second", paused=True, num_drawn=3))
    async with streaming(rig, session, user("hi")) as stream:
        await rig.sglang.held(1)
        assert await stream.next() is not None
        rig.sglang.weight_version = "w-2"
        rig.sglang.release()
        await stream.rest()
    assert stream.events[-1] == "[DONE]"
    (record,) = await rig.records(session)
    assert (record["weight_versions"], record["mixed_version"]) == (None, True)
    assert await rig.metric("stenograph_mixed_version_turns_total") == "1.0"
    assert (await rig.chat(await rig.open(), user("hi"), stream=True)).status == 200
    assert [asked.json.get("stream") for asked in rig.sglang.requests] == [True, None]
    (engine,) = (await rig.call("GET", "/ready")).json()["engines"]
    assert engine["detail"] == "its weights change while turns run: chats come whole, with the weights of each token"


@pytest.mark.parametrize(
    ("asked", "session"),
    [
        ({}, {}),
        ({"stream": True, "logprobs": True, "top_logprobs": 2}, {}),
        ({"stream": True, "stop": ["x"]}, {}),  # a stream shows the beginning of one that is cut off
        ({"stream": True, "top_p": 0.5}, {"support": True}),
    ],
)
async def test_what_a_stream_would_lack_is_asked_for_whole(
    rig: Rig, asked: dict[str, Any], session: dict[str, Any]
) -> None:
    answer = await rig.chat(await rig.open(**session), user("hi"), **asked)
    assert answer.status == 200, answer.body
    assert "stream" not in rig.sglang.requests[-1].json
    assert rig.sglang.requests[-1].json["return_meta_info"] is True


async def test_payloads_that_trainers_replay_are_asked_for_whole(connect: Connect) -> None:  # noqa: F811 - the fixture
    async with connect(server_info=SERVER_INFO, replay=ReplayKind.ROUTED_EXPERTS) as rig:
        assert (await rig.chat(await rig.open(), user("hi"), stream=True)).status == 200
        assert "stream" not in rig.sglang.requests[-1].json


async def router(asked: AskedRequest) -> Response | None:
    return Response(body=b'{"workers": []}') if asked.path == "/workers" else None


@pytest.mark.parametrize(
    "lacks",
    [
        {"tool_call_parser": None},  # then steps without text have no log-probabilities
        {"return_output_ids": None},  # an older version
        {"tokenizer_worker_num": 2},  # several processes that name the weights
        {"routes": router},
    ],
)
async def test_a_server_whose_streams_may_lack_something_is_asked_for_whole_replies(
    connect: Connect,  # noqa: F811 - the fixture
    lacks: Mapping[str, Any],
) -> None:
    routes = lacks.get("routes")
    info = SERVER_INFO if routes else {**SERVER_INFO, **lacks}
    async with connect(server_info=info, routes=routes) as rig:
        assert not rig.engine.capabilities.streams
        assert (await rig.chat(await rig.open(), user("hi"), stream=True)).status == 200
        assert "stream" not in rig.sglang.requests[-1].json


async def test_a_reasoning_parser_is_one_too(connect: Connect) -> None:  # noqa: F811 - the fixture
    info = {**SERVER_INFO, "tool_call_parser": None, "reasoning_parser": "qwen3"}
    async with connect(server_info=info) as rig:
        assert (await rig.chat(await rig.open(), user("hi"), stream=True)).status == 200
        assert rig.sglang.requests[-1].json["stream"] is True


async def test_many_streams_at_once_are_each_their_own(rig: Rig) -> None:
    async def one(number: int) -> None:
        session = await rig.open()
        answer = await rig.chat(session, user(f"say {number}"), stream=True)
        (record,) = await rig.records(session)
        assert answer.status == 200
        assert output_ids(record)[-1] == END

    await asyncio.gather(*(one(number) for number in range(16)))
