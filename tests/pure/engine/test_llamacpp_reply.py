"""What llama.cpp writes is believed only where it keeps every law; what we write leaves nothing to its defaults."""

import asyncio
import json
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
)
from stenograph.core.sse import EventReader
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SamplingParams,
    TopLogprob,
    token_ids,
)
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.transport import Headers, HttpReply
from stenograph.engine.llamacpp.adapter import LlamaCpp, LlamaCppReading
from stenograph.engine.llamacpp.schema import choice_grammar
from stenograph.engine.llamacpp.text import Pieces, ends_within_character
from stenograph.engine.llamacpp.wire import (
    NO_SEED,
    SAMPLERS,
    EngineFailure,
    decode_event,
    decode_model,
    decode_ranking,
    decode_reply,
    encode_ranking,
    encode_repetition,
    encode_request,
    seed_of,
)

RECORDINGS = Path(__file__).parents[2] / "recordings" / "llamacpp"
VOCAB = 1000
SMOLLM2_VOCAB = 49152
NO_PIECES = Pieces([b"?"] * VOCAB)
"""Of a model whose texts agree with nothing that comes here: what was left out is always sampled again."""
LOWEST_FLOAT32 = -3.4028234663852886e38


def recording(name: str) -> Any:
    return json.loads((RECORDINGS / f"{name}.json").read_text())


def pointer_of(error: StenographError) -> str | None:
    """What the error blames, as OpenAI's chats point at it."""
    return None if error.blame is None else OpenAISpelling(prompt="messages").pointer(error.blame)


def request(rid: str = "r-0", ids: Sequence[int] = (1, 2, 3), **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(rid),
        prompt=Prompt(new_ids=token_ids(ids)),
        params=SamplingParams(**params),
        affinity_key="session-1",
    )


def sampled(id_: int, place: int, logprob: Any = -0.5, **changes: Any) -> dict[str, Any]:
    """An event with one token, the one at `place` of those that were sampled, counted from 0."""
    row = {"id": id_, "token": "x", "bytes": [120], "logprob": logprob, "top_logprobs": [{"id": 4, "logprob": -0.25}]}
    event = {"index": 0, "content": "x", "tokens": [id_], "stop": False, "id_slot": -1}
    return {
        **event,
        "tokens_predicted": place + 1,
        "tokens_evaluated": 3,
        "completion_probabilities": [row],
        **changes,
    }


def last(num: int, stop_type: Any = "eos", **changes: Any) -> dict[str, Any]:
    told = {"tokens_predicted": num, "tokens_evaluated": 3, "stop_type": stop_type, "stopping_word": ""}
    return {"tokens": [], "stop": True, **told, "timings/cache_n": 2, **changes}


def whole(ids: Sequence[int], told: Sequence[int], **changes: Any) -> dict[str, Any]:
    """A reply that was not streamed: all ids, and those of which the logprob is told."""
    rows = [{"id": id_, "logprob": -0.5, "top_logprobs": []} for id_ in told]
    return {**last(len(ids), "limit"), "tokens": list(ids), "completion_probabilities": rows, **changes}


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def read(reading: LlamaCppReading, *events: dict[str, Any]) -> list[Chunk]:
    return [chunk for event in events for chunk in reading.event(dumped(event))]


def capabilities(vocab_size: int) -> Capabilities:
    return replace(
        LlamaCpp(AdapterOptions(model="m", vocab_size=vocab_size), Pieces([])).capabilities, max_context_tokens=4096
    )


def reading_of(asked: GenerateRequest | None = None, pieces: Pieces = NO_PIECES) -> LlamaCppReading:
    return LlamaCppReading(asked or request(), capabilities(VOCAB), pieces)


def law_of(*events: dict[str, Any] | bytes, asked: GenerateRequest | None = None) -> str:
    """The law that a stream breaks."""
    reading = reading_of(asked)

    def read_all() -> None:
        for event in events:
            reading.event(event if isinstance(event, bytes) else dumped(event))
        asyncio.run(reading.settle(never_asked))
        reading.end()

    with pytest.raises(UpstreamInvalid) as caught:
        read_all()
    return caught.value.law


