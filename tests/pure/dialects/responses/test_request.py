"""Requests to Responses: which messages items become, what is taken, what is refused, and where the blame points."""

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, PastLine, ToolMode
from stenograph.core.errors import (
    InvalidJson,
    InvalidRequest,
    PreviousResponseNotFound,
    StenographError,
    UnrenderableMessage,
)
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.types import GrammarKind
from stenograph.dialects.base import Incoming
from stenograph.dialects.common.sampling_fields import Rule
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.responses.fields import RESPONSES_FIELDS
from stenograph.dialects.responses.ids import sealed
from stenograph.dialects.responses.reply import output_items
from stenograph.dialects.responses.request import decode_response
from stenograph.dialects.responses.spelling import ReplyForm, form_of_record
from stenograph.dialects.responses.tools import CallForm
from stenograph.dialects.settings import UnknownFields
from stenograph.trajectory.matching import HarnessMatcher

FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches."}
TURN = "0123456789abcdef0123456789abcdef"


class Past:
    """Turns that a session holds, by the ids of their requests."""

    def __init__(self, lines: Mapping[str, PastLine]) -> None:
        self._lines = lines

    def line_of(self, request_id: str) -> PastLine | None:
        return self._lines.get(request_id)

    def reply_of(self, request_id: str) -> Message | None:
        line = self._lines.get(request_id)
        return None if line is None else line.messages[-1]


def body(items: Any = "hi", **fields: Any) -> bytes:
    return json.dumps({"input": items, **fields}).encode()


def decode(items: Any = "hi", *, past: Past | None = None, **fields: Any) -> ChatRequest:
    return decode_response(Incoming(body=body(items, **fields), past=past)).request


def refused(
    items: Any = "hi", kind: type[StenographError] = InvalidRequest, *, past: Past | None = None, **fields: Any
) -> StenographError:
    with pytest.raises(kind) as caught:
        decode(items, past=past, **fields)
    return caught.value


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def said(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts, **more}


# --- items to messages ----------------------------------------------------------------------------------------------


def test_a_string_is_one_user_message_and_instructions_come_first() -> None:
    assert decode("hi", instructions="Be brief.").messages == (
        Message(role=Role.SYSTEM, content="Be brief."),
        user("hi"),
    )


def test_items_of_a_reply_are_one_message() -> None:
    items = [
        said("user", "hi"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        said("assistant", "So", "!"),
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "list", "namespace": "fs", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "text\n"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "done"}]},
    ]
    assert decode(items).messages == (
        user("hi"),
        Message(
            role=Role.ASSISTANT,
            content="So!",
            reasoning="Hm",
            tool_calls=(
                ToolCall(id="c1", name="add", arguments='{"a": 1}'),
                ToolCall(id="c2", name="fs__list", arguments="{}"),
                ToolCall(id="c3", name="patch", arguments='{"input":"text\\n"}'),
            ),
        ),
        Message(role=Role.TOOL, content="2", tool_call_id="c1"),
        Message(role=Role.TOOL, content="done", tool_call_id="c3"),
    )


def test_reasoning_begins_a_new_message_so_that_appended_items_do_not_change_what_came_before() -> None:
    broken = {"type": "reasoning", "id": f"rs_{TURN}", "summary": [], "content": None}
    again = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Better"}]}
    messages = decode([said("user", "hi"), broken, again, said("assistant", "Yes")]).messages
    assert messages == (
        user("hi"),
        Message(role=Role.ASSISTANT),
        Message(role=Role.ASSISTANT, content="Yes", reasoning="Better"),
    )


