"""Replies of Responses: items in their client's own form, events that make the same response, types of the SDK."""

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stenograph.core.chat import ChatReply, ParsedReply, ReplyOptions, StreamPiece
from stenograph.core.errors import (
    BudgetSpent,
    ContextLengthExceeded,
    InvalidRequest,
    Limit,
    LimitExceeded,
    StenographError,
    UpstreamUnreachable,
)
from stenograph.core.messages import Message, ReplyDelta, Role, ToolCall, ToolCallDelta
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Prompt,
    SampledTurn,
    SamplingParams,
    TopLogprob,
    Usage,
    token_ids,
)
from stenograph.dialects.responses.reply import encode_response, output_items
from stenograph.dialects.responses.spelling import ReplyForm
from stenograph.dialects.responses.stream import ResponseWriter
from stenograph.dialects.responses.tools import CallForm
from tests.openresponses import check_event, check_response

EVENT = TypeAdapter[Any](ResponseStreamEvent)
TURN = "0123456789abcdef0123456789abcdef"
PARAMS = SamplingParams(temperature=0.25, presence_penalty=-1.0, num_top_logprobs=2)
FORM = ReplyForm(
    calls={
        "patch": CallForm(name="patch", kind="custom"),
        "fs__add": CallForm(name="add", namespace="fs"),
        "fs__patch": CallForm(name="patch", kind="custom", namespace="fs"),
        "tool_search": CallForm(name="tool_search", kind="search"),
    },
    seals_reasoning=True,
)


def reply_of(message: Message, reason: FinishReason = FinishReason.STOP, num_ids: int = 3) -> ChatReply:
    ids = token_ids(range(num_ids))
    sampled = SampledTurn(
        ids=ids,
        logprobs=array("d", [-0.5] * num_ids),
        sampling_logprobs=None,
        top_logprobs=tuple((TopLogprob(id=7, logprob=-1.0),) for _ in ids),
        finish=Finish(reason=reason),
        weights=(),
        num_cached_tokens=2,
        times=None,
    )
    return ChatReply(
        id=f"resp_{TURN}",
        created=5,
        model="tiny",
        prompt=Prompt(new_ids=token_ids([1, 2, 3])),
        params=PARAMS,
        parsed=ParsedReply(message=message),
        sampled=sampled,
        usage=Usage(num_prompt=3, num_completion=num_ids, num_cached=2, num_reasoning=1),
    )


def token_text(id_: int) -> str:
    return "\N{REPLACEMENT CHARACTER}" if id_ == 1 else f"t{id_}"


def whole(reply: ChatReply, options: ReplyOptions, form: ReplyForm = FORM) -> dict[str, Any]:
    content = encode_response(reply, options, form, "tiny", token_text)
    text = taken(content)
    Response.model_validate_json(text, strict=True)
    check_response(json.loads(text))
    return dict(json.loads(text))


def writer(options: ReplyOptions, form: ReplyForm = FORM) -> ResponseWriter:
    return ResponseWriter(
        reply_id=f"resp_{TURN}",
        created=5,
        model="tiny",
        options=options,
        form=form,
        params=PARAMS,
        token_text=token_text,
    )


def taken(content: bytes | Iterator[bytes]) -> bytes:
    return content if isinstance(content, bytes) else b"".join(content)


