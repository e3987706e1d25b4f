"""GLM's and MiniMax's replies as ids: read whatever they are, however they come; what is malformed is told by ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from stenograph.core.chat import ParseProblem
from stenograph.core.types import Finish, FinishReason
from stenograph.families.glm.family import GLM4_5, GLM4_7
from stenograph.families.minimax.family import MINIMAX_M2
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import CallSyntax, ForcedTool
from stenograph.text.conversations import WEATHER
from stenograph.text.family import Family
from stenograph.text.grammar.lark import quoted
from stenograph.text.reading import PartKind, Reading
from stenograph.text.reply import ReplyParser

STOP = Finish(reason=FinishReason.STOP)
END = "<|observation|>"
FAMILIES = (GLM4_5, GLM4_7, MINIMAX_M2)
BY_NAME = [pytest.param(family, id=family.name) for family in FAMILIES]


def calls_of(family: Family) -> CallSyntax:
    assert family.syntax.calls is not None
    return family.syntax.calls


def spelled(family: Family, *calls: dict[str, str]) -> str:
    """Calls of WEATHER as the family's template writes them, after content."""
    lead = calls_of(family).lead
    if family is MINIMAX_M2:
        inner = "".join(
            f'<invoke name="{WEATHER.name}">\n'
            + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in call.items())
            + "</invoke>\n"
            for call in calls
        )
        return f"{lead}<minimax:tool_call>\n{inner}</minimax:tool_call>"
    return "".join(
        f"{lead}<tool_call>{WEATHER.name}{lead}"
        + "".join(f"<arg_key>{key}</arg_key>{lead}<arg_value>{value}</arg_value>{lead}" for key, value in call.items())
        + "</tool_call>"
        for call in calls
    )


