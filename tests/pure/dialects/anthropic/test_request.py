"""Requests to Anthropic's Messages: what becomes of each block, what is refused, and that the blame points at it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, ToolMode
from stenograph.core.errors import InvalidJson, InvalidRequest, StenographError, UnrenderableMessage
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.types import GrammarKind
from stenograph.dialects.anthropic.blocks import TOOL_REFERENCE
from stenograph.dialects.anthropic.fields import MESSAGES_FIELDS
from stenograph.dialects.anthropic.request import DEFERRED_TOOL, decode_messages
from stenograph.dialects.anthropic.spelling import signature_of, signed_request
from stenograph.dialects.common.json_bodies import MAX_MESSAGES, MAX_PARTS, MAX_REST_BYTES
from stenograph.dialects.common.sampling_fields import Rule
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.settings import UnknownFields

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add.", "input_schema": SCHEMA}


def body(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"max_tokens": 9, "messages": messages or [USER], **fields}).encode()


def failure_of(raw: bytes) -> StenographError | None:
    try:
        decode_messages(raw)
    except StenographError as error:
        return error
    return None


def refused(raw: bytes, kind: type[StenographError] = InvalidRequest) -> StenographError:
    with pytest.raises(kind) as caught:
        decode_messages(raw)
    return caught.value


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(call: str, content: Any = "r", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def use(call: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "add", "input": arguments}


def test_each_block_has_its_place_among_the_messages() -> None:
    request = decode_messages(
        body(
            {"role": "user", "content": [text("a", cache_control={"type": "ephemeral"}), text("b", citations=None)]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t1 ", "signature": "s"},
                    {"type": "thinking", "thinking": "t2", "signature": "s"},
                    text("c"),
                    use("1", a=1),
                    {**use("2"), "caller": None, "toolset_name": None},
                ],
            },
            {"role": "user", "content": [text("x"), result("1"), result("2", [text("p"), text("q")]), text("y")]},
            {"role": "system", "content": [text("late")]},
            system=[text("one"), text("two")],
        )
    )
    assert request.messages == (
        Message(role=Role.SYSTEM, content="one\n\ntwo"),
        Message(role=Role.USER, content="ab"),
        Message(
            role=Role.ASSISTANT,
            content="c",
            reasoning="t1 t2",
            tool_calls=(
                ToolCall(id="1", name="add", arguments='{"a": 1}'),
                ToolCall(id="2", name="add", arguments="{}"),
            ),
        ),
        Message(role=Role.USER, content="x"),
        Message(role=Role.TOOL, content="r", tool_call_id="1"),
        Message(role=Role.TOOL, content="pq", tool_call_id="2"),
        Message(role=Role.USER, content="y"),
        Message(role=Role.SYSTEM, content="late"),
    )
    pointers = [request.spelling.pointer(Blame(RequestPart.MESSAGES, i, ("content",))) for i in range(8)]
    assert pointers == [
        "/system",
        "/messages/0/content",
        "/messages/1/content",
        "/messages/2/content/0/content",
        "/messages/2/content/1/content",
        "/messages/2/content/2/content",
        "/messages/2/content/3/content",
        "/messages/3/content",
    ]
    assert request.spelling.pointer(Blame(RequestPart.MESSAGES, 0, ("content", 1))) == "/system/1"
    assert request.system_blocks is not None
    assert request.system_blocks.texts == ("one", "two")
    assert request.spelling.pointer(Blame(RequestPart.MESSAGES, 4, ("role",))) == "/messages/2/content/1/type"


def test_a_string_is_one_text_block() -> None:
    one = decode_messages(body(USER, system="s"))
    assert one.messages == decode_messages(body({"role": "user", "content": [text("hi")]}, system=[text("s")])).messages


def test_empty_thinking_is_not_sent_back() -> None:
    reply = {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "s"}, text("a")]}
    assert decode_messages(body(USER, reply, USER)).messages[1] == Message(role=Role.ASSISTANT, content="a")


def test_a_signature_of_ours_names_its_request_and_another_s_names_none() -> None:
    ours, other = signature_of("abc"), "c2ln0001"
    thoughts = [{"type": "thinking", "thinking": "", "signature": one} for one in (ours, other, "é", "stg1." * 100)]
    request = decode_messages(body(USER, {"role": "assistant", "content": thoughts}, USER))
    assert request.replies_of == {"abc"}


@given(st.text(max_size=300))
def test_any_signature_can_be_read(signature: str) -> None:
    assert signed_request(signature) is None or signature_of(signed_request(signature) or "") != ""


def test_the_same_tool_has_the_same_text_as_in_a_chat() -> None:
    function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
    chat = json.dumps({"messages": [USER], "tools": [{"type": "function", "function": function}]}).encode()
    assert decode_messages(body(tools=[{**TOOL, "type": "custom", "strict": True}])).tools == decode_chat(chat).tools


def test_choices_of_tools() -> None:
    def chosen(choice: Any) -> tuple[ToolMode, str | None, bool]:
        request = decode_messages(body(tools=[TOOL], tool_choice=choice))
        return request.tool_choice.mode, request.tool_choice.name, request.parallel_tool_calls

    assert chosen({"type": "auto"}) == (ToolMode.AUTO, None, True)
    assert chosen({"type": "any", "disable_parallel_tool_use": True}) == (ToolMode.REQUIRED, None, False)
    assert chosen({"type": "tool", "name": "add"}) == (ToolMode.NAMED, "add", True)
    assert chosen({"type": "none"}) == (ToolMode.NONE, None, True)


def test_sampling_arrives_under_our_names_and_is_kept_under_the_client_s() -> None:
    request = decode_messages(
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            seed=7,
            stop_sequences=["a"],
            stop_token_ids=[1],
            ignore_eos=True,
            logit_bias={"5": 1},
            presence_penalty=0.5,
            thinking={"type": "disabled"},
            output_config={"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}},
        )
    )
    params = request.params
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 4, ("a",), (1,))
    assert (params.max_tokens, params.seed, params.presence_penalty) == (9, 7, 0.5)
    assert params.grammar is not None
    assert (params.grammar.kind, json.loads(params.grammar.source)) == (GrammarKind.JSON_SCHEMA, SCHEMA)
    assert (request.thinks, request.effort) == (False, "max")
    assert {"stop", "max_tokens", "temperature"} <= request.said
    assert (request.sent["stop_sequences"], json.loads(request.sent["thinking"])) == ('["a"]', {"type": "disabled"})
    assert request.spelling.pointer(Blame(RequestPart.SAMPLING, path=("stop", 0))) == "/stop_sequences/0"
    assert request.spelling.pointer(Blame(RequestPart.GRAMMAR)) == "/output_config/format"


def test_a_deferred_tool_is_callable_from_its_reference_on_and_never_in_the_list() -> None:
    late = {**TOOL, "name": "late", "defer_loading": True}
    before = decode_messages(body(tools=[TOOL, late]))
    assert [[tool.name for tool in some] for some in (before.tools, before.late_tools)] == [["add"], []]
    assert refused(body(tools=[TOOL, late], tool_choice={"type": "tool", "name": "late"})).param == "/tool_choice/name"
    refer = [text("found:"), {"type": "tool_reference", "tool_name": "late"}, text("use it")]
    told = (USER, {"role": "assistant", "content": [use("1")]}, {"role": "user", "content": [result("1", refer)]})
    after = decode_messages(body(*told, tools=[TOOL, late], tool_choice={"type": "tool", "name": "late"}))
    (tool,) = after.late_tools
    assert (tool.name, [one.name for one in after.tools]) == ("late", ["add"])
    assert after.messages[-1].content == f"found:\n{tool.json}\nuse it"
    assert "\n" not in tool.json
    assert [one.rule for one in after.rewrites] == [DEFERRED_TOOL, TOOL_REFERENCE]
    assert (after.rewrites[1].where, after.rewrites[1].message) == ("/messages/2/content/0/content/1", 2)
    unknown = [{"type": "tool_reference", "tool_name": "lates"}]
    error = refused(body(*told[:2], {"role": "user", "content": [result("1", unknown)]}, tools=[late]))
    assert (error.param, "Did you mean 'late'?" in str(error)) == ("/messages/2/content/0/content/0/tool_name", True)


def test_errors_of_new_results_are_recorded() -> None:
    told = [
        USER,
        {"role": "assistant", "content": [use("1")]},
        {"role": "user", "content": [result("1", is_error=True)]},
    ]
    assert decode_messages(body(*told)).recorded == {"is_error": '["1"]'}
    more = [*told, {"role": "assistant", "content": "so"}, USER]
    assert decode_messages(body(*more)).recorded == {}


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"max_tokens": None}, InvalidRequest, "/max_tokens"),
        ({"max_tokens": 0}, InvalidRequest, "/max_tokens"),
        ({"messages": []}, InvalidRequest, "/messages"),
        ({"messages": [{"role": "system", "content": "s"}]}, InvalidRequest, "/messages"),
        ({"messages": [USER, {"role": "assistant", "content": "so"}]}, InvalidRequest, "/messages"),
        ({"messages": [{"role": "usr", "content": "x"}]}, InvalidRequest, "/messages/0/role"),
        ({"messages": [{"role": "user"}]}, InvalidRequest, "/messages/0/content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            UnrenderableMessage,
            "/messages/0/content/0/type",
        ),
        (
            {"messages": [{"role": "user", "content": [result("1", [{"type": "document", "source": {}}])]}]},
            UnrenderableMessage,
            "/messages/0/content/0/content/0/type",
        ),
        ({"messages": [{"role": "user", "content": [use("1")]}]}, InvalidRequest, "/messages/0/content/0/type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, InvalidRequest, "/messages/0/content/0/text"),
        ({"messages": [{"role": "system", "content": [result("1")]}]}, InvalidRequest, "/messages/0/content/0/type"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{**use("1"), "input": [1]}]}, USER]},
            InvalidRequest,
            "/messages/1/content/0/input",
        ),
        (
            {"messages": [{"role": "user", "content": [text("a", cache_contrl=1)]}]},
            InvalidRequest,
            "/messages/0/content/0/cache_contrl",
        ),
        ({"system": [{"type": "document"}]}, UnrenderableMessage, "/system/0/type"),
        ({"system": [use("1")]}, InvalidRequest, "/system/0/type"),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "w", "max_uses": 2}]},
            InvalidRequest,
            "/tools/1/type",
        ),
        ({"tools": [{"name": "f"}]}, InvalidRequest, "/tools/0/input_schema"),
        ({"tool_choice": {"type": "any"}}, InvalidRequest, "/tool_choice"),
        ({"tool_choice": {"type": "required"}}, InvalidRequest, "/tool_choice/type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "ad"}}, InvalidRequest, "/tool_choice/name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "add"}}, InvalidRequest, "/tool_choice/name"),
        ({"stop_sequences": [""]}, InvalidRequest, "/stop_sequences"),
        ({"temperature": -1}, InvalidRequest, "/temperature"),
        ({"thinking": {"type": "sometimes"}}, InvalidRequest, "/thinking/type"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            InvalidRequest,
            "/context_management/edits/0",
        ),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]
                }
            },
            InvalidRequest,
            "/context_management/edits/0",
        ),
        ({"mcp_servers": [{}]}, InvalidRequest, "/mcp_servers"),
        ({"container": "c"}, InvalidRequest, "/container"),
        ({"rid": "r"}, InvalidRequest, "/rid"),
        ({"max_token": 3}, InvalidRequest, "/max_token"),
        ({"chat_template_kwargs": {"tools": []}}, InvalidRequest, "/chat_template_kwargs/tools"),
    ],
)
def test_what_is_refused_is_pointed_at(fields: dict[str, Any], kind: type[StenographError], param: str) -> None:
    error = refused(body(**fields), kind)
    assert (type(error), error.param) == (kind, param)


def test_a_tool_of_the_vendor_s_own_is_refused_in_the_words_that_clients_act_on() -> None:
    error = refused(body(tools=[{"type": "bash_20250124", "name": "bash"}]))
    words = "Input tag 'bash_20250124' found using 'type' does not match any of the expected tags: 'custom'"
    assert words in str(error)


@pytest.mark.parametrize("name", ["mcp_servers", "container", "fallbacks", "compaction", "thread", "n", "rid"])
def test_null_is_absent(name: str) -> None:
    assert failure_of(body(**{name: None})) is None


def test_recorded_fields_are_kept_and_unknown_ones_if_they_may_be() -> None:
    names = [name for name in MESSAGES_FIELDS.names if MESSAGES_FIELDS.rule_of(name) is Rule.RECORDED]
    request = decode_messages(body(**{name: {"x": 1} for name in names}))
    assert request.recorded == dict.fromkeys(names, '{"x": 1}')
    assert decode_messages(body(wat=[1]), unknown_fields=UnknownFields.RECORD).recorded == {"wat": "[1]"}


def test_only_counting_needs_no_max_tokens_and_may_end_with_a_reply() -> None:
    raw = json.dumps({"messages": [USER, {"role": "assistant", "content": "so"}]}).encode()
    assert len(decode_messages(raw, only_counts=True).messages) == 2


def test_sizes_are_limited_before_anything_is_made() -> None:
    many = [text("x")] * (MAX_PARTS + 1)
    assert refused(body({"role": "user", "content": many})).param == "/messages/0/content"
    assert refused(body({"role": "user", "content": [result("1", many)]})).param == "/messages/0/content"
    assert refused(body(*[USER] * (MAX_MESSAGES + 1))).param == "/messages"
    assert "Beside its messages" in str(refused(body(system="x" * (MAX_REST_BYTES + 1))))


# --- properties -----------------------------------------------------------------------------------------------------

WORDS = st.text(alphabet="ab \n", max_size=6)
CALLS = st.builds(lambda call, number: use(call, a=number), st.sampled_from(["1", "2", "3"]), st.integers(0, 9))
THOUGHTS = st.builds(lambda said: {"type": "thinking", "thinking": said, "signature": "s"}, WORDS)
TEXTS = st.builds(text, WORDS)
REFERENCES = st.just({"type": "tool_reference", "tool_name": "late"})
RESULTS = st.builds(
    result, st.sampled_from(["1", "2", "3"]), st.one_of(WORDS, st.lists(st.one_of(TEXTS, REFERENCES), max_size=3))
)
USERS = st.builds(
    lambda content: {"role": "user", "content": content},
    st.one_of(WORDS, st.lists(st.one_of(TEXTS, RESULTS), max_size=4)),
)
SYSTEMS = st.builds(
    lambda content: {"role": "system", "content": content}, st.one_of(WORDS, st.lists(TEXTS, max_size=2))
)
REPLIES = st.builds(
    lambda content: {"role": "assistant", "content": content},
    st.one_of(WORDS, st.lists(st.one_of(TEXTS, THOUGHTS, CALLS), max_size=4)),
)
CONVERSATIONS = st.lists(st.one_of(USERS, SYSTEMS, REPLIES), min_size=1, max_size=8)
TOOLS = [TOOL, {**TOOL, "name": "late", "defer_loading": True}]


def read(messages: list[Any], system: str | None) -> ChatRequest:
    raw = json.dumps({"messages": messages, "system": system, "tools": TOOLS}).encode()
    return decode_messages(raw, only_counts=True)


@given(CONVERSATIONS, st.one_of(st.none(), WORDS))
def test_what_stands_before_a_reply_maps_the_same_whatever_follows_it(
    messages: list[dict[str, Any]], system: str | None
) -> None:
    if all(message["role"] == "system" for message in messages):
        return
    whole = read(messages, system)
    for end in range(1, len(messages) + 1):
        is_before_reply = end == len(messages) or messages[end]["role"] == "assistant"
        if is_before_reply and any(message["role"] != "system" for message in messages[:end]):
            part = read(messages[:end], system)
            assert whole.messages[: len(part.messages)] == part.messages
            assert len(part.spelling.places) == len(part.messages)  # type: ignore[attr-defined]


@given(st.binary(max_size=200))
@example(b"")
@example(b"[]")
@example(b'{"messages": [{}], "max_tokens": 1}')
def test_garbage_is_never_more_than_a_400(raw: bytes) -> None:
    error = failure_of(raw)
    assert isinstance(error, InvalidJson | InvalidRequest | UnrenderableMessage)


@given(st.data())
def test_a_damaged_request_is_never_more_than_a_400(data: st.DataObject) -> None:
    messages = data.draw(CONVERSATIONS)
    raw = bytearray(body(*messages, system="s", tools=TOOLS, tool_choice={"type": "auto"}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    error = failure_of(bytes(raw))
    assert error is None or error.status == 400


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), WORDS),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from(MESSAGES_FIELDS.names), JSON)
def test_any_value_of_any_field_is_taken_or_a_400(name: str, value: Any) -> None:
    error = failure_of(msgspec.json.encode({"max_tokens": 9, "messages": [USER], name: value}))
    assert error is None or error.status == 400