def events_of(*contents: bytes | Iterator[bytes]) -> list[dict[str, Any]]:
    text = b"".join(map(taken, contents)).decode()
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        check_event(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def streamed(pieces: Sequence[StreamPiece], reply: ChatReply, options: ReplyOptions) -> list[dict[str, Any]]:
    one = writer(options)
    prompts = [reply.prompt.ids]
    sent = [taken(one.start(prompts))]
    for piece in pieces:
        sent += [taken(one.pieces([piece], prompts)), taken(one.alive(prompts))]
    return events_of(*sent, taken(one.end([reply])))


def accumulated(events: list[dict[str, Any]]) -> list[Any]:
    """The items as a client that goes by the pieces has them."""
    items: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.reasoning_text.delta" | "response.output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                assert items[event["output_index"]]["id"] == event["item_id"]
                part["text"] += event["delta"]
                part.setdefault("logprobs", []).extend(event.get("logprobs", []))
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "response.output_item.done":
                before = items[event["output_index"]]
                items[event["output_index"]] = event["item"]
                texts = [part["text"] for part in event["item"].get("content", [])]
                assert [part["text"] for part in before.get("content", [])] == texts
                assert [before.get(name) for name in ("id", "arguments", "input")] == [
                    event["item"].get(name) for name in ("id", "arguments", "input")
                ]
            case _:
                pass
    return items


# --- items ----------------------------------------------------------------------------------------------------------


def items_of(*calls: tuple[str, str], content: str | None = None) -> list[Any]:
    tool_calls = tuple(ToolCall(id=f"c{i}", name=name, arguments=text) for i, (name, text) in enumerate(calls))
    return list(output_items(TURN, Message(role=Role.ASSISTANT, content=content, tool_calls=tool_calls), FORM))


def test_calls_go_back_in_their_own_form() -> None:
    plain, custom, spaced, both, search = items_of(
        ("add", '{"a": 1}'),
        ("patch", '{"input": "*** Begin\\n"}'),
        ("fs__add", "{}"),
        ("fs__patch", '{"input": ""}'),
        ("tool_search", '{"query": "x"}'),
    )
    assert (plain["type"], plain["name"], plain["arguments"]) == ("function_call", "add", '{"a": 1}')
    assert "namespace" not in plain
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** Begin\n")
    assert (spaced["type"], spaced["name"], spaced["namespace"]) == ("function_call", "add", "fs")
    assert (both["type"], both["namespace"], both["input"]) == ("custom_tool_call", "fs", "")
    assert (search["type"], search["arguments"], search["execution"]) == ("tool_search_call", {"query": "x"}, "client")
    assert [one["id"] for one in (plain, custom, search)] == [f"fc_{TURN}_0", f"ctc_{TURN}_1", f"tsc_{TURN}_4"]


@pytest.mark.parametrize("arguments", ["{}", '{"input": 1}', '{"input": "a", "b": 1}', '"a"', "{", "[" * 5000])
def test_a_custom_call_without_a_text_goes_back_as_the_model_wrote_it(arguments: str) -> None:
    (item,) = items_of(("patch", arguments))
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "patch", arguments)


def test_a_reply_with_nothing_to_see_is_an_empty_text_and_no_reply_is_no_item() -> None:
    (item,) = items_of(content="")
    assert item["content"][0]["text"] == ""
    assert items_of(content=None) == []


def test_the_item_that_was_cut_is_incomplete() -> None:
    def statuses(**message: Any) -> list[str]:
        items = output_items(TURN, Message(role=Role.ASSISTANT, **message), FORM, FinishReason.LENGTH)
        return [item["status"] for item in items]

    call = (ToolCall(id="c", name="add", arguments="{}"),)
    assert statuses(reasoning="Hm", content="") == ["incomplete"]
    assert statuses(reasoning="Hm", content="So") == ["completed", "incomplete"]
    assert statuses(reasoning="Hm", content=None, tool_calls=call) == ["completed", "completed"]


def test_a_cut_response_says_so() -> None:
    message = Message(role=Role.ASSISTANT, content="So")
    for reason in (FinishReason.LENGTH, FinishReason.ABORT):
        body = whole(reply_of(message, reason), ReplyOptions())
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert body["completed_at"] is None
        *_, last = streamed([], reply_of(Message(role=Role.ASSISTANT, content=""), reason), ReplyOptions())
        assert last["type"] == "response.incomplete"


def test_usage_counts_what_the_clients_own_type_demands() -> None:
    usage = whole(reply_of(Message(role=Role.ASSISTANT, content="So")), ReplyOptions())["usage"]
    assert usage == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 6,
    }


# --- streamed equals whole ------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
CALLS = st.sampled_from(
    [
        ("add", '{"a": 1}'),
        ("add", ""),
        ("patch", '{"input": "x"}'),
        ("patch", "{}"),
        ("fs__add", "{}"),
        ("tool_search", '{"q": 1}'),
    ]
)
OPTIONS = st.builds(
    ReplyOptions,
    stream=st.just(True),
    logprobs=st.booleans(),
    return_token_ids=st.booleans(),
    tokens_as_ids=st.booleans(),
)


@given(
    reasoning=st.lists(TEXTS, max_size=3),
    content=st.lists(TEXTS, max_size=3),
    calls=st.lists(CALLS, max_size=3),
    calls_first=st.booleans(),
    reason=st.sampled_from(list(FinishReason)),
    options=OPTIONS,
)
def test_a_streamed_response_is_the_whole_one_and_its_pieces_make_it(
    reasoning: list[str],
    content: list[str],
    calls: list[tuple[str, str]],
    calls_first: bool,
    reason: FinishReason,
    options: ReplyOptions,
) -> None:
    made = tuple(ToolCall(id=f"c{i}", name=name, arguments=text) for i, (name, text) in enumerate(calls))
    text = "".join(content)
    message = Message(
        role=Role.ASSISTANT,
        content=None if made and not text else text,
        reasoning="".join(reasoning) or None,
        tool_calls=made,
    )
    deltas = [ToolCallDelta(index=i, id=c.id, name=c.name, arguments=c.arguments) for i, c in enumerate(made)]
    call_pieces = [StreamPiece(delta=ReplyDelta(tool_calls=tuple(deltas)))]
    texts = [StreamPiece(delta=ReplyDelta(content=part)) for part in content]
    pieces = [
        *(StreamPiece(delta=ReplyDelta(reasoning=part)) for part in reasoning),
        *([*call_pieces, *texts] if calls_first else [*texts, *call_pieces]),
    ]
    reply = reply_of(message, reason)
    events = streamed(pieces, reply, options)
    body = whole(reply, options)
    assert events[-1]["response"] == body
    assert events[-1]["type"] == f"response.{body['status']}"
    assert accumulated(events) == body["output"]
    assert {event["type"] for event in events[:2]} == {"response.created", "response.in_progress"}


