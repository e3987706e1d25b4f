"""A stream of SGLang's chat route: read as what it is, whatever its steps, or refused by the law that it breaks."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.sglang_parts import SampledReply, StreamedStep, chat_events
from stenograph.core.errors import StenographError, UpstreamInvalid, UpstreamRefused, UpstreamUnreachable
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.sse import EventReader
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    MixedWeights,
    Prompt,
    RequestId,
    SampledTurn,
    SamplingParams,
    WeightSpan,
    token_ids,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.sglang.chat_stream import SGLangChatStream
from stenograph.engine.validate import TurnCollector
from stenograph.session.reply_buffer import ReplyBuffer

VOCAB, RID, MAX_TOKENS = 49152, "r-0", 40
CALL = ("call_0", "add", '{"a": 1}')
ASKED = {
    "return_output_ids_in_sglext": True,
    "return_cached_tokens_details": True,
    "stream_options": {"include_usage": True},
}


def sampled(ids: Sequence[int], *, num_cached: int = 2) -> SampledReply:
    return SampledReply(
        rid=RID,
        ids=ids,
        logprobs=[-(at + 1) / 8 for at in range(len(ids))],
        tops=(),
        versions=(),
        num_prompt=3,
        num_cached=num_cached,
        routed_experts=None,
        indexer_topk=None,
        rows_have_text=True,
    )


def stream(
    ids: Sequence[int] = (1, 2, 3),
    texts: Sequence[tuple[int, str]] = ((1, "a"), (2, ""), (3, "b")),
    *,
    finish: str = "stop",
    reasoning: str | None = None,
    calls: Sequence[tuple[str, str, str]] = (),
    has_parser: bool = True,
    reports_cache: bool = False,
) -> list[dict[str, Any]]:
    """A stream's events; `texts` are the number of tokens after each step, and the text that it adds."""
    events: list[dict[str, Any]] = []
    num_sent = 0
    for at, (num_drawn, text) in enumerate(texts):
        is_last = at == len(texts) - 1
        step = StreamedStep(
            num_sent=num_sent,
            num_drawn=num_drawn,
            text=text,
            reasoning=None if at else reasoning,
            calls=calls if is_last else (),
            finish=finish if is_last else None,
            matched=7 if finish == "stop" else None,
        )
        events += chat_events(
            sampled(ids),
            step,
            model="m",
            token_text=str,
            has_parser=has_parser,
            reports_cache=reports_cache,
            asked=ASKED,
        )
        num_sent = num_drawn
    return events


class Names:
    """Answers of `/model_info`, one after another."""

    def __init__(self, *names: str | None) -> None:
        self._names = list(names)

    async def __call__(self, method: str, target: str, body: bytes = b"", headers: Any = ()) -> HttpReply:
        name = self._names.pop(0)
        if name == "gone":
            raise UpstreamUnreachable("The engine is gone.")
        told = json.dumps({"weight_version": name}).encode()
        return HttpReply(
            status=200 if name is not None else 404, content_type="application/json", headers=(), body=told
        )


def reader_of(overlapped: Callable[[], object]) -> SGLangChatStream:
    request = GenerateRequest(
        request_id=RequestId(RID),
        prompt=Prompt(new_ids=token_ids((1, 2, 3))),
        params=SamplingParams(max_tokens=MAX_TOKENS),
    )
    return SGLangChatStream(request, vocab_size=VOCAB, num_prompt=3, overlapped=overlapped)


def read(
    *events: Any, names: Sequence[str | None] = ("w-1", "w-1"), ends: bool = True, overlaps: list[str] | None = None
) -> list[Chunk]:
    """The chunks of a stream, as the engine reads them."""

    async def reading() -> list[Chunk]:
        seen: list[str] = [] if overlaps is None else overlaps
        reader = reader_of(lambda: seen.append("overlapped"))
        ask = Names(*names)
        await reader.begin(ask)
        chunks: list[Chunk] = []
        for event in events:
            chunks += reader.event(event if isinstance(event, bytes) else json.dumps(event).encode())
        if ends:
            chunks += await reader.settle(ask)
            chunks += reader.end()
            assert reader.end() == ()
        return chunks

    return asyncio.run(reading())


def turn(chunks: Sequence[Chunk]) -> SampledTurn:
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=MAX_TOKENS, num_prompt=3)
    for chunk in chunks:
        collector.add(chunk)
    return collector.result()


def message(chunks: Sequence[Chunk]) -> Message:
    buffer = ReplyBuffer()
    for chunk in chunks:
        assert chunk.written is not None
        assert chunk.written.id == RID
        buffer.push(chunk.written.delta, chunk)
    return buffer.message