def test_items_that_are_known_to_be_of_two_turns_are_two_messages_and_those_of_one_turn_one() -> None:
    other = TURN[::-1]
    of_one = [said("assistant", "a", id=f"msg_{TURN}"), {"type": "reasoning", "id": f"rs_{TURN}_1", "summary": []}]
    assert len(decode([*of_one, said("assistant", "b", id=f"msg_{other}")]).messages) == 2
    late = {"type": "reasoning", "id": f"rs_{TURN}_1", "content": [{"type": "reasoning_text", "text": "\n\nB"}]}
    first = {"type": "reasoning", "id": f"rs_{TURN}", "content": [{"type": "reasoning_text", "text": "A"}]}
    (message,) = decode([first, of_one[0], late]).messages
    assert message == Message(role=Role.ASSISTANT, content="a", reasoning="A\n\nB")


def test_a_late_developer_stands_where_it_is_as_a_system_message() -> None:
    items = [said("developer", "a"), said("system", "b"), said("user", "c"), said("developer", "d")]
    roles = [message.role for message in decode(items).messages]
    assert roles == [Role.DEVELOPER, Role.SYSTEM, Role.USER, Role.SYSTEM]


def test_a_bare_message_needs_no_type() -> None:
    assert decode([{"role": "user", "content": "hi"}]).messages == (user("hi"),)


