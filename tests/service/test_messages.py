"""Anthropic's Messages over a real socket: the official SDK, its types, and what the session keeps."""

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from anthropic import BadRequestError
from anthropic.types import Message

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.chat import ReplyOptions
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason, token_ids
from stenograph.dialects.anthropic.reply import MessagesStream
from stenograph.dialects.anthropic.spelling import MessagesSpelling
from stenograph.http.loaded_model import make_renderer

from .conftest import Live, output_ids, running, tiny_files
from .messages_kit import BASH, HELLO, LOOK, checked, client_of, error_of, events_of, post

THREE = [
    LOOK,
    '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>',
    "There is a note.",
]


async def records(live: Live, session: str) -> list[dict[str, Any]]:
    return list((await live.call("GET", f"/sessions/{session}")).json()["records"])


def results(reply: Message) -> dict[str, Any]:
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": f"did {block.input}"}]}
        for block in reply.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": blocks}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_sdk_s_agent_loop_is_one_line_with_exact_ids(live: Live, stream: bool) -> None:
    session = await live.open()
    scripts = [live.says(text) for text in THREE]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is here?"}]}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "system": "Be brief.", "tools": [BASH]}
    seen: list[Message] = []
    async with client_of(live, session) as client:
        for _ in scripts:
            if stream:
                async with client.messages.stream(messages=messages, **asked) as events:
                    reply: Message = await events.get_final_message()
            else:
                reply = await client.messages.create(messages=messages, **asked)
            Message.model_validate(reply.model_dump(), strict=True)
            seen.append(reply)
            messages += [{"role": "assistant", "content": [block.model_dump() for block in reply.content]}]
            messages += [results(reply)]
    kept = await records(live, session)
    assert [output_ids(record) for record in kept] == [list(script.ids) for script in scripts]
    before: list[int] = []
    for record in kept:
        assert record["request"]["input_ids"][: len(before)] == before
        before = record["request"]["input_ids"] + output_ids(record)
    assert [[block.type for block in reply.content] for reply in seen] == [
        ["thinking", "text", "tool_use"],
        ["tool_use", "tool_use"],
        ["text"],
    ]
    assert [reply.stop_reason for reply in seen] == ["tool_use", "tool_use", "end_turn"]
    assert len((await live.call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]) == 1


@pytest.mark.parametrize(
    ("text", "finish"),
    [
        (LOOK, None),
        (THREE[1], None),
        ("plain", None),
        ("", None),
        ("<think>\nonly thought\n</think>\n\n", None),
        ("a STOP", Finish(reason=FinishReason.STOP, matched="STOP")),
        ("cut", Finish(reason=FinishReason.LENGTH)),
        ("<think>\ncut here", Finish(reason=FinishReason.LENGTH)),
        ("gone", Finish(reason=FinishReason.ABORT)),
        (LOOK, Finish(reason=FinishReason.ABORT)),
        ('<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>', None),
        ('before <tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call> after', None),
    ],
)
@pytest.mark.parametrize("display", [None, "omitted"])
async def test_a_streamed_reply_is_the_whole_one_field_by_field(
    live: Live, text: str, finish: Finish | None, display: str | None
) -> None:
    fields: dict[str, Any] = {"tools": [BASH], "stop_sequences": ["STOP"]}
    if display is not None:
        fields["thinking"] = {"type": "enabled", "budget_tokens": 1024, "display": display}
    live.says(text, finish=finish)
    live.says(text, finish=finish)
    whole = checked(await post(live, None, HELLO, **fields))
    async with (
        client_of(live, None) as client,
        client.messages.stream(
            messages=[{"role": "user", "content": "hello"}], model="tiny", max_tokens=1000, extra_body=fields
        ) as events,
    ):
        streamed = (await events.get_final_message()).model_dump(exclude_unset=True)
    assert streamed.pop("stop_details") is None  # the SDK's accumulator adds it
    for one in (whole, streamed):
        del one["id"]
        for block in one["content"]:
            block.pop("signature", None)
            block.pop("parsed_output", None)
            if block["type"] == "tool_use":
                del block["id"]
    assert streamed == whole


