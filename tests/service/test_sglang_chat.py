"""The whole server before a stand-in of SGLang: what the client gets, what the engine is told, what is kept."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from yarl import URL

from standins.faults import Answer as Response
from standins.faults import Fault
from standins.planned_server import AskedRequest, ReplyScript
from standins.sglang_server import SGLangServer
from stenograph.core.kinds import ReplyMode
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.session.manager import SessionManager
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, assistant, output_ids, running, user


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A server, the stand-in behind it, and a plain client."""

    url: str
    manager: SessionManager
    sglang: SGLangServer
    engine: HttpEngine
    renderer: Renderer
    client: aiohttp.ClientSession

    def script(self, text: str, **options: Any) -> ReplyScript:
        """A reply of this text that ends with `<|im_end|>`."""
        ids = (*self.renderer.tokenizer.encode(text), END)
        return ReplyScript(**{"ids": ids, "text": text, "matched": END, **options})

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named.setdefault("content-type", "application/json")
        url = URL(self.url + path, encoded=True)
        async with self.client.request(method, url, data=data, headers=named, allow_redirects=False) as response:
            return Answer(status=response.status, headers=response.headers, body=await response.read())

    async def open(self, **options: Any) -> str:
        return str((await self.call("POST", "/sessions", options)).json()["session_id"])

    async def chat(self, session_id: str, *messages: dict[str, Any], **fields: Any) -> Answer:
        return await self.call(
            "POST", f"/sessions/{session_id}/v1/chat/completions", {"messages": list(messages), **fields}
        )

    async def records(self, session_id: str) -> list[Any]:
        view = (await self.call("GET", f"/sessions/{session_id}")).json()
        return list(view["records"])

    async def metric(self, line: str) -> str:
        page = (await self.call("GET", "/metrics")).body.decode()
        return next((row.rsplit(" ", 1)[1] for row in page.splitlines() if row.startswith(line)), "absent")


Connect = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def connect(renderer: Renderer) -> Connect:
    """Servers with other settings, each before a stand-in of its own."""

    @asynccontextmanager
    async def connected(
        *,
        replay: ReplayKind = ReplayKind.NONE,
        engine_key: str | None = None,
        server_info: dict[str, Any] | None = None,
        routes: Callable[[AskedRequest], Awaitable[Response | None]] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Rig]:
        tokenizer = renderer.tokenizer
        async with SGLangServer(
            encode=lambda text: list(tokenizer.encode(text)),
            decode=lambda ids: tokenizer.decode(list(ids), skip_special=True),
            stop_id=END,
            routes=routes,
        ) as sglang:
            sglang.server_info = server_info
            adapter = SGLangChat(
                AdapterOptions(
                    model="tiny",
                    vocab_size=renderer.tokenizer.vocab_size,
                    replay=replay,
                    reply_mode=settings.get("reply", ReplyMode.PASSTHROUGH),
                )
            )
            engine = HttpEngine(HttpEngineOptions(url=sglang.url, api_key=engine_key), adapter)
            await engine.start()
            try:
                async with (
                    running(engine, renderer, **settings) as (url, manager),
                    aiohttp.ClientSession() as client,
                ):
                    yield Rig(url=url, manager=manager, sglang=sglang, engine=engine, renderer=renderer, client=client)
            finally:
                await engine.aclose()

    return connected


@pytest.fixture
async def rig(connect: Connect) -> AsyncIterator[Rig]:
    async with connect() as running_rig:
        yield running_rig


