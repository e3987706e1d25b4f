"""A grammar that a client asks for is of the answer: reasoning that the prompt opened comes before it, unconstrained.

Each joined grammar is given to the embedded engine's own llguidance, so that what it admits is seen, not its text.
"""

import json
import re

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import GrammarBesideCall, InvalidRequest
from stenograph.core.types import Grammar, GrammarKind, PromptEnd
from stenograph.embedded.grammar.llguidance import LlguidanceBackend
from stenograph.engine.settings import EngineKind
from stenograph.families.gpt_oss.family import before_answer
from stenograph.families.gpt_oss.reply import CHANNEL, MESSAGE, START
from stenograph.families.gpt_oss.reply import END as CLOSE
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.grammar.held import BeforeAnswer, Holder, held_grammar, open_reasoning
from stenograph.text.grammar.lark import marker
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

END, VOCAB = 2, 320
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
CHOICES = ["yes/no", 'a "b"', "\x7fé"]
JSON_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
GRAMMARS = {
    Grammar(kind=GrammarKind.JSON_OBJECT): ('{"any": [1, "x"]}', "[1]"),
    JSON_SCHEMA: ('{"a": 1}', '{"b": 1}'),
    Grammar(kind=GrammarKind.CHOICE, source=json.dumps(CHOICES)): (CHOICES[1], "no"),
    Grammar(kind=GrammarKind.REGEX, source=r"[0-9/]+\/x/(a|b)"): ("1/2/x/b", "1"),
}
"""Each with what is in its language, and what is not."""
FORCED = Grammar(kind=GrammarKind.LARK, source='start: "call"')
MARKS = ReasoningMarks()


def capable(*, grammars: frozenset[GrammarKind] = frozenset(GrammarKind), parses: bool = False) -> Holder:
    return Holder(engine="e", kinds=grammars, parses=parses)


