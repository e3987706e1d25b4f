"""Columns that are read out of a body are what its decoder reads; a body that is odd in anything is left to it."""

import json
import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.kit.reply_shape import ReplyShape, native_reply, reply_body
from stenograph.core.errors import UpstreamInvalid
from stenograph.engine import rows
from stenograph.engine.columns import STAND_IN_ID, Columns, cut_columns
from stenograph.engine.sglang import chat_wire
from stenograph.engine.sglang.chat_wire import decode_reply
from stenograph.engine.sglang.generate_wire import SGLangGenerateReading

KEY = b'"output_token_logprobs":'
ROWS = b"[[-0.25,7,null],[-1e-07,31611,null],[-0.0,0,null]]"
ROWS_OF_TEXTS = b'[[-0.25,7," the"],[-1e-07,31611,"\\n\\":[\xc3\xa9"],[-0.0,0,"[["]]'


def body_of(told: bytes, *, before: bytes = b"", after: bytes = b"", content: str = "", others: bytes = b"") -> bytes:
    """A reply with `told` as its rows; `before` and `after` stand beside them, `others` beside its only choice."""
    message = json.dumps({"role": "assistant", "content": content}).encode()
    meta = b'"meta_info":{"completion_tokens":3,%b%b%b%b}' % (before, KEY, told, after)
    choice = b'{"index":0,"message":%b,"finish_reason":"stop",%b}' % (message, meta)
    return b'{"id":"r","choices":[%b%b],"usage":{"prompt_tokens":4}}' % (choice, others)


def plain(body: bytes) -> str:
    """All that the decoder reads of a body but for the texts of its rows, or what it says of it."""
    try:
        told = rows.decoded(chat_wire._COMPLETION, body, chat_wire._LAWS)
    except UpstreamInvalid as error:
        return f"{error.law}: {error}"
    return without_texts(told)


def without_texts(told: chat_wire._SGLangCompletion) -> str:
    for choice in told.choices:
        for row in choice.meta_info.output_token_logprobs or ():
            row.text = None
    return repr(told)


def apart(body: bytes) -> tuple[str, Columns | None]:
    """The same, where rows are read as columns if they can be; and the columns."""
    try:
        told, columns = rows.decoded_apart(chat_wire._COMPLETION, body, chat_wire._LAWS, chat_wire._meta_of)
    except UpstreamInvalid as error:
        return f"{error.law}: {error}", None
    if columns is not None:
        both = zip(columns.logprobs, columns.ids, strict=True)
        told.choices[0].meta_info.output_token_logprobs = [rows.Row(logprob=lp, id=id_) for lp, id_ in both]
    return without_texts(told), columns


LOGPROBS = ["-0.5", "-0.0", "0", "-0", "0.0", "-1e-07", "-1E+2", "-12345678901234567890", "1e400", "-1e-400", "-5e-324"]
LOGPROBS += ["-2.5332655906677246", "1.7976931348623157e308", "9" * 400, "-.5", "-1.", "+1", "NaN", "-Infinity", "0x1"]
PLAIN_IDS = ["0", "7", "10", "31611", "1000000", "10000000", "2147483647", "-0", " 5", "5 ", "\n5"]
ODD_IDS = ["2147483648", "9" * 30, "1e300", "-1e300", str(STAND_IN_ID), "-1", "1.0", "1e2", "1E2", "7e2"]
ODD_IDS += ["1e+3", "1e03", "10e1", "1.2e1", "01", "5.", "e2", "1e2,3"]
ODD = ["true", "null", '"5"', "[]", "{}", "", "[1", "1]", "-", "5,6", "5,null],[-1,6"]