@pytest.mark.parametrize(
    ("item", "kind", "param"),
    [
        ({"role": "user", "content": [{"type": "input_file"}]}, UnrenderableMessage, "/content/0/type"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, UnrenderableMessage, "/content/0/type"),
        ({"type": "message", "role": "use", "content": "x"}, InvalidRequest, "/role"),
        ({"type": "message", "role": "user", "content": "x", "statuss": 1}, InvalidRequest, "/statuss"),
        ({"role": "user", "content": [{"type": "input_text", "text": 1}]}, InvalidRequest, "/content/0/text"),
        ({"type": "local_shell_call", "call_id": "c"}, UnrenderableMessage, "/type"),
        ({"type": "web_search_call", "id": "x"}, UnrenderableMessage, "/type"),
        ({"type": "compaction", "encrypted_content": "x"}, UnrenderableMessage, "/type"),
        ({"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}, InvalidRequest, "/name"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, InvalidRequest, "/arguments"),
        ({"type": "item_reference", "id": f"msg_{TURN}"}, InvalidRequest, "/id"),
        ({}, InvalidRequest, ""),
        (7, InvalidRequest, ""),
    ],
)  # fmt: skip
def test_an_item_that_cannot_be_shown_is_refused_with_its_place(
    item: Any, kind: type[StenographError], param: str
) -> None:
    assert refused([said("user", "hi"), item], kind).param == f"/input/1{param}"


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "argumentss": "{}", "arguments": "{}"}
    assert "Did you mean 'arguments'?" in str(refused([item]))
    assert "Did you mean 'instructions'?" in str(refused(instruction="x"))


def test_an_empty_input_has_nothing_to_answer() -> None:
    assert refused([]).param == "/input"


# --- what a session holds -------------------------------------------------------------------------------------------

REPLY = Message(
    role=Role.ASSISTANT, content="So", reasoning="Hm", tool_calls=(ToolCall(id="c1", name="add", arguments="{}"),)
)


def past(**fields: Any) -> Past:
    before = decode_response(Incoming(body=body("hi", **fields)))
    return Past({TURN: PastLine(messages=(*before.request.messages, REPLY), request_json=before.request_json)})


def test_a_previous_response_brings_its_line_but_not_its_instructions() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    tool = Message(role=Role.TOOL, content="2", tool_call_id="c1")
    for fields in ({}, {"instructions": "Be brief."}):
        request = decode([result], past=past(**fields), previous_response_id=f"resp_{TURN}", instructions="Other.")
        assert request.messages == (Message(role=Role.SYSTEM, content="Other."), user("hi"), REPLY, tool)
    assert decode([result], past=past(), previous_response_id=f"resp_{TURN}").messages == (user("hi"), REPLY, tool)


def test_a_system_item_is_inherited() -> None:
    first = decode_response(Incoming(body=body([said("system", "Be brief."), said("user", "hi")])))
    line = PastLine(messages=(*first.request.messages, REPLY), request_json=first.request_json)
    request = decode("on", past=Past({TURN: line}), previous_response_id=f"resp_{TURN}")
    assert request.messages[0] == Message(role=Role.SYSTEM, content="Be brief.")


@pytest.mark.parametrize("named", ["resp_0001", f"resp_{TURN[::-1]}", "", f"resp_{TURN}0"])
def test_an_unknown_previous_response_is_refused_with_its_own_code(named: str) -> None:
    error = refused(kind=PreviousResponseNotFound, past=past(), previous_response_id=named)
    assert (error.param, error.code, error.status) == ("/previous_response_id", "previous_response_not_found", 400)


def test_without_a_session_there_is_no_previous_response() -> None:
    assert refused(previous_response_id=f"resp_{TURN}").param == "/previous_response_id"


def test_references_stand_for_the_items_of_a_reply() -> None:
    ids = [f"rs_{TURN}", f"msg_{TURN}", f"fc_{TURN}_0"]
    items = [said("user", "hi"), *({"type": "item_reference", "id": one} for one in ids), said("user", "on")]
    assert decode(items, past=past()).messages == (user("hi"), REPLY, user("on"))
    bare = [said("user", "hi"), *({"id": one} for one in ids), said("user", "on")]
    assert decode(bare, past=past()).messages == (user("hi"), REPLY, user("on"))
    for unknown in (f"fc_{TURN}_1", f"msg_{TURN[::-1]}", "msg_0001"):
        error = refused([{"type": "item_reference", "id": unknown}], past=past())
        assert error.param == "/input/0/id"


def test_references_cannot_make_a_small_request_a_huge_one() -> None:
    long = Message(role=Role.ASSISTANT, content="x" * 2**20, reasoning="y" * 2**20)

    held = Past({TURN: PastLine(messages=(user("hi"), long), request_json=b"{}")})
    for item in (
        {"type": "item_reference", "id": f"msg_{TURN}"},
        {"type": "item_reference", "id": f"rs_{TURN}"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed(TURN)},
    ):
        assert decode([item, said("user", "on")] * 30, past=held).messages
        assert (refused([item, said("user", "on")] * 33, past=held).param or "").startswith("/input/64/")


def test_encrypted_reasoning_of_ours_is_what_was_reasoned_and_of_others_nothing() -> None:
    def reasoning(encrypted: str) -> str | None:
        item = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": encrypted}
        return decode([said("user", "hi"), item, said("assistant", "So")], past=past()).messages[1].reasoning

    assert reasoning(sealed(TURN)) == "Hm"
    for other in (sealed(TURN[::-1]), "gAAAAABo", "", "é", sealed(TURN)[:-3], "x" * 5000):
        assert reasoning(other) is None


# --- tools ----------------------------------------------------------------------------------------------------------


def test_a_function_is_the_tool_that_it_is_on_a_chat() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
    assert decode(tools=[{"type": "function", **function}]).tools == decode_chat(json.dumps(chat).encode()).tools


def test_every_kind_of_tool_is_a_function_and_its_calls_go_back_in_their_own_form() -> None:
    search = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    hosted = {"type": "web_search", "external_web_access": True}
    space = {"type": "namespace", "name": "fs", "description": "Files.", "tools": [FUNCTION, CUSTOM]}
    read = decode_response(Incoming(body=body(tools=[FUNCTION, CUSTOM, space, search, hosted])))
    assert [tool.name for tool in read.request.tools] == ["add", "patch", "fs__add", "fs__patch", "tool_search"]
    assert json.loads(read.request.recorded["tools"]) == [hosted]
    assert form_of_record(read.request_json).calls == {
        "patch": CallForm(name="patch", kind="custom"),
        "fs__add": CallForm(name="add", namespace="fs"),
        "fs__patch": CallForm(name="patch", kind="custom", namespace="fs"),
        "tool_search": CallForm(name="tool_search", kind="search"),
    }


def test_tools_that_a_search_found_are_known_by_their_own_names() -> None:
    found = {"type": "namespace", "name": "mcp", "description": "", "tools": [FUNCTION]}
    items = [
        said("user", "hi"),
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "add"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [found]},
    ]
    read = decode_response(Incoming(body=body(items)))
    assert read.request.messages[1].tool_calls == (ToolCall(id="c", name="tool_search", arguments='{"query": "add"}'),)
    assert json.loads(read.request.messages[2].content or "") == [found]
    assert form_of_record(read.request_json).calls == {"mcp__add": CallForm(name="add", namespace="mcp")}
    assert [tool.name for tool in read.request.late_tools] == ["mcp__add"]
    assert decode(items, tool_choice={"type": "function", "name": "add", "namespace": "mcp"}).tool_choice.forces