async def test_events_come_in_their_order_and_each_is_of_the_official_type(live: Live) -> None:
    live.says(LOOK)
    answer = await post(live, None, HELLO, tools=[BASH], stream=True)
    events = events_of(answer.body)
    kinds = [event["type"] for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert (deltas.count("signature_delta"), deltas.count("input_json_delta")) == (1, 1)
    start, last = events[0]["message"], events[-2]
    assert start["usage"]["input_tokens"] == last["usage"]["input_tokens"] > 0
    assert (start["usage"]["output_tokens"], last["usage"]["output_tokens_details"]["thinking_tokens"] > 0) == (0, True)
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_reasoning_and_text_go_out_as_they_are_sampled(live: Live) -> None:
    session = await live.open()
    script = live.says(LOOK, paused=True)
    body = {"model": "tiny", "max_tokens": 500, "messages": [HELLO], "tools": [BASH], "stream": True}
    seen = b""
    live.engine.step(8)
    async with live.client.post(f"{live.url}/sessions/{session}/v1/messages", json=body) as answer:
        for num_steps, awaited, times in ((0, b"thinking_delta", 1), (5, b"thinking_delta", 2), (12, b"text_delta", 1)):
            live.engine.step(num_steps)
            while seen.count(awaited) < times:
                seen += await answer.content.readany()
        live.engine.step(2)
        while seen.count(b"text_delta") < 2:
            seen += await answer.content.readany()
        assert (b"signature_delta" in seen, b"tool_use" in seen) == (True, False)
        live.engine.step(len(script.ids))
        seen += await answer.read()
    deltas = [event["delta"]["type"] for event in events_of(seen) if event["type"] == "content_block_delta"]
    assert (deltas.count("thinking_delta") > 1, deltas.count("text_delta") > 1) == (True, True)
    assert len(await records(live, session)) == 1


async def test_usage_counts_cached_tokens_apart(live: Live) -> None:
    ids = tuple(live.renderer.tokenizer.encode("x"))
    live.engine.plan(Script(ids=ids, num_cached=3, finish=Finish(reason=FinishReason.LENGTH)))
    reply = checked(await post(live, None, HELLO))
    num = len(live.engine.requests[0].prompt.ids)
    assert reply["usage"] == {
        "input_tokens": num - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": len(ids),
        "output_tokens_details": {"thinking_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_stop_reasons(live: Live, stream: bool) -> None:
    async def stopped(text: str, finish: Finish | None, **fields: Any) -> tuple[str, str | None]:
        live.says(text, finish=finish)
        answer = await post(live, None, HELLO, tools=[BASH], stream=stream, **fields)
        said = events_of(answer.body)[-2]["delta"] if stream else checked(answer)
        if finish is not None and finish.reason is FinishReason.ABORT and not stream:
            assert answer.headers["x-stenograph-finish"] == "abort"
        return said["stop_reason"], said["stop_sequence"]

    length = Finish(reason=FinishReason.LENGTH)
    assert await stopped("a", None) == ("end_turn", None)
    assert await stopped(THREE[1], None) == ("tool_use", None)
    assert await stopped("aSTOP", Finish(reason=FinishReason.STOP, matched="STOP"), stop_sequences=["STOP"]) == (
        "stop_sequence",
        "STOP",
    )
    assert await stopped("abc", length, max_tokens=3) == ("max_tokens", None)
    assert await stopped("a", Finish(reason=FinishReason.ABORT)) == ("end_turn", None)
    assert await stopped(THREE[1], Finish(reason=FinishReason.ABORT)) == ("end_turn", None)


async def test_a_reply_that_fills_the_context_says_so(serve: Any) -> None:
    async with serve(over_budget="clamp") as live:
        live.engine.plan(Script(ids=(9,) * 5000, finish=Finish(reason=FinishReason.LENGTH)))
        counted = await post(live, None, HELLO, path="/v1/messages/count_tokens")
        left = 4096 - counted.json()["input_tokens"]
        live.engine._scripts.clear()
        live.engine.plan(Script(ids=(9,) * left, finish=Finish(reason=FinishReason.LENGTH)))
        reply = checked(await post(live, None, HELLO, max_tokens=100_000))
        assert reply["stop_reason"] == "model_context_window_exceeded"
        live.engine.plan(Script(ids=(9,) * left, finish=Finish(reason=FinishReason.LENGTH)))
        assert checked(await post(live, None, HELLO, max_tokens=left))["stop_reason"] == "max_tokens"


async def test_errors_have_anthropic_s_shape_words_and_pointers(live: Live) -> None:
    session = await live.open(history="linear")
    assert error_of(await post(live, session, HELLO, path="/v1/messages", max_tokens=None)) == (
        400,
        "invalid_request_error",
        "/max_tokens",
    )
    assert error_of(await post(live, "none", HELLO)) == (404, "not_found_error", None)
    assert error_of(await live.call("GET", "/v1/messages")) == (405, "invalid_request_error", None)
    too_long = await post(live, session, {"role": "user", "content": "x" * 5000})
    assert too_long.json()["error"]["message"].startswith("prompt is too long: ")
    assert too_long.json()["error"]["message"].endswith(" tokens > 4096 maximum")
    both = await post(live, session, HELLO, max_tokens=4090)
    num = (await post(live, session, HELLO, path="/v1/messages/count_tokens")).json()["input_tokens"]
    assert both.json()["error"]["message"] == (
        f"input length and `max_tokens` exceed context limit: {num} + 4090 > 4096"
    )
    assert error_of(both) == (400, "invalid_request_error", "/max_tokens")
    image = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url"}}]}
    refused = await post(live, session, image)
    assert error_of(refused) == (400, "invalid_request_error", "/messages/0/content/1/source/url")
    search = await post(live, session, HELLO, tools=[BASH, {"type": "web_search_20250305", "name": "web_search"}])
    assert "Input tag 'web_search_20250305' found using 'type' does not match" in search.json()["error"]["message"]
    unknown = await post(live, session, HELLO, max_token=3)
    assert "Did you mean 'max_tokens'?" in unknown.json()["error"]["message"]
    async with client_of(live, session) as client:
        with pytest.raises(BadRequestError, match="Unknown field"):
            await client.messages.create(messages=[], model="m", max_tokens=1, extra_body={"nonsense": 1})


async def test_blame_points_into_the_client_s_own_messages(live: Live) -> None:
    session = await live.open(history="linear")
    for text in ("one", "two"):
        live.says(text)
    await post(live, session, HELLO, system="p")
    told = [HELLO, {"role": "assistant", "content": "one"}, {"role": "user", "content": "b"}]
    await post(live, session, *told, system="p")
    more = [*told, {"role": "assistant", "content": "two"}, {"role": "user", "content": "c"}]
    assert error_of(await post(live, session, *more, system="q")) == (400, "invalid_request_error", "/system")
    orphan = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "r"}]}
    assert error_of(await post(live, None, orphan)) == (400, "invalid_request_error", "/messages/0/content/0/type")