numbers = st.floats(allow_nan=False, allow_infinity=False, max_value=0).map(repr)
logprobs = numbers | st.sampled_from(LOGPROBS) | st.sampled_from(ODD)
ids = st.integers(0, 10**7).map(str) | st.sampled_from(PLAIN_IDS + ODD_IDS) | st.sampled_from(ODD)
TEXTS = [" the", "\n", "é", '"', "\\", "],[", '"],[', "]]", "[", "null],[", '":[', ",[-1,5,", "\ud83d", "12345678"]
texts = st.none() | st.sampled_from(TEXTS) | st.text(max_size=3)
told_texts = texts.map(lambda text: json.dumps(text, ensure_ascii=False))
odd_texts = told_texts | st.sampled_from(["nul", "Null", "null ", " null", "null,null", "0", "n", "", '"', '"\\ud83d"'])
plain_rows = st.tuples(numbers, st.integers(0, 2**31 - 1), told_texts).map(lambda row: f"[{row[0]},{row[1]},{row[2]}]")
odd_rows = st.one_of(
    st.tuples(logprobs, ids).map(lambda row: f"[{row[0]},{row[1]},null]"),
    st.tuples(numbers, st.integers(0, 99).map(str), odd_texts).map(lambda row: f"[{','.join(row)}]"),
    st.tuples(numbers, st.integers(0, 99)).map(lambda row: f"[{row[0]},{row[1]}]"),
    st.sampled_from(["[]", "[[-1,5,null]]", "[-1,5,null,null]", "[-1,5,6,null]", "[5,null]", "null", "[-1,5,null]x"]),
)
lists = st.tuples(
    st.lists(plain_rows, min_size=1, max_size=5), st.one_of([st.none()] * 4 + [odd_rows]), st.integers(0, 5)
).map(lambda told: "[" + ",".join(told[0] if told[1] is None else _inserted(*told)) + "]")
OTHER = KEY + b"[[-1,5,null],[-2,6,null]]"
BESIDE = [b"", OTHER, KEY + b"null", KEY + b"[]", b'"output_top_logprobs":[[[-1,5,null],[-2,6,null]]]', b'"a":"' + KEY]
BESIDE += [b'"a":[{%b}]' % OTHER, b'"a":[[-1,5,null],[-2,6,null]]', b'"a":%d' % STAND_IN_ID, b'"a":"%d"' % STAND_IN_ID]
BESIDE += [KEY + b"[[0,%d]]" % STAND_IN_ID, b'"output_ids":[1,2]', b'"a":"\xc3\xa9"', b'"a":"\xff"', b'"a":"' + ROWS]
CONTENTS = ["", "é", OTHER.decode(), str(STAND_IN_ID), 'x","output_token_logprobs":[[-1,5,null],[-2,6,null]]', "\\"]
OTHERS = [b"", b",{}", body_of(ROWS).join([b",", b""]), b',{"meta_info":{%b}}' % OTHER, b"]"]


def _inserted(told: list[str], odd: str | None, place: int) -> list[str]:
    return [*told[:place], *([] if odd is None else [odd]), *told[place:]]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    beside = [b"%b" % part for part in draw(st.tuples(*[st.sampled_from([b""] * 9 + BESIDE)] * 2))]
    body = body_of(
        draw(lists).encode(errors="surrogatepass"),
        before=beside[0] and beside[0] + b",",
        after=beside[1] and b"," + beside[1],
        content=draw(st.sampled_from([""] * 5 + CONTENTS)),
        others=draw(st.sampled_from([b""] * 5 + OTHERS)),
    )
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        place = draw(st.integers(0, len(body)))
        new = draw(st.sampled_from([b"", *(bytes([one]) for one in b'"\\,:{}[] 019.eE+-nul\t\n\x00\xff')]))
        body = body[:place] + new + body[place + draw(st.sampled_from([0, 1, 1, 2, 8])) :]
    return body


@settings(max_examples=500)
@given(bodies())
@example(body_of(ROWS))
@example(body_of(ROWS_OF_TEXTS))
@example(body_of(b'[[-0.5,1,"],["],[-0.5,2,"]]"]]'))
@example(body_of(b'[[-0.5,1,"],[",-0.5,2,"x"]]'))
@example(body_of(b'[["12345678",1,null],[-0.5,2,"x"]]'))
@example(body_of(ROWS, before=OTHER + b","))
@example(body_of(ROWS, after=b"," + OTHER))
def test_whatever_is_read_as_columns_is_what_the_decoder_reads(body: bytes) -> None:
    assert apart(body)[0] == plain(body)