async def never_asked(method: str, target: str, body: bytes = b"") -> HttpReply:
    raise AssertionError("there was nothing to ask")


class Answers:
    """A server's answers, one after the other; `bodies` are the questions."""

    def __init__(self, *answers: Any, status: int = 200) -> None:
        self.bodies: list[Any] = []
        self._answers = list(answers)
        self._status = status

    async def __call__(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
        assert (method, target, headers) == ("POST", "/completion", ())
        self.bodies.append(json.loads(body))
        answer = dumped(self._answers.pop(0))
        return HttpReply(status=self._status, content_type="application/json", headers=(), body=answer)


def ranking(num_prompt: int, *tops: tuple[int, float]) -> dict[str, Any]:
    row = {"id": 67, "logprob": -9.0, "top_logprobs": [{"id": id_, "logprob": logprob} for id_, logprob in tops]}
    return {**last(1, "limit", tokens_evaluated=num_prompt), "tokens": [67], "completion_probabilities": [row]}


# -- recordings of a real one


def test_the_recorded_stream_is_read_as_it_came() -> None:
    told = recording("completion_stream")
    asked = request(ids=told["request"]["json"]["prompt"])
    reading = LlamaCppReading(asked, capabilities(SMOLLM2_VOCAB), Pieces([]))
    reader = EventReader(max_bytes=2**20)
    chunks = [chunk for data in reader.feed(told["response"]["body"].encode()) for chunk in reading.event(data)]
    chunks += asyncio.run(reading.settle(never_asked))
    chunks += reading.end()
    assert [id_ for chunk in chunks for id_ in chunk.ids] == [60, 23, 39614, 1141]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [
        -1.8529294729232788,
        -0.41766247153282166,
        -0.8899336457252502,
        -0.10162607580423355,
    ]
    assert [chunk.finish for chunk in chunks] == [None] * 4 + [Finish(reason=FinishReason.LENGTH)]
    assert chunks[-1].num_cached_tokens == 36


def test_the_recorded_whole_reply_is_read_as_it_came() -> None:
    told = recording("completion_token_ids")
    body = told["response"]["body"]
    reply = decode_reply(dumped(body), vocab_size=SMOLLM2_VOCAB, num_prompt=37)
    assert list(reply.ids) == body["tokens"]
    assert [(one.id, one.logprob) for one in reply.sampled] == [
        (row["id"], row["logprob"]) for row in body["completion_probabilities"]
    ]
    assert (reply.num_cached, reply.stop_type) == (36, "limit")


def test_a_recorded_stream_that_is_cut_anywhere_never_passes_for_a_whole_one() -> None:
    told = recording("completion_stream")
    body: bytes = told["response"]["body"].encode()
    asked = request(ids=told["request"]["json"]["prompt"])
    end = body.rindex(b"data: ") + len(body[body.rindex(b"data: ") :].rstrip())
    for cut in range(len(body)):
        reading = LlamaCppReading(asked, capabilities(SMOLLM2_VOCAB), Pieces([]))
        chunks = [chunk for data in EventReader(max_bytes=2**20).feed(body[:cut]) for chunk in reading.event(data)]
        chunks += reading.end()
        is_whole = bool(chunks) and chunks[-1].finish is not None
        assert is_whole == (cut >= end + len("\n\n")), cut
        assert [id_ for chunk in chunks for id_ in chunk.ids] == [60, 23, 39614, 1141][: len(chunks)]


# -- the laws


@pytest.mark.parametrize(
    ("law", "events"),
    [
        ("json", [b"{"]),
        ("json", [b'{"stop":false}x']),
        ("json", [dumped(sampled(5, 0)).replace(b"-0.5", b"NaN")]),
        ("logprob_is_finite", [dumped(sampled(5, 0)).replace(b"-0.5", b"1e999")]),
        ("utf8", [b'{"content":"\xff"}']),
        ("shape", [b"[]"]),
        ("shape", [b"[" * 100_000]),
        ("shape", [sampled(5, 0, stop="no")]),
        ("shape", [sampled(5, 0, tokens_predicted=-1)]),
        ("shape", [{"content": "x"}]),
        ("shape", [last(0, stop_type=None)]),
        ("has_logprobs", [sampled(5, 0, completion_probabilities=[])]),
        ("has_logprobs", [sampled(5, 0, tokens=[5, 6])]),
        ("ids_agree", [sampled(5, 0, tokens=[6])]),
        ("id_in_vocab", [sampled(VOCAB, 0)]),
        ("id_in_vocab", [sampled(10**40, 0)]),
        ("id_in_vocab", [sampled(-1, 0)]),
        ("id_in_vocab", [sampled(True, 0)]),
        ("id_in_vocab", [dumped(sampled(5, 0)).replace(b'"id": 4', b'"id": 4.0')]),
        ("id_in_vocab", [dumped(sampled(5, 0)).replace(b'"id": 4', b'"id": 1000')]),
        ("logprob_is_finite", [sampled(5, 0, logprob=None)]),
        ("logprob_is_finite", [sampled(5, 0, logprob="-1")]),
        ("logprob_is_finite", [sampled(5, 0, logprob=LOWEST_FLOAT32)]),
        ("prompt_agrees", [sampled(5, 0, tokens_evaluated=4)]),
        ("prompt_agrees", [last(1, tokens_evaluated=2)]),
        ("count_agrees", [sampled(5, 1), sampled(6, 0)]),
        ("count_agrees", [sampled(5, 0), sampled(5, 0)]),
        ("count_agrees", [sampled(5, 0, tokens_predicted=0)]),
        ("count_agrees", [sampled(5, 0), last(0)]),
        ("count_agrees", [sampled(5, 0), last(1), sampled(6, 1)]),
        ("count_agrees", [sampled(5, 0), last(1), last(1)]),
        ("count_agrees", [last(10**12)]),
        ("has_tokens", [last(0)]),
        ("finish_reason", [sampled(5, 0), last(1, "none")]),
        ("finish_reason", [sampled(5, 0), last(1, "word")]),
        ("finish_reason", [sampled(5, 0), last(1, "word", stopping_word="other")]),
    ],
)
def test_a_stream_that_lies_is_refused_with_the_law_it_breaks(law: str, events: list[Any]) -> None:
    assert law_of(*events, asked=request(stop=("end",))) == law


@pytest.mark.parametrize(
    ("law", "reply"),
    [
        ("json", b""),
        ("shape", {}),
        ("count_agrees", {"tokens": [1], "stop_type": "eos", "tokens_predicted": 2}),
        ("count_agrees", {"tokens": [1], "stop_type": "eos"}),
        ("id_in_vocab", {"tokens": [VOCAB], "stop_type": "eos", "tokens_predicted": 1}),
        ("id_in_vocab", {"tokens": [1.5], "stop_type": "eos", "tokens_predicted": 1}),
        ("prompt_agrees", {"tokens": [], "stop_type": "eos", "tokens_predicted": 0, "tokens_evaluated": 4}),
    ],
)
def test_a_whole_reply_that_lies_is_refused_with_the_law_it_breaks(law: str, reply: Any) -> None:
    with pytest.raises(UpstreamInvalid) as caught:
        decode_reply(reply if isinstance(reply, bytes) else dumped(reply), vocab_size=VOCAB, num_prompt=3)
    assert caught.value.law == law


@given(st.binary() | st.text().map(str.encode) | st.from_regex(rb'\{"(tokens|stop|error)":.{0,20}\}', fullmatch=True))
def test_any_bytes_are_an_event_or_break_a_law(data: bytes) -> None:
    for decode in (decode_event, decode_reply, decode_ranking):
        with suppress(UpstreamInvalid):
            decode(data, vocab_size=VOCAB, num_prompt=3)
    with suppress(UpstreamInvalid):
        decode_model(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([sampled(5, 0), last(1)]), st.data())
def test_an_event_with_anything_at_any_place_is_read_as_true_or_breaks_a_law(
    event: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(event)))
    reading = reading_of()
    try:
        chunks = [*reading.event(json.dumps({**event, name: data.draw(JSON)}).encode()), *reading.end()]
    except UpstreamInvalid:
        return
    else:
        for chunk in chunks:
            assert all(type(id_) is int and 0 <= id_ < VOCAB for id_ in chunk.ids)
            assert all(math.isfinite(logprob) for logprob in chunk.logprobs)