async def test_an_error_of_a_turn_names_it_in_its_body_as_in_its_header(live: Live) -> None:
    live.engine.plan(Script(ids=(), error=UpstreamUnreachable("It broke.")))
    broken = await post(live, None, HELLO)
    assert (broken.status, broken.json()["request_id"]) == (502, broken.headers["x-request-id"])
    assert (await post(live, None, HELLO, max_tokens=None)).json()["request_id"] is None


async def test_the_record_has_the_headers_that_choose_a_version_of_the_protocol(live: Live) -> None:
    session = await live.open()
    live.says("hi")
    given = {"anthropic_version": "2023-06-01", "anthropic_beta": "a-2025-01-01,b", "x_other": "c"}
    checked(await post(live, session, HELLO, headers=given))
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert record["request"]["parameters"]["recorded"] == {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "a-2025-01-01,b",
    }


async def test_a_stream_that_fails_ends_with_an_error_event(live: Live) -> None:
    ids = tuple(live.renderer.tokenizer.encode("good day"))
    live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("It broke.")))
    events = events_of((await post(live, None, HELLO, stream=True)).body)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
    assert "message_stop" not in [event["type"] for event in events]


async def test_count_tokens_is_the_prompt_of_the_next_request(live: Live) -> None:
    session = await live.open()
    messages: list[dict[str, Any]] = [HELLO]
    async with client_of(live, session) as client:
        for text in THREE:
            live.says(text)
            counted = await client.messages.count_tokens(model="tiny", messages=messages, tools=[BASH], system="s")  # type: ignore[arg-type]
            reply = checked(await post(live, session, *messages, tools=[BASH], system="s"))
            assert counted.input_tokens == reply["usage"]["input_tokens"]
            calls = [block for block in reply["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "r"} for call in calls]
            messages += [
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": results or "?"},
            ]
    rows = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert [row["turn"] is None for row in rows] == [True, False] * 3


async def test_a_conversation_that_adds_nothing_to_its_line_counts_as_one_without_a_session(live: Live) -> None:
    session = await live.open()
    live.says("two")
    reply = checked(await post(live, session, HELLO))
    messages: list[Any] = [HELLO, {"role": "assistant", "content": reply["content"]}]
    counts: list[int] = []
    for one in (session, None):
        async with client_of(live, one) as client:
            counts.append((await client.messages.count_tokens(model="tiny", messages=messages)).input_tokens)
    assert counts[0] == counts[1]
    assert (await post(live, session, *messages)).status == 400


async def test_a_session_goes_on_from_chat_to_messages_and_back(live: Live) -> None:
    session = await live.open()
    scripts = [live.says(text) for text in (LOOK, "two", "three")]
    function = {"name": "bash", "description": "Run a command.", "parameters": BASH["input_schema"]}
    tool = {"type": "function", "function": function}
    system = {"role": "system", "content": "s"}
    first = (await live.chat(session, system, HELLO, tools=[tool])).json()["choices"][0]["message"]
    call = first["tool_calls"][0]
    sent = [
        {"type": "text", "text": first["content"]},
        {"type": "tool_use", "id": call["id"], "name": "bash", "input": {"command": "ls"}},
    ]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "a b"}]}
    second = checked(
        await post(live, session, HELLO, {"role": "assistant", "content": sent}, result, tools=[BASH], system="s")
    )
    assert second["content"] == [{"type": "text", "text": "two"}]
    messages = [
        first,
        {"role": "tool", "tool_call_id": call["id"], "content": "a b"},
        {"role": "assistant", "content": "two"},
    ]
    await live.chat(session, system, HELLO, *messages, {"role": "user", "content": "more"}, tools=[tool])
    kept = await records(live, session)
    assert [output_ids(record) for record in kept] == [list(script.ids) for script in scripts]
    assert [record["path"] for record in kept] == ["/v1/chat/completions", "/v1/messages", "/v1/chat/completions"]


