"""Completions over a real socket: what goes to the engine, what comes back, and what a session keeps of it."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import EngineUnavailable
from stenograph.core.types import Finish, FinishReason, Grammar, GrammarKind
from stenograph.dialects.settings import UnknownFields
from stenograph.engine.base import Capabilities
from stenograph.session.settings import OverBudget
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, assistant, output_ids, running, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]

REMAINING = "x-stenograph-remaining-tokens"
SESSION_REMAINING = "x-stenograph-session-remaining-tokens"
STOP = Finish(reason=FinishReason.STOP, matched=END)


async def complete(live: Live, session_id: str | None, prompt: Any, **fields: Any) -> Answer:
    headers = fields.pop("headers", {})
    prefix = "" if session_id is None else f"/sessions/{session_id}"
    return await live.call("POST", f"{prefix}/v1/completions", {"prompt": prompt, **fields}, **headers)


async def view_of(live: Live, session_id: str) -> Any:
    return (await live.call("GET", f"/sessions/{session_id}")).json()


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def prompts_of(live: Live) -> list[list[int]]:
    return [request.prompt.ids.tolist() for request in live.engine.requests]


# --- one prompt


async def test_a_reply_has_openais_shape_and_the_ids_in_vllms_places(live: Live) -> None:
    script = live.says("Hello")
    answer = await complete(live, None, [5, 6, 7], logprobs=1, return_token_ids=True)
    body = answer.json()
    (choice,) = body["choices"]
    assert answer.status == 200
    assert body["object"] == "text_completion"
    assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert (choice["index"], choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        0,
        "Hello",
        "stop",
        END,
    )
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6, 7], list(script.ids))
    texts = [live.renderer.tokenizer.token_text(id_) for id_ in script.ids]
    assert choice["logprobs"]["tokens"] == texts
    assert texts[-1] == "<|im_end|>"
    assert choice["logprobs"]["token_logprobs"] == [-(i + 1) / 8 for i in range(len(texts))]
    assert choice["logprobs"]["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(texts))]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[text] for text in texts]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, len(texts))
    assert "render;dur=" in answer.headers["server-timing"]


async def test_ids_go_to_the_engine_as_they_are_and_text_with_its_control_tokens(live: Live) -> None:
    text = "<|im_start|>user\nhi ☃<|im_end|>\n"
    for prompt in ([5, 0, 319, 1], [[5, 0, 319, 1]], text, [text], "the user " * 2000):
        live.says("x")
        assert (await complete(live, None, prompt)).status == 200
    encoded = live.renderer.tokenizer.encode(text).tolist()
    assert prompts_of(live)[:4] == [[5, 0, 319, 1]] * 2 + [encoded] * 2
    assert (encoded[0], encoded.count(END)) == (1, 1)
    assert prompts_of(live)[4] == live.renderer.tokenizer.encode("the user " * 2000).tolist()
    assert all(request.chat is None for request in live.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "ab"),
        ({"include_stop_str_in_output": True}, "ab cd"),
        ({"skip_special_tokens": False}, "<|im_start|>ab"),
    ],
)
async def test_the_text_ends_before_the_stop_string_and_has_no_control_tokens_unless_asked(
    live: Live, fields: dict[str, Any], text: str, stream: bool
) -> None:
    ids = (1, *live.renderer.tokenizer.encode("ab cd"), *live.renderer.tokenizer.encode("ef"))
    live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=" cd")))
    options = {"return_token_ids": True, "stream": stream, **fields}
    answer = await complete(live, None, [9], stop=[" cd", "zz"], **options)
    choices = (
        [choice for event in events_of(answer.body)[:-1] for choice in event["choices"]]
        if stream
        else answer.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == text
    assert [id_ for choice in choices for id_ in choice.get("token_ids", [])] == list(ids)
    assert choices[-1]["stop_reason"] == " cd"


async def test_reasoning_and_calls_are_text(live: Live) -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    live.says(text)
    (choice,) = (await complete(live, None, "x")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


async def test_what_streams_and_what_does_not_leave_identical_records(live: Live) -> None:
    records = []
    for stream in (False, True):
        live.says("Naïve ☃ text")
        session = await live.open()
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await complete(live, session, "hi", stream=stream, return_token_ids=True, user="u", **options)
        assert answer.status == 200
        (record,) = (await view_of(live, session))["records"]
        for name in ("timestamp", "request_timestamp", "request_id", "stages", "stage_seconds"):
            del record[name]
        for name in ("id", "created"):
            del record["response"][name]
        del record["response"]["choices"][0]["meta_info"]["id"]
        records.append(record)
        if stream:
            *chunks, last = events_of(answer.body)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert ("".join(choice["text"] for choice in choices), last) == ("Naïve ☃ text", "[DONE]")
            assert [id_ for choice in choices for id_ in choice.get("token_ids", [])] == output_ids(record)
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
            assert choices[0]["prompt_token_ids"] == record["request"]["input_ids"]
            assert chunks[-1]["usage"]["completion_tokens"] == len(output_ids(record))
    assert records[0] == records[1]
    assert records[0]["path"] == "/v1/completions"
    assert records[0]["request"]["messages"] == []
    assert records[0]["request"]["parameters"]["recorded"] == {"user": "u"}
    assert records[0]["response"]["choices"][0]["text"] == "Naïve ☃ text"


async def test_text_that_could_still_become_a_stop_string_waits_and_its_ids_do_not(live: Live) -> None:
    encode = live.renderer.tokenizer.encode
    ids = (*encode("a"), *encode("b"), *encode("c"))
    assert len(ids) == 3
    live.engine.plan(Script(ids=ids, paused=True, finish=Finish(reason=FinishReason.STOP, matched="bc")))
    live.engine.step(2)
    body = {"prompt": [9], "stop": "bc", "stream": True, "return_token_ids": True}
    async with live.client.post(f"{live.url}/v1/completions", json=body) as response:
        seen = b""
        while seen.count(b'"token_ids":[') < 2:
            seen += await response.content.readany()
        first = [choice for event in events_of(seen) for choice in event["choices"]]
        assert "".join(choice["text"] for choice in first) == "a"
        live.engine.step(2)
        seen += await response.content.read()
    assert "".join(choice["text"] for event in events_of(seen)[:-1] for choice in event["choices"]) == "a"


# --- refusals, before the engine is asked


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([320], "/prompt/0"),
        ([5, 6, 2**31 - 1], "/prompt/2"),
        ([[5], [6, 320]], "/prompt/1/1"),
        ([5, True], "/prompt/1"),
        ([5, 6.0], "/prompt/1"),
        ([-1], "/prompt/0"),
        ([], "/prompt"),
        ("", "/prompt"),
        ([""], "/prompt/0"),
        (["a", ""], "/prompt/1"),
        ([[5], []], "/prompt/1"),
        (None, "/prompt"),
        ({"a": 1}, "/prompt"),
    ],
)
async def test_a_bad_prompt_is_pointed_at_and_no_engine_sees_any_of_it(live: Live, prompt: Any, param: str) -> None:
    session = await live.open(history="tree")
    for owner in (None, session):
        answer = await complete(live, owner, prompt)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request"), answer.body
        assert answer.json()["error"]["param"] == param
    assert live.engine.requests == []
    live.says("fine")
    assert (await complete(live, session, "x")).status == 200


async def test_a_prompt_that_is_too_long_is_refused_without_touching_the_engine_alone_or_among_others(
    live: Live,
) -> None:
    long = [9] * 4097
    for prompt, param in ((long, "/prompt"), ([[9], long], "/prompt/1"), ("the" * 5000, "/prompt")):
        answer = await complete(live, None, prompt, max_tokens=1)
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, your prompt ")
    answer = await complete(live, None, [9] * 96, max_tokens=4001)
    assert answer.json()["error"] == {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 4097 tokens"
        " (96 in the prompt, 4001 in the completion). Please reduce the length of the prompt or completion.",
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
        "param": "/max_tokens",
    }
    assert live.engine.requests == []


@pytest.mark.parametrize("value", [True, False, None])
async def test_that_a_client_asked_for_padded_events_is_in_the_record(live: Live, value: bool | None) -> None:
    session = await live.open()
    fields = {"stream": True, "stream_options": {"include_obfuscation": value}, "user": "u"}
    for call in (
        lambda: complete(live, session, [5, 6], **fields),
        lambda: live.chat(session, user("hi"), **fields),
    ):
        live.says("x")
        answer = await call()
        assert answer.status == 200
        assert b"obfuscation" not in answer.body
        record = (await view_of(live, session))["records"][-1]
        padding = {} if value is None else {"stream_options": {"include_obfuscation": value}}
        assert record["request"]["parameters"]["recorded"] == {"user": "u", **padding}


async def test_truncation_keeps_the_end_the_beginning_or_what_the_context_leaves(live: Live) -> None:
    ids = [(7 * index) % 300 + 3 for index in range(5000)]
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": -1}, ids[-4095:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 96}, ids[-4000:]),
        ({"truncate_prompt_tokens": 4096 - 5, "max_tokens": 5}, ids[-4091:]),
    ]
    for fields, kept in cases:
        live.engine.plan(Script(ids=(5,), finish=Finish(reason=FinishReason.LENGTH)))
        answer = await complete(live, None, ids, **fields)
        assert answer.status == 200, answer.body
        assert prompts_of(live)[-1] == kept
    live.says("x")
    await complete(live, None, [8, 9], truncate_prompt_tokens=50)
    assert prompts_of(live)[-1] == [8, 9]
    answer = await complete(live, None, ids, truncate_prompt_tokens=-1, max_tokens=4096)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("num_prompt", "wanted", "num_kept", "num_granted"),
    [(30, 20, 19, 1), (30, 25, 19, 1), (30, 19, 1, 19), (30, 5, 15, 5), (4, 20, 4, 16), (19, 20, 19, 1)],
)
async def test_truncation_leaves_a_clamped_reply_a_token_to_draw(
    renderer: Renderer, num_prompt: int, wanted: int, num_kept: int, num_granted: int
) -> None:
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=20)
    async with (
        running(engine, renderer, over_budget=OverBudget.CLAMP) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        engine.plan(Script(ids=(5,), finish=Finish(reason=FinishReason.LENGTH)))
        ids = list(range(3, 3 + num_prompt))
        answer = await complete(live, None, ids, truncate_prompt_tokens=-1, max_tokens=wanted)
        assert answer.status == 200, answer.body
        (request,) = engine.requests
        assert request.prompt.ids.tolist() == ids[-num_kept:]
        assert request.params.max_tokens == num_granted


class Untold(ScriptedEngine):
    """Does not tell how long its context is."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_context_tokens=None)