def test_an_error_within_a_stream_is_the_engine_s_refusal() -> None:
    body = b'{"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}'
    with pytest.raises(UpstreamRefused) as caught:
        reading_of().event(body)
    assert (caught.value.engine_status, caught.value.body) == (500, body)
    odd = decode_event(b'{"error":{"code":42}}', vocab_size=VOCAB, num_prompt=3)
    assert odd == EngineFailure(status=500)
    message = "request (3000 tokens) exceeds the available context size (1024 tokens), try increasing it"
    with pytest.raises(ContextLengthExceeded) as too_long:
        reading_of().event(json.dumps({"error": {"code": 400, "message": message}}).encode())
    assert (too_long.value.num_prompt_tokens, too_long.value.max_context_tokens) == (3000, 1024)


def test_the_token_that_progress_tells_of_is_none() -> None:
    reading = reading_of()
    progress = sampled(0, -1, completion_probabilities=[], prompt_progress={"total": 3, "cache": 2, "processed": 3})
    (chunk,) = read(reading, progress, sampled(5, 0))
    assert (chunk.ids, chunk.num_cached_tokens) == ((5,), 2)


def test_a_reply_that_is_no_stream_is_refused() -> None:
    with pytest.raises(UpstreamInvalid, match="streams"):
        reading_of().whole(HttpReply(status=200, content_type="application/json", headers=(), body=b"{}"))