def test_two_tools_of_one_name_are_refused() -> None:
    flat = {**FUNCTION, "name": "fs__add"}
    space = {"type": "namespace", "name": "fs", "tools": [FUNCTION]}
    assert refused(tools=[flat, space]).param == "/tools/1/tools/0/name"


def test_a_custom_tool_shows_its_grammar_and_a_forced_one_is_held_to_a_regex() -> None:
    regex = {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
    (tool,) = decode(tools=[regex], tool_choice={"type": "custom", "name": "patch"}).tools
    assert "[0-9]+" in tool.json
    assert "pattern" not in tool.json
    assert json.loads(tool.parameters_json)["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    lark = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
    assert "start: x" in decode(tools=[lark]).tools[0].json
    assert refused(tools=[lark], tool_choice={"type": "custom", "name": "patch"}).param == "/tool_choice/name"


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ("auto", ToolMode.AUTO, None),
        (None, ToolMode.AUTO, None),
        ("none", ToolMode.NONE, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "add"}, ToolMode.NAMED, "add"),
        ({"type": "custom", "name": "patch"}, ToolMode.NAMED, "patch"),
    ],
)
def test_a_choice_is_taken(choice: Any, mode: ToolMode, name: str | None) -> None:
    request = decode(tools=[FUNCTION, CUSTOM], tool_choice=choice)
    assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "/tool_choice"),
        ("required", "/tool_choice"),
        ({"type": "function", "name": "sub"}, "/tool_choice/name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "/tool_choice/type"),
        ({"type": "web_search"}, "/tool_choice/type"),
        ({"name": "add"}, "/tool_choice/type"),
        (7, "/tool_choice"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice: Any, param: str) -> None:
    assert refused(tools=[{"type": "web_search"}], tool_choice=choice).param == param


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "magic"}, "/tools/0/type"),
        ({"name": "f"}, "/tools/0/type"),
        ({**FUNCTION, "paramters": {}}, "/tools/0/paramters"),
        ({"type": "namespace", "name": "", "tools": []}, "/tools/0/name"),
        ({**CUSTOM, "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}, "/tools/0/format"),
        ({**CUSTOM, "format": {"type": "json"}}, "/tools/0/format/type"),
    ],
)
def test_a_tool_that_cannot_be_shown_is_refused(tool: Any, param: str) -> None:
    assert refused(kind=StenographError, tools=[tool]).param == param


# --- fields ---------------------------------------------------------------------------------------------------------


def test_fields_arrive() -> None:
    request = decode(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=9,
        seed=7,
        stop=["a"],
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        include=["message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results"],
        top_logprobs=2,
        stream=True,
        store=False,
        metadata={"a": "b"},
        client_metadata={"x": 1},
        text={"verbosity": "low"},
    )
    assert (request.params.temperature, request.params.max_tokens, request.params.stop) == (0.5, 9, ("a",))
    assert request.params.num_top_logprobs == 2
    assert request.reply.logprobs
    assert request.reply.stream
    assert request.template_kwargs == {"reasoning_effort": "low"}
    assert not request.parallel_tool_calls
    assert set(request.recorded) == {"store", "metadata", "client_metadata", "include"}
    assert {"temperature", "max_tokens", "seed"} <= request.said