async def test_the_engines_bytes_and_headers_go_out_as_they_came_and_the_sample_is_exact(rig: Rig) -> None:
    session = await rig.open()
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(("Naïve ☃", "two", "three")):
        rig.sglang.plan(
            rig.script(
                text,
                triples=number != 1,
                fault=Fault.DOUBLED_HEADERS if number == 2 else Fault.NONE,
                content_type="application/json; charset=x",
                headers=(("X-Engine", "e"), ("Connection", "x-hop"), ("X-Hop", "no"), ("Server-Timing", "e;dur=1")),
            )
        )
        messages.append(user(f"question {number}"))
        answer = await rig.chat(session, *messages)
        assert answer.status == 200, answer.body
        assert answer.body == rig.sglang.replies[-1].body
        assert answer.headers["content-type"] == "application/json; charset=x"
        assert answer.headers["x-engine"] == "e"
        assert "x-hop" not in answer.headers
        assert "validate;dur=" in answer.headers["server-timing"]
        for name, value in (("server", "stenograph"), ("date", answer.headers["date"])):
            assert answer.headers.getall(name) == [value]  # type: ignore[attr-defined]
        messages.append(answer.json()["choices"][0]["message"])
    asked = [request.json["input_ids"] for request in rig.sglang.requests]
    drawn = [list(rig.script(text).ids) for text in ("Naïve ☃", "two", "three")]
    for turn in range(2):
        assert asked[turn + 1][: len(asked[turn] + drawn[turn])] == asked[turn] + drawn[turn]
    samples = (await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()
    (sample,) = samples["samples"]
    assert sample["tokens"] == asked[-1] + drawn[-1]
    assert sum(sample["loss_mask"]) == sum(map(len, drawn))
    assert sample["weight_spans"] == [{"version": "default", "start": len(asked[0]), "end": len(sample["tokens"])}]
    assert set(sample["weight_versions"]) == {"default"}
    view = (await rig.call("GET", f"/sessions/{session}")).json()
    assert view["metadata"]["accumulated_token_ids"] == sample["tokens"]
    assert view["metadata"]["tito_session_mismatch"] == []
    assert [record["request"]["input_ids"] for record in view["records"]] == asked
    assert rig.sglang.requests[0].header("x-smg-routing-key") == session


async def test_the_engine_is_asked_in_its_own_words(rig: Rig) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "cache_control": {"a": 1}}]
    session = await rig.open(chat_template_kwargs={"enable_thinking": False})
    answer = await rig.chat(
        session, *messages, tools=[tool], tool_choice="required", temperature=0.5, stop=["x"], max_completion_tokens=9
    )
    assert answer.status == 200, answer.body
    asked = rig.sglang.requests[0].json
    assert asked["messages"] == messages
    assert asked["tools"] == [tool]
    assert (asked["tool_choice"], asked["temperature"], asked["stop"], asked["max_tokens"]) == (
        "required", 0.5, ["x"], 9,
    )  # fmt: skip
    assert (asked["logprobs"], asked["return_meta_info"], asked["no_stop_trim"]) == (True, True, False)
    assert "stream" not in asked
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked["rid"] == (await rig.records(session))[0]["request_id"]