# -- how it ends


@pytest.mark.parametrize(
    ("event", "finish"),
    [
        (last(2, "eos"), Finish(reason=FinishReason.STOP, matched=6)),
        (last(2, "word", stopping_word="end"), Finish(reason=FinishReason.STOP, matched="end")),
        (last(2, "limit"), Finish(reason=FinishReason.LENGTH)),
    ],
)
def test_why_it_ended(event: dict[str, Any], finish: Finish) -> None:
    reading = reading_of(request(stop=("end",)))
    assert [chunk.ids for chunk in read(reading, sampled(5, 0), sampled(6, 1), event)] == [(5,), (6,)]
    assert reading.end() == (Chunk(ids=(), logprobs=(), finish=finish, num_cached_tokens=2),)


def test_without_its_last_event_a_stream_has_no_end() -> None:
    reading = reading_of()
    read(reading, sampled(5, 0))
    assert not reading.has_enough
    assert reading.end() == ()


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_a_stop_token_ends_the_turn_and_the_stream(stop: int) -> None:
    reading = reading_of(request(stop_token_ids=(stop,)))
    events = [sampled(id_, place) for place, id_ in enumerate((5, 6, 7))]
    ids: list[int] = []
    for event in events:
        assert not reading.has_enough
        ids += [id_ for chunk in read(reading, event) for id_ in chunk.ids]
        if reading.has_enough:
            break
    assert asyncio.run(reading.settle(never_asked)) == ()
    assert ids == list(range(5, stop + 1))
    assert reading.end()[0].finish == Finish(reason=FinishReason.STOP, matched=stop)


def test_what_comes_with_a_stop_token_but_after_it_is_not_the_turn_s() -> None:
    reading = reading_of(request(stop_token_ids=(6,)))
    rows = [{"id": id_, "logprob": -1.0, "top_logprobs": []} for id_ in (5, 6, 7)]
    event = sampled(0, 2, tokens=[5, 6, 7], completion_probabilities=rows)
    assert [chunk.ids for chunk in read(reading, event)] == [(5, 6)]
    assert asyncio.run(reading.settle(never_asked)) == ()