def test_a_format_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    grammar = decode(text=wanted).params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == (GrammarKind.JSON_SCHEMA, schema)
    request = decode(text={"format": {"type": "json_object"}})
    assert request.params.grammar is not None
    assert request.spelling.pointer(Blame(RequestPart.GRAMMAR)) == "/text/format"
    assert decode(text={"format": {"type": "text"}}).params.grammar is None
    assert refused(text=wanted, regex="a").param == "/regex"
    assert refused(text={"format": {"type": "xml"}}).param == "/text/format/type"
    assert refused(text={"format": {"type": "json_schema", "name": "x"}}).param == "/text/format/schema"


@pytest.mark.parametrize(
    "name", [name for name in RESPONSES_FIELDS.names if RESPONSES_FIELDS.rule_of(name) is Rule.REFUSED]
)
def test_a_refused_field_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    assert refused(**{name: {"x": 1}}).param == f"/{name}"
    assert decode(**{name: None}).messages == (user("hi"),)


def test_neutral_values_are_taken() -> None:
    request = decode(background=False, truncation="disabled", context_management=[])
    assert request.recorded == {}
    assert refused(background=True).param == "/background"
    assert refused(truncation="auto").param == "/truncation"


def test_unknown_fields_are_refused_or_recorded() -> None:
    assert refused(frobnicate=1).param == "/frobnicate"
    incoming = Incoming(body=body(frobnicate=1))
    assert decode_response(incoming, unknown_fields=UnknownFields.RECORD).request.recorded == {"frobnicate": "1"}


def test_blame_points_into_the_request() -> None:
    space = {"type": "namespace", "name": "fs", "tools": [FUNCTION]}
    items = [
        said("user", "hi"),
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    pointer = decode(items, instructions="x", tools=[FUNCTION, space]).spelling.pointer
    where = RequestPart.MESSAGES
    assert pointer(Blame(where, 0, ("content",))) == "/instructions"
    assert pointer(Blame(where, 1, ("role",))) == "/input/0/role"
    assert pointer(Blame(where, 2)) == "/input/1"
    assert pointer(Blame(where, 2, ("tool_calls", 0, "arguments"))) == "/input/2"
    assert pointer(Blame(where, 3, ("content",))) == "/input/3/output"
    assert pointer(Blame(where, 9)) == "/input"
    assert pointer(Blame(RequestPart.TOOLS, 1, ("parameters",))) == "/tools/1/tools/0/parameters"
    assert pointer(Blame(RequestPart.TOOLS)) == "/tools"
    assert pointer(Blame(RequestPart.MAX_TOKENS)) == "/max_output_tokens"
    assert pointer(Blame(RequestPart.PROMPT)) == "/input"
    assert pointer(Blame(RequestPart.SAMPLING, path=("top_k",))) == "/top_k"
    assert pointer(Blame(RequestPart.TOOL_CHOICE)) == "/tool_choice"
    assert decode(max_tokens=3).spelling.pointer(Blame(RequestPart.MAX_TOKENS)) == "/max_tokens"


# --- laws -----------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
FORM = ReplyForm(
    calls={"patch": CallForm(name="patch", kind="custom"), "fs__add": CallForm(name="add", namespace="fs")},
    seals_reasoning=True,
)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    num_calls = draw(st.integers(0, 2))
    calls: list[ToolCall] = []
    for number in range(num_calls):
        name = draw(st.sampled_from(["add", "patch", "fs__add"]))
        arguments: object = {"input": draw(TEXTS)} if name == "patch" else draw(st.sampled_from([{}, {"a": 1}]))
        calls.append(ToolCall(id=f"c{number}", name=name, arguments=json.dumps(arguments)))
    content = draw(TEXTS)
    return Message(
        role=Role.ASSISTANT,
        content=None if calls and not content else content,
        reasoning=draw(st.none() | TEXTS.filter(bool)),
        tool_calls=tuple(calls),
    )


@st.composite
def prompts(draw: st.DrawFn, reply: Message | None) -> list[dict[str, Any]]:
    """What a client puts before the next reply: results, late instructions, texts."""
    items: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": call.id, "output": draw(TEXTS)}
        for call in (() if reply is None else reply.tool_calls)
    ]
    roles = draw(st.lists(st.sampled_from(["user", "developer", "system"]), min_size=not items, max_size=2))
    return [*items, *(said(role, draw(TEXTS)) for role in roles)]


