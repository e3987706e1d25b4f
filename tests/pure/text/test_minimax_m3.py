"""MiniMax-M3's calls as text: nested elements are read by the tool's schema, and what is malformed stays text."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.core.types import Finish, FinishReason
from stenograph.families import family_named
from stenograph.families.minimax.m3_calls import CLOSE, M3_CALLS, MARK, OPEN, BlockEnd
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import CallText
from stenograph.text.reading import PartKind, Reading
from stenograph.text.reply import ReplyParser

ENTRY = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"item": {"type": "string"}, "all": {"$ref": "#/$defs/all"}}},
        "all": {"$ref": "#/$defs/all"},
        "maybe": {"type": ["string", "null"]},
    },
    "$defs": {"entry": ENTRY, "all": {"type": "array", "items": {"$ref": "#/$defs/entry"}}},
}
TOOLS = {"f": Tool(name="f", json="{}", parameters_json=json.dumps(SCHEMA))}


def spelled(value: object) -> str:
    """As the template writes it."""
    if isinstance(value, dict):
        return "".join(f"{MARK}<{key}>{spelled(one)}{MARK}</{key}>" for key, one in value.items())
    if isinstance(value, list):
        return "".join(f"{MARK}<item>{spelled(one)}{MARK}</item>" for one in value)
    return value if isinstance(value, str) else json.dumps(value)


def body_of(*calls: Mapping[str, object]) -> str:
    invoked = (f'{MARK}<invoke name="f">{spelled(arguments)}{MARK}</invoke>\n' for arguments in calls)
    return "\n" + "".join(invoked)


def read(body: str) -> tuple[CallText, ...] | ParseProblem:
    return M3_CALLS.read(OPEN, body, TOOLS)


TEXT = st.text(max_size=6) | st.sampled_from(["3", "null", "[1]", "</text>", "<item>", "</invoke>\n", CLOSE[1:], "]<]"])
ENTRIES = st.lists(st.fixed_dictionaries({"name": TEXT, "size": st.integers(-9, 9)}), max_size=3)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "texts": st.lists(TEXT, max_size=3),
        "deep": st.fixed_dictionaries({}, optional={"item": TEXT, "all": ENTRIES}),
        "all": ENTRIES,
        "maybe": st.none() | st.sampled_from(["a", "3", ""]),
    },
)


@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_calls_with_any_nested_arguments_are_read_as_they_were_made(calls: list[dict[str, Any]]) -> None:
    found = read(body_of(*calls))
    assert isinstance(found, tuple), found
    assert [json.loads(one.arguments) for one in found] == calls


@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=2), step=st.integers(1, 9))
def test_a_block_closes_at_the_same_place_however_its_text_comes(calls: list[dict[str, Any]], step: int) -> None:
    body = body_of(*calls)
    text, scanner = f"{body}{CLOSE}after {CLOSE}", BlockEnd()
    ends = (scanner.find(text[:end]) for end in range(0, len(text) + step, step))
    assert next(end for end in ends if end is not None) == (len(body), len(body) + len(CLOSE))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "f",
        f'{MARK}<invoke name="f">',
        f'{MARK}<invoke name="">{MARK}</invoke>',
        f'{MARK}<invoke name="f">{MARK}</invoke>x',
        f'{MARK}<invoke name="f">x{MARK}</invoke>',
        f'{MARK}<invoke name="f">{MARK}<a>x{MARK}</b>{MARK}</invoke>',
        f'{MARK}<invoke name="f">{MARK}<a>{MARK}<b>x{MARK}</b>y{MARK}</a>{MARK}</invoke>',
        f'{MARK}<invoke name="f">{f"{MARK}<a>" * 5000}',
    ],
)
def test_a_malformed_block_is_an_outcome(body: str) -> None:
    assert read(body) is ParseProblem.TOOL_CALL_WRONG_SHAPE
    assert M3_CALLS.read_cut(OPEN, body, TOOLS) is ParseProblem.TOOL_CALL_UNCLOSED


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<mm:think>a</mm:think>b", "a", "b"),
        ("</mm:think>b", None, "b"),
        ("b</mm:think>", None, "b</mm:think>"),
        ("</mm:thin", None, "</mm:thin"),
    ],
)
def test_a_reply_without_reasoning_may_begin_with_its_close(text: str, reasoning: str | None, content: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer_json())
    ids = tokenizer.encode(text)
    for pieces in ([ids], [[id_] for id_ in ids]):
        parser = ReplyParser(
            tokenizer,
            family_named("minimax-m3").syntax,
            Reading(tools=(), prompt_end=family_named("minimax-m3").syntax.prompt_end("ai\n")),
        )
        for piece in pieces:
            parser.feed(piece)
        message = parser.finish(Finish(reason=FinishReason.STOP))[1].message
        assert (message.reasoning, message.content) == (reasoning, content)
        kinds = [part.kind for part in parser.parts()]
        assert kinds == [*([PartKind.REASONING] if content == "b" else []), PartKind.CONTENT]