@given(st.lists(st.tuples(st.floats(max_value=0, allow_infinity=False), st.integers(0, 10**7 - 1)), min_size=2))
def test_all_numbers_are_read_bit_for_bit(told: list[tuple[float, int]]) -> None:
    body = body_of(json.dumps([[lp, id_, None] for lp, id_ in told], separators=(",", ":")).encode())
    columns = apart(body)[1]
    assert columns is not None
    assert columns.logprobs.tobytes() == array("d", [lp for lp, _ in told]).tobytes()
    assert columns.ids.tolist() == [id_ for _, id_ in told]
    assert (len(columns), columns[1:].ids) == (len(told), columns.ids[1:])


@pytest.mark.parametrize("num", [2, 14, 15, 16, 17, 2**16 - 1, 2**16, 2**16 + 1])
def test_lists_of_any_length_are_read_as_columns(num: int) -> None:
    columns = apart(body_of(b"[" + b",".join(b"[-%d.5,%d,null]" % (at % 7, at) for at in range(num)) + b"]"))[1]
    assert columns is not None
    assert (len(columns), columns.ids[-1], columns.logprobs[1]) == (num, num - 1, -1.5)


def test_brackets_are_not_counted_for_more_than_their_text() -> None:
    body = body_of(b"[" * 2**24)
    tracemalloc.start()
    assert cut_columns(body) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(body)


@pytest.mark.parametrize(
    "told",
    [
        *[ROWS.replace(b"31611", id_.encode()) for id_ in ODD_IDS],
        *[ROWS.replace(b"-1e-07", odd.encode()) for odd in ODD],
        ROWS.replace(b",null]", b"]"),
        ROWS.replace(b",", b", "),
        ROWS.replace(b"-0.25", b"-1"),
        ROWS.replace(b"-0.25", b"-12345678901234567890"),
        ROWS.replace(b"-0.25", b'"12345678"'),
        ROWS.replace(b"-1e-07", b"null"),
        ROWS.replace(b"],[", b"] ,["),
        ROWS.replace(b"7,null]", b"7,0]"),
        ROWS.replace(b"7,null]", b'7,"],["]'),
        ROWS.replace(b"7,null]", b'7,"\\"],["]'),
        ROWS.replace(b"7,null]", b'7,"\xff"]'),
        b'[[-1.0,5,"],[",-2.0,6,"x"]]',
        b"[[-1.0,5,null,-2.0,6,null],[-3.0,7,null]]",
        b"[[-1.0,5],[-2.0,6,null]]",
        ROWS.replace(b"],[-0", b",-0", 1),
        b"[[-1,5,-2,null],[6,null]]",
        b"[[-1,null],[5,-2,6,null]]",
        b"[[-1,5],[null,-2,6,null]]",
        b"[[-1,5,null]]",
        b"[[]]",
        b"[]",
    ],
)
def test_rows_in_another_spelling_are_left_to_the_decoder(told: bytes) -> None:
    body = body_of(told)
    assert apart(body) == (plain(body), None)


@pytest.mark.parametrize("id_", PLAIN_IDS)
@pytest.mark.parametrize("told", [ROWS, ROWS_OF_TEXTS])
def test_rows_with_texts_and_with_nulls_are_read_as_columns(told: bytes, id_: str) -> None:
    columns = apart(body_of(told.replace(b"31611", id_.encode())))[1]
    assert columns is not None
    assert columns.ids.tolist() == [7, int(id_), 0]


@pytest.mark.parametrize(
    "body",
    [
        body_of(ROWS, after=b"," + KEY + b"[[-3,1,null]]"),
        body_of(ROWS, after=b"," + KEY + b"null"),
        body_of(ROWS, before=OTHER + b","),
        body_of(ROWS, after=b"," + KEY + b"[[0,%d]]" % STAND_IN_ID),
        body_of(ROWS, after=b',"a":"%d"' % STAND_IN_ID),
        body_of(ROWS, before=b'"a":{%b},' % OTHER),
        body_of(ROWS, others=b"," + body_of(ROWS)),
        body_of(ROWS)[:-1],
        body_of(ROWS) + b"{}",
    ],
)
def test_columns_that_are_not_those_of_the_reply_are_not_taken(body: bytes) -> None:
    assert apart(body) == (plain(body), None)


