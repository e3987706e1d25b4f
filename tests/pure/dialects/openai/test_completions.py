"""A completions request is taken or refused with a pointer; ids stay ids, however many there are."""

import json
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatReply, ParsedReply, ReplyOptions, StreamPiece, Truncation
from stenograph.core.errors import InvalidRequest, StenographError
from stenograph.core.messages import Message, ReplyDelta, Role
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    SampledTurn,
    SamplingParams,
    TopLogprob,
    Usage,
)
from stenograph.dialects.common.sampling_fields import Rule
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.chat_reply import DONE, StreamEncoder
from stenograph.dialects.openai.completions import COMPLETION_FIELDS, PIECE_BYTES, decode_completion
from stenograph.dialects.openai.completions_reply import CompletionStreamEncoder
from stenograph.dialects.settings import UnknownFields


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def refused(raw: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode_completion(raw)
    return caught.value


def failure_of(raw: bytes, unknown: UnknownFields = UnknownFields.REFUSE) -> StenographError | None:
    try:
        decode_completion(raw, unknown_fields=unknown)
    except StenographError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("prompt", "prompts", "is_list"),
    [
        ("a", ("a",), False),
        (["a"], ("a",), True),
        (["a", "b"], ("a", "b"), True),
        ([1, 2], (array("i", [1, 2]),), False),
        ([[1, 2]], (array("i", [1, 2]),), True),
        ([[1], [2, 3]], (array("i", [1]), array("i", [2, 3])), True),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_prompt_is_text_or_ids_one_or_several(prompt: Any, prompts: Any, is_list: bool, indent: int | None) -> None:
    request = decode_completion(json.dumps({"prompt": prompt}, indent=indent).encode())
    assert request.prompts == prompts
    assert request.spelling.pointer(Blame(RequestPart.PROMPT, 0)) == ("/prompt/0" if is_list else "/prompt")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([True], "/prompt/0"),
        ([1, 2.0], "/prompt/1"),
        ([1, "a"], "/prompt/1"),
        ([1, None], "/prompt/1"),
        ([1, [2]], "/prompt/1"),
        ([-1], "/prompt/0"),
        ([1, 2**31], "/prompt/1"),
        ([2**70], "/prompt/0"),
        (["a", 1], "/prompt/1"),
        ([[1], 2], "/prompt/1"),
        ([[1], [2, False]], "/prompt/1/1"),
        ([[1], ["a"]], "/prompt/1/0"),
        ({}, "/prompt"),
        (1, "/prompt"),
        (True, "/prompt"),
        (None, "/prompt"),
    ],
)
def test_what_is_no_prompt_is_pointed_at(prompt: Any, param: str) -> None:
    assert refused(body(prompt=prompt)).param == param


def test_a_prompt_is_required() -> None:
    assert refused(b"{}").param == "/prompt"


@given(st.integers(0, 60_000), st.integers(1, 2**31 - 1), st.sampled_from([None, 1]))
def test_many_ids_are_read_in_pieces_as_few_are_at_once(num: int, step: int, indent: int | None) -> None:
    ids = [index * step % 2**31 for index in range(num)]
    text = json.dumps({"prompt": [ids, ids[:10]]}, indent=indent if num < 5000 else None)
    assert [list(prompt) for prompt in decode_completion(text.encode()).prompts] == [ids, ids[:10]]


@pytest.mark.parametrize("wrong", [True, 1.5, "1,2", [1, 2], -1, None, {"a": [1, 2]}])
@pytest.mark.parametrize("at", [0, 5_000, 29_999])
def test_one_wrong_id_among_many_is_pointed_at(wrong: object, at: int) -> None:
    ids: list[object] = [70_000] * 30_000
    ids[at] = wrong
    raw = body(prompt=[[1], ids])
    assert len(raw) > 2 * PIECE_BYTES
    assert refused(raw).param is not None
    assert str(refused(raw).param).startswith(f"/prompt/1/{at}")