def law_of(*events: Any, names: Sequence[str | None] = ("w-1", "w-1")) -> str:
    with pytest.raises(UpstreamInvalid) as caught:
        turn(read(*events, names=names))
    assert str(caught.value).startswith(f"{caught.value.law}: ")
    return caught.value.law


# -- what is read


def test_text_comes_as_it_is_sampled_and_all_tokens_with_the_end() -> None:
    *pieces, last = read(*stream())
    assert [(one.written.delta.content, one.written.num_tokens) for one in pieces if one.written] == [
        ("a", 1),
        ("", 1),  # a step without text
        ("b", 1),
    ]
    assert all(not one.ids and one.finish is None for one in pieces)
    whole = turn([*pieces, last])
    assert whole.ids.tolist() == [1, 2, 3]
    assert whole.logprobs.tolist() == [-0.125, -0.25, -0.375]
    assert whole.finish == Finish(reason=FinishReason.STOP, matched=7)
    assert whole.weights == (WeightSpan(version="w-1", start=0, end=3),)
    assert (whole.num_cached_tokens, whole.mixed) == (2, None)
    assert message([*pieces, last]) == Message(role=Role.ASSISTANT, content="ab")


def test_reasoning_and_calls_are_parsed_by_the_engine() -> None:
    calls = (CALL, ("call_1", "f", "{}"))
    chunks = read(*stream(texts=((2, "hi"), (3, "")), reasoning="hm", calls=calls))
    said = message(chunks)
    assert (said.reasoning, said.content) == ("hm", "hi")
    assert said.tool_calls == tuple(ToolCall(id=id_, name=name, arguments=told) for id_, name, told in calls)
    assert turn(chunks).finish == Finish(reason=FinishReason.STOP, matched=7)


def test_the_cache_is_reported_in_usage_or_beside_the_ids() -> None:
    assert turn(read(*stream(reports_cache=True))).num_cached_tokens == 2
    told = stream()
    told[-2]["sglext"]["cached_tokens_details"] = {"device": 1, "host": 1, "storage": 1, "storage_backend": "f"}
    assert turn(read(*told)).num_cached_tokens == 3
    told[-2]["sglext"].pop("cached_tokens_details")
    assert turn(read(*told)).num_cached_tokens == 0


def test_weights_that_changed_meanwhile_are_claimed_for_no_token() -> None:
    overlaps: list[str] = []
    mixed = turn(read(*stream(), names=("w-1", "w-2"), overlaps=overlaps))
    assert (mixed.weights, mixed.mixed, overlaps) == ((), MixedWeights(oldest="w-1"), ["overlapped"])


@pytest.mark.parametrize("names", [("w-1", "gone"), ("w-1", None), (None, "w-1")])
def test_weights_whose_name_is_not_known_at_both_ends_are_claimed_for_no_token(names: Sequence[str | None]) -> None:
    overlaps: list[str] = []
    unknown = turn(read(*stream(), names=names, overlaps=overlaps))
    assert (unknown.weights, unknown.mixed, overlaps) == ((), MixedWeights(oldest=names[0]), [])
    assert unknown.ids.tolist() == [1, 2, 3]


def test_weights_without_a_name_are_left_to_the_server() -> None:
    unnamed = turn(read(*stream(), names=(None, None)))
    assert (unnamed.weights, unnamed.mixed) == ((), None)


def test_an_aborted_stream_has_what_was_sampled() -> None:
    aborted = turn(read(*stream((1, 2), ((1, "a"), (2, "b"), (2, "")), finish="abort")))
    assert (aborted.ids.tolist(), aborted.finish) == ([1, 2], Finish(reason=FinishReason.ABORT))
    assert aborted.logprobs.tolist() == [-0.125, -0.25]


@pytest.mark.parametrize("ids", [[[]], ...])
def test_an_abort_before_the_first_token_has_none(ids: Any) -> None:
    events = stream((), ((0, ""),), finish="abort")
    assert [list(one) for one in events[-2]["sglext"]["output_ids"]] == [[]]
    if ids is ...:
        events[-2]["sglext"].pop("output_ids")
    events[-1]["usage"]["prompt_tokens"] = 0  # an abort of what waits is reported without the prompt
    assert not turn(read(*events)).ids


def test_nothing_ends_without_a_finish() -> None:
    *before, _finish, ids, usage = stream()
    assert all(chunk.finish is None for chunk in read(*before, ids, usage))
    assert all(chunk.finish is None for chunk in read(*stream(), ends=False))