async def test_what_the_context_leaves_cannot_be_kept_where_the_context_is_not_known(renderer: Renderer) -> None:
    engine = Untold(vocab_size=320)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        for prompt in ([5, 6, 7], "the user", [[5], [6]]):
            error = (await complete(live, None, prompt, truncate_prompt_tokens=-1)).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_request", "/truncate_prompt_tokens")
            assert "does not report how long its context is" in error["message"]
        assert engine.requests == []
        live.says("x")
        assert (await complete(live, None, [5, 6, 7], truncate_prompt_tokens=2)).status == 200
        assert prompts_of(live) == [[6, 7]]


async def test_truncated_and_untruncated_prompts_at_once_are_each_cut_as_they_ask(live: Live) -> None:
    """Text and ids, long and short: truncation is slicing ids, and no tokenizer is told anything."""
    rng = random.Random(1)
    words = ["the ", "user ", "asks ", "☃ ", "<|im_end|>", "answer\n"]
    calls, wanted = [], {}
    for seed in range(60):
        text = "".join(rng.choice(words) for _ in range(rng.choice([3, 200, 1200])))
        ids = live.renderer.tokenizer.encode(text).tolist()
        num = rng.choice([None, 1, 5, 50])
        live.engine.plan_for(seed, Script(ids=(5, END), finish=STOP))
        fields = {} if num is None else {"truncate_prompt_tokens": num}
        calls.append(complete(live, None, rng.choice([text, ids]), seed=seed, max_tokens=2, **fields))
        wanted[seed] = ids if num is None else ids[-num:]
    assert {answer.status for answer in await asyncio.gather(*calls)} == {200}
    assert {request.params.seed: request.prompt.ids.tolist() for request in live.engine.requests} == wanted