def test_fields_arrive() -> None:
    request = decode_completion(
        body(
            model="m", temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=7, stop="a", stop_token_ids=[1],
            ignore_eos=True, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1,
            logit_bias={"5": -100, "3": 1.5}, max_tokens=9, logprobs=3, stream=True,
            stream_options={"include_usage": True}, return_token_ids=True, skip_special_tokens=False,
            include_stop_str_in_output=True, user="u", echo=False, suffix="", best_of=1, n=1, add_special_tokens=False,
        )
    )  # fmt: skip
    assert request.params == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=7, stop=("a",), stop_token_ids=(1,), ignore_eos=True,
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, logit_bias=((3, 1.5), (5, -100.0)),
        max_tokens=9, num_top_logprobs=3,
    )  # fmt: skip
    assert request.reply == ReplyOptions(stream=True, include_usage=True, logprobs=True, return_token_ids=True)
    assert (request.text.skips_special, request.text.keeps_stop) == (False, True)
    assert request.recorded == {"user": '"u"'}


def test_null_means_absent_for_every_field() -> None:
    nulls = {name: None for name in COMPLETION_FIELDS.names if name != "prompt"}
    assert decode_completion(body(**nulls)) == decode_completion(body())


def test_every_field_has_exactly_one_rule() -> None:
    assert {COMPLETION_FIELDS.rule_of(name) for name in COMPLETION_FIELDS.names} == set(Rule)


@pytest.mark.parametrize("name", sorted(COMPLETION_FIELDS.refused))
def test_a_refused_field_is_refused_with_its_reason(name: str) -> None:
    error = refused(body(**{name: "asked for"}))
    assert (error.param, COMPLETION_FIELDS.refused[name] in error.message) == (f"/{name}", True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "/n"),
        ({"best_of": 2}, "/best_of"),
        ({"best_of": 0}, "/best_of"),
        ({"echo": True}, "/echo"),
        ({"suffix": "x"}, "/suffix"),
        ({"add_special_tokens": True}, "/add_special_tokens"),
        ({"logprobs": 21}, "/logprobs"),
        ({"logprobs": -1}, "/logprobs"),
        ({"logprobs": True}, "/logprobs"),
        ({"max_tokens": 0}, "/max_tokens"),
        ({"truncate_prompt_tokens": 0}, "/truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "/truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.0}, "/truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "/truncation_side"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "up"}, "/truncation_side"),
        ({"stream_options": {}}, "/stream_options"),
        ({"messages": []}, "/messages"),
    ],
)
def test_a_bad_request_points_at_the_field_to_blame(fields: dict[str, Any], param: str) -> None:
    assert refused(body(**fields)).param == param


def test_an_unknown_field_is_refused_with_the_nearest_known_name_or_recorded() -> None:
    assert "'truncate_prompt_tokens'" in refused(body(truncate_prompt_token=1)).message
    request = decode_completion(body(truncate_prompt_token=1), unknown_fields=UnknownFields.RECORD)
    assert request.recorded == {"truncate_prompt_token": "1"}