async def test_a_tool_call_that_the_engine_parsed_is_the_message_that_comes_back(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(
        rig.script("", ids=(*rig.renderer.tokenizer.encode("<x>"), END), tool_calls=(("call_7", "f", '{"a": 1}'),))
    )
    first = (await rig.chat(session, user("go"))).json()["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    call = {**first["message"]["tool_calls"][0], "function": {"name": "f", "arguments": '{"a":1.0}'}}
    replayed = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_7", "content": "done"}
    assert (await rig.chat(session, user("go"), replayed, result)).status == 200
    assert len(await rig.records(session)) == 2


async def test_a_client_that_streams_gets_one_piece_and_leaves_the_same_record(rig: Rig) -> None:
    records = []
    for stream in (False, True):
        session = await rig.open()
        rig.sglang.plan(rig.script("Hello", reasoning="why"))
        answer = await rig.chat(session, user("hi"), stream=stream)
        (record,) = await rig.records(session)
        kept = record["response"]["choices"][0]
        del kept["meta_info"]["id"]
        records.append((kept, record["request"]["input_ids"], record["weight_versions"]))
        if stream:
            events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
            assert events[-1] == "[DONE]"
            assert [delta for delta in deltas if delta.get("reasoning_content") or delta.get("content")] == [
                {"content": "Hello", "reasoning_content": "why"}
            ]
    assert records[0] == records[1]


@pytest.mark.parametrize("mode", list(ReplyMode))
async def test_lean_replies_leave_out_the_experts_which_records_and_samples_keep(
    connect: Connect, mode: ReplyMode
) -> None:
    async with connect(reply=mode, replay=ReplayKind.ALL) as rig:
        session = await rig.open()
        script = rig.script("Hi")
        messages = [user("hello")]
        rig.sglang.plan(rig.script("Hi"))
        await rig.chat(await rig.open(), *messages)  # to learn how long the prompt is
        num_tokens = len(rig.sglang.requests[0].json["input_ids"]) + len(script.ids)
        experts = np.arange((num_tokens - 1) * 4, dtype="<i4")
        rig.sglang.plan(rig.script("Hi", routed_experts=experts.tobytes(), indexer_topk=experts.tobytes()))
        answer = await rig.chat(session, *messages)
        assert rig.sglang.requests[-1].json["return_routed_experts"] is True
        told = rig.sglang.replies[-1].body
        meta = answer.json()["choices"][0]["meta_info"]
        if mode is ReplyMode.PASSTHROUGH:
            assert answer.body == told
        else:
            assert "routed_experts" not in meta
            assert "indexer_topk" not in meta
            assert meta["output_token_logprobs"] == json.loads(told)["choices"][0]["meta_info"]["output_token_logprobs"]
        (record,) = await rig.records(session)
        kept = record["response"]["choices"][0]["meta_info"]
        assert kept["routed_experts"] == kept["indexer_topk"] == base64.b64encode(experts.tobytes()).decode()
        samples = (await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()
        assert samples["samples"][0]["rollout_routed_experts"] == experts.reshape(num_tokens - 1, 2, 2).tolist()
        rig.sglang.plan(rig.script("Hi", body=told.replace(b'"routed_experts":"', b'"routed_experts":"?')))
        assert (await rig.chat(await rig.open(), *messages)).status == 502


@pytest.mark.parametrize("status", [302, 400, 404, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_anything_but_200_goes_out_as_it_came_and_is_not_recorded(rig: Rig, status: int, stream: bool) -> None:
    session = await rig.open()
    body = b'{"object":"error", "message" : "no"}'
    rig.sglang.plan(rig.script("", status=status, body=body, headers=(("Retry-After", "7"), ("Location", "/x"))))
    answer = await rig.chat(session, user("hi"), stream=stream)
    assert (answer.status, answer.body) == (status, body)
    assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("7", "application/json")
    assert await rig.records(session) == []
    assert (await rig.chat(session, user("hi"))).status == 200


ASKED = {
    "v1/chat/completions": {"messages": [user("hi")]},
    "v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [user("hi")]},
    "v1/responses": {"model": "tiny", "input": "hi"},
    "v1beta/models/tiny:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "v1/completions": {"prompt": "hi"},
}


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_the_ledger_has_the_status_that_the_client_got(rig: Rig, status: int) -> None:
    session = await rig.open()
    got: list[int] = []
    for path, body in ASKED.items():
        rig.sglang.plan(rig.script("", status=status, body=b'{"message":"no"}'))
        got.append((await rig.call("POST", f"/sessions/{session}/{path}", body)).status)
    assert got == [status] * len(ASKED)
    rows = (await rig.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert [(row["status"], row["error"]) for row in rows] == [(status, "upstream_refused")] * len(ASKED)


def lies() -> dict[str, tuple[str, Callable[[dict[str, Any]], object]]]:
    """Ways in which a 200 can lie, and the law that each breaks: the reply is edited, or replaced by bytes."""

    def choice(body: dict[str, Any]) -> Any:
        return body["choices"][0]

    def rows(body: dict[str, Any]) -> Any:
        return choice(body)["meta_info"]["output_token_logprobs"]

    def put(target: Any, key: Any, value: object) -> None:
        target[key] = value

    return {
        "null content": ("content_is_text", lambda b: put(choice(b)["message"], "content", None)),
        "no meta_info": ("has_meta_info", lambda b: choice(b).pop("meta_info")),
        "no logprobs": ("has_logprobs", lambda b: choice(b)["meta_info"].pop("output_token_logprobs")),
        "no count": ("has_completion_tokens", lambda b: choice(b)["meta_info"].pop("completion_tokens")),
        "one token less": ("count_agrees", lambda b: rows(b).pop()),
        "an id beyond the vocabulary": ("id_in_vocab", lambda b: put(rows(b)[0], 1, 10**6)),
        "a huge id": ("id_in_vocab", lambda b: put(rows(b)[0], 1, 10**40)),
        "a bool for an id": ("id_in_vocab", lambda b: put(rows(b)[0], 1, True)),
        "a float for an id": ("id_in_vocab", lambda b: put(rows(b)[0], 1, 1.0)),
        "a null logprob": ("logprob_is_finite", lambda b: put(rows(b)[0], 0, None)),
        "a bool logprob": ("logprob_is_finite", lambda b: put(rows(b)[0], 0, False)),
        "a row of one": ("row_shape", lambda b: put(rows(b), 0, [-1.0])),
        "another prompt": ("prompt_agrees", lambda b: put(choice(b)["meta_info"], "prompt_tokens", 3)),
        "two choices": ("one_choice", lambda b: b["choices"].append(choice(b))),
        "another finish": ("finish_reason", lambda b: put(choice(b), "finish_reason", "eos")),
        "NaN": ("json", lambda b: json.dumps(b).replace("-0.125", "NaN", 1).encode()),
        "1e999": ("logprob_is_finite", lambda b: json.dumps(b).replace("[-0.125", "[1e999").encode()),
        "bytes after it": ("json", lambda b: json.dumps(b).encode() + b"x"),
        "no UTF-8": ("utf8", lambda b: json.dumps(b).replace("chat.completion", "@").encode().replace(b"@", b"\xff")),
        "no JSON": ("json", lambda b: b"<html>"),
        "nothing": ("json", lambda b: b""),
    }  # fmt: skip


REAL = json.loads((Path(__file__).parent / "recordings/sglang/engine-0.5.23.json").read_text(encoding="utf-8"))
TOO_LONG: dict[str, Any] = next(one["reply"] for one in REAL if one["name"] == "chat_too_long")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_a_real_sglang_finds_too_long_has_the_code_that_agents_compact_by(
    connect: Connect, stream: bool
) -> None:
    info = {"tool_call_parser": "hermes", "return_output_ids": True, "tokenizer_worker_num": 1}
    async with connect(server_info=info) as rig:
        for in_event in (False, True) if stream else (False,):
            told = json.dumps({"error": TOO_LONG} if in_event else TOO_LONG).encode()
            rig.sglang.plan(rig.script("x", status=400, body=told, error_event=in_event))
            answer = await rig.chat(await rig.open(), user("hi"), stream=stream)
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (400, "context_length_exceeded"), answer.body
            assert "8192" in error["message"]
            rig.sglang.plan(rig.script("x", status=400, body=told, error_event=in_event))
            body = {"messages": [user("hi")], "max_tokens": 9, "stream": stream}
            messages = await rig.call("POST", f"/sessions/{await rig.open()}/v1/messages", body)
            assert messages.status == 400, messages.body
            assert "context" in messages.json()["error"]["message"]
            assert await rig.records(await rig.open()) == []


@pytest.mark.parametrize("lie", list(lies()))
async def test_a_200_that_lies_is_502_with_its_law_and_leaves_nothing(rig: Rig, lie: str) -> None:
    law, edit = lies()[lie]
    session = await rig.open()
    rig.sglang.plan(rig.script("fine"))
    assert (await rig.chat(session, user("hi"))).status == 200
    before = await rig.records(session)
    rig.sglang.plan(rig.script("fine", edit=edit))
    messages = (user("hi"), assistant("fine"), user("more"))
    answer = await rig.chat(session, *messages)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (502, "upstream_invalid"), answer.body
    assert error["message"].startswith(f"{law}: "), error
    assert await rig.records(session) == before
    assert await rig.metric(f'stenograph_upstream_invalid_total{{law="{law}"}}') == "1.0"
    assert (await rig.chat(session, *messages)).status == 200


@pytest.mark.parametrize(
    "fault",
    [
        Fault.CLOSED, Fault.RESET, Fault.CUT_BODY, Fault.CUT_CHUNK, Fault.LONG_LENGTH, Fault.BAD_CHUNK, Fault.GARBAGE,
    ],
)  # fmt: skip
async def test_a_broken_exchange_is_502_and_the_next_turn_works(rig: Rig, fault: Fault) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("lost", fault=fault))
    answer = await rig.chat(session, user("hi"))
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_unreachable"), answer.body
    assert await rig.records(session) == []
    assert (await rig.chat(session, user("hi"))).status == 200


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.HELD_HEADERS, Fault.HELD_BODY])
async def test_a_turn_past_its_deadline_is_504_and_stopped_at_the_engine(connect: Connect, fault: Fault) -> None:
    async with connect(request_timeout_s=0.2) as rig:
        session = await rig.open()
        rig.sglang.plan(rig.script("late", fault=fault))
        answer = await rig.chat(session, user("hi"))
        assert (answer.status, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        rid = rig.sglang.requests[0].json["rid"]
        await rig.sglang.aborted(1)
        await rig.sglang.left(1)
        assert (rig.sglang.aborts, rig.sglang.hung_up) == ([rid], [rid])
        assert await rig.records(session) == []
        assert (await rig.chat(session, user("hi"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_closes_the_engines_connection_and_aborts_with_our_id(rig: Rig, stream: bool) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("never", paused=True))
    call = asyncio.ensure_future(rig.chat(session, user("hi"), stream=stream))
    await rig.sglang.begun(1)
    call.cancel()
    rid = rig.sglang.requests[0].json["rid"]
    await rig.sglang.aborted(1)
    await rig.sglang.left(1)
    assert (rig.sglang.aborts, rig.sglang.hung_up) == ([rid], [rid])
    assert (await rig.chat(session, user("hi"))).status == 200
    assert len(await rig.records(session)) == 1


async def test_an_aborted_turn_is_returned_unchanged_and_recorded(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("partial", paused=True, num_drawn=3))
    call = asyncio.ensure_future(rig.chat(session, user("hi")))
    await rig.sglang.held(1)
    assert (await rig.call("POST", f"/sessions/{session}/abort")).json() == {"aborted": 1}
    answer = await call
    assert (answer.status, answer.body) == (200, rig.sglang.replies[0].body)
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    (record,) = await rig.records(session)
    assert (record["status"], len(output_ids(record))) == ("aborted", 3)
    more = await rig.chat(session, user("hi"), answer.json()["choices"][0]["message"], user("more"))
    assert (more.status, more.json()["error"]["code"]) == (409, "truncated_generation")
    assert (await rig.chat(session, user("hi"))).status == 200


async def test_a_deleted_sessions_caller_gets_the_partial_reply_or_404(connect: Connect) -> None:
    async with connect(abort_grace_s=0.3) as rig:
        for ignored, status in ((0, 200), (10**6, 404)):
            session = await rig.open()
            rig.sglang.plan(rig.script("partial", paused=True, num_drawn=2, ignored_aborts=ignored))
            call = asyncio.ensure_future(rig.chat(session, user("hi")))
            await rig.sglang.held(1)
            assert (await rig.call("DELETE", f"/sessions/{session}")).status == 204
            answer = await call
            assert answer.status == status, answer.body
            if status == 404:
                assert answer.json()["error"]["code"] == "session_not_found"
            assert (await rig.chat(session, user("hi"))).status == 404
        await rig.sglang.idle()
        assert rig.manager.num_in_flight == 0


async def test_an_abort_that_the_engine_does_not_answer_ends_as_a_timeout(connect: Connect) -> None:
    async with connect(abort_grace_s=0.3) as rig:
        session = await rig.open()
        rig.sglang.plan(rig.script("stuck", paused=True, ignored_aborts=10**6))
        call = asyncio.ensure_future(rig.chat(session, user("hi")))
        await rig.sglang.held(1)
        await rig.call("POST", f"/sessions/{session}/abort")
        answer = await call
        assert (answer.status, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        await rig.sglang.left(1)
        assert (await rig.chat(session, user("hi"))).status == 200


async def test_aborting_everything_while_64_sessions_run_returns_every_reply_and_loses_none(rig: Rig) -> None:
    sessions = [await rig.open() for _ in range(64)]
    rig.sglang.plan(*(rig.script(f"reply {number}", paused=True, num_drawn=number % 5) for number in range(64)))
    calls = [asyncio.ensure_future(rig.chat(session, user("hi"), n=1)) for session in sessions]
    await rig.sglang.begun(64)
    assert (await rig.call("POST", "/abort_request", {"abort_all": True})).json() == {"aborted": 64}
    answers = await asyncio.gather(*calls)
    assert [answer.status for answer in answers] == [200] * 64
    for session, answer in zip(sessions, answers, strict=True):
        (record,) = await rig.records(session)
        rows = answer.json()["choices"][0]["meta_info"]["output_token_logprobs"]
        assert record["status"] == "aborted"
        assert output_ids(record) == [row[1] for row in rows]
    num_drawn = [len(output_ids((await rig.records(session))[0])) for session in sessions]
    assert sum(num_drawn) == sum(number % 5 for number in range(64))


async def test_a_retry_joins_the_turn_in_flight_and_the_engine_sees_one(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("once", paused=True))
    body = {"messages": [user("hi")]}
    path = f"/sessions/{session}/v1/chat/completions"
    first = asyncio.ensure_future(rig.call("POST", path, body))
    await rig.sglang.held(1)
    second = asyncio.ensure_future(rig.call("POST", path, body, x_stainless_retry_count="1"))
    busy = await rig.call("POST", path, body)
    assert (busy.status, busy.headers["x-should-retry"]) == (409, "false")
    rig.sglang.release()
    one, two = await asyncio.gather(first, second)
    assert one.body == two.body == rig.sglang.replies[0].body
    assert len(rig.sglang.requests) == 1
    assert len(await rig.records(session)) == 1


async def test_a_reader_that_never_reads_pins_nothing(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("big"))
    await rig.chat(await rig.open(), user("hi"))
    body = json.loads(rig.sglang.replies[0].body or b"")
    rig.sglang.plan(rig.script("big", edit=lambda reply: reply.update(padding="x" * 30_000_000)))
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    payload = json.dumps({"messages": [user("hi")]}).encode()
    head = f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\n"
    head += f"host: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    assert (await reader.read(1)) == b"H"  # the turn is committed, its reply is on its way, and nobody reads on
    message = body["choices"][0]["message"]
    assert (await rig.chat(session, user("hi"), message, user("more"))).status == 200
    assert len(await rig.records(session)) == 2
    assert rig.manager.num_in_flight == 0
    writer.close()


async def test_concurrent_turns_on_a_tree_become_siblings(rig: Rig) -> None:
    session = await rig.open(history="tree")
    rig.sglang.plan(rig.script("root"))
    root = (await rig.chat(session, user("hi"))).json()["choices"][0]["message"]
    rig.sglang.plan(*(rig.script(text, paused=True) for text in ("left", "right")))
    calls = [asyncio.ensure_future(rig.chat(session, user("hi"), root, user("go"))) for _ in range(2)]
    await rig.sglang.held(2)
    rig.sglang.release()
    assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200]
    view = (await rig.call("GET", f"/sessions/{session}")).json()
    assert [node["parent"] for node in view["metadata"]["tree"]["nodes"]] == [None, 0, 0]
    assert [leaf["path_node_ids"] for leaf in view["metadata"]["tree"]["leaves"]] == [[0, 1], [0, 2]]
    lines = (await rig.call("GET", f"/sessions/{session}/drift")).json()["lines"]
    assert [(line["leaf"], line["mismatches"]) for line in lines] == [(1, []), (2, [])]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_goes_to_the_route_that_takes_ids_and_is_kept_like_a_chat(rig: Rig, stream: bool) -> None:
    session = await rig.open(history="tree")
    rig.sglang.plan(rig.script("one"), rig.script("two"))
    for turn in range(2):
        answer = await rig.call(
            "POST", f"/sessions/{session}/v1/completions", {"prompt": f"x{turn}", "stream": stream, "max_tokens": 64}
        )
        assert answer.status == 200, answer.body
        asked = [asked for asked in rig.sglang.asked if asked.method == "POST"]
        assert [one.path for one in asked] == ["/generate"] * (turn + 1)
        assert asked[-1].json["stream"] is stream
        assert "messages" not in asked[-1].json
    samples = (await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert len(samples) == 2


async def test_the_proxy_passes_on_what_its_list_names_and_nothing_else(rig: Rig) -> None:
    session = await rig.open()
    base = f"/sessions/{session}"
    answer = await rig.call(
        "POST", f"{base}/v1/embeddings?a=b%2Fc", {"input": "hi"}, authorization="Bearer secret", x_custom="kept"
    )
    assert (answer.status, answer.json()["object"]) == (200, "list")
    asked = rig.sglang.asked[-1]
    assert asked.path == "/v1/embeddings?a=b%2Fc"
    assert (asked.header("authorization"), asked.header("x-custom")) == (None, "kept")
    assert asked.header("x-smg-routing-key") == session
    assert (await rig.call("GET", f"{base}/v1/models")).json()["data"][0]["id"] == "stand-in"
    num_asked = len(rig.sglang.asked)
    for path in ("v1/embeddings/x", "flush_cache", "v1/../flush_cache", "v1%2Fembeddings/../x", "v1"):
        refused = await rig.call("POST", f"{base}/{path}", {})
        assert refused.status in (403, 404), path
    assert (await rig.call("POST", "/v1/embeddings", {"input": "hi"})).status == 200
    assert len(rig.sglang.asked) == num_asked + 1
    assert (await rig.call("POST", "/sessions/none/v1/embeddings", {})).status == 404
    assert (await rig.call("GET", f"{base}/samples")).status == 405
    assert await rig.records(session) == []


async def test_the_engines_key_goes_with_every_request_and_a_clients_own_with_none(
    connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "step-1").mkdir()
    keys = {"api_key": ("client",), "admin_key": ("client",), "engine_key": "engine", "weights_dir": tmp_path}
    client = {"authorization": "Bearer client"}
    async with connect(**keys) as rig:
        session = (await rig.call("POST", "/sessions", {}, **client)).json()["session_id"]
        base = f"/sessions/{session}"
        for stream in (False, True):
            rig.sglang.plan(rig.script("ok"), rig.script("ok"))
            chat = {"messages": [user("a")], "stream": stream}
            assert (await rig.call("POST", f"{base}/v1/chat/completions", chat, **client)).status == 200
            prompt = {"prompt": "a", "stream": stream}
            assert (await rig.call("POST", f"{base}/v1/completions", prompt, **client)).status == 200
        assert (await rig.call("POST", f"{base}/v1/embeddings", {"input": "hi"}, **client)).status == 200
        update = {"model_path": "step-1"}
        assert (await rig.call("POST", "/update_weights_from_disk", update, **client)).status == 200
        rig.sglang.plan(rig.script("a long reply", paused=True, num_drawn=1))
        turn = asyncio.ensure_future(rig.call("POST", f"{base}/v1/completions", {"prompt": "a"}, **client))
        await rig.sglang.held(1)
        assert (await rig.call("POST", "/abort_request", {"abort_all": True}, **client)).status == 200
        assert (await turn).status == 200
        paths = {asked.path.partition("?")[0] for asked in rig.sglang.asked}
        assert {"/model_info", "/generate", "/v1/embeddings", "/abort_request", "/update_weights_from_disk"} <= paths
        sent = {value for asked in rig.sglang.asked for name, value in asked.headers if name == "authorization"}
        assert sent == {"Bearer engine"}
        assert all(asked.header("authorization") for asked in rig.sglang.asked)


async def test_an_engine_that_is_down_is_502_and_not_ready_until_it_is_back(rig: Rig) -> None:
    session = await rig.open()
    await rig.sglang.aclose()
    answer = await rig.chat(session, user("hi"))
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
    ready = await rig.call("GET", "/ready")
    assert (ready.status, ready.json()["engines"][0]["state"]) == (503, "down")
    assert (await rig.call("GET", "/health")).status == 200
    await rig.sglang.start()
    assert (await rig.chat(session, user("hi"))).status == 200
    assert (await rig.call("GET", "/ready")).status == 200


async def test_the_ids_are_in_the_reply_of_a_client_that_asks_for_them(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("Hi", headers=(("ETag", "x"),)), rig.script("Hi"))
    answer = await rig.chat(session, user("hi"), return_token_ids=True)
    body, told = answer.json(), json.loads(rig.sglang.replies[0].body or b"")
    assert body.pop("prompt_token_ids") == rig.sglang.requests[0].json["input_ids"]
    assert body["choices"][0].pop("token_ids") == list(rig.script("Hi").ids)
    assert body == told
    assert "etag" not in answer.headers
    stream = await rig.chat(await rig.open(), user("hi"), return_token_ids=True, stream=True)
    events = [line.removeprefix("data: ") for line in stream.body.decode().split("\n\n") if line]
    first = json.loads(events[0])
    assert first["prompt_token_ids"] == rig.sglang.requests[1].json["input_ids"]
    assert first["id"] == json.loads(rig.sglang.replies[1].body or b"")["id"]


@pytest.mark.parametrize(("sent", "seen"), [("caf\u00e9", "caf\udce9"), ("plain", "plain"), ("a\x01b", None)])
async def test_a_header_of_any_bytes_goes_out_as_it_came_or_not_at_all(rig: Rig, sent: str, seen: str | None) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("Hi", headers=(("X-Note", sent), ("X-Long", "x" * 9000))))
    answer = await rig.chat(session, user("hi"))
    assert (answer.status, answer.headers.get("x-note"), answer.headers.get("x-long")) == (200, seen, None)
    assert len(await rig.records(session)) == 1


@pytest.mark.parametrize("status", [600, 999, 99])
async def test_a_status_that_nobody_may_send_is_a_lie_too(rig: Rig, status: int) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("Hi", status=status))
    answer = await rig.chat(session, user("hi"))
    assert answer.status == 502, answer.body
    assert await rig.records(session) == []


async def test_a_client_that_pipelines_is_hung_up_on_and_its_turn_is_stopped(rig: Rig) -> None:
    session = await rig.open()
    rig.sglang.plan(rig.script("never", paused=True))
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps({"messages": [user("hi")]}).encode()
    head = f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\n"
    head += f"host: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await rig.sglang.held(1)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert await reader.read() == b""
    await rig.sglang.aborted(1)
    writer.close()
    assert (await rig.chat(session, user("hi"))).status == 200
    assert len(await rig.records(session)) == 1


async def test_headers_beyond_any_sense_are_refused(rig: Rig) -> None:
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nidempotency-key: " + b"x" * 100_000 + b"\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 431")
    writer.close()


@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_the_ids_that_are_sent_as_text_are_the_lines_also_after_a_retry_and_a_branch(
    rig: Rig, history: str
) -> None:
    session = await rig.open(history=history)
    messages: list[dict[str, Any]] = []
    for text, num_dropped in (("one", 0), ("two", 0), ("two again", 2), ("three", 0), ("four", 0)):
        messages = messages[: len(messages) - num_dropped]
        rig.sglang.plan(rig.script(text))
        messages.append(user(f"for {text}"))
        answer = await rig.chat(session, *messages)
        assert answer.status == 200, answer.body
        messages.append(answer.json()["choices"][0]["message"])
    records = await rig.records(session)
    assert [output_ids(record) for record in records] == [
        list(rig.script(text).ids) for text in ("one", "two again", "three", "four")
    ]
    by_rid = {request.json["rid"]: request.json["input_ids"] for request in rig.sglang.requests}
    for record, following in pairwise(records):
        assert record["request"]["input_ids"] == by_rid[record["request_id"]]
        line = by_rid[record["request_id"]] + output_ids(record)
        assert by_rid[following["request_id"]][: len(line)] == line


async def test_the_three_tokens_that_kimi_k3s_chat_does_not_count_are_known(renderer: Renderer) -> None:
    def fewer(reply: dict[str, Any]) -> None:
        reply["choices"][0]["meta_info"]["prompt_tokens"] -= 3

    for parser, status in (("kimi_k3", 200), ("hermes", 502)):
        async with SGLangServer(encode=lambda text: list(renderer.tokenizer.encode(text)), stop_id=END) as sglang:
            sglang.server_info = {"tool_call_parser": parser}
            adapter = SGLangChat(AdapterOptions(model="tiny", vocab_size=renderer.tokenizer.vocab_size))
            engine = HttpEngine(HttpEngineOptions(url=sglang.url), adapter)
            await engine.start()
            try:
                async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:
                    sglang.plan(ReplyScript(ids=(*renderer.tokenizer.encode("ok"), END), text="ok", edit=fewer))
                    body = {"model": "m", "messages": [user("a")]}
                    async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                        assert answer.status == status, await answer.text()
            finally:
                await engine.aclose()