# --- on a session


async def test_a_session_of_completions_is_what_went_to_and_came_from_the_engine(live: Live) -> None:
    for history in ("linear", "tree"):
        session = await live.open(history=history)
        line: list[int] = []
        drawn: list[int] = []
        for new in ([5, 6], [7], [8, 9, 10]):
            script = live.says("It is so.")
            answer = await complete(live, session, line + new, return_token_ids=True)
            assert answer.status == 200, answer.body
            line += new + list(script.ids)
            drawn += script.ids
        view = await view_of(live, session)
        assert view["metadata"]["accumulated_token_ids"] == line
        assert "tito_session_mismatch" not in view["metadata"]
        assert [record["response"]["id"] for record in view["records"]][-1] == answer.json()["id"]
        assert view["records"][-1]["request"]["input_ids"] == line[: -len(script.ids)]
        delta = (await live.call("GET", f"/sessions/{session}?records=delta")).json()["records"]
        assert [record["request"]["input_ids"] for record in delta] == [[5, 6], [7], [8, 9, 10]]
        samples = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
        (sample,) = samples
        assert sample["tokens"] == line
        response = line[-sample["response_length"] :]
        assert [id_ for id_, m in zip(response, sample["loss_mask"], strict=True) if m] == drawn
        (drift,) = (await live.call("GET", f"/sessions/{session}/drift")).json()["lines"]
        assert (drift["mismatches"], "completion" in drift["unrenderable"]) == (None, True)


