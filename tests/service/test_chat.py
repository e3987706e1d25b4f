"""Chats over a real socket: what a client gets, what the engine got, and what the session keeps."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest

from standins.scripted_engine import Script
from stenograph.core.errors import EngineUnavailable, InvalidRequest
from stenograph.core.types import Finish, FinishReason
from stenograph.offload.pool import CpuPool

from .conftest import END, Live, assistant, output_ids, user

T = TypeVar("T")
Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def test_the_sample_is_what_went_to_and_came_from_the_engine(live: Live) -> None:
    session = await live.open()
    scripts = [live.says("Paris."), live.says("It is old."), live.says("Bye.")]
    messages: list[dict[str, Any]] = []
    for question in ("Capital?", "Tell me more", "Thanks"):
        messages.append(user(question))
        answer = await live.chat(session, *messages, seed=1)
        assert answer.status == 200, answer.body
        messages.append(answer.json()["choices"][0]["message"])
    prompts = [list(request.prompt.ids) for request in live.engine.requests]
    for turn in range(2):
        before = prompts[turn] + list(scripts[turn].ids)
        assert prompts[turn + 1][: len(before)] == before
    everything = prompts[-1] + list(scripts[-1].ids)
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert view["metadata"]["accumulated_token_ids"] == everything
    samples = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()
    (sample,) = samples["samples"]
    assert sample["tokens"] == everything
    drawn = [id_ for chunk in live.engine.chunks for id_ in chunk.ids]
    logprobs = [logprob for chunk in live.engine.chunks for logprob in chunk.logprobs]
    mask, start = sample["loss_mask"], len(everything) - sample["response_length"]
    kept = [(id_, lp) for id_, m, lp in zip(everything[start:], mask, sample["rollout_log_probs"], strict=True) if m]
    assert kept == list(zip(drawn, logprobs, strict=True))
    assert all(lp == 0.0 for m, lp in zip(mask, sample["rollout_log_probs"], strict=True) if not m)


async def test_a_reply_has_the_openai_shape(live: Live) -> None:
    script = live.says("Hello")
    answer = await live.chat(await live.open(), user("hi"), logprobs=True, top_logprobs=0, return_token_ids=True)
    body = answer.json()
    choice = body["choices"][0]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", END)
    assert choice["token_ids"] == list(script.ids)
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == [-(i + 1) / 8 for i in range(len(script.ids))]
    assert body["prompt_token_ids"] == list(live.engine.requests[0].prompt.ids)
    assert body["usage"]["completion_tokens"] == len(script.ids)
    assert "render;dur=" in answer.headers["server-timing"]
    assert answer.headers.getall("server") == ["stenograph"]  # type: ignore[attr-defined]
    assert len(answer.headers.getall("date")) == 1  # type: ignore[attr-defined]


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_what_streams_and_what_does_not_leave_identical_records(live: Live) -> None:
    records = []
    for stream in (False, True):
        live.says("Naïve ☃ text")
        session = await live.open()
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await live.chat(session, user("hi"), stream=stream, **options)
        assert answer.status == 200
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        for name in ("timestamp", "request_timestamp", "request_id", "stages", "stage_seconds"):
            del record[name]
        for name in ("id", "created"):
            del record["response"][name]
        del record["response"]["choices"][0]["meta_info"]["id"]
        records.append(record)
        if stream:
            *chunks, last = events_of(answer.body)
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
            assert (text, last) == ("Naïve ☃ text", "[DONE]")
            assert chunks[-1]["usage"]["completion_tokens"] == len(output_ids(record))
            assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert records[0] == records[1]


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
THOUGHT_AND_CALL = (
    "<think>\nlet me add\n</think>\n\nI will add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_tool_calls_come_back_as_openai_fields_and_can_be_replayed(
    live: Live, stream: bool
) -> None:
    session = await live.open()
    live.says(THOUGHT_AND_CALL)
    answer = await live.chat(session, user("1+2?"), tools=[ADD], stream=stream)
    if stream:
        *chunks, _ = events_of(answer.body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(delta.get("content", "") for delta in deltas),
            "reasoning_content": "".join(delta.get("reasoning_content", "") for delta in deltas),
            "tool_calls": [{name: call[name] for name in ("id", "type", "function")}],
        }
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
    assert finish == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("I will add.", "let me add")
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1,  "b": 2}'})
    live.says("3")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    assert (await live.chat(session, user("1+2?"), message, result, tools=[ADD])).status == 200
    first, second = (request.prompt.ids.tolist() for request in live.engine.requests)
    assert second[: len(first)] == first
    assert live.renderer.tokenizer.decode(second[len(first) :]).startswith(THOUGHT_AND_CALL + "<|im_end|>\n")


async def test_a_records_parse_problem_is_null_where_there_is_none(live: Live) -> None:
    for text, problem in (("Hello", None), ("<think>\nfor ever", "reasoning_unclosed")):
        session = await live.open()
        live.says(text)
        assert (await live.chat(session, user("hi"))).status == 200
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        assert record["response"]["choices"][0]["parse_problem"] == problem


async def test_the_terminal_event_comes_after_the_commit(live: Live) -> None:
    script = live.says("several tokens", paused=True)
    session = await live.open()
    path = f"{live.url}/sessions/{session}/v1/chat/completions"
    live.engine.step()  # a stream's headers wait for its first token, so that an early error has a status
    async with live.client.post(
        path, json={"messages": [user("hi")], "stream": True, "return_token_ids": True}
    ) as response:
        seen = b""
        while b'"token_ids"' not in seen:
            seen += await response.content.readany()
        assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == []
        live.engine.step(len(script.ids))
        while b"[DONE]" not in seen:
            seen += await response.content.readany()
        assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1


async def test_a_second_chat_is_refused_at_once_and_leaves_the_first_alone(live: Live) -> None:
    live.says("one", paused=True)
    session, other = await live.open(), await live.open()
    first = asyncio.ensure_future(live.chat(session, user("hi")))
    await live.engine.begun(1)
    for _ in range(2):
        answer = await live.chat(session, user("hi"))
        assert (answer.status, answer.json()["error"]["code"]) == (409, "session_busy")
        assert answer.headers["x-should-retry"] == "false"
    assert len(live.engine.requests) == 1
    live.says("free")
    assert (await live.chat(other, user("hi"))).status == 200
    live.engine.step(20)
    assert (await first).status == 200
    live.says("two")
    assert (await live.chat(session, user("hi"), assistant("one"), user("more"))).status == 200


async def test_a_client_that_hangs_up_stops_the_engine_and_leaves_the_session_usable(live: Live) -> None:
    script = live.says("never heard", paused=True)
    session = await live.open()
    call = asyncio.ensure_future(live.chat(session, user("hi")))
    await live.engine.begun(1)
    live.engine.step(2)
    call.cancel()
    await asyncio.wait({call})
    await live.engine.idle()
    assert live.engine.stopped == [live.engine.requests[0].request_id]
    assert script.paused
    assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == []
    live.says("again")
    assert (await live.chat(session, user("hi"))).status == 200


async def test_a_client_that_comes_back_with_its_hang_up_never_finds_its_dead_turn(live: Live) -> None:
    session = await live.open()
    body = json.dumps({"messages": [user("hi")]}).encode()
    head = f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\n"
    head += f"host: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = live.url.removeprefix("http://").split(":")
    for round_ in range(20):
        with socket.create_connection((host, int(port))) as first, socket.create_connection((host, int(port))) as later:
            live.says("never heard", paused=True)
            first.sendall(head.encode() + body)
            await live.engine.begun(2 * round_ + 1)
            live.says("heard")
            first.close()
            later.sendall(head.encode() + body)  # the server's loop has not run between the two
            answer = await asyncio.to_thread(later.recv, 4096)
            assert answer.startswith(b"HTTP/1.1 200"), answer


async def test_an_engine_failure_is_told_keeps_nothing_and_frees_the_session(live: Live) -> None:
    live.engine.plan(Script(ids=(5,), error=EngineUnavailable("it died", retry_after_s=2.0)))
    session = await live.open()
    answer = await live.chat(session, user("hi"))
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"] == "2"
    live.says("fine")
    assert (await live.chat(session, user("hi"))).status == 200
    assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1


async def test_an_engine_failure_in_mid_stream_is_an_event_and_no_done(live: Live) -> None:
    ids = tuple(live.renderer.tokenizer.encode("several tokens"))
    live.engine.plan(Script(ids=ids, error=EngineUnavailable("it died"), paused=True))
    session = await live.open()
    live.engine.step()
    body = {"messages": [user("hi")], "stream": True, "return_token_ids": True}
    async with live.client.post(f"{live.url}/sessions/{session}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        seen = await response.content.readany()
        live.engine.step(len(ids))
        seen += await response.read()
    *_, last = events_of(seen)
    assert last["error"]["code"] == "engine_unavailable"
    assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == []


async def test_a_deadline_stops_the_engine_keeps_nothing_and_frees_the_session(serve: Serve) -> None:
    async with serve(request_timeout_s=0.05) as live:
        live.says("never", paused=True)
        session = await live.open()
        answer = await live.chat(session, user("hi"))
        assert (answer.status, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        assert live.engine.stopped == [live.engine.requests[0].request_id]
        assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == []
        assert not live.manager.sessions.get(session).is_busy


async def test_a_grammar_that_the_engine_refuses_is_blamed_on_the_field_that_it_came_from(live: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for fields, param in (
        ({"response_format": form}, "/response_format"),
        ({"tools": [ADD], "tool_choice": "required"}, "/tools"),
    ):
        live.engine.plan(Script(ids=(), error=InvalidRequest("The grammar does not compile.")))
        answer = await live.chat(await live.open(), user("hi"), **fields)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_garbage_from_an_engine_is_502_and_never_recorded(live: Live) -> None:
    live.engine.plan(Script(ids=(5, 10**6)))
    session = await live.open()
    answer = await live.chat(session, user("hi"))
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_invalid")
    assert "id_in_vocab" in answer.json()["error"]["message"]
    assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == []


async def test_a_turn_cut_by_length_can_be_regenerated_but_where_refused_not_extended(live: Live) -> None:
    session = await live.open(after_length="refuse")
    live.says("cut", finish=Finish(reason=FinishReason.LENGTH))
    answer = await live.chat(session, user("hi"), max_tokens=50)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    answer = await live.chat(session, user("hi"), assistant("cut"), user("go on"))
    assert (answer.status, answer.json()["error"]["code"]) == (409, "truncated_generation")
    live.says("whole")
    assert (await live.chat(session, user("hi"))).status == 200
    assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1


async def test_deleting_a_session_ends_its_turn_with_the_partial_reply_and_keeps_nothing(live: Live) -> None:
    live.says("partial", paused=True)
    session = await live.open()
    call = asyncio.ensure_future(live.chat(session, user("hi")))
    await live.engine.begun(1)
    live.engine.step()
    deleted = await live.call("DELETE", f"/sessions/{session}")
    assert deleted.status == 204
    answer = await call
    assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/samples")):
        assert (await live.call(method, f"/sessions/{session}{path}")).status == 404
    assert (await live.chat(session, user("hi"))).status == 404


async def test_abort_returns_every_partial_reply_and_records_it_as_aborted(live: Live) -> None:
    sessions = [await live.open() for _ in range(64)]
    calls = []
    for index, session in enumerate(sessions):
        live.says("partial", paused=True)
        calls.append(asyncio.ensure_future(live.chat(session, user("hi"))))
        await live.engine.begun(index + 1)
    assert (await live.call("POST", "/abort_request", {"abort_all": True})).json() == {"aborted": 64}
    for answer in await asyncio.gather(*calls):
        assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
    for session in sessions:
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        assert record["status"] == "aborted"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b'{"messages": 1}', 400, "invalid_request", "/messages"),
        (b'{"messages": []}', 400, "invalid_request", "/messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "wat": 1}', 400, "invalid_request", "/wat"),
        (b'{"messages": [{"role": "user", "content": "x"}], "input_ids": [1]}', 400, "invalid_request", "/input_ids"),
    ],
)
async def test_bad_input_is_a_clear_400_and_leaves_the_session_unharmed(
    live: Live, body: bytes, status: int, code: str, param: str | None
) -> None:
    session = await live.open()
    answer = await live.call("POST", f"/sessions/{session}/v1/chat/completions", body)
    assert (answer.status, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (status, code, param)
    assert answer.json()["error"]["message"]
    live.says("fine")
    assert (await live.chat(session, user("hi"))).status == 200


async def test_a_context_that_is_too_long_is_refused_before_the_engine_sees_it(live: Live) -> None:
    session = await live.open()
    for fields in ({"messages": [user("x" * 5000)]}, {"messages": [user("x")], "max_tokens": 4096}):
        answer = await live.call("POST", f"/sessions/{session}/v1/chat/completions", fields)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert live.engine.requests == []


async def test_the_session_is_named_by_path_then_header_then_bearer(live: Live) -> None:
    one, two = await live.open(), await live.open()
    path = "/v1/chat/completions"
    body = {"messages": [user("hi")]}
    for call, owner in (
        (live.call("POST", f"/sessions/{one}{path}", body, x_session_id=two), one),
        (live.call("POST", path, body, x_session_id=two), two),
    ):
        live.says("x")
        assert (await call).status == 200
        assert len((await live.call("GET", f"/sessions/{owner}")).json()["records"]) == 1
    live.says("x")
    assert (await live.call("POST", path, body, authorization=f"Bearer {two}")).status == 200
    live.says("x")
    assert (await live.call("POST", path, body, authorization="Bearer sk-dummy")).status == 200  # served statelessly
    assert (await live.call("POST", path, body, x_session_id="nobody")).status == 404
    assert (await live.call("POST", f"/sessions/nobody{path}", body)).status == 404


class BlockedPool(CpuPool):
    """A pool whose work waits until the test lets it go: a turn that stands in its rendering."""

    def __init__(self) -> None:
        super().__init__(2)
        self.entered = asyncio.Event()
        self.let_go = asyncio.Event()

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        self.entered.set()
        await self.let_go.wait()
        return await super().run(work, num_bytes=num_bytes)


async def test_an_abort_while_a_turn_renders_ends_it_before_the_engine_sees_it(serve: Serve) -> None:
    pool = BlockedPool()
    async with serve(pool=pool) as live:
        session = await live.open()
        call = asyncio.ensure_future(live.chat(session, user("hi")))
        await pool.entered.wait()
        assert (await live.call("POST", f"/sessions/{session}/abort")).json() == {"aborted": 1}
        pool.let_go.set()
        answer = await call
        assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
        assert answer.json()["usage"]["completion_tokens"] == 0
        assert live.engine.requests == []
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        assert (record["status"], output_ids(record)) == ("aborted", [])


async def test_a_hang_up_while_a_turn_renders_leaves_the_session_free(serve: Serve) -> None:
    pool = BlockedPool()
    async with serve(pool=pool) as live:
        session = await live.open()
        call = asyncio.ensure_future(live.chat(session, user("hi")))
        await pool.entered.wait()
        (turn,) = live.manager.sessions.get(session).running
        call.cancel()
        await asyncio.wait({turn.task})
        assert (await live.call("GET", "/health")).status == 200
        pool.let_go.set()
        live.says("again")
        assert (await live.chat(session, user("hi"))).status == 200
        assert len(live.engine.requests) == 1


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [70, 500, 900])
async def test_what_is_nested_too_deeply_is_400_wherever_it_stands(live: Live, depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    bodies: list[dict[str, Any]] = [
        {"tools": [tool]},
        {"chat_template_kwargs": nested(depth)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(depth)}}},
    ]
    for fields in bodies:
        answer = await live.chat(await live.open(), user("x"), **fields)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert (await live.call("POST", "/sessions", {"chat_template_kwargs": nested(depth)})).status == 400
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(nested(depth))}}
    replayed = [user("x"), {"role": "assistant", "tool_calls": [call]}, user("y")]
    answer = await live.chat(await live.open(), *replayed)
    assert answer.status in (400, 503)  # 503: the arguments could be shown, and no script is left