def as_replayed(item: dict[str, Any], habit: str) -> dict[str, Any]:
    """An item as a client sends it back."""
    item = json.loads(json.dumps(item))
    if habit == "without ids":
        item.pop("id")
        item.pop("status", None)
    elif habit == "without texts of reasoning" and item["type"] == "reasoning":
        item["content"] = None
    elif habit == "bare messages" and item["type"] == "message":
        return {"role": "assistant", "content": item["content"][0]["text"]}
    return item


HABITS = ["as it came", "without ids", "without texts of reasoning", "bare messages"]


@given(st.data())
def test_the_items_up_to_a_reply_give_a_prefix_of_what_all_give_and_end_with_that_reply(data: st.DataObject) -> None:
    habit = data.draw(st.sampled_from(HABITS))
    items: list[dict[str, Any]] = []
    ends: list[tuple[int, Message]] = []
    reply: Message | None = None
    turns = map("{:032x}".format, count())
    for _ in range(data.draw(st.integers(1, 4))):
        items += data.draw(prompts(reply))
        if data.draw(st.booleans()) and habit == "as it came":  # a stream that broke: its items are sent back
            broken = data.draw(replies())
            items += output_items(next(turns), broken, FORM)  # type: ignore[arg-type]
        reply = data.draw(replies())
        items += [as_replayed(one, habit) for one in output_items(next(turns), reply, FORM)]  # type: ignore[arg-type]
        ends.append((len(items), reply))
    items += data.draw(prompts(reply))
    whole = decode(items).messages
    for end, stored in ends:
        part = decode(items[:end]).messages
        assert whole[: len(part)] == part
        assert HarnessMatcher().matches(stored, part[-1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*RESPONSES_FIELDS.names, "x"])
TYPES = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "tool_search_call", "tool_search_output", "item_reference", "function", "custom", "namespace", "tool_search",
    "web_search", "grammar", "json_schema",
]  # fmt: skip
KEYS = [
    "type", "role", "id", "content", "summary", "call_id", "name", "arguments", "input", "output", "tools", "format",
    "parameters", "namespace", "encrypted_content", "execution", "syntax", "definition", "text",
]  # fmt: skip
SHAPED = st.recursive(
    JSON | st.sampled_from([*TYPES, "user", f"msg_{TURN}", f"rs_{TURN}", f"fc_{TURN}_0", sealed(TURN), "client"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=20,
)


def answer_to(raw: bytes) -> StenographError | None:
    try:
        decode_response(Incoming(body=raw, past=past()))
    except StenographError as error:
        return error
    return None


@given(st.binary() | st.dictionaries(NAMES, SHAPED, max_size=4).map(lambda fields: json.dumps(fields).encode()))
@example(b'{"input": "\xff"}')
@example(b'{"input": "\\ud800"}')
@example(b'{"input": ' + b"[" * 100_000)
@example(b'{"input": "x", "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
def test_garbage_gives_nothing_but_a_400(raw: bytes) -> None:
    error = answer_to(raw)
    assert error is None or error.status == 400


@given(st.lists(SHAPED, min_size=1, max_size=4), st.lists(SHAPED, max_size=3), SHAPED)
def test_garbage_items_and_tools_give_nothing_but_a_400(items: list[Any], tools: list[Any], choice: Any) -> None:
    error = answer_to(json.dumps({"input": items, "tools": tools, "tool_choice": choice}).encode())
    assert error is None or error.status == 400


def test_what_is_not_json_is_refused() -> None:
    assert isinstance(answer_to(b"{"), InvalidJson)
