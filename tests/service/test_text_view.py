"""How a reply's text is shown, as SGLang's and vLLM's clients ask for it; what it shows can be sent back."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from standins.scripted_engine import Script
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest
from stenograph.core.routing import Routing
from stenograph.core.types import Finish, FinishReason

from .conftest import END, Answer, Live, output_ids, user

START = 1
"""`<|im_start|>`"""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nlet me add\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def events_of(answer: Answer) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def message_of(answer: Answer, *, stream: bool) -> dict[str, Any]:
    """The message of a reply, put together from its deltas if it was streamed."""
    assert answer.status == 200, answer.body
    if not stream:
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    deltas = [choice["delta"] for event in events_of(answer) for choice in event["choices"]]
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
    return made


async def check_goes_on(live: Live, session: str, messages: Sequence[dict[str, Any]], **fields: Any) -> None:
    """The message that came can be sent back: the next prompt begins with all ids, and no turn is replaced."""
    live.says("on")
    assert (await live.chat(session, *messages, user("go on"), **fields)).status == 200
    *_, before, last = live.engine.requests
    (first, second) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    line = [*before.prompt.ids, *output_ids(first)]
    assert list(last.prompt.ids)[: len(line)] == line
    assert second["node_id"] != first["node_id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_control_tokens_that_are_asked_for_are_text_but_for_the_one_that_ends_the_reply(
    live: Live, stream: bool
) -> None:
    encode = live.renderer.tokenizer.encode
    ids = (*encode("a"), START, *encode("b"), END, *encode("c"), END)
    for fields, text in (({}, "abc"), ({"skip_special_tokens": False}, "a<|im_start|>b<|im_end|>c")):
        session = await live.open()
        live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=END)))
        answer = await live.chat(session, user("x"), stream=stream, **fields)
        message = message_of(answer, stream=stream)
        assert message == {"role": "assistant", "content": text}
        await check_goes_on(live, session, [user("x"), message], **fields)


async def test_a_control_token_that_does_not_end_the_reply_is_text_also_as_the_last(live: Live) -> None:
    ids = (*live.renderer.tokenizer.encode("a"), START)
    live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.LENGTH)))
    answer = await live.chat(None, user("x"), skip_special_tokens=False)
    assert message_of(answer, stream=False)["content"] == "a<|im_start|>"


async def test_a_call_is_parsed_with_control_tokens_in_the_text(live: Live) -> None:
    live.says(f"I add.\n{CALL}")
    answer = await live.chat(None, user("x"), tools=[ADD], skip_special_tokens=False)
    message = message_of(answer, stream=False)
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("I add.", "add")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
async def test_the_stop_string_stays_where_it_is_asked_for(live: Live, field: str, stream: bool) -> None:
    ids = (*live.renderer.tokenizer.encode("ab cd"), *live.renderer.tokenizer.encode("ef"))
    for value, text in ((False, "ab"), (True, "ab cd")):
        session = await live.open()
        live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=" cd")))
        answer = await live.chat(session, user("x"), stream=stream, stop=[" cd"], **{field: value})
        message = message_of(answer, stream=stream)
        assert message["content"] == text
        await check_goes_on(live, session, [user("x"), message])
        live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=" cd")))
        completed = await live.call("POST", "/v1/completions", {"prompt": "x", "stop": " cd", field: value})
        assert completed.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stop_string_within_the_least_number_of_tokens_is_text(live: Live, path: str, stream: bool) -> None:
    ids = (*live.renderer.tokenizer.encode("ab!"), *live.renderer.tokenizer.encode("cd!ef"))
    least = len(live.renderer.tokenizer.encode("ab!")) + 1
    live.engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched="!")))
    asked: dict[str, Any] = {"messages": [user("x")]} if "chat" in path else {"prompt": "x"}
    answer = await live.call("POST", path, {**asked, "stop": "!", "min_tokens": least, "stream": stream})
    if "chat" in path:
        assert message_of(answer, stream=stream)["content"] == "ab!cd"
    else:
        bodies = events_of(answer) if stream else [answer.json()]
        assert "".join(body["choices"][0]["text"] for body in bodies) == "ab!cd"
    (request,) = live.engine.requests
    assert request.params.min_tokens == least


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_that_is_not_separated_is_content_as_it_was_written(live: Live, stream: bool) -> None:
    for text, has_call in ((f"{THOUGHT}It is 3.", False), (f"{THOUGHT}I add.\n{CALL}", True), (THOUGHT + CALL, True)):
        session = await live.open()
        live.says(text)
        fields = {"tools": [ADD], "separate_reasoning": False}
        answer = await live.chat(session, user("1+2?"), stream=stream, **fields)
        message = message_of(answer, stream=stream)
        assert "reasoning_content" not in message
        assert message["content"] == (
            text.removesuffix(CALL).removesuffix("\n") if "I add" in text else text.removesuffix(CALL)
        )
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == ["add"] * has_call
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message.get("tool_calls", [])
        ]
        await check_goes_on(live, session, [user("1+2?"), message, *answers], tools=[ADD])


async def test_reasoning_that_a_client_takes_out_of_the_content_still_matches(live: Live) -> None:
    session = await live.open()
    live.says(f"{THOUGHT}It is 3.")
    assert (await live.chat(session, user("1+2?"), separate_reasoning=False)).status == 200
    sent_back = {"role": "assistant", "content": "It is 3.", "reasoning_content": "let me add"}
    await check_goes_on(live, session, [user("1+2?"), sent_back])


async def test_reasoning_that_never_ends_is_content_too_and_still_a_problem(live: Live) -> None:
    session = await live.open()
    live.says("<think>\nfor ever")
    answer = await live.chat(session, user("x"), separate_reasoning=False)
    assert message_of(answer, stream=False) == {"role": "assistant", "content": "<think>\nfor ever"}
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert record["response"]["choices"][0]["parse_problem"] == "reasoning_unclosed"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_name_tokens_by_their_ids_where_that_is_asked_for(live: Live, stream: bool) -> None:
    script = live.says("Hello")
    names = [f"token_id:{id_}" for id_ in script.ids]
    fields = {"stream": stream, "return_tokens_as_token_ids": True}
    answer = await live.chat(None, user("x"), logprobs=True, **fields)
    bodies = events_of(answer) if stream else [answer.json()]
    told_of: list[Any] = [body["choices"][0]["logprobs"] for body in bodies]
    rows: list[Any] = [row for part in told_of if part for row in part["content"]]
    assert [row["token"] for row in rows] == names
    texts = [live.renderer.tokenizer.token_text(id_) for id_ in script.ids]
    assert [bytes(row["bytes"]).decode() for row in rows] == texts
    live.says("Hello")
    completed = await live.call("POST", "/v1/completions", {"prompt": "x", "logprobs": 1, **fields})
    parts = [body["choices"][0]["logprobs"] for body in (events_of(completed) if stream else [completed.json()])]
    told = [part for part in parts if part]
    assert [name for part in told for name in part["tokens"]] == names
    assert [list(top) for part in told for top in part["top_logprobs"]] == [[name] for name in names]
    assert [at for part in told for at in part["text_offset"]] == [sum(map(len, texts[:i])) for i in range(len(texts))]


async def test_a_chat_without_a_session_is_cut_to_the_tokens_that_are_wanted(live: Live) -> None:
    live.says("a")
    assert (await live.chat(None, user("hello there"))).status == 200
    (whole,) = (list(request.prompt.ids) for request in live.engine.requests)
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, whole[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, whole[:3]),
        ({"truncate_prompt_tokens": 9999}, whole),
        ({"truncate_prompt_tokens": -1}, whole),
    ):
        live.says("a")
        assert (await live.chat(None, user("hello there"), **fields)).status == 200
        assert list(live.engine.requests[-1].prompt.ids) == kept
    answer = await live.chat(session := await live.open(), user("hello there"), truncate_prompt_tokens=3)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "/truncate_prompt_tokens")
    assert "without a session" in error["message"]
    live.says("a")
    assert (await live.chat(session, user("hello there"), truncate_prompt_tokens=None)).status == 200


async def test_a_priority_reaches_the_engine_and_the_record(live: Live) -> None:
    session = await live.open()
    live.says("a")
    assert (await live.chat(session, user("x"), priority=-3)).status == 200
    assert live.engine.requests[-1].routing == Routing(priority=-3)
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert record["request"]["parameters"]["recorded"] == {"priority": -3}


async def test_what_an_engine_refuses_is_blamed_on_the_name_that_the_client_gave(live: Live) -> None:
    for field in ("min_tokens", "min_new_tokens"):
        blame = Blame(RequestPart.SAMPLING, path=("min_tokens",))
        live.engine.plan(Script(ids=(), error=InvalidRequest("no least number", blame=blame)))
        answer = await live.chat(None, user("x"), **{field: 2})
        assert (answer.status, answer.json()["error"]["param"]) == (400, f"/{field}")