def test_alternatives_are_those_that_were_asked_for_and_possible() -> None:
    top = [{"id": 4, "logprob": -0.25}, {"id": 5, "logprob": -1.5}, {"id": 6, "logprob": LOWEST_FLOAT32}]
    event = sampled(5, 0)
    event["completion_probabilities"][0]["top_logprobs"] = top
    (chunk,) = read(reading_of(request(num_top_logprobs=3)), event)
    assert chunk.top_logprobs == ((TopLogprob(id=4, logprob=-0.25), TopLogprob(id=5, logprob=-1.5)),)
    (chunk,) = read(reading_of(), event)
    assert chunk.top_logprobs is None


# -- what a stream leaves out


async def test_tokens_that_end_within_a_character_are_sampled_again_and_looked_up() -> None:
    asked = request(num_top_logprobs=1, seed=7)
    reading = reading_of(asked)
    chunks = read(reading, sampled(5, 0), sampled(7, 2), sampled(8, 3), last(5, "limit"))
    assert [chunk.ids for chunk in chunks] == [(5,)]
    answers = Answers(
        whole((5, 6, 7, 8, 9), (5, 7, 8)),
        ranking(4, (2, -0.125), (6, -2.5)),
        ranking(7, (9, -0.0625)),
    )
    settled = await reading.settle(answers)
    assert [(chunk.ids, chunk.logprobs) for chunk in settled] == [
        ((6,), (-2.5,)),
        ((7,), (-0.5,)),
        ((8,), (-0.5,)),
        ((9,), (-0.0625,)),
    ]
    assert settled[0].top_logprobs == ((TopLogprob(id=2, logprob=-0.125),),)
    assert reading.end()[0].finish == Finish(reason=FinishReason.LENGTH)
    again, first, second = answers.bodies
    assert (again["prompt"], again["seed"], again["n_predict"], again["stream"]) == ([1, 2, 3], 7, 5, False)
    assert (first["prompt"], second["prompt"]) == ([1, 2, 3, 5], [1, 2, 3, 5, 6, 7, 8])


async def test_no_more_is_sampled_again_than_shows_what_was_left_out() -> None:
    reading = reading_of()
    read(reading, sampled(5, 0), sampled(7, 2), sampled(8, 3), sampled(9, 4), last(5))
    answers = Answers(whole((5, 6, 7), (5, 7)), ranking(4, (6, -1.0)))
    settled = await reading.settle(answers)
    assert [id_ for chunk in settled for id_ in chunk.ids] == [6, 7, 8, 9]
    assert answers.bodies[0]["n_predict"] == 3


@pytest.mark.parametrize("ids", [(4, 6, 7), (5, 6, 4), (5, 6), (5, 6, 7, 8)])
async def test_what_is_sampled_again_otherwise_is_refused(ids: tuple[int, ...]) -> None:
    reading = reading_of()
    read(reading, sampled(5, 0), sampled(7, 2), last(3))
    with pytest.raises(UpstreamInvalid, match="repetition_agrees"):
        await reading.settle(Answers(whole(ids, ())))


async def test_an_unlikely_token_is_looked_for_among_more_and_at_last_among_all() -> None:
    reading = LlamaCppReading(request(), capabilities(SMOLLM2_VOCAB), NO_PIECES)
    read(reading, sampled(5, 0), last(2))
    answers = Answers(whole((5, 6), (5,)), ranking(4, (7, -1.0)), ranking(4, (8, -1.0)), ranking(4, (6, -20.0)))
    (chunk,) = await reading.settle(answers)
    assert chunk.logprobs == (-20.0,)
    assert [body["n_probs"] for body in answers.bodies[1:]] == [64, 4096, SMOLLM2_VOCAB]