@given(st.data())
def test_any_steps_make_the_same_turn_and_text(data: st.DataObject) -> None:
    """Whatever comes in a step: several tokens, a token without text, text without a token."""
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
    text = data.draw(st.text(max_size=6))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=len(cuts), max_size=len(cuts))))
    ends, parts = [*cuts, len(ids)], [0, *places, len(text)]
    steps = [(end, text[start:stop]) for end, start, stop in zip(ends, parts, parts[1:], strict=False)]
    chunks = read(*stream(ids, steps, reasoning=data.draw(st.none() | st.just("hm"))))
    whole = turn(chunks)
    assert whole.ids.tolist() == ids
    assert whole.logprobs.tolist() == [-(at + 1) / 8 for at in range(len(ids))]
    assert sum(chunk.num_sampled for chunk in chunks) == len(ids)
    assert message(chunks).content == text


# -- as SGLang writes it

FILE = Path(__file__).parents[2] / "service" / "recordings" / "sglang" / "chat-streams-0.5.23.json"
WRITTEN: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads(FILE.read_text(encoding="utf-8"))}
"""Streams that the serving code of SGLang 0.5.23 made of planned tokens, whose i-th logprob is -(i + 1) / 8."""
SAID: dict[str, tuple[str, str | None]] = {
    "characters_of_several_tokens": ("Hi ☃ there", None),
    "call": ("Let me see. \n", None),
    "reasoning": ("So.", "hm well"),
    "several_tokens_a_step": ("Hello there my friend", None),
    "aborted": ("Hello there", None),
    "aborted_before_the_first_token": ("", None),
}


def written(name: str) -> list[bytes]:
    events = EventReader(max_bytes=2**20).feed(WRITTEN[name]["body"].encode())
    return [data for data in events if data != b"[DONE]"]


@pytest.mark.parametrize("name", SAID)
def test_what_sglang_writes_is_read_as_what_was_sampled(name: str) -> None:
    ids = WRITTEN[name]["ids"]
    chunks = read(*written(name))
    whole, said = turn(chunks), message(chunks)
    assert whole.ids.tolist() == ids
    assert whole.logprobs.tolist() == [-(at + 1) / 8 for at in range(len(ids))]
    assert whole.finish.reason is (FinishReason.ABORT if "abort" in name else FinishReason.STOP)
    assert whole.num_cached_tokens == 2
    assert sum(chunk.num_sampled for chunk in chunks) == len(ids)
    assert (said.content, said.reasoning) == SAID[name]
    calls = [(call.name, call.arguments) for call in said.tool_calls]
    assert calls == ([("add", '{"a": 1.5}')] if name == "call" else [])


def test_what_sglang_writes_without_a_parser_lacks_the_end_token_s_log_probability() -> None:
    assert law_of(*written("without_a_parser")) == "count_agrees"


# -- what is refused