@pytest.fixture(scope="module", params=["token", "text"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One in which the close of the reasoning is a token, and one in which it is plain text."""
    reference = Reference.from_str(tiny_tokenizer_json())
    if request.param == "token":
        marks = [AddedToken(mark, special=False) for mark in (MARKS.open, MARKS.close)]
        reference.add_tokens(marks)  # pyright: ignore[reportUnknownMemberType]
    return Tokenizer(reference.to_str())


def opened(tokenizer: Tokenizer) -> BeforeAnswer:
    reasoning = open_reasoning(MARKS, tokenizer.added_tokens, MARKS.end_of("<|im_start|>assistant\n<think>\n"))
    assert reasoning is not None
    return reasoning


def admits(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a reply may be this text and then end."""
    backend = LlguidanceBackend(tokenizer, vocab_size=VOCAB + 4, eos_ids=(END,))
    state = backend.compile(grammar).start()
    for id_ in tokenizer.encode(text):
        if not state.allowed()[id_]:
            return False
        state.accept(id_)
    return bool(state.allowed()[END])


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_the_answer_is_held_and_the_reasoning_before_it_is_not(tokenizer: Tokenizer, grammar: Grammar) -> None:
    inside, outside = GRAMMARS[grammar]
    held = held_grammar(grammar, None, opened(tokenizer), capable())
    assert held is not None
    for thought in ("", 'so {"a": 2}\n\nyes\n', "ends with <"):
        assert admits(tokenizer, held, f"{thought}</think>\n\n{inside}")
        assert not admits(tokenizer, held, f"{thought}</think>\n\n{outside}")
        assert not admits(tokenizer, held, f"{thought}</think>\n\n{inside}</think>\n\n{inside}")
    assert not admits(tokenizer, held, inside)


def test_in_harmony_the_answer_is_held_within_the_final_channel() -> None:
    reference = Reference.from_str(tiny_tokenizer_json())
    marks = [AddedToken(mark, special=True) for mark in (START, CHANNEL, MESSAGE, CLOSE)]
    reference.add_tokens(marks)  # pyright: ignore[reportUnknownMemberType]
    tokenizer = Tokenizer(reference.to_str())
    before = before_answer(lambda text: marker(text, tokenizer.added_tokens))
    held = held_grammar(JSON_SCHEMA, None, before, capable())
    assert held is not None
    thought, header = f"{CHANNEL}analysis{MESSAGE}so {{}}{CLOSE}{START}assistant", f"{CHANNEL}final{MESSAGE}"
    for start in (header, f"{thought}{header}"):
        assert admits(tokenizer, held, f'{start}{{"a": 1}}')
        assert not admits(tokenizer, held, f'{start}{{"b": 1}}')
    for other in ("", thought, f"{thought}{CHANNEL}commentary{MESSAGE}"):
        assert not admits(tokenizer, held, f'{other}{{"a": 1}}')


@pytest.mark.parametrize(
    ("end", "says", "is_reasoning"),
    [
        ("assistant\n", PromptEnd.SILENT, False),
        ("assistant\n<think>", PromptEnd.OPENS, True),
        ("assistant\n<think>\n", PromptEnd.OPENED, True),
        ("<think>\n\n</think>", PromptEnd.CLOSES, False),
        ("<think>\n\n</think>\n\n", PromptEnd.CLOSED, False),
        ("", PromptEnd.SILENT, False),
    ],
)
def test_the_end_of_a_prompt_says_whether_the_reply_begins_in_its_reasoning(
    end: str, says: PromptEnd, is_reasoning: bool
) -> None:
    assert MARKS.end_of(end) is says
    assert says.is_reasoning is is_reasoning
    assert ReplySyntax(reasoning=None).prompt_end(end) is PromptEnd.SILENT


@pytest.mark.parametrize("end", ["<|im_start|>assistant\n", "<think>\n\n</think>\n\n"])
def test_without_open_reasoning_a_grammar_is_as_it_was_asked_for(end: str) -> None:
    assert open_reasoning(MARKS, {}, MARKS.end_of(end)) is None
    assert open_reasoning(None, {}, PromptEnd.OPENS) is None
    assert held_grammar(JSON_SCHEMA, None, None, capable()) is JSON_SCHEMA
    assert held_grammar(None, None, None, capable()) is None


def test_a_schema_cannot_undo_the_style_that_it_is_held_with(tokenizer: Tokenizer) -> None:
    loose = {**SCHEMA, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    asked = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(loose))
    held = held_grammar(asked, None, opened(tokenizer), capable())
    assert held is not None
    assert not admits(tokenizer, held, '</think>\n\n{  "a": 1}')


def test_forced_calls_and_engines_that_parse_see_to_the_reasoning_themselves(tokenizer: Tokenizer) -> None:
    reasoning = opened(tokenizer)
    assert held_grammar(None, FORCED, reasoning, capable()) is FORCED
    parses = capable(parses=True, grammars=frozenset({GrammarKind.JSON_SCHEMA}))
    assert held_grammar(JSON_SCHEMA, None, reasoning, parses) is JSON_SCHEMA
    assert held_grammar(None, FORCED, reasoning, parses) is None


@pytest.mark.parametrize(
    ("grammar", "grammars", "told"),
    [
        (JSON_SCHEMA, frozenset[GrammarKind](), "has no json_schema grammars"),
        (JSON_SCHEMA, frozenset({GrammarKind.JSON_SCHEMA}), "cannot hold the answer alone"),
        (Grammar(kind=GrammarKind.EBNF, source='root ::= "a"'), frozenset(GrammarKind), "cannot be put behind"),
        (Grammar(kind=GrammarKind.LARK, source='start: "a"'), frozenset(GrammarKind), "cannot be put behind"),
        (Grammar(kind=GrammarKind.REGEX, source="a\nb"), frozenset(GrammarKind), "write a line feed"),
    ],
)
def test_what_cannot_be_held_after_the_reasoning_is_refused_by_its_field(
    tokenizer: Tokenizer, grammar: Grammar, grammars: frozenset[GrammarKind], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        held_grammar(grammar, None, opened(tokenizer), capable(grammars=grammars))
    assert caught.value.blame == Blame(RequestPart.GRAMMAR)


def test_an_engine_that_cannot_force_a_call_is_said_to() -> None:
    without = capable(grammars=frozenset({GrammarKind.JSON_SCHEMA}))
    with pytest.raises(InvalidRequest, match="The engine e cannot be made to call a tool") as caught:
        held_grammar(None, FORCED, None, without)
    assert caught.value.blame == Blame(RequestPart.TOOL_CHOICE)
    named = re.findall(r"(--[\w-]+)(?: ([\w-]+))?", caught.value.message)
    can = {EngineKind.VLLM, EngineKind.SGLANG, EngineKind.EMBEDDED}
    assert set(named) == {("--engine", kind.value) for kind in can}, "and no other flag"


def test_a_grammar_and_a_forced_call_are_not_both_held() -> None:
    with pytest.raises(GrammarBesideCall) as caught:
        held_grammar(JSON_SCHEMA, FORCED, None, capable())
    assert caught.value.blame == Blame(RequestPart.TOOL_CHOICE)