@pytest.mark.parametrize(
    ("fields", "truncation"),
    [
        ({}, None),
        ({"truncate_prompt_tokens": -1}, Truncation(num_tokens=None)),
        ({"truncate_prompt_tokens": 3}, Truncation(num_tokens=3)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, Truncation(num_tokens=3)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, Truncation(num_tokens=3, keeps_end=False)),
    ],
)
def test_a_truncation_arrives(fields: dict[str, Any], truncation: Truncation | None) -> None:
    assert decode_completion(body(**fields)).truncation == truncation


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_GRAMMAR = Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type":"object","properties":{"a":{"type":"integer"}}}')
EBNF, LARK = 'root ::= "a" | word\nword ::= [a-z]+', 'start: "a" | "::="'
EBNF_GRAMMAR, LARK_GRAMMAR = Grammar(kind=GrammarKind.EBNF, source=EBNF), Grammar(kind=GrammarKind.LARK, source=LARK)
REGEX_GRAMMAR = Grammar(kind=GrammarKind.REGEX, source="a+")
GRAMMARS: list[tuple[dict[str, Any], Grammar, str]] = [
    ({"response_format": {"type": "json_object"}}, Grammar(kind=GrammarKind.JSON_OBJECT), "/response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        SCHEMA_GRAMMAR,
        "/response_format",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_GRAMMAR, "/structured_outputs/json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA_GRAMMAR, "/structured_outputs/json"),
    (
        {"structured_outputs": {"json_object": True, "regex": None}},
        Grammar(kind=GrammarKind.JSON_OBJECT),
        "/structured_outputs/json_object",
    ),
    ({"structured_outputs": {"regex": "a+"}}, REGEX_GRAMMAR, "/structured_outputs/regex"),
    (
        {"structured_outputs": {"choice": ["a", 'b"']}},
        Grammar(kind=GrammarKind.CHOICE, source='["a","b\\""]'),
        "/structured_outputs/choice",
    ),
    ({"structured_outputs": {"grammar": EBNF}}, EBNF_GRAMMAR, "/structured_outputs/grammar"),
    ({"structured_outputs": {"grammar": LARK}}, LARK_GRAMMAR, "/structured_outputs/grammar"),
    ({"regex": "a+", "response_format": {"type": "text"}}, REGEX_GRAMMAR, "/regex"),
    ({"ebnf": EBNF}, EBNF_GRAMMAR, "/ebnf"),
    ({"json_schema": json.dumps(SCHEMA)}, SCHEMA_GRAMMAR, "/json_schema"),
    ({"guided_json": SCHEMA}, SCHEMA_GRAMMAR, "/guided_json"),
    ({"guided_regex": "a+"}, REGEX_GRAMMAR, "/guided_regex"),
    ({"guided_choice": ["a"]}, Grammar(kind=GrammarKind.CHOICE, source='["a"]'), "/guided_choice"),
    ({"guided_grammar": LARK}, LARK_GRAMMAR, "/guided_grammar"),
]


@pytest.mark.parametrize(("fields", "grammar", "param"), GRAMMARS)
def test_each_spelling_of_a_grammar_is_that_grammar_in_both_dialects(
    fields: dict[str, Any], grammar: Grammar, param: str
) -> None:
    chat = decode_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    completion = decode_completion(body(**fields))
    for request in (chat, completion):
        assert (request.params.grammar, request.spelling.pointer(Blame(RequestPart.GRAMMAR))) == (grammar, param)


def test_an_empty_grammar_is_refused_by_its_name() -> None:
    assert refused(body(regex=" ")).message == "regex is empty."
    assert refused(body(structured_outputs={"grammar": ""})).message == "structured_outputs.grammar is empty."


def test_every_kind_of_grammar_can_be_asked_for() -> None:
    assert {grammar.kind for _, grammar, _ in GRAMMARS} == set(GrammarKind)


def test_two_grammars_are_refused_whichever_they_are() -> None:
    for number, (one, _, _) in enumerate(GRAMMARS):
        for other, _, param in GRAMMARS[number + 1 :]:
            if not one.keys() & other.keys():
                error = refused(body(**{**one, **other}))
                assert error.param in {f"/{name}" for name in (*one, *other)}, (one, other, param)
                assert "send one" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "/structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "/structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "/structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "/structured_outputs/regexp"),
        ({"structured_outputs": {"choice": []}}, "/structured_outputs/choice"),
        ({"structured_outputs": {"choice": [1]}}, "/structured_outputs/choice/0"),
        ({"structured_outputs": {"json": "[1]"}}, "/structured_outputs/json"),
        ({"structured_outputs": {"json": "{"}}, "/structured_outputs/json"),
        ({"json_schema": "x"}, "/json_schema"),
        ({"regex": ""}, "/regex"),
        ({"ebnf": " \n"}, "/ebnf"),
        ({"guided_choice": [""]}, "/guided_choice"),
        ({"guided_json": "null"}, "/guided_json"),
    ],
)
def test_a_bad_grammar_points_at_the_field_to_blame(fields: dict[str, Any], param: str) -> None:
    assert refused(body(**fields)).param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(COMPLETION_FIELDS.names), JSON, max_size=6), st.sampled_from(UnknownFields))
@example({"prompt": [[]]}, UnknownFields.REFUSE)
def test_any_json_is_taken_or_refused_with_400(fields: dict[str, Any], unknown: UnknownFields) -> None:
    error = failure_of(json.dumps({"prompt": "x", **fields}).encode(), unknown)
    assert error is None or error.status == 400
    assert error is None or error.param is None or error.param.startswith("/")


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: b'{"prompt":' + text.encode() + b"}"))
@example(b'{"prompt":"\\ud800"}')
@example(b'{"prompt":"\xff"}')
@example(b'{"prompt":' + b"[" * 100_000)
@example(b'{"prompt":[' + b"[" * 100_000 + b"]" * 100_000 + b"]}")
@example(b'{"prompt":[1,2')
@example(b'{"prompt":[ ]}')
@example(b'{"prompt":[1,]}')
@example(b'{"prompt":[' + b"1," * 50_000 + b"]}")
@example(b'{"prompt":[' + b"1," * 50_000 + b"1e3]}")
def test_any_bytes_are_taken_or_refused_with_400(raw: bytes) -> None:
    error = failure_of(raw)
    assert error is None or error.status == 400


