"""A forced call's grammar and the parser are one: all that the grammar admits is read as reasoning, then calls.

Random walks through the embedded engine's masks, in every family whose calls can be forced, which like to write the
grammar's own literals and the reply's markers, as tokens and as plain text, wherever they may.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Message, Tool
from stenograph.core.types import Finish, FinishReason, Grammar, GrammarKind
from stenograph.embedded.grammar.llguidance import LlguidanceBackend
from stenograph.families import FAMILIES, family_named
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.family import Family
from stenograph.text.grammar.held import Holder, forced_calls
from stenograph.text.reading import Reading
from stenograph.text.reply import ReplyParser

END_ID = 2
NUM_WALKS, MAX_TOKENS, PATIENCE_TOKENS = 10, 600, 80
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"anyOf": [{"enum": ["C", "°F <b>"]}, {"type": "null"}]},
        "deep": {"type": "boolean"},
        "options": {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string"}}}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 99}},
}
TOOLS = (
    Tool(name="look_up", json="{}", parameters_json=json.dumps(SCHEMA)),
    Tool(name="none", json="{}", parameters_json='{"type": "object", "properties": {}, "additionalProperties": false}'),
)
SCHEMAS = {"look_up": SCHEMA, "none": json.loads(TOOLS[1].parameters_json)}
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
FORCED = list(
    {
        family.syntax: family
        for family in (known.family() for known in FAMILIES)
        if family.syntax.calls is not None and family.make_parser is None
    }.values()
)
"""One family of each syntax."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """How the prompt ends, and what may come before the calls."""

    end: str
    may_reason: bool
    must_close: str = ""


def prompts(family: Family, *, has_tokens: bool) -> Iterator[Prompt]:
    marks = family.syntax.reasoning
    yield Prompt(end="assistant\n", may_reason=marks is not None and has_tokens)
    if marks is not None:
        yield Prompt(end=f"assistant\n{marks.open}\n", may_reason=True, must_close=marks.close)
        yield Prompt(end=f"assistant\n{marks.open}\n\n{marks.close}\n\n", may_reason=False)
        yield Prompt(end=f"assistant\n{marks.open}{marks.close}", may_reason=False)


@cache
def tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    reference = Reference.from_str(tiny_tokenizer_json())
    reference.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return Tokenizer(reference.to_str())


@cache
def backend(markers: tuple[str, ...]) -> LlguidanceBackend:
    made = tokenizer(markers)
    return LlguidanceBackend(made, vocab_size=made.vocab_size, eos_ids=(END_ID,))


def wishes(family: Family, made: Tokenizer, grammar: Grammar) -> list[list[int]]:
    """What a walk likes to write: each literal of the rules, and each marker in plain text and as its token."""
    rules = "\n".join(line for line in grammar.source.splitlines() if "%json" not in line)
    texts = [json.loads(literal) for literal in LITERAL.findall(rules)]
    found = [list(made.encode_plain(text)) for text in (*texts, *family.syntax.markers, '"', "}", "]}", "\n")]
    found += [[made.added_tokens[marker]] for marker in family.syntax.markers if marker in made.added_tokens]
    return [one for one in found if one]


def walk(markers: tuple[str, ...], grammar: Grammar, liked: list[list[int]], seed: int) -> list[int] | None:
    """The ids of a reply that came to the end of its grammar; None where it did not."""
    state = backend(markers).compile(grammar).start()
    rng = random.Random(seed)
    ids: list[int] = []
    wish: list[int] = []
    while len(ids) < MAX_TOKENS:
        allowed = state.allowed()
        if allowed[END_ID] and (state.is_finished or rng.random() < 0.5):
            return ids
        if not wish or not allowed[wish[0]]:
            at_hand = [one for one in liked if allowed[one[0]]]
            any_id = [int(rng.choice(np.flatnonzero(allowed).tolist()))]
            wish = list(rng.choice(at_hand)) if at_hand and rng.random() < impatience(len(ids)) else any_id
            if wish == [END_ID]:
                return ids
        ids.append(wish.pop(0))
        state.accept(ids[-1])
    return None


def impatience(num_tokens: int) -> float:
    return 0.3 if num_tokens < PATIENCE_TOKENS else 0.95


def read(family: Family, made: Tokenizer, ids: list[int], prompt: Prompt) -> Message:
    parser = ReplyParser(made, family.syntax, Reading(tools=TOOLS, prompt_end=family.syntax.prompt_end(prompt.end)))
    parser.feed(ids)
    parsed = parser.finish(Finish(reason=FinishReason.STOP))[1]
    assert not parsed.faults, made.decode(ids)
    return parsed.message


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [(GrammarKind.LARK, False), (GrammarKind.LARK, True), (GrammarKind.EBNF, True), (GrammarKind.REGEX, False)],
    ids=["one", "parallel", "gbnf", "regex"],
)
@pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("family", FORCED, ids=lambda family: family.name)
def test_all_that_the_grammar_admits_is_read_as_reasoning_and_calls(
    family: Family, has_tokens: bool, parallel: bool, kind: GrammarKind
) -> None:
    markers = tuple(dict.fromkeys(family.syntax.markers)) if has_tokens else ()
    made = tokenizer(markers)
    num_ended = num_reasoned = num_calls = 0
    for prompt in prompts(family, has_tokens=has_tokens):
        grammar = forced(family, made, prompt, parallel, kind)
        liked = wishes(family, made, forced(family, made, prompt, parallel))
        for seed in range(NUM_WALKS):
            ids = walk(markers, grammar, liked, seed)
            if ids is None:
                continue
            message, text = read(family, made, ids, prompt), made.decode(ids)
            assert prompt.must_close in text
            assert message.content is None, text
            assert message.tool_calls, text
            assert parallel or len(message.tool_calls) == 1, text
            for call in message.tool_calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            assert prompt.may_reason or message.reasoning is None, text
            num_ended += 1
            num_reasoned += message.reasoning is not None
            num_calls += len(message.tool_calls)
    assert num_ended > NUM_WALKS // 4
    assert num_calls > num_ended or not parallel
    assert num_reasoned or family.syntax.reasoning is None


def forced(
    family: Family, made: Tokenizer, prompt: Prompt, parallel: bool, kind: GrammarKind = GrammarKind.LARK
) -> Grammar:
    choice, holder = ToolChoice(mode=ToolMode.REQUIRED), Holder(engine="e", kinds={kind})
    end = family.syntax.prompt_end(prompt.end)
    try:
        grammar = forced_calls(TOOLS, choice, parallel, family.syntax, made.added_tokens, prompt_end=end, holder=holder)
    except InvalidRequest as error:
        pytest.skip(str(error))
    assert grammar is not None
    assert grammar.kind is kind
    return grammar


QWEN3 = family_named("qwen3")
MARKERS = QWEN3.syntax.markers
OPENED, CLOSED, PLAIN = "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", "assistant\n"
JUST_CLOSED = CLOSED.rstrip()
CALL = '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("end", "text", "is_admitted"),
    [
        (OPENED, f"So.\n</think>\n\n{CALL}", True),
        (OPENED, f"</think>\n\n{CALL}", True),
        (OPENED, CALL, False),
        (PLAIN, CALL, True),
        (PLAIN, f"<think>\nSo.\n</think>\n\n{CALL}", True),
        (PLAIN, f"So.\n\n{CALL}", False),
        (CLOSED, CALL, True),
        (JUST_CLOSED, f"\n\n{CALL}", True),
        (JUST_CLOSED, CALL, False),
        (CLOSED, f"<think>\nSo.\n</think>\n\n{CALL}", False),
    ],
)
def test_a_forced_reply_begins_as_its_prompt_left_the_reasoning(end: str, text: str, is_admitted: bool) -> None:
    made = tokenizer(MARKERS)
    grammar = forced(QWEN3, made, Prompt(end=end, may_reason=True), False)
    state = backend(MARKERS).compile(grammar).start()
    for token_id in made.encode(text):
        if not state.allowed()[token_id]:
            assert not is_admitted
            return
        state.accept(token_id)
    assert is_admitted
    assert state.allowed()[END_ID]


def test_a_model_without_a_token_that_opens_reasoning_is_not_offered_any() -> None:
    grammars = [
        forced(family, tokenizer(()), Prompt(end=PLAIN, may_reason=False), True)
        for family in (QWEN3, family_named("smollm2"))
    ]
    assert all("reasoning" not in grammar.source for grammar in grammars)


@pytest.mark.parametrize("parallel", [False, True], ids=["one", "parallel"])
@pytest.mark.parametrize("family", FORCED, ids=lambda family: family.name)
def test_a_grammar_begins_with_the_rule_before_which_reasoning_may_be_put(family: Family, parallel: bool) -> None:
    grammar = forced(family, tokenizer(()), Prompt(end=PLAIN, may_reason=False), parallel)
    assert grammar.source.startswith("start:")
    assert len(re.findall(r"\bstart\b", LITERAL.sub("", grammar.source))) == 1