def changed(path: str, value: Any) -> list[dict[str, Any]]:
    """A valid stream with the value at `path` replaced; deleted if it is `...`."""
    whole = stream(calls=(CALL,), texts=((1, "a"), (3, "")))
    parent: Any = whole
    *steps, last = [int(step) if step.lstrip("-").isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return whole


LIES: list[tuple[str, str, Any]] = [
    ("request_agrees", "1.id", "r-1"),
    ("request_agrees", "1.id", ...),
    ("one_choice", "1.choices", [{"delta": {}}, {"delta": {}}]),
    ("one_choice", "1.choices.0.delta", 1),
    ("content_is_text", "1.choices.0.delta.content", 1),
    ("has_logprobs", "1.choices.0.logprobs", {}),
    ("has_logprobs", "1.choices.0.logprobs.content", 1),
    ("logprob_is_finite", "1.choices.0.logprobs.content.0.logprob", None),
    ("logprob_is_finite", "1.choices.0.logprobs.content.0.logprob", "x"),
    ("logprob_not_positive", "1.choices.0.logprobs.content.0.logprob", 0.5),
    ("count_agrees", "1.choices.0.logprobs", None),
    ("count_agrees", "1.choices.0.logprobs.content", []),
    ("max_tokens", "1.choices.0.logprobs.content", [{"logprob": -1.0}] * (MAX_TOKENS + 1)),
    ("tool_calls_shape", "2.choices.0.delta.tool_calls.0.id", None),
    ("tool_calls_shape", "2.choices.0.delta.tool_calls.0.function.name", None),
    ("tool_calls_shape", "2.choices.0.delta.tool_calls.0.index", 1),
    ("tool_calls_shape", "2.choices.0.delta.tool_calls.0.index", -1),
    ("tool_calls_shape", "2.choices.0.delta.tool_calls.0.function", "f"),
    ("tool_calls_shape", "3.choices.0.delta.tool_calls.0.index", 2),
    ("finish_reason", "-3.choices.0.finish_reason", "because"),
    ("finish_reason", "-3.choices.0.finish_reason", 1),
    ("finish_is_last", "4.choices.0.finish_reason", "stop"),
    ("has_finish", "-3.choices.0.finish_reason", None),
    ("has_ids", "-2.sglext", None),
    ("has_ids", "-2.sglext.output_ids", None),
    ("has_ids", "-2.sglext.output_ids", []),
    ("has_ids", "-2.sglext.output_ids", [[1, 2, 3], [1]]),
    ("has_ids", "-2.sglext.output_ids", [["x"]]),
    ("has_ids", "-2.sglext.output_ids.0.0", -1),
    ("id_in_vocab", "-2.sglext.output_ids.0.0", VOCAB),
    ("id_in_vocab", "-2.sglext.output_ids.0.0", 10**30),
    ("count_agrees", "-2.sglext.output_ids", [[1, 2]]),
    ("count_agrees", "-2.sglext.output_ids", [[1, 2, 3, 4]]),
    ("has_completion_tokens", "-1.usage", None),
    ("has_completion_tokens", "-1.usage.completion_tokens", ...),
    ("has_completion_tokens", "-1.usage.completion_tokens", -1),
    ("count_agrees", "-1.usage.completion_tokens", 4),
    ("prompt_agrees", "-1.usage.prompt_tokens", 4),
    ("prompt_agrees", "-1.usage.prompt_tokens", 0),
    ("cached_in_prompt", "-2.sglext.cached_tokens_details.device", 4),
    ("shape", "-2.sglext.cached_tokens_details", 4),
    ("shape", "1", [1]),
]


@pytest.mark.parametrize(("law", "path", "lie"), LIES)
def test_a_lie_is_named_by_the_law_that_it_breaks(law: str, path: str, lie: Any) -> None:
    assert law_of(*changed(path, lie)) == law


def test_a_lie_is_one() -> None:
    assert turn(read(*changed("1.choices.0.finish_reason", None))).ids.tolist() == [1, 2, 3]


def test_ids_come_once() -> None:
    *before, ids, usage = stream()
    assert law_of(*before, ids, ids, usage) == "has_ids"


def test_no_token_without_an_abort_is_refused() -> None:
    assert law_of(*stream((), ((0, ""),), finish="stop")) == "has_tokens"


def test_a_server_without_a_parser_leaves_out_log_probabilities_and_is_found_out() -> None:
    assert law_of(*stream(has_parser=False)) == "count_agrees"


def test_an_abort_that_lacks_a_log_probability_keeps_nothing() -> None:
    assert law_of(*stream((1, 2), ((1, "a"), (2, "")), finish="abort", has_parser=False)) == "count_agrees"


def test_a_reply_that_comes_whole_is_refused() -> None:
    reader = reader_of(list)
    with pytest.raises(UpstreamInvalid, match="streams: a stream was asked for, and 'application/json' came"):
        reader.whole(HttpReply(status=200, content_type="application/json", headers=(), body=b"{}"))


@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize("status", [400, 500, 503])
def test_an_error_as_an_event_is_the_refusal_that_it_would_be_outside(at: int, status: int) -> None:
    events: list[Any] = stream()
    error = {"error": {"object": "error", "message": "out of memory", "type": "X", "param": None, "code": status}}
    events.insert(at, error)
    with pytest.raises(UpstreamRefused) as caught:
        read(*events)
    assert (caught.value.engine_status, json.loads(caught.value.body)) == (status, error)


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_flipped_bytes_are_refused_or_read_as_they_are(which: int, flips: list[tuple[int, int]]) -> None:
    bodies = [json.dumps(event).encode() for event in stream(calls=(CALL,))]
    which %= len(bodies)
    body = bytearray(bodies[which])
    for at, byte in flips:
        body[at % len(body)] = byte
    bodies[which] = bytes(body)
    check_any(bodies)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("abort"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, at: str = "") -> list[str]:
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    own = [at] if at else []
    return own + [path for key, child in children for path in paths(child, f"{at}.{key}" if at else str(key))]


@given(st.sampled_from(paths(changed("0.id", RID))), JSON)
def test_any_value_anywhere_is_refused_or_read_as_it_is(path: str, value: Any) -> None:
    check_any([json.dumps(event).encode() for event in changed(path, value)])


def check_any(bodies: Sequence[bytes]) -> None:
    """Whatever comes is refused, or is a turn whose tokens are those of the one event that has ids."""
    try:
        whole = turn(read(*bodies))
    except StenographError:
        return
    told = [json.loads(body).get("sglext") for body in bodies]
    lists = [one["output_ids"] for one in told if isinstance(one, dict) and one.get("output_ids") is not None]
    assert whole.ids.tolist() == (lists[0][0] if lists else [])
    assert len(whole.logprobs) == len(whole.ids)
    assert whole.ids or whole.finish.reason is FinishReason.ABORT
