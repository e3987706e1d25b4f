"""The text of a block of calls, whatever a model wrote: no reader raises, and a block closes where its text does."""

import json
import re
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.families import FAMILIES
from stenograph.text.call_syntax import CallSyntax, ForcedTool

SCHEMA: dict[str, object] = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}}
TOOLS = {"f": Tool(name="f", json="{}", parameters_json=json.dumps(SCHEMA))}
SYNTAXES = {
    calls: family.name
    for family in (known.family() for known in FAMILIES)
    if (calls := family.syntax.calls) is not None and family.make_parser is None
}
BITS = (
    *'{}[]"\\\n :,1',
    *(
        "f",
        '"a"',
        "null",
        '"{}"',
        '"name": ',
        '"parameters": ',
        '"arguments": ',
        '"type"',
        "<",
        "</",
        "\\ud800",
        " " * 9,
    ),
)


def pieces_of(syntax: CallSyntax) -> list[str]:
    """Markers, whole and cut, and the literals of the grammar that forces a call."""
    source = syntax.grammar([ForcedTool(number=0, name="f", schema=SCHEMA)], True, json.dumps)
    literals = [json.loads(one) for one in re.findall(r'"(?:[^"\\\n]|\\.)*"', source) if "\\x" not in one]
    return [*syntax.openers, *syntax.markers, *(marker[:-1] for marker in syntax.markers), *literals]


@pytest.mark.parametrize("syntax", SYNTAXES, ids=SYNTAXES.values())
@given(data=st.data())
def test_any_text_of_a_block_is_read_or_told_and_closes_at_one_place(syntax: CallSyntax, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(pieces_of(syntax)) | st.sampled_from(BITS), max_size=16))
    opener, text = data.draw(st.sampled_from(syntax.openers)), "".join(pieces)
    growing = syntax.scanner(opener)
    found = [growing.find(so_far) for so_far in accumulate(pieces)]
    closed = next((span for span in found if span is not None), None)
    assert closed == syntax.scanner(opener).find(text)
    for read in (syntax.read, syntax.read_cut):
        calls = read(opener, text[: closed[0]] if closed else text, TOOLS)
        for call in () if isinstance(calls, ParseProblem) else calls:
            assert call.name
            assert isinstance(json.loads(call.arguments), dict)
