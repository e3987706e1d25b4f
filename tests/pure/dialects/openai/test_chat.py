"""OpenAI chat requests: what is taken, what is refused, and that whoever is to blame is pointed at."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from stenograph.core.chat import ChatRequest, KnownMessages, TextPrint, ToolMode
from stenograph.core.errors import InvalidJson, InvalidRequest, StenographError, UnrenderableMessage
from stenograph.core.messages import Role
from stenograph.core.types import GrammarKind
from stenograph.dialects.common.sampling import request_json
from stenograph.dialects.common.sampling_fields import Rule
from stenograph.dialects.openai.chat import _LATEST, MAX_KNOWN, _beside_of, decode_chat
from stenograph.dialects.openai.chat_fields import CHAT_FIELDS
from stenograph.dialects.openai.spelling import CHAT
from stenograph.dialects.settings import UnknownFields

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def refused(raw: bytes, kind: type[StenographError] = InvalidRequest) -> StenographError:
    with pytest.raises(kind) as caught:
        decode_chat(raw)
    return caught.value


def failure_of(raw: bytes) -> StenographError | None:
    try:
        decode_chat(raw)
    except StenographError as error:
        return error
    return None


def test_every_sampling_parameter_arrives() -> None:
    request = decode_chat(
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=7,
            stop=["a", "b"],
            stop_token_ids=[1],
            ignore_eos=True,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            logit_bias={"5": -100, "3": 1.5},
            max_completion_tokens=9,
            logprobs=True,
            top_logprobs=3,
        )
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.1, 7)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("a", "b"), (1,), True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert params.logit_bias == ((3, 1.5), (5, -100.0))
    assert (params.max_tokens, params.num_top_logprobs, request.reply.logprobs) == (9, 3, True)


def test_null_means_absent_for_every_field() -> None:
    nulls = {name: None for name in CHAT_FIELDS.names if name != "messages"}
    assert decode_chat(body(**nulls)) == decode_chat(body())


def test_messages_of_every_role_arrive() -> None:
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}
    request = decode_chat(
        json.dumps(
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "developer", "content": "d"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
                ]
            }
        ).encode()
    )
    assert [message.role for message in request.messages] == list(Role)
    assert request.messages[2].content == "ab"
    assert request.messages[3].reasoning == "why"
    assert request.messages[3].tool_calls[0].arguments == "{}"
    assert request.messages[4].tool_call_id == "c1"


def test_recorded_fields_are_kept_as_they_came_and_change_nothing_else() -> None:
    request = decode_chat(body(user="u", metadata={"a": 1}, store=None))
    assert request.recorded == {"user": '"u"', "metadata": '{"a": 1}'}
    assert json.loads(request_json("/", request.model, request.recorded, request.sent))["recorded"] == {
        "user": "u",
        "metadata": {"a": 1},
    }
    assert request.params == decode_chat(body()).params


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS.refused))
def test_a_refused_field_is_refused_with_its_reason(name: str) -> None:
    error = refused(body(**{name: "asked for"}))
    assert error.param == f"/{name}"
    assert CHAT_FIELDS.refused[name] in error.message


def test_every_field_has_exactly_one_rule() -> None:
    assert {CHAT_FIELDS.rule_of(name) for name in CHAT_FIELDS.names} == set(Rule)
    assert set(CHAT_FIELDS.refused) <= set(CHAT_FIELDS.names)


def test_an_unknown_field_is_refused_with_the_nearest_known_name() -> None:
    error = refused(body(temprature=1))
    assert error.param == "/temprature"
    assert "'temperature'" in error.message


def test_an_unknown_field_is_recorded_where_the_server_says_so() -> None:
    request = decode_chat(body(my_extra={"x": [1, 2]}), unknown_fields=UnknownFields.RECORD)
    assert json.loads(request.recorded["my_extra"]) == {"x": [1, 2]}


SCHEMA_FORMAT = {"name": "x", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"messages": [{"role": "user", "content": 3}]}', "/messages/0/content"),
        (b'{"messages": [{"content": "x"}]}', "/messages/0/role"),
        (b'{"messages": [{"role": "user", "content": "x", "wat": 1}]}', "/messages/0/wat"),
        (b'{"messages": "x"}', "/messages"),
        (b'{"messages": []}', "/messages"),
        (b"{}", "/messages"),
        (b"[]", None),
        (body(temperature="hot"), "/temperature"),
        (body(temperature=-1), "/temperature"),
        (body(top_p=0), "/top_p"),
        (body(max_tokens=0), "/max_tokens"),
        (body(max_tokens=1.5), "/max_tokens"),
        (body(max_tokens=True), "/max_tokens"),
        (body(max_tokens=2, max_completion_tokens=3), "/max_completion_tokens"),
        (body(n=2), "/n"),
        (body(seed=2**70), "/seed"),
        (body(stop=[""]), "/stop"),
        (body(stop=["x"] * 65), "/stop"),
        (body(logit_bias={"x": 1}), "/logit_bias"),
        (body(logit_bias={"1": 1000}), "/logit_bias"),
        (body(stop_token_ids=[10**30]), "/stop_token_ids"),
        (body(repetition_penalty=1e-310), "/repetition_penalty"),
        (body(top_logprobs=2), "/top_logprobs"),
        (body(logprobs=True, top_logprobs=21), "/top_logprobs"),
        (body(stream_options={"include_usage": True}), "/stream_options"),
        (body(tool_choice="required"), "/tool_choice"),
        (body(tool_choice="maybe", tools=[TOOL]), "/tool_choice"),
        (
            body(tool_choice={"type": "function", "function": {"name": "no"}}, tools=[TOOL]),
            "/tool_choice/function/name",
        ),
        (body(response_format={"type": "xml"}), "/response_format/type"),
        (body(response_format={"type": "json_schema"}), "/response_format/json_schema"),
        (body(response_format={"type": "json_object", "json_schema": SCHEMA_FORMAT}), "/response_format/json_schema"),
        (body(response_format={"type": "text", "json_schema": SCHEMA_FORMAT}), "/response_format/json_schema"),
        (body(chat_template_kwargs={"messages": 1}), "/chat_template_kwargs/messages"),
        (body(messages=[{"role": "robot", "content": "x"}]), "/messages/0/role"),
        (body(messages=[{"role": "user"}]), "/messages/0/content"),
        (body(messages=[{"role": "tool", "content": "x"}]), "/messages/0/tool_call_id"),
        (body(messages=[{**USER, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]), "/messages/0/tool_calls"),
    ],
)
def test_a_bad_request_points_at_the_field_to_blame(raw: bytes, param: str | None) -> None:
    assert refused(raw).param == param


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (
            body(messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]),
            "/messages/0/content/0/type",
        ),
        (body(tools=[{"type": "web_search"}]), "/tools/0/type"),
    ],
)
def test_what_no_template_can_show_is_unrenderable(raw: bytes, param: str) -> None:
    assert refused(raw, UnrenderableMessage).param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "user": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        body() + b"x",
        b"[" * 100_000,
        b'{"temperature": NaN}',
    ],
)
def test_what_is_not_json_in_utf8_is_refused_also_in_fields_that_are_skipped(raw: bytes) -> None:
    with pytest.raises((InvalidJson, InvalidRequest)) as caught:
        decode_chat(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param", "known"),
    [
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "/tool_choice/type", "'function'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "/tool_choice/type", "'function'"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "/response_format/type", "json_schema"),
    ],
)
def test_what_is_of_a_type_that_is_not_known_is_refused_for_that(
    fields: dict[str, Any], param: str, known: str
) -> None:
    error = refused(body(tools=[TOOL], **fields))
    assert error.param == param
    assert known in error.message


def test_what_a_type_has_of_its_own_is_blamed_where_the_type_is_known() -> None:
    assert refused(body(tools=[TOOL], tool_choice={"type": "function"})).param == "/tool_choice/function"
    assert refused(body(tool_choice={"custom": 1})).param == "/tool_choice/custom"
    assert refused(body(response_format={"type": "text", "x": 1})).param == "/response_format/x"


def test_an_empty_stop_string_is_refused_in_words() -> None:
    for stop in ("", ["a", ""]):
        assert refused(body(stop=stop)).message == "A stop string is empty: it must have at least one character."


def test_tool_choices_and_formats_arrive() -> None:
    named = decode_chat(body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}}))
    assert (named.tool_choice.mode, named.tool_choice.name) == (ToolMode.NAMED, "add")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formatted = decode_chat(
        body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    )
    assert formatted.params.grammar is not None
    assert formatted.params.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(formatted.params.grammar.source) == schema


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(CHAT_FIELDS.names), JSON, max_size=6))
@example({"messages": [{"role": "user", "content": "x", "tool_calls": []}]})
def test_any_json_is_taken_or_refused_with_400(fields: dict[str, Any]) -> None:
    raw = json.dumps({"messages": [USER], **fields}).encode()
    error = failure_of(raw)
    assert error is None or error.status == 400
    assert error is None or error.param is None or error.param.startswith("/")


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused_with_400(raw: bytes) -> None:
    with pytest.raises(StenographError) as caught:
        decode_chat(raw)
    assert caught.value.status == 400


def with_message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


def with_part(**part: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}


def with_assistant(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "assistant", **fields}, {"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (with_part(type="video_url", video_url={"url": "x"}), "unrenderable_message", "/messages/0/content/1/type"),
        (with_part(type="image", source={"a": 1}), "unrenderable_message", "/messages/0/content/1/type"),
        (with_part(type="text", text="b", txt=1), "invalid_request", "/messages/0/content/1/txt"),
        (with_part(type="text", text="b", image_url="x"), "invalid_request", "/messages/0/content/1/image_url"),
        (
            {**with_message(), "tools": [{"type": "custom", "custom": {"name": "c"}}]},
            "unrenderable_message",
            "/tools/0/type",
        ),
        (
            {**with_message(), "tools": [{"type": "web_search", "external_web_access": True}]},
            "unrenderable_message",
            "/tools/0/type",
        ),
        (
            with_assistant(tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "c", "input": ""}}]),
            "unrenderable_message",
            "/messages/0/tool_calls/0/type",
        ),
        (with_message(images=["x"]), "unrenderable_message", "/messages/0/images"),
        (with_assistant(reasoning="a", reasoning_content="b"), "invalid_request", "/messages/0/reasoning"),
        ({**with_message(), "max_completion_tokens": 0}, "invalid_request", "/max_completion_tokens"),
        ({**with_message(), "max_tokens": 0}, "invalid_request", "/max_tokens"),
    ],
)
def test_what_is_to_blame_is_what_is_pointed_at(body: dict[str, object], code: str, param: str) -> None:
    with pytest.raises(StenographError) as caught:
        decode_chat(json.dumps(body).encode())
    assert (caught.value.code, caught.value.param) == (code, param)


def test_an_unknown_name_inside_of_a_message_is_told_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="Did you mean 'content'"):
        decode_chat(b'{"messages": [{"role": "user", "contnt": "x"}]}')


@pytest.mark.parametrize("harmless", [{"images": []}, {"images": None}])
def test_empty_decorations_are_taken(harmless: dict[str, object]) -> None:
    assert decode_chat(json.dumps(with_message(**harmless)).encode()).messages[0].content == "x"


SPACES = st.sampled_from(["", " ", "\n\t "])
CONVERSATION = st.lists(
    st.sampled_from(
        [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "é☃"}]},
            {"role": "assistant", "content": "ok"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "system", "content": "]},{["},
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "]"}]},
        ]
    ),
    min_size=1,
    max_size=6,
)


FIELDS = st.sampled_from(
    ["", '"model": "m", ', '"zzz": [{"role": "user"}], ', '"messages": [{"role": "user", "content": "twice"}], ']
)


@given(
    before=CONVERSATION,
    after=CONVERSATION,
    around=st.tuples(FIELDS, FIELDS, FIELDS),
    gap=SPACES,
    end=SPACES,
    cut=st.integers(0, 3),
    unknown_fields=st.sampled_from(UnknownFields),
)
def test_what_was_read_before_is_not_read_again_and_nothing_else_is_skipped(
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    around: tuple[str, str, str],
    gap: str,
    end: str,
    cut: int,
    unknown_fields: UnknownFields,
) -> None:
    head, other_head, tail = around

    def body_of(messages: list[dict[str, Any]], head: str) -> bytes:
        text = f",{gap}".join(json.dumps(message, ensure_ascii=False) for message in messages)
        return f'{{{head}"messages": [{text}{end}], {tail}"temperature": 0.5}}'.encode()

    def outcome(body: bytes, *known: KnownMessages) -> ChatRequest | tuple[str, str | None]:
        try:
            return decode_chat(body, unknown_fields=unknown_fields, known=known)
        except StenographError as error:
            return error.message, error.param

    first = outcome(body_of(before, head))
    assume(isinstance(first, ChatRequest))
    assert isinstance(first, ChatRequest)
    assert first.text_print is not None
    known = KnownMessages(
        dialect=CHAT,
        text_print=first.text_print,
        list_start=first.list_start,
        messages=first.messages,
        system_blocks=first.system_blocks,
    )
    whole = body_of([*before[: len(before) - cut], *after], other_head)
    plain, quick = outcome(whole), outcome(whole, known)
    assert (replace(quick, known=None) if isinstance(quick, ChatRequest) else quick) == plain
    if isinstance(quick, ChatRequest) and not cut and head == other_head and "messages" not in tail:
        assert quick.known is known


@given(text=st.binary(max_size=60), cut=st.integers(0, 60), more=st.binary(max_size=20))
def test_a_print_that_goes_on_is_that_of_the_whole(text: bytes, cut: int, more: bytes) -> None:
    whole = TextPrint().then(text)
    assert TextPrint().then(text[:cut]).then(memoryview(text)[cut:]) == whole
    assert whole.begins(text + more)
    assert whole.begins(more) == more.startswith(text)


@pytest.mark.parametrize("more", ["", ",", ' , {"role": "user"}', ', {"role": "user", "content": "x"}], "a": ["b"'])
def test_a_body_that_ends_as_another_did_reads_as_if_it_were_the_first(more: str) -> None:
    start = '{"messages": [{"role": "user", "content": "hi"}'
    first = decode_chat(f"{start}]}}".encode())
    assert first.text_print is not None
    known = KnownMessages(dialect=CHAT, text_print=first.text_print, list_start=13, messages=first.messages)

    def outcome(*known: KnownMessages) -> object:
        try:
            return replace(decode_chat(f"{start}{more}]}}".encode(), known=known), known=None)
        except StenographError as error:
            return type(error), error.message, error.param

    assert outcome(known) == outcome()


def test_an_error_after_what_is_known_points_at_the_messages_place_in_the_whole() -> None:
    first = decode_chat(body(messages=[USER, USER]))
    assert first.text_print is not None
    known = KnownMessages(
        dialect=CHAT,
        text_print=first.text_print,
        list_start=first.list_start,
        messages=first.messages,
    )
    for bad, param in (
        ({"role": "user", "content": "x", "zz": 1}, "/messages/3/zz"),
        ({"role": "who", "content": "x"}, "/messages/3/role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "/messages/3/content/0/image_url/url"),
        ({"role": "user", "content": [{"type": "video", "video": {}}]}, "/messages/3/content/0/type"),
        (3, "/messages/3"),
    ):
        for at_hand in ((), (known,)):
            with pytest.raises(StenographError) as caught:
                decode_chat(body(messages=[USER, USER, USER, bad]), known=at_hand)
            assert caught.value.param == param


BESIDE = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 1, True, 3.0]),
        "max_tokens": st.sampled_from([1, 2, 0]),
        "max_completion_tokens": st.sampled_from([1, 2]),
        "tools": st.sampled_from([[TOOL], [], [{"type": "x"}]]),
        "tool_choice": st.sampled_from(["auto", "required", "none"]),
        "stream": st.booleans(),
        "chat_template_kwargs": st.sampled_from([{"a": 1}, {"a": True}, {"tools": []}]),
        "nonsense": st.just(1),
    },
)


@given(
    beside=st.lists(BESIDE, min_size=1, max_size=2),
    messages=st.lists(st.sampled_from([[USER], [], [{"role": "x"}], 3]), min_size=2, max_size=3),
    first=st.booleans(),
)
def test_fields_that_were_read_in_another_request_read_as_if_they_were_not(
    beside: list[dict[str, Any]], messages: list[Any], first: bool
) -> None:
    bodies = [
        json.dumps({"messages": said, **fields} if first else {**fields, "messages": said}).encode()
        for said in messages
        for fields in beside
    ]

    def outcome(raw: bytes) -> object:
        try:
            request = decode_chat(raw)
        except StenographError as error:
            return type(error), error.message, error.param
        return request, repr((request.params, request.template_kwargs, request.recorded, request.sent))

    fresh: list[object] = []
    for raw in bodies:
        _beside_of.cache_clear()
        fresh.append(outcome(raw))
    assert [outcome(raw) for raw in bodies] == fresh


def test_bodies_are_decoded_on_several_threads_whose_fields_differ() -> None:
    """Large bodies are decoded on workers, so what is kept of the latest ones changes on several threads."""
    bodies = [
        b'{"model":"m%d","messages":[{"role":"user","content":"hi"}]}' % number for number in range(3 * MAX_KNOWN)
    ]

    def decode(first: int) -> None:
        for number in range(3000):
            index = (first + number) % len(bodies)
            assert decode_chat(bodies[index]).model == f"m{index}"

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(decode, range(0, len(bodies), len(bodies) // 4)))
    finally:
        sys.setswitchinterval(before)
    assert len(_LATEST) < MAX_KNOWN + 4