@pytest.fixture(scope="module")
def marked(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tiny tokenizer with the families' markers as tokens, as in their own."""
    made = tokenizers.Tokenizer.from_str(reference.to_str())
    made.add_special_tokens([END])
    made.add_tokens(list(dict.fromkeys(marker for family in FAMILIES for marker in family.syntax.markers)))
    return made


@pytest.fixture(scope="module")
def tiny(marked: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(marked.to_str())


def reader(
    tokenizer: Tokenizer, family: Family, ids: Sequence[int], *, by_id: bool = False, prompt: str = ""
) -> ReplyParser:
    parser = ReplyParser(
        tokenizer, family.syntax, Reading(tools=(WEATHER,), prompt_end=family.syntax.prompt_end(prompt))
    )
    for piece in [[token_id] for token_id in ids] if by_id else [ids]:
        parser.feed(piece)
    return parser


@dataclass(frozen=True, kw_only=True)
class Bad:
    """What is malformed in which family."""

    family: Family
    text: str
    problem: ParseProblem


WRONG, UNCLOSED = ParseProblem.TOOL_CALL_WRONG_SHAPE, ParseProblem.TOOL_CALL_UNCLOSED
MALFORMED = [
    *(
        Bad(family=family, text=text, problem=problem)
        for family in (GLM4_5, GLM4_7)
        for text, problem in (
            ('<tool_call>{"name": "f"}</tool_call>', WRONG),
            ("<tool_call></tool_call>", WRONG),
            ("<tool_call>f<arg_key>a</tool_call>", WRONG),
            ("<tool_call>f<arg_key>a</arg_key>b<arg_value>c</arg_value></tool_call>", WRONG),
            ("<tool_call>f<arg_key>a</arg_key><arg_value>b", UNCLOSED),
            ("<tool_call>f<arg_key>a</arg_key><arg_value>b</tool_call>", UNCLOSED),
        )
    ),
    *(
        Bad(family=MINIMAX_M2, text=text, problem=problem)
        for text, problem in (
            ('<minimax:tool_call>{"name": "f"}</minimax:tool_call>', WRONG),
            ("<minimax:tool_call></minimax:tool_call>", WRONG),
            ('<minimax:tool_call><invoke name="f">a</invoke></minimax:tool_call>', WRONG),
            ('<minimax:tool_call><invoke name="f"></invoke>a</minimax:tool_call>', WRONG),
            ('<minimax:tool_call><invoke name="f"></invoke>', UNCLOSED),
            ('<minimax:tool_call><invoke name="f"><parameter name="a">b</minimax:tool_call>', UNCLOSED),
        )
    ),
]


@pytest.mark.parametrize("by_id", [False, True], ids=["at once", "by id"])
@pytest.mark.parametrize("bad", MALFORMED, ids=lambda bad: f"{bad.family.name} {bad.text}")
def test_a_malformed_call_is_told_with_its_ids_beside_those_that_are_well_formed(
    tiny: Tokenizer, bad: Bad, by_id: bool
) -> None:
    family, close = bad.family, calls_of(bad.family).markers[1]
    marks = family.syntax.reasoning
    assert marks is not None
    first = {"city": f"3{close}", "days": "3", "options": f'{{"a": [true, "{close}"]}}', "more": "x"}
    thought = f"<think>{marks.after_open}hm{marks.before_close}</think>{marks.after_close}"
    before = tiny.encode(f"{thought}So:{spelled(family, first, {'city': 'true'})}")
    wrong = tiny.encode(bad.text)
    ids = before + wrong + tiny.encode(END)
    parser = reader(tiny, family, ids, by_id=by_id)
    parsed = parser.finish(STOP)[1]
    (fault,) = parsed.faults
    assert (fault.problem, fault.seen) == (bad.problem, bad.text)
    assert ids[fault.start : fault.end] == wrong
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", f"So:{bad.text}")
    assert [json.loads(one.arguments) for one in parsed.message.tool_calls] == [
        {"city": f"3{close}", "days": 3, "options": {"a": [True, close]}, "more": "x"},
        {"city": "true"},
    ]
    num_pieces = 2 if family is GLM4_5 else 1  # a line break between two blocks is content
    assert [part.kind for part in parser.parts()] == [
        PartKind.REASONING,
        *(PartKind.CONTENT, PartKind.TOOL_CALL) * num_pieces,
        PartKind.CONTENT,
        PartKind.END,
    ]


def test_a_line_break_that_belongs_to_reasoning_which_the_prompt_has_closed_is_no_content(tiny: Tokenizer) -> None:
    for prompt, text in (("<think></think>", "\nhello"), ("<think></think>\n", "hello")):
        for by_id in (False, True):
            parser = reader(tiny, GLM4_5, tiny.encode(text + END), by_id=by_id, prompt=prompt)
            parsed = parser.finish(STOP)[1]
            assert (parsed.message.content, parsed.message.reasoning, parsed.num_reasoning_tokens) == ("hello", None, 0)


PIECES = [
    *dict.fromkeys(marker for family in FAMILIES for marker in family.syntax.markers),
    *('<invoke name="f">', "</invoke>", '<parameter name="a">', "</parameter>", "f", "\n", "{", '"', END),
]


@pytest.mark.parametrize("family", BY_NAME)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    data=st.data(),
    prompt=st.sampled_from(["", "<think>", "<think>\n", "</think>"]),
)
def test_any_ids_parse_alike_in_any_pieces_and_their_parts_are_all_of_them(
    tiny: Tokenizer, family: Family, text: str, data: st.DataObject, prompt: str
) -> None:
    ids = [*tiny.encode(text), *data.draw(st.lists(st.integers(-1, tiny.vocab_size + 9), max_size=6))]
    parsers = [reader(tiny, family, ids, by_id=by_id, prompt=prompt) for by_id in (False, True)]
    parsed = [parser.finish(STOP)[1] for parser in parsers]
    assert parsed[0] == parsed[1]
    parts = parsers[0].parts()
    assert parts == parsers[1].parts()
    assert all(0 <= fault.start <= fault.end <= len(ids) for fault in parsed[0].faults)
    at = 0
    for part in parts:
        assert at - 1 <= part.start <= at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)


@pytest.mark.parametrize("parallel", [False, True], ids=["one", "parallel"])
@pytest.mark.parametrize("family", BY_NAME)
def test_the_grammar_of_forced_calls_has_what_the_template_writes_with_markers_as_their_tokens(
    marked: tokenizers.Tokenizer, tiny: Tokenizer, family: Family, parallel: bool
) -> None:
    forced = ForcedTool(number=0, name=WEATHER.name, schema=json.loads(WEATHER.parameters_json))
    calls = calls_of(family)
    source = calls.grammar([forced], parallel, lambda text: text if text in tiny.added_tokens else quoted(text))
    one, other = {"city": "é </b>\n", "days": "3", "options": '{"deep": [1, null]}'}, {"city": ""}
    tokenizer = LLTokenizer(marked.to_str(), eos_token=tiny.added_tokens[END])
    for asked, is_whole in (([one], True), ([other], True), ([one, other], parallel), ([{"days": "3"}], False)):
        text = spelled(family, *asked)
        ids = list(tiny.encode((text if family is MINIMAX_M2 else text.removeprefix(calls.lead)) + END))
        matcher = LLMatcher(tokenizer, source)
        assert not matcher.get_error()
        assert (matcher.validate_tokens(ids) == len(ids)) is is_whole, text