async def test_recorded_fields_are_in_the_record(live: Live) -> None:
    session = await live.open()
    live.says("a")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    await post(
        live,
        session,
        HELLO,
        metadata={"user_id": "u"},
        context_management=edits,
        stop_sequences=["x"],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
    )
    (record,) = await records(live, session)
    assert record["request"]["parameters"]["recorded"] == {"metadata": {"user_id": "u"}, "context_management": edits}
    assert (record["request"]["stop_sequences"], record["request"]["thinking"]) == (["x"], {"type": "adaptive"})
    assert record["request"]["parameters"]["sampling_params"]["stop"] == ["x"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_token_ids_come_where_they_are_asked_for(live: Live, stream: bool) -> None:
    script = live.says("hi there")
    answer = await post(live, None, HELLO, stream=stream, return_token_ids=True)
    said = events_of(answer.body)[-2] if stream else checked(answer)
    assert said["token_ids"] == list(script.ids)
    assert said["prompt_token_ids"] == list(live.engine.requests[0].prompt.ids)


FETCH = {"name": "fetch", "description": "Fetch.", "input_schema": {"type": "object"}, "defer_loading": True}


async def test_a_deferred_tool_is_brought_in_and_called_on_one_line(live: Live) -> None:
    session = await live.open()
    search = live.says('<tool_call>\n{"name": "bash", "arguments": {"command": "search"}}\n</tool_call>')
    messages: list[dict[str, Any]] = [HELLO]
    first = checked(await post(live, session, *messages, tools=[BASH, FETCH]))
    (call,) = first["content"]
    found = [{"type": "tool_reference", "tool_name": "fetch"}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": found}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    live.says('<tool_call>\n{"name": "fetch", "arguments": {}}\n</tool_call>')
    forced = {"type": "tool", "name": "fetch"}
    second = checked(await post(live, session, *messages, tools=[BASH, FETCH], tool_choice=forced))
    assert [(block["type"], block.get("name")) for block in second["content"]] == [("tool_use", "fetch")]
    (strand,) = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]
    assert strand["num_turns"] == 2
    prompts = [list(request.prompt.ids) for request in live.engine.requests]
    assert prompts[1][: len(prompts[0]) + len(search.ids)] == prompts[0] + list(search.ids)
    said = [live.renderer.tokenizer.decode(prompt) for prompt in prompts]
    assert ["Fetch." in text for text in said] == [False, True]
    grammar = live.engine.requests[1].params.grammar
    assert grammar is not None
    assert ("fetch" in grammar.source, "bash" in grammar.source) == (True, False)
    (_, record) = await records(live, session)
    assert [one["rule"] for one in record["request"]["rewrites"]] == ["deferred-tool", "tool-reference"]


async def test_an_aborted_turn_is_recorded_as_that(live: Live) -> None:
    session = await live.open()
    live.says("gone", finish=Finish(reason=FinishReason.ABORT))
    answer = await post(live, session, HELLO)
    assert answer.headers["x-stenograph-finish"] == "abort"
    assert [record["status"] for record in await records(live, session)] == ["aborted"]


async def test_a_silent_stream_begins_with_its_message_and_is_kept_alive_by_pings(live: Live) -> None:
    """The first event is the beginning of the message, also where nothing is sampled yet."""
    writer = MessagesStream(reply_id="msg_r", model="m", options=ReplyOptions(stream=True), spelling=MessagesSpelling())
    prompts = [token_ids([1, 2, 3])]
    early = events_of(writer.alive(prompts) + writer.alive(prompts) + bytes(writer.start(prompts)))
    assert [event["type"] for event in early] == ["message_start", "ping", "ping"]
    assert early[0]["message"]["usage"]["input_tokens"] == 3


async def test_what_clients_ask_of_thinking_is_the_template_s_own_switch() -> None:
    template = (
        "[{{ enable_thinking }}|{{ reasoning_effort }}]"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    files = replace(tiny_files(), chat_template=template)
    renderer = make_renderer(files, "template")
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        for thinking, effort, written in (
            ("disabled", None, "[False|]"),
            ("enabled", "low", "[True|low]"),
            ("adaptive", "max", "[|high]"),
        ):
            live.says("a")
            checked(await post(live, None, HELLO, thinking={"type": thinking}, output_config={"effort": effort}))
            assert renderer.tokenizer.decode(list(engine.requests[-1].prompt.ids)).startswith(written)