async def test_a_token_whose_logprob_nobody_tells_is_refused() -> None:
    reading = reading_of()
    read(reading, sampled(5, 0), last(2))
    answers = Answers(whole((5, 6), (5,)), ranking(4, (7, -1.0)), ranking(4, (6, LOWEST_FLOAT32)))
    with pytest.raises(UpstreamInvalid, match="has_logprobs"):
        await reading.settle(answers)


async def test_a_stop_token_among_those_left_out_ends_the_turn_there() -> None:
    reading = reading_of(request(stop_token_ids=(6, 8)))
    read(reading, sampled(5, 0), sampled(7, 2), sampled(8, 3))
    assert reading.has_enough
    settled = await reading.settle(Answers(whole((5, 6, 7), (5, 7)), ranking(4, (6, -1.0))))
    assert [chunk.ids for chunk in settled] == [(6,)]
    assert reading.end()[0].finish == Finish(reason=FinishReason.STOP, matched=6)


async def test_a_refusal_of_what_is_asked_afterwards_is_passed_on() -> None:
    reading = reading_of()
    read(reading, sampled(5, 0), last(2))
    with pytest.raises(UpstreamRefused) as caught:
        await reading.settle(Answers({"error": {}}, status=503))
    assert caught.value.engine_status == 503


# -- the same, read off the text

LETTERS = {
    4: b"",
    5: b"p",
    6: b"\xf0\x9f",
    7: b"\x98",
    8: b"\x80",
    9: b" \xc3",
    10: b"\xa9!",
    11: b"\xf0\x9f\x98",
    12: b"\xe2",
}
PIECES = Pieces([LETTERS.get(id_, b"?") for id_ in range(VOCAB)])


@pytest.mark.parametrize(
    ("tokens", "text", "filled"),
    [
        ((5, None, 10, 5), "p é!p", (5, 9, 10, 5)),
        ((5, None, 10, 5), "p é!", (5, 9, 10, 5)),
        ((None, 10, None, 10), " é! é!", (9, 10, 9, 10)),
        ((4, 5, None, 10), "p é!", (4, 5, 9, 10)),
        ((None, 8), "😀", (11, 8)),
        ((None, None, 8), "😀", None),
        ((5, None, 10), "p", None),
        ((5, None), "p", None),
        ((5, None, 10), "pé!", None),
        ((5, None, 10), "p \ufffd!", None),
        ((6, None, 10), "p é!", None),
        ((5, None, 5), "pp", None),
        ((5, None, None, 10), "p é!", (5, 9, 4, 10)),
        ((5, *[None] * 9, 10), "p é!", None),
    ],
)
def test_missing_tokens_are_those_that_alone_make_the_text(
    tokens: tuple[int | None, ...], text: str, filled: tuple[int, ...] | None
) -> None:
    assert PIECES.fill(tokens, text.encode()) == (None if filled is None else list(filled))


def test_where_several_tokens_make_the_same_text_nothing_is_guessed() -> None:
    pieces = Pieces([b"\xf0", b"\xf0\x9f", b"\x9f\x98", b"\x98", b"\x80", b"\xf0\x9f\x98", b""])
    assert pieces.fill((None, None, 4), "😀".encode()) is None
    assert pieces.fill((None, 4), "😀".encode()) == [5, 4]
    twice = Pieces([b"\xc3", b"\xc3", b"\xa9"])
    assert twice.fill((None, 2), "é".encode()) is None


@given(st.lists(st.sampled_from([b"\xf0\x9f", b"\x98", b"\x80", b" \xc3", b"\xa9", b"p", b"\xe2\x82", b"\xac", b""])))
def test_what_is_read_off_is_what_was_sampled_or_nothing(pieces: list[bytes]) -> None:
    table = sorted(set(pieces))
    sampled_ids = [table.index(piece) for piece in pieces]
    joined = [b"".join(pieces[: place + 1]) for place in range(len(pieces))]
    tokens = [None if ends_within_character(text) else id_ for id_, text in zip(sampled_ids, joined, strict=True)]
    text = b"".join(pieces).decode(errors="replace").encode()
    assert Pieces(table).fill(tokens, text) in (None, sampled_ids)