async def test_a_completion_goes_on_after_a_chat_and_a_chat_beside_it(live: Live) -> None:
    session = await live.open(history="tree")
    live.says("Paris.")
    await live.chat(session, user("Capital?"))
    line = (await view_of(live, session))["metadata"]["accumulated_token_ids"]
    live.says("tail")
    assert (await complete(live, session, [*line, 198])).status == 200
    live.says("More.")
    assert (await live.chat(session, user("Capital?"), assistant("Paris."), user("more"))).status == 200
    nodes = (await view_of(live, session))["metadata"]["tree"]["nodes"]
    assert [node["parent"] for node in nodes] == [None, 0, 0]
    kept = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert len(kept) == 1  # siblings: the later one supersedes


async def test_a_linear_session_replaces_its_last_turn_and_refuses_what_would_take_more(live: Live) -> None:
    session = await live.open(history="linear", after_length="refuse")
    line: list[int] = []
    for text in ("one", "two"):
        script = live.says(text)
        await complete(live, session, [*line, 5])
        line += [5, *script.ids]
    before = len(line) - 1 - len(script.ids)
    answer = await complete(live, session, [6, 7])
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "history_mismatch", "/prompt")
    assert (await complete(live, session, line)).json()["error"]["code"] == "history_mismatch"
    live.says("again", finish=Finish(reason=FinishReason.LENGTH))
    assert (await complete(live, session, [*line[:before], 9, 9])).status == 200
    view = await view_of(live, session)
    assert len(view["records"]) == 2
    answer = await complete(live, session, [*view["metadata"]["accumulated_token_ids"], 5])
    assert (answer.status, answer.json()["error"]["code"]) == (409, "truncated_generation")
    live.says("chat")
    assert (await live.chat(session, user("hi"))).status == 400
    assert len(live.engine.requests) == 3


async def test_the_session_is_named_by_path_then_header_then_bearer(live: Live) -> None:
    one, two = await live.open(), await live.open()
    path, body = "/v1/completions", {"prompt": "hi"}
    for call, owner in (
        (live.call("POST", f"/sessions/{one}{path}", body, x_session_id=two), one),
        (live.call("POST", path, body, x_session_id=two), two),
    ):
        live.says("x")
        assert (await call).status == 200
        assert len((await view_of(live, owner))["records"]) == 1
    live.says("x")
    assert (await live.call("POST", path, body, authorization=f"Bearer {two}")).status == 200
    live.says("x")
    assert (await live.call("POST", path, body, authorization="Bearer sk-dummy")).status == 200
    assert (await live.call("POST", path, body, x_session_id="nobody")).status == 404
    assert (await live.call("POST", f"/sessions/nobody{path}", body)).status == 404


async def test_a_busy_linear_session_refuses_a_completion_at_once(live: Live) -> None:
    live.says("one", paused=True)
    session = await live.open(history="linear")
    first = asyncio.ensure_future(live.chat(session, user("hi")))
    await live.engine.begun(1)
    answer = await complete(live, session, "x")
    assert (answer.status, answer.json()["error"]["code"]) == (409, "session_busy")
    assert answer.headers["x-should-retry"] == "false"
    live.engine.step(20)
    assert (await first).status == 200


# --- several prompts


