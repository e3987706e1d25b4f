"""Gemini's contents as messages: what stands before a reply never changes, and no bytes do harm."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ChatRequest, ToolMode
from stenograph.core.errors import CallerError, InvalidRequest
from stenograph.core.messages import Message, Role
from stenograph.core.types import GrammarKind
from stenograph.dialects.gemini.request import decode_count, decode_gemini
from stenograph.dialects.gemini.schemas import json_schema
from stenograph.dialects.settings import UnknownFields

Content = dict[str, Any]
LOOK = {"functionDeclarations": [{"name": "look"}, {"name": "see"}]}


def decoded(body: Any, **options: Any) -> ChatRequest:
    return decode_gemini(json.dumps(body).encode(), model="m", stream=False, is_sse=False, **options)


def messages(*contents: Content) -> list[Message]:
    return list(decoded({"contents": contents}).messages)


def status_of(decode: Callable[[], ChatRequest]) -> int:
    """The status with which a request would be answered as far as its decoding goes."""
    try:
        return 200 if decode().messages else 0
    except CallerError as error:
        return error.status


texts = st.text(max_size=5)
ids = st.sampled_from(["a", "b", ""])
objects = st.dictionaries(texts, st.none() | st.integers() | texts, max_size=2)
said = st.builds(lambda text: {"text": text}, texts)
thoughts = st.builds(lambda text: {"text": text, "thought": True}, texts)
calls = st.builds(
    lambda id_, name, args: {"functionCall": {"name": name, "args": args, **({"id": id_} if id_ else {})}},
    ids,
    st.sampled_from(["look", "see"]),
    objects,
)
results = st.builds(
    lambda id_, name, response: {"functionResponse": {"name": name, "response": response, "id": id_}},
    st.sampled_from(["a", "b"]),
    st.sampled_from(["look", "see"]),
    objects,
)
model_contents = st.builds(
    lambda parts: {"role": "model", "parts": parts}, st.lists(said | thoughts | calls, min_size=1, max_size=3)
)
user_contents = st.builds(
    lambda role, parts: {"parts": parts, **({"role": role} if role else {})},
    st.sampled_from(["user", "function", None]),
    st.lists(said | results, min_size=1, max_size=3),
)


@given(contents=st.lists(model_contents | user_contents, min_size=1, max_size=8), system=st.none() | texts)
def test_the_messages_before_a_reply_are_the_same_whatever_follows(contents: list[Content], system: str | None) -> None:
    head = {} if system is None else {"systemInstruction": {"parts": [{"text": system}]}}
    whole = decoded({"contents": contents, **head}).messages
    for end in range(1, len(contents)):
        is_reply = contents[end].get("role") == "model"
        if is_reply and contents[end - 1].get("role") != "model":
            before = decoded({"contents": contents[:end], **head}).messages
            assert whole[: len(before)] == before
            assert whole[len(before)].role is Role.ASSISTANT


@given(contents=st.lists(model_contents | user_contents, min_size=1, max_size=6))
def test_each_message_is_pointed_at_and_nothing_that_was_said_is_lost(contents: list[Content]) -> None:
    request = decoded({"contents": contents})
    pointers = request.spelling.messages  # type: ignore[attr-defined]
    assert len(pointers) == len(request.messages)
    for pointer in pointers:
        found: Any = {"contents": contents}
        for step in pointer.split("/")[1:]:
            found = found[int(step) if step.isdigit() else step]
    parts = [part for content in contents for part in content["parts"]]
    spoken = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    thought = "".join(part["text"] for part in parts if part.get("thought"))
    assert "".join(one.content or "" for one in request.messages if one.role is not Role.TOOL) == spoken
    assert "".join(one.reasoning or "" for one in request.messages) == thought
    assert sum(len(one.tool_calls) for one in request.messages) == sum("functionCall" in part for part in parts)
    answered = [json.loads(one.content or "") for one in request.messages if one.role is Role.TOOL]
    without_copies = [
        part["functionResponse"]["response"]
        for content in contents
        for index, part in enumerate(content["parts"])
        if "functionResponse" in part and part not in content["parts"][:index]
    ]
    assert answered == without_copies


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = [
    *("contents", "parts", "role", "text", "thought", "functionCall", "functionResponse", "name", "args", "response"),
    *("id", "systemInstruction", "tools", "functionDeclarations", "parameters", "generationConfig", "responseSchema"),
    *("responseMimeType", "topK", "stopSequences", "thinkingConfig", "thinkingBudget", "toolConfig", "model"),
    *(
        "functionCallingConfig",
        "mode",
        "allowedFunctionNames",
        "generateContentRequest",
        "inlineData",
        "safetySettings",
    ),
]
bodies = st.recursive(
    json_values | st.sampled_from(["user", "model", "ANY", "application/json", "look"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELD_NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(body=bodies, valid=st.booleans(), unknown=st.sampled_from(list(UnknownFields)))
def test_a_body_of_any_shape_is_read_or_refused_by_the_caller_s_fault(
    body: Any, valid: bool, unknown: UnknownFields
) -> None:
    if valid and isinstance(body, dict):
        body = {**body, "contents": [{"parts": [{"text": "a"}]}]}
    text = json.dumps(body).encode()
    for decode in (
        lambda: decode_gemini(text, model="m", stream=True, is_sse=True, unknown_fields=unknown),
        lambda: decode_count(text, model="m", unknown_fields=unknown),
    ):
        assert status_of(decode) in (200, 400)


@given(text=st.binary(max_size=40))
def test_garbage_is_400(text: bytes) -> None:
    for body in (text, b'{"contents": [{"parts": [{"text": "' + text + b'"}]}]}', b'{"contents": ' + text):
        assert status_of(partial(decode_gemini, body, model="m", stream=False, is_sse=False)) in (200, 400)


@pytest.mark.parametrize("name", ["functionCall", "functionResponse", "parameters"])
def test_a_value_that_is_nested_too_deeply_is_400(name: str) -> None:
    deep = "[" * 5000 + "]" * 5000
    part = '{"functionCall": {"name": "f", "args": {"a": %s}}}'
    if name == "functionResponse":
        part = '{"functionResponse": {"id": "a", "name": "f", "response": {"a": %s}}}'
    role = "model" if "Call" in name else "user"
    contents = f'{{"contents": [{{"role": "{role}", "parts": [{part % deep}]}}]}}'
    if name == "parameters":
        contents = (
            '{"contents": [{"parts": [{"text": "a"}]}], "tools": [{"functionDeclarations": [{"name": "f", "parameters":'
            f' {{"a": {deep}}}}}]}}]}}'
        )
    for body in (contents, contents.replace('"contents"', '"top_k": 1, "contents"')):
        with pytest.raises(CallerError):
            decode_gemini(body.encode(), model="m", stream=False, is_sse=False)


# --- what the fields mean -------------------------------------------------------------------------------------------


def config(**fields: Any) -> ChatRequest:
    return decoded({"contents": [{"parts": [{"text": "a"}]}], "generationConfig": fields})


def test_thinking_is_an_effort_or_switched_off_and_budgets_are_recorded() -> None:
    levels = ("MINIMAL", "LOW", "MEDIUM", "HIGH")
    assert [config(thinkingConfig={"thinkingLevel": level}).effort for level in levels] == [
        *("low", "low", "medium", "high")
    ]
    assert config(thinkingConfig={"thinkingBudget": 0}).thinks is False
    for neutral in ({"thinkingBudget": -1}, {"thinkingBudget": 900}, {"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}):
        request = config(thinkingConfig=neutral)
        assert (request.thinks, request.effort) == (None, None)
        assert msgspec.json.decode(request.sent["generationConfig"])["thinkingConfig"] == neutral


def test_what_a_client_is_silent_about_is_not_said() -> None:
    request = config(temperature=None, topP=0.5, stopSequences=[])
    assert request.said == {"top_p", "stop"}
    assert request.sent == {"generationConfig": '{"topP":0.5,"stopSequences":[]}'}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        (
            {"responseMimeType": "application/json", "responseJsonSchema": {"type": "OBJECT", "properties": {}}},
            GrammarKind.JSON_SCHEMA,
            {"type": "object", "properties": {}},
        ),
        (
            {"responseMimeType": "application/json"},
            GrammarKind.JSON_SCHEMA,
            {"anyOf": [{"type": "object"}, {"type": "array"}]},
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b"]}},
            GrammarKind.CHOICE,
            ["a", "b"],
        ),
    ],
)
def test_a_schema_is_a_grammar(fields: dict[str, Any], kind: GrammarKind, source: object) -> None:
    grammar = config(**fields).params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == (kind, source)


@pytest.mark.parametrize(
    ("given_config", "mode", "name"),
    [
        ({}, ToolMode.AUTO, None),
        ({"mode": "AUTO"}, ToolMode.AUTO, None),
        ({"mode": "NONE"}, ToolMode.NONE, None),
        ({"mode": "ANY"}, ToolMode.REQUIRED, None),
        ({"mode": "ANY", "allowedFunctionNames": ["look"]}, ToolMode.NAMED, "look"),
        ({"mode": "ANY", "allowedFunctionNames": ["see", "look"]}, ToolMode.REQUIRED, None),
    ],
)
def test_a_calling_config_is_a_tool_choice(given_config: dict[str, Any], mode: ToolMode, name: str | None) -> None:
    body = {
        "contents": [{"parts": [{"text": "a"}]}],
        "tools": [LOOK],
        "toolConfig": {"functionCallingConfig": given_config},
    }
    choice = decoded(body).tool_choice
    assert (choice.mode, choice.name) == (mode, name)


def test_google_s_schema_is_json_schema() -> None:
    google = {
        "type": "OBJECT",
        "propertyOrdering": ["n", "type"],
        "required": ["n"],
        "properties": {
            "n": {"type": "INTEGER", "nullable": True, "minimum": 1, "example": 3, "format": "int32"},
            "type": {"type": "ARRAY", "items": {"type": "STRING", "enum": ["STRING", "b"]}, "minItems": "2"},
            "nullable": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True},
            "any": {"type": "TYPE_UNSPECIFIED"},
        },
    }
    assert json_schema(google) == {
        "type": "object",
        "required": ["n"],
        "properties": {
            "n": {"type": ["integer", "null"], "minimum": 1, "examples": [3], "format": "int32"},
            "type": {"type": "array", "items": {"type": "string", "enum": ["STRING", "b"]}, "minItems": 2},
            "nullable": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
            "any": {},
        },
    }


@given(schema=st.dictionaries(texts, json_values, max_size=3))
def test_a_schema_in_json_schema_s_words_stays_as_it_is(schema: dict[str, Any]) -> None:
    plain = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "title": "t", "default": schema}
    assert json_schema(plain) == plain


def test_unknown_fields_are_recorded_where_the_server_says_so() -> None:
    body = {"contents": [{"parts": [{"text": "a"}]}], "wat": 1, "generationConfig": {"seed": 1, "hm": [2]}}
    request = decoded(body, unknown_fields=UnknownFields.RECORD)
    assert (request.recorded, request.params.seed) == ({"wat": "1", "hm": "[2]"}, 1)
    with pytest.raises(InvalidRequest, match="--unknown-fields record"):
        decoded(body)


def test_names_in_snake_case_are_the_same_request() -> None:
    body: dict[str, Any] = {
        "contents": [
            {"parts": [{"text": "a_b"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f_g", "args": {"top_k": 1, "topK": 2}}}]},
            {"parts": [{"functionResponse": {"name": "f_g", "response": {"function_call": 1}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [
            {"functionDeclarations": [{"name": "f_g", "parametersJsonSchema": {"properties": {"max_items": {}}}}]}
        ],
        "generationConfig": {"maxOutputTokens": 3, "thinkingConfig": {"thinkingBudget": 0}},
    }
    snake = json.dumps(body)
    for name in set(re.findall(r"[a-z]+[A-Z]\w+", snake)) - {"topK"}:
        respelled = re.sub("([A-Z])", r"_\1", name).lower()
        snake = snake.replace(f'"{name}"', f'"{respelled}"')
    assert "max_output_tokens" in snake
    for unknown in UnknownFields:
        read = decoded(json.loads(snake), unknown_fields=unknown)
        wanted = decoded(body, unknown_fields=unknown)
        assert read == wanted
    counted = decode_count(json.dumps({"generate_content_request": json.loads(snake)}).encode(), model="m")
    assert counted.messages == decoded(body).messages


def test_a_model_s_contents_that_follow_each_other_are_one_message() -> None:
    one, two = messages(
        {"parts": [{"text": "a"}]},
        {"role": "model", "parts": [{"text": "b", "thought": True}, {"text": "c"}]},
        {"role": "model", "parts": [{"text": "d"}, {"functionCall": {"name": "look"}}]},
    )
    assert (one.role, two.content, two.reasoning) == (Role.USER, "cd", "b")
    assert [(call.name, call.arguments) for call in two.tool_calls] == [("look", "{}")]


def test_a_result_that_is_sent_twice_is_one() -> None:
    call = {"functionCall": {"id": "a", "name": "look"}}
    result = {"functionResponse": {"id": "a", "name": "look", "response": {"n": 1}}}
    other = {"functionResponse": {"id": "a", "name": "look", "response": {"n": 2}}}
    said_before = ({"parts": [{"text": "a"}]}, {"role": "model", "parts": [call, call]})
    found = messages(*said_before, {"parts": [result, result, other, result]})
    assert [one.content for one in found[2:]] == ['{"n":1}', '{"n":2}']
    rewrites = decoded({"contents": [*said_before, {"parts": [result, result, other, result]}]}).rewrites
    assert [(one.rule, one.where, one.before, one.after, one.message) for one in rewrites] == [
        ("result-copy", "/contents/2/parts/1/functionResponse", '{"n": 1}', "", 2),
        ("result-copy", "/contents/2/parts/3/functionResponse", '{"n": 1}', "", 3),
    ]
    without_ids = {"functionResponse": {"name": "look", "response": {"n": 1}}}
    assert len(messages(*said_before, {"parts": [without_ids, without_ids]})) == 4


def test_a_large_conversation_is_read_in_portions_and_within_limits() -> None:
    many = [{"role": ("user", "model")[index % 2], "parts": [{"text": "x" * 40}]} for index in range(3000)]
    assert len(decoded({"contents": many}).messages) == 3000
    many[2500]["parts"] = [{"text": 1}]
    with pytest.raises(InvalidRequest) as caught:
        decoded({"contents": many})
    assert caught.value.param == "/contents/2500/parts/0/text"
    for body, param in (
        ({"contents": [{"parts": [{"text": ""}] * 40_000}]}, "/contents/0/parts"),
        ({"contents": [{"parts": [{"text": ""}]}] * 40_000}, "/contents"),
        ({"contents": [{"parts": [{"text": "a"}]}], "systemInstruction": {"parts": [{"text": "x" * 2**21}]}}, None),
    ):
        with pytest.raises(InvalidRequest, match="at most") as caught:
            decoded(body)
        assert caught.value.param == param


def test_many_results_cost_time_in_proportion_to_their_number() -> None:
    """Ten thousand calls and results are looked at once each: pairs of them would be a hundred million."""
    calls_sent = [{"functionCall": {"name": "look"}} for _ in range(10_000)]
    answers = [{"functionResponse": {"name": "look", "response": {"n": number}}} for number in range(10_000)]
    read = messages({"parts": [{"text": "a"}]}, {"role": "model", "parts": calls_sent}, {"parts": answers})
    assert [one.tool_call_id for one in read[2:]] == [call.id for call in read[1].tool_calls]