@pytest.mark.parametrize(
    ("text", "is_within"),
    [
        (b"", False), (b"a", False), (b"\xc3", True), (b"a\xc3\xa9", False), (b"\xe2\x82", True),
        (b"\xe2\x82\xac", False), (b"\xf0\x9f\x98", True), (b"\xf0\x9f\x98\x80", False), (b"\x80\x80", False),
        (b"\xff", False), (b"\xc3a", False),
    ],
)  # fmt: skip
def test_when_llama_cpp_waits_for_the_rest_of_a_character(text: bytes, is_within: bool) -> None:
    assert ends_within_character(text) is is_within


async def test_nothing_is_sampled_again_where_the_text_tells() -> None:
    reading = reading_of(request(stop=("é!",)), PIECES)
    read(
        reading,
        sampled(5, 0, content="p"),
        sampled(8, 2, content="😀"),
        sampled(10, 4, content=" "),
        last(5, "word", stopping_word="é!"),
    )
    answers = Answers(ranking(4, (11, -1.0)), ranking(6, (9, -2.0)))
    settled = await reading.settle(answers)
    assert [id_ for chunk in settled for id_ in chunk.ids] == [11, 8, 9, 10]
    assert reading.end()[0].finish == Finish(reason=FinishReason.STOP, matched="é!")


# -- what is sent


def sent(asked: GenerateRequest) -> Any:
    return json.loads(encode_request(asked, vocab_size=VOCAB))


def test_a_request_names_everything_that_a_default_could_change() -> None:
    body = sent(request(max_tokens=9, temperature=0.5, top_p=0.75, top_k=40, min_p=0.125, stop=("a", '"'), seed=3))
    assert body["prompt"] == [1, 2, 3]
    assert (body["n_predict"], body["temperature"], body["top_p"], body["top_k"]) == (9, 0.5, 0.75, 40)
    assert (body["min_p"], body["stop"], body["seed"], body["ignore_eos"]) == (0.125, ["a", '"'], 3, False)
    assert body["samplers"] == list(SAMPLERS)
    assert (body["mirostat"], body["n_cache_reuse"], body["min_keep"], body["dynatemp_range"]) == (0, 0, 0, 0.0)
    assert (body["stream"], body["return_tokens"], body["n_probs"], body["post_sampling_probs"]) == (
        True,
        True,
        1,
        False,
    )
    plain = sent(request())
    assert (plain["n_predict"], plain["temperature"], plain["top_k"], plain["top_p"]) == (-1, 1.0, 0, 1.0)
    assert (plain["min_p"], plain["repeat_penalty"], plain["repeat_last_n"]) == (0.0, 1.0, 0)


def test_ids_that_are_text_already_are_joined_as_they_are() -> None:
    prompt = Prompt(new_ids=token_ids((1, 2)), json_fragments=(b"1, 2",))
    asked = GenerateRequest(request_id=RequestId("r"), prompt=prompt, params=SamplingParams())
    assert encode_request(asked, vocab_size=VOCAB).endswith(b'"prompt":[1, 2]}')
    assert encode_ranking(prompt, token_ids((3,)), 5).endswith(b'"prompt":[1, 2,3]}')
    assert encode_ranking(prompt, token_ids(), 5).endswith(b'"prompt":[1, 2]}')


def test_a_repetition_differs_from_its_request_in_nothing_but_its_form() -> None:
    asked = request(max_tokens=9, seed=3, grammar=Grammar(kind=GrammarKind.EBNF, source='root ::= "a"'))
    first, again = sent(asked), json.loads(encode_repetition(asked, 4, vocab_size=VOCAB))
    changed = {name for name in first.keys() | again.keys() if first.get(name) != again.get(name)}
    assert changed == {"stream", "n_predict", "return_progress"}


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_seed_is_one_that_llama_cpp_does_not_replace(seed: int) -> None:
    folded = seed_of(request(seed=seed))
    assert 0 <= folded < NO_SEED
    assert folded == seed_of(request("another", seed=seed))
    if 0 <= seed < NO_SEED:
        assert folded == seed