async def test_several_prompts_make_choices_in_order_and_sibling_turns(live: Live) -> None:
    session = await live.open(history="tree")
    root = live.says("root")
    await complete(live, session, [5])
    line = [5, *root.ids]
    scripts = [live.says(text) for text in ("one", "two", "three")]
    prompts = [[*line, 6], [*line, 7], [8]]
    answer = await complete(live, session, prompts, return_token_ids=True, logprobs=0)
    body = answer.json()
    assert [choice["text"] for choice in body["choices"]] == ["one", "two", "three"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == prompts
    assert [choice["token_ids"] for choice in body["choices"]] == [list(script.ids) for script in scripts]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == sum(len(script.ids) for script in scripts)
    nodes = (await view_of(live, session))["metadata"]["tree"]["nodes"]
    assert [node["parent"] for node in nodes] == [None, 0, 0, None]
    assert [node["response_id"] for node in nodes[1:]] == [f"{body['id']}-{index}" for index in range(3)]
    samples = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert [sample["tokens"] for sample in samples] == [
        [*prompts[1], *scripts[1].ids],  # its sibling 0 is superseded
        [*prompts[2], *scripts[2].ids],
    ]


async def test_several_prompts_stream_side_by_side(live: Live) -> None:
    scripts = [live.says("one two", paused=True), live.says("three four", paused=True)]
    session = await live.open(history="tree")
    call = asyncio.ensure_future(
        complete(live, session, ["a", "b"], stream=True, return_token_ids=True, stream_options={"include_usage": True})
    )
    await live.engine.begun(2)
    first, second = (request.request_id for request in live.engine.requests)
    for _ in range(2):
        for id_ in (second, first):
            live.engine.step_turn(id_)
    live.engine.step_turn(second, 20)
    live.engine.step_turn(first, 20)
    *events, last = events_of((await call).body)
    assert last == "[DONE]"
    for index, (text, script) in enumerate(zip(("one two", "three four"), scripts, strict=True)):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [id_ for choice in own for id_ in choice.get("token_ids", [])] == list(script.ids)
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert sum("prompt_token_ids" in choice for choice in own) == 1
    assert events[-1]["usage"]["completion_tokens"] == sum(len(script.ids) for script in scripts)
    assert len((await view_of(live, session))["metadata"]["tree"]["nodes"]) == 2


async def test_a_linear_session_takes_one_prompt_at_a_time(live: Live) -> None:
    session = await live.open(history="linear")
    answer = await complete(live, session, ["a", "b"])
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/prompt")
    live.says("x")
    assert (await complete(live, session, ["a"])).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_error_of_one_prompt_is_the_requests_stops_the_others_and_keeps_nothing(
    live: Live, stream: bool
) -> None:
    session = await live.open(history="tree")
    live.says("done")
    live.engine.plan(Script(ids=(5,), error=EngineUnavailable("it died"), paused=True))
    live.says("never", paused=True)
    call = asyncio.ensure_future(complete(live, session, ["a", "b", "c"], stream=stream))
    await live.engine.begun(3)
    _, failing, other = (request.request_id for request in live.engine.requests)
    live.engine.step_turn(failing, 2)
    answer = await call
    if stream:
        *_, last = events_of(answer.body)
        assert last["error"]["code"] == "engine_unavailable"
    else:
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    await live.engine.idle()
    assert other in live.engine.stopped
    assert live.manager.num_in_flight == 0
    assert (await view_of(live, session))["records"] == []
    live.says("fine")
    assert (await complete(live, session, "a")).status == 200


async def test_a_client_that_hangs_up_stops_all_of_its_prompts(live: Live) -> None:
    session = await live.open(history="tree")
    for text in ("one", "two", "three"):
        live.says(text, paused=True)
    call = asyncio.ensure_future(complete(live, session, ["a", "b", "c"]))
    await live.engine.begun(3)
    assert live.manager.num_in_flight == 3
    call.cancel()
    await asyncio.wait({call})
    await live.engine.idle()
    assert sorted(live.engine.stopped) == sorted(request.request_id for request in live.engine.requests)
    assert (await view_of(live, session))["records"] == []


async def test_an_abort_ends_all_prompts_with_what_they_have(live: Live) -> None:
    session = await live.open(history="tree")
    scripts = [live.says("one", paused=True), live.says("two", paused=True)]
    call = asyncio.ensure_future(complete(live, session, ["a", "b"], return_token_ids=True))
    await live.engine.begun(2)
    live.engine.step_turn(live.engine.requests[1].request_id)
    assert (await live.call("POST", f"/sessions/{session}/abort")).json() == {"aborted": 2}
    choices = (await call).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert choices[0]["token_ids"] == []
    assert choices[1]["token_ids"] in ([], list(scripts[1].ids[:1]))
    nodes = (await view_of(live, session))["metadata"]["tree"]["nodes"]
    assert [node["status"] for node in nodes] == ["aborted", "aborted"]
    live.says("again")
    assert (await complete(live, session, "a")).status == 200  # nothing was drawn: it is asked for again


async def test_each_prompt_counts_as_a_turn_wherever_there_is_a_limit(serve: Serve) -> None:
    async with serve(max_in_flight=3, max_nodes=4) as live:
        answer = await complete(live, None, ["a"] * 4)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "/prompt")
        live.says("x", paused=True)
        running = asyncio.ensure_future(complete(live, None, "a"))
        await live.engine.begun(1)
        answer = await complete(live, None, ["a"] * 3)
        assert (answer.status, answer.json()["error"]["code"]) == (429, "limit_exceeded")
        assert answer.headers["x-should-retry"] == "true"
        live.engine.step(9)
        assert (await running).status == 200
        session = await live.open(history="tree", max_turns=5)
        for _ in range(3):
            live.says("x")
        assert (await complete(live, session, ["a", "b", "c"])).status == 200
        answer = await complete(live, session, ["d", "e"])
        assert (answer.status, answer.json()["error"]["code"]) == (400, "limit_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        assert len(live.engine.requests) == 4


# --- retries


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_retry_joins_what_runs_or_is_given_the_reply_again(live: Live, prompt: Any) -> None:
    num = len(prompt)
    session = await live.open(history="tree")
    for text in ("one", "two")[:num]:
        live.says(text, paused=True)
    key = {"headers": {"idempotency_key": "k"}}
    calls = [asyncio.ensure_future(complete(live, session, prompt, **key)) for _ in range(2)]
    await live.engine.begun(num)
    live.engine.step(20)
    one, two = await asyncio.gather(*calls)
    again = await complete(live, session, prompt, **key)
    assert one.body == two.body == again.body
    assert len(live.engine.requests) == num
    answer = await complete(live, session, "other", **key)
    assert (answer.status, answer.json()["error"]["code"]) == (422, "idempotency_mismatch")
    answer = await live.call(
        "POST", f"/sessions/{session}/v1/chat/completions", {"messages": [user("a")]}, idempotency_key="k"
    )
    assert answer.status == 422


# --- budgets


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_left_stands_in_headers(live: Live, stream: bool) -> None:
    session = await live.open(history="tree", max_total_tokens=100)
    script = live.says("one")
    num = len(script.ids)
    answer = await complete(live, session, [5] * 10, stream=stream)
    drawn = 0 if stream else num
    assert answer.headers[REMAINING] == str(4096 - 10 - drawn)
    assert answer.headers[SESSION_REMAINING] == str(100 - 10 - drawn)
    live.says("one")
    answer = await live.chat(session, user("hi"), stream=stream)
    num_prompt = len(prompts_of(live)[-1])
    assert answer.headers[REMAINING] == str(4096 - num_prompt - drawn)
    assert answer.headers[SESSION_REMAINING] == str(100 - 10 - num - num_prompt - drawn)
    live.says("one")
    assert SESSION_REMAINING not in (await complete(live, None, [5])).headers


async def test_several_prompts_share_what_the_session_leaves(live: Live) -> None:
    session = await live.open(history="tree", max_total_tokens=30)
    for _ in range(2):
        live.engine.plan(Script(ids=(5, 6), finish=Finish(reason=FinishReason.LENGTH)))
    answer = await complete(live, session, [[5] * 10, [6] * 7], max_tokens=50)
    assert [request.params.max_tokens for request in live.engine.requests] == [6, 6]
    assert answer.headers[SESSION_REMAINING] == str(30 - 17 - 4)
    assert answer.headers[REMAINING] == str(4096 - 12)
    answer = await complete(live, session, [[7] * 4, [8] * 4])
    assert (answer.status, answer.json()["error"]["code"]) == (400, "limit_exceeded")
    assert len(live.engine.requests) == 2


async def test_a_client_that_asks_for_too_much_is_refused_or_given_what_there_is(serve: Serve) -> None:
    for over_budget in OverBudget:
        async with serve(over_budget=over_budget) as live:
            for call in (
                lambda: live.chat(None, user("hi"), max_tokens=32000),
                lambda: complete(live, None, [5], max_tokens=32000),
            ):
                live.says("x")
                answer = await call()
                if over_budget is OverBudget.REFUSE:
                    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
                    assert answer.json()["error"]["param"] == "/max_tokens"
                else:
                    assert answer.status == 200
                    request = live.engine.requests[-1]
                    assert request.params.max_tokens == 4096 - len(request.prompt.ids)
            answer = await complete(live, None, [5] * 4096)
            assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_without_max_tokens_the_context_is_the_limit(live: Live) -> None:
    live.says("x")
    await complete(live, None, [5, 6])
    assert live.engine.requests[0].params.max_tokens == 4094


# --- structured output


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"structured_outputs": {"regex": "a+"}}, Grammar(kind=GrammarKind.REGEX, source="a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(kind=GrammarKind.CHOICE, source='["a","b"]')),
        ({"ebnf": 'root ::= "a"'}, Grammar(kind=GrammarKind.EBNF, source='root ::= "a"')),
        ({"response_format": {"type": "json_object"}}, Grammar(kind=GrammarKind.JSON_OBJECT)),
    ],
)
async def test_a_grammar_reaches_the_engine_from_either_route(live: Live, fields: Any, grammar: Grammar) -> None:
    live.says("a")
    live.says("a")
    assert (await complete(live, None, "x", **fields)).status == 200
    assert (await live.chat(None, user("x"), **fields)).status == 200
    assert [request.params.grammar for request in live.engine.requests] == [grammar, grammar]