# --- replies


def events(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]


def whole(content: bytes | Iterator[bytes]) -> bytes:
    return content if isinstance(content, bytes) else b"".join(content)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_many_prompt_ids_in_a_stream_are_written_as_few_are(num_prompts: int) -> None:
    """In the first events, and where nothing was drawn, in the last."""
    chunk = Chunk(ids=[7], logprobs=[-1.0])

    def written(prompt: "array[int]") -> tuple[list[bytes | Iterator[bytes]], list[bytes]]:
        def encoder(dialect: type[CompletionStreamEncoder] | type[StreamEncoder]) -> Any:
            options = ReplyOptions(stream=True, return_token_ids=True, include_usage=True)
            return dialect(reply_id="r", created=1, model="m", options=options, token_text=str)

        prompts = [prompt] * num_prompts
        replies = [
            ChatReply(
                id="r",
                created=1,
                model="m",
                prompt=Prompt(new_ids=prompt),
                params=SamplingParams(),
                parsed=ParsedReply(message=Message(role=Role.ASSISTANT, content="")),
                sampled=SampledTurn(
                    ids=array("i"),
                    logprobs=array("d"),
                    sampling_logprobs=None,
                    top_logprobs=None,
                    finish=Finish(reason=FinishReason.STOP),
                    weights=(),
                    num_cached_tokens=0,
                    times=None,
                ),
                usage=Usage(num_prompt=0, num_completion=0),
            )
        ] * num_prompts
        pieces = [StreamPiece(delta=ReplyDelta(), chunks=(chunk,), index=index) for index in range(num_prompts)]
        contents = [
            encoder(StreamEncoder).start(prompts[:1]),
            encoder(CompletionStreamEncoder).pieces(pieces, prompts),
            encoder(CompletionStreamEncoder).end(replies),
        ]
        return contents, [whole(content) for content in contents]

    ids = array("i", [number * 7919 % 150_000 for number in range(30_000)])
    few, few_bytes = written(array("i", [1]))
    many, many_bytes = written(ids)
    for content in few_bytes:
        as_msgspec_writes = b"".join(b"data: %b\n\n" % msgspec.json.encode(event) for event in events(content))
        assert content.removesuffix(DONE) == as_msgspec_writes
    assert [type(content) for content in few] == [bytes] * 3
    assert not any(isinstance(content, bytes) for content in many)
    of_many = b'"prompt_token_ids":' + msgspec.json.encode(ids.tolist())
    assert [content.replace(b'"prompt_token_ids":[1]', of_many) for content in few_bytes] == many_bytes
    assert [content.count(b"prompt_token_ids") for content in few_bytes] == [1, num_prompts, num_prompts]


def test_in_a_stream_each_choice_has_its_own_offsets_and_its_prompts_ids_once() -> None:
    options = ReplyOptions(stream=True, logprobs=True, return_token_ids=True)
    encoder = CompletionStreamEncoder(
        reply_id="r", created=1, model="m", options=options, token_text=lambda id_: "é" * id_
    )
    prompts = [array("i", [1]), array("i", [2])]

    def piece(index: int, *ids: int) -> StreamPiece:
        chunk = Chunk(ids=ids, logprobs=[-1.0] * len(ids), top_logprobs=((TopLogprob(id=9, logprob=-2.0),),) * len(ids))
        return StreamPiece(delta=ReplyDelta(), chunks=(chunk,), index=index)

    written = [encoder.pieces([piece(0, 3, 4), piece(1, 5)], prompts), encoder.pieces([piece(0, 6)], prompts)]
    told = [event for some in written for event in events(whole(some))]
    choices = [choice for event in told for choice in event["choices"]]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 3], [0], [7]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1], [2], None]
    assert choices[1]["logprobs"]["top_logprobs"] == [{"é" * 5: -1.0, "é" * 9: -2.0}]
    assert encoder.pieces([StreamPiece(delta=ReplyDelta())], prompts) == b""