def test_without_a_seed_it_is_made_of_the_request_s_id() -> None:
    assert seed_of(request("a")) == zlib.crc32(b"a") % NO_SEED
    assert seed_of(request("a")) != seed_of(request("b"))


def test_bias_is_sent_as_pairs_and_repetition_penalty_over_everything() -> None:
    body = sent(request(logit_bias=((5, -100.0),), repetition_penalty=1.5))
    assert body["logit_bias"] == [[5, -100.0]]
    assert (body["repeat_penalty"], body["repeat_last_n"]) == (1.5, 2**20)
    limited = request(repetition_penalty=1.5, max_tokens=7)
    assert sent(limited)["repeat_last_n"] == 10
    assert json.loads(encode_request(limited, vocab_size=VOCAB, max_context_tokens=5))["repeat_last_n"] == 5


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"presence_penalty": 0.5}, "/presence_penalty"),
        ({"frequency_penalty": -0.5}, "/frequency_penalty"),
        ({"min_tokens": 2}, "/min_tokens"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "/logit_bias"),
        ({"stop_token_ids": (VOCAB,)}, "/stop_token_ids"),
        ({"grammar": Grammar(kind=GrammarKind.REGEX, source="a")}, None),
        ({"grammar": Grammar(kind=GrammarKind.LARK, source="start: /a/")}, None),
        ({"grammar": Grammar(kind=GrammarKind.EBNF, source="%llguidance {}\nstart: /a/")}, None),
        ({"grammar": Grammar(kind=GrammarKind.CHOICE, source="[]")}, None),
        ({"grammar": Grammar(kind=GrammarKind.CHOICE, source='["a",""]')}, None),
        ({"grammar": Grammar(kind=GrammarKind.CHOICE, source="[1]")}, None),
    ],
)
def test_what_llama_cpp_would_do_otherwise_is_refused(params: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sent(request(**params))
    assert pointer_of(caught.value) == param


@pytest.mark.parametrize("params", [{"stop_token_ids": (5, VOCAB)}, {"logit_bias": ((5, 1.0), (VOCAB, 1.0))}])
def test_an_id_that_the_model_does_not_have_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{VOCAB} is not a token id: the vocabulary has {VOCAB} ids"):
        sent(request(**params))


def test_grammars_go_under_the_names_that_llama_cpp_reads() -> None:
    def fields(kind: GrammarKind, source: str = "") -> Any:
        body = sent(request(grammar=Grammar(kind=kind, source=source)))
        return body.get("json_schema"), body.get("grammar")

    spelling = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    assert fields(GrammarKind.JSON_OBJECT) == ({"x-guidance": spelling, "type": "object"}, None)
    assert fields(GrammarKind.JSON_SCHEMA, ' {"type": "string"} ') == ({"x-guidance": spelling, "type": "string"}, None)
    assert fields(GrammarKind.JSON_SCHEMA, "{ }") == ({"x-guidance": spelling}, None)
    assert fields(GrammarKind.EBNF, 'root ::= "a"') == (None, 'root ::= "a"')
    assert fields(GrammarKind.CHOICE, '["a\\"\\\\", "é"]') == (
        None,
        'root ::= "a\\U00000022\\U0000005C" | "\\U000000E9"',
    )
    assert choice_grammar('["\\u0000 ~"]') == 'root ::= "\\U00000000 ~"'


# -- what a server says of its model


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"data": [{"id": "m", "meta": {"n_vocab": 320, "n_ctx": 256, "size": 1}}]}, (320, 256)),
        ({"data": [{"meta": {"n_vocab": 320}}]}, (320, None)),
        ({"data": [{"id": "m", "meta": None}]}, (None, None)),
        ({"data": []}, (None, None)),
    ],
)
def test_what_a_server_tells_of_its_model(body: Any, told: tuple[int | None, int | None]) -> None:
    assert decode_model(dumped(body)) == told
