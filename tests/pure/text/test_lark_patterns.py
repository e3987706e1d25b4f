"""The grammar of a forced call is of a kind that the engine has, or what it cannot hold is refused by name."""

import json
import re
from typing import Any

import pytest

from stenograph.core.blame import RequestPart
from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.core.types import Grammar, GrammarKind
from stenograph.families import FAMILIES, family_named
from stenograph.text.family import Family
from stenograph.text.grammar.held import Holder, forced_calls

LARK, EBNF, REGEX = GrammarKind.LARK, GrammarKind.EBNF, GrammarKind.REGEX
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "a"}}\n</tool_call>'


def forced(family: str, parameters: Any, *kinds: GrammarKind, parses: bool = False) -> Grammar:
    tools = [Tool(name=name, json="{}", parameters_json=json.dumps(parameters)) for name in ("first", "look_up")]
    choice = ToolChoice(mode=ToolMode.NAMED, name="look_up")
    one, holder = family_named(family), Holder(engine="e", kinds=kinds, parses=parses)
    grammar = forced_calls(tools, choice, False, one.syntax, {}, calls=one.forced_calls, holder=holder)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [([REGEX, EBNF, LARK], LARK), ([REGEX, EBNF], EBNF), ([REGEX, GrammarKind.CHOICE], REGEX), ([], LARK)],
)
def test_a_grammar_is_of_the_kind_that_holds_most(kinds: list[GrammarKind], kind: GrammarKind) -> None:
    assert forced("chatml", CITY, *kinds).kind is kind


def test_an_engine_that_parses_calls_is_given_none_of_another_kind() -> None:
    assert forced("chatml", CITY, REGEX, parses=True).kind is LARK


def test_a_regular_expression_is_of_the_named_tool_alone() -> None:
    pattern = forced("chatml", CITY, REGEX).source
    assert re.fullmatch(pattern, CALL)
    assert not re.fullmatch(pattern, CALL.replace("look_up", "first"))
    assert not re.fullmatch(pattern, f"{CALL}\n{CALL}")


@pytest.mark.parametrize("kind", [EBNF, REGEX])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_that_can_be_forced_can_be_so_by_text_but_gpt_oss(family: Family, kind: GrammarKind) -> None:
    try:
        forced(family.name, CITY, LARK)
    except InvalidRequest:
        return
    if family.name != "gpt-oss":
        assert forced(family.name, CITY, kind).kind is kind
        return
    with pytest.raises(InvalidRequest, match="parts that no other grammar can hold"):
        forced(family.name, CITY, kind)


NAMES = [f"r{n}" for n in range(10)]
ALL = {name: {"$ref": f"#/$defs/{name}"} for name in NAMES}
MUTUAL = {
    "properties": ALL,
    "$defs": {name: {"type": "object", "properties": ALL, "required": NAMES} for name in NAMES},
}
DEEP: dict[str, Any] = {"type": "boolean"}
for _ in range(400):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("family", "parameters", "kind", "why"),
    [
        (
            "chatml",
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            EBNF,
            "in the parameters of /tools/1 there is 'pattern' at '/properties/a'",
        ),
        ("qwen3-coder", {"properties": {"a": {"type": "string", "maxLength": 3}}}, EBNF, "has a length"),
        ("chatml", {"properties": {"a": DEEP}}, EBNF, "nested too deeply"),
        ("chatml", {"properties": {"a": DEEP}}, REGEX, "nested too deeply"),
        ("chatml", MUTUAL, REGEX, "65536"),
        (
            "chatml",
            {"properties": {f"p{n}": {} for n in range(101)}},
            EBNF,
            "101 properties, of which none is required",
        ),
        ("chatml", {"description": "x" * 300_000}, EBNF, "more than 262144 characters"),
    ],
    ids=["keyword", "length", "deep", "deep regex", "mutual", "optional", "long"],
)
def test_what_cannot_be_held_is_refused_with_the_engines_that_can(
    family: str, parameters: Any, kind: GrammarKind, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(why)) as caught:
        forced(family, parameters, kind)
    assert "The engine e cannot be made to call a tool" in caught.value.message
    assert "--engine vllm" in caught.value.message
    assert caught.value.blame is not None
    assert caught.value.blame.part is RequestPart.TOOL_CHOICE