def test_reasoning_after_the_text_is_an_item_of_its_own_of_the_same_turn() -> None:
    message = Message(role=Role.ASSISTANT, content="So", reasoning="A\n\nB")
    deltas = (ReplyDelta(reasoning="A"), ReplyDelta(content="So"), ReplyDelta(reasoning="\n\nB"))
    events = streamed([StreamPiece(delta=delta) for delta in deltas], reply_of(message), ReplyOptions())
    items = events[-1]["response"]["output"]
    assert [item["id"] for item in items] == [f"rs_{TURN}", f"msg_{TURN}", f"rs_{TURN}_1"]
    assert accumulated(events) == items


def test_logprobs_come_with_the_text_and_all_of_them_at_its_end() -> None:
    options = ReplyOptions(stream=True, logprobs=True)
    reply = reply_of(Message(role=Role.ASSISTANT, content="So", reasoning="Hm"), num_ids=700)

    def chunk(start: int, end: int) -> Chunk:
        tops = tuple((TopLogprob(id=7, logprob=-1.0),) for _ in range(start, end))
        return Chunk(ids=tuple(range(start, end)), logprobs=(-0.5,) * (end - start), top_logprobs=tops)

    pieces = [
        StreamPiece(delta=ReplyDelta(reasoning="Hm"), chunks=(chunk(0, 10),)),
        StreamPiece(delta=ReplyDelta(content="So"), chunks=(chunk(10, 20), chunk(20, 690))),
        StreamPiece(delta=ReplyDelta(), chunks=(chunk(690, 700),)),
    ]
    events = streamed(pieces, reply, options)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    rows = [row for event in deltas for row in event["logprobs"]]
    (part,) = whole(reply, options)["output"][1]["content"]
    assert rows == part["logprobs"]
    assert [row["token"] for row in rows] == [token_text(id_) for id_ in range(700)]
    assert len(deltas) > 2
    assert (rows[1]["bytes"], rows[2]["bytes"], rows[2]["top_logprobs"][0]["token"]) == ([], list(b"t2"), "t7")


# --- signs of life, failures ----------------------------------------------------------------------------------------


def test_a_sign_of_life_begins_the_response_and_is_in_progress_once_more() -> None:
    one = writer(ReplyOptions())
    reply = reply_of(Message(role=Role.ASSISTANT, content="So"))
    events = events_of(one.alive([]), one.alive([]), one.start([]), one.alive([]), one.end([reply]))
    assert [event["type"] for event in events[:4]] == ["response.created", *["response.in_progress"] * 3]
    assert {event["response"]["id"] for event in events[:4]} == {reply.id}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UpstreamUnreachable("It broke."), "server_error"),
        (LimitExceeded(Limit.IN_FLIGHT, "Full."), "rate_limit_exceeded"),
        (InvalidRequest("No."), "invalid_prompt"),
    ],
)
def test_a_failure_is_an_event_with_what_was_done_by_then(error: StenographError, code: str) -> None:
    one = writer(ReplyOptions())
    deltas = (ReplyDelta(reasoning="A"), ReplyDelta(content="So"))
    events = events_of(one.start([]), one.pieces([StreamPiece(delta=delta) for delta in deltas], []), one.failed(error))
    last = events[-1]["response"]
    assert (last["status"], last["error"]) == ("failed", {"code": code, "message": error.message})
    assert [item["type"] for item in last["output"]] == ["reasoning"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthExceeded(num_prompt_tokens=9, max_tokens=1, max_context_tokens=8), "context_length_exceeded"),
        (BudgetSpent(Limit.SESSION_TURNS, "Spent."), "insufficient_quota"),
    ],
)
def test_what_no_try_changes_has_the_code_that_ends_a_clients_tries(error: StenographError, code: str) -> None:
    """The SDK's type does not have these codes, which are those that Codex takes as final."""
    text = writer(ReplyOptions()).failed(error).decode()
    assert f'"code":"{code}"' in text