def test_a_text_that_speaks_of_rows_does_not_keep_columns_from_being_read() -> None:
    body = body_of(ROWS, content=OTHER.decode(), before=b'"output_top_logprobs":null,')
    assert apart(body)[1] == Columns(ids=array("i", [7, 31611, 0]), logprobs=array("d", [-0.25, -1e-07, -0.0]))


LARGE = ReplyShape(num_tokens=3000)


def large(**changes: Any) -> bytes:
    """A reply whose rows are read as columns, with other members of its meta_info."""
    whole = json.loads(reply_body(LARGE))
    whole["choices"][0]["meta_info"] |= changes
    body = json.dumps(whole, separators=(",", ":")).encode()
    assert len(body) > rows.LARGE_PAYLOAD_BYTES
    return body


@pytest.mark.parametrize(
    ("body", "vocab_size", "expected"),
    [
        (large(), 49000, "id_in_vocab: 49124 is not a token id: the vocabulary has 49000 ids"),
        (large(completion_tokens=2999), 49152, "count_agrees: 2999 completion tokens, but 3000 in output_token_log"),
        (large(prompt_tokens=5), 49152, "prompt_agrees: 1 ids were sent, but the engine reports 5 prompt tokens"),
        (large(completion_tokens="3000"), 49152, "has_completion_tokens: Expected `int`, got `str`"),
    ],
)
def test_a_large_reply_is_held_to_the_laws_of_all_others(body: bytes, vocab_size: int, expected: str) -> None:
    assert cut_columns(body) is not None
    with pytest.raises(UpstreamInvalid) as caught:
        decode_reply(body, vocab_size=vocab_size, num_prompt=1)
    spaced = json.dumps(json.loads(body)).encode()
    with pytest.raises(UpstreamInvalid) as spelled_otherwise:
        decode_reply(spaced, vocab_size=vocab_size, num_prompt=1)
    assert str(caught.value) == str(spelled_otherwise.value)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("is_cumulative", [False, True])
def test_a_stream_of_large_parts_is_read_in_both_spellings(is_cumulative: bool) -> None:
    body = b"".join(native_reply(ReplyShape(num_tokens=6000)).filled(b'"r"', 1))
    whole = json.loads(body)
    meta = whole["meta_info"]
    told = meta["output_token_logprobs"]
    parts = []
    for num in (2500, 6000):
        fresh = (
            told[:num] if is_cumulative or not parts else told[len(parts[0]["meta_info"]["output_token_logprobs"]) :]
        )
        reason = meta["finish_reason"] if num == len(told) else None
        named = {**meta, "output_token_logprobs": fresh, "completion_tokens": num, "finish_reason": reason}
        parts.append({"meta_info": named, "output_ids": [row[1] for row in fresh]})
    read: list[list[Any]] = []
    for separators in ((",", ":"), (", ", ": ")):
        reading = SGLangGenerateReading(request_id="r", vocab_size=49152, num_prompt=1)
        events = [json.dumps(part, separators=separators).encode() for part in parts]
        assert [cut_columns(event) is None for event in events] == [" " in separators[0]] * 2
        read.append([chunk for event in events for chunk in reading.event(event)] + [*reading.end()])
    assert read[0] == read[1]
    assert [id_ for chunk in read[0] for id_ in chunk.ids] == whole["output_ids"]
    lying = parts[1]["meta_info"]
    lying["output_token_logprobs"] = [[-1.0, 1, None], *lying["output_token_logprobs"][1:]]
    reading = SGLangGenerateReading(request_id="r", vocab_size=49152, num_prompt=1)
    reading.event(json.dumps(parts[0], separators=(",", ":")).encode())
    with pytest.raises(UpstreamInvalid, match="stream_extends" if is_cumulative else "ids_agree"):
        reading.event(json.dumps(parts[1], separators=(",", ":")).encode())


def test_a_large_reply_says_the_same_in_both_spellings() -> None:
    spaced = json.dumps(json.loads(large())).encode()
    assert cut_columns(spaced) is None
    told, same = (decode_reply(body, vocab_size=49152, num_prompt=1) for body in (large(), spaced))
    assert told == same
    assert len(told.ids) == 3000