async def test_a_grammar_beside_a_forced_call_is_refused(live: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = await live.chat(None, user("x"), tools=[tool], tool_choice="required", regex="a")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/tool_choice")
    assert answer.json()["error"]["message"].startswith("regex cannot")


# --- long prompts


async def test_a_long_prompt_is_read_and_written_in_pieces_that_are_the_whole(serve: Serve) -> None:
    rng = random.Random(2)
    long = [rng.randrange(320) for _ in range(60_000)]
    for unknown_fields in UnknownFields:
        async with serve(unknown_fields=unknown_fields) as live:
            session = await live.open()
            for prompt in (long, [long]):
                live.engine.plan(Script(ids=(5, END), finish=STOP))
                answer = await complete(
                    live, session, prompt, truncate_prompt_tokens=4000, return_token_ids=True, max_tokens=9
                )
                assert answer.status == 200, answer.body
                assert prompts_of(live)[-1] == answer.json()["choices"][0]["prompt_token_ids"] == long[-4000:]
            for wrong in (True, "1,2", [1, 2], 320.0):
                answer = await complete(live, session, [*long[:50_000], wrong, *long[50_000:]])
                assert (answer.status, answer.json()["error"]["param"]) == (400, "/prompt/50000")


async def test_a_long_reply_is_one_body_with_its_length(renderer: Renderer) -> None:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=100_000)
    long = [index % 320 for index in range(50_000)]
    async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:
        for path, fields in (
            ("completions", {"prompt": long}),
            ("chat/completions", {"messages": [user("the " * 9000)]}),
        ):
            engine.plan(Script(ids=(5, END), finish=STOP))
            async with client.post(f"{url}/v1/{path}", json={**fields, "return_token_ids": True}) as response:
                body = await response.read()
                assert response.headers["content-length"] == str(len(body))
                told = json.loads(body)
                told_ids = told.get("prompt_token_ids") or told["choices"][0]["prompt_token_ids"]
                assert told_ids == engine.requests[-1].prompt.ids.tolist()
                assert len(told_ids) > 8192


async def test_of_prompts_that_continue_one_strand_one_does_and_the_others_open_strands(live: Live) -> None:
    session = await live.open()
    script = live.says("one")
    await complete(live, session, [5, 6])
    line = [5, 6, *script.ids]
    prompts = [[*line, 7], [*line, 8], [*line, 7]]
    for _ in prompts:
        live.says("more")
    answer = await complete(live, session, prompts)
    assert answer.status == 200, answer.body
    view = await view_of(live, session)
    assert [row["num_turns"] for row in view["metadata"]["strands"]] == [2, 1, 1]
    assert view["metadata"]["discarded"]["turns"] == 0
    assert sorted(list(request.prompt.ids) for request in live.engine.requests[1:]) == sorted(prompts)
