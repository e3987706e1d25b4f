"""Invariants of guided decoding: an output in the language, or a refusal; never an ignored constraint."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from stenograph.conformance.lab import Lab, NotOffered
from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.messages import Tool
from stenograph.core.types import FinishReason, Grammar, GrammarKind
from stenograph.text.grammar.held import Holder, forced_calls
from stenograph.text.json_calls import HERMES
from stenograph.text.reply_syntax import ReplySyntax

NUM_SEEDS, MOST_SEEDS = 4, 32
"""Draws of each grammar, since a model without knowledge of it goes several ways; more until one is whole."""
MAX_TOKENS, MAX_CALL_TOKENS = 64, 128

_REGEX = "[0-9]{3}-(ab|cd)"
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
)
_TOOL = Tool(name="look", json="{}", parameters_json=_SCHEMA)
_CALLS = [
    f'<tool_call>\n{{"name": "look", "arguments": {{"ok": {ok}, "size": "{size}"}}}}\n</tool_call>'
    for ok in ("true", "false")
    for size in ("small", "large")
]
"""All its possible arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Language:
    """A grammar's source, whether a text is in its language, and whether a text can be the beginning of one in it."""

    source: str
    holds: Callable[[str], bool]
    may_begin: Callable[[str], bool]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _begins_object(text: str) -> bool:
    return text.lstrip()[:1] in ("", "{")


def _is_sized(text: str) -> bool:
    told: dict[str, Any] = json.loads(text) if _is_object(text) else {}
    return set(told) == {"ok", "size"} and isinstance(told["ok"], bool) and told["size"] in ("small", "large")


def _one_of(source: str, *texts: str) -> _Language:
    return _Language(
        source=source,
        holds=lambda text: text in texts,
        may_begin=lambda text: any(whole.startswith(text) for whole in texts),
    )


_LANGUAGES: Mapping[GrammarKind, _Language] = {
    GrammarKind.JSON_OBJECT: _Language(source="", holds=_is_object, may_begin=_begins_object),
    GrammarKind.JSON_SCHEMA: _Language(source=_SCHEMA, holds=_is_sized, may_begin=_begins_object),
    GrammarKind.REGEX: _Language(
        source=_REGEX,
        holds=lambda text: re.fullmatch(_REGEX, text) is not None,
        may_begin=lambda text: re.fullmatch(r"[0-9]{0,3}|[0-9]{3}-[ac]?", text) is not None,
    ),
    GrammarKind.CHOICE: _one_of('["yes", "no", "not yet"]', "yes", "no", "not yet"),
    GrammarKind.LARK: _one_of('start: ("ab" | "cd") "!"', "ab!", "cd!"),
    GrammarKind.EBNF: _one_of('root ::= ("ab" | "cd") "!"', "ab!", "cd!"),
}


async def keeps_grammar(lab: Lab, kind: GrammarKind) -> None:
    """Outputs are in the language, whatever the seed; a kind unknown to the engine is refused."""
    language = _LANGUAGES[kind]
    grammar = Grammar(kind=kind, source=language.source)
    if kind in lab.capabilities.grammars:
        await _check_held(lab, grammar, language)
    else:
        await lab.check_refused(lab.request(grammar=grammar), f"a grammar of the kind {kind}")


async def forces_a_call(lab: Lab) -> None:
    """Under the grammar of a forced call, of a kind known to the engine, outputs are calls in their syntax."""
    kinds = lab.capabilities.grammars
    grammar = forced_calls(
        [_TOOL],
        ToolChoice(mode=ToolMode.REQUIRED),
        False,
        ReplySyntax(calls=HERMES),
        {},
        holder=Holder(engine=lab.capabilities.engine, kinds=kinds),
    )
    if grammar is None or grammar.kind not in kinds:
        raise NotOffered("a kind of grammar that can be a call's")
    await _check_held(lab, grammar, _one_of(grammar.source, *_CALLS), MAX_CALL_TOKENS)


async def _check_held(lab: Lab, grammar: Grammar, language: _Language, max_tokens: int = MAX_TOKENS) -> None:
    num_whole = 0
    for seed in range(MOST_SEEDS):
        if num_whole and seed >= NUM_SEEDS:
            break
        turn = await lab.greedy(temperature=1.0, seed=seed, grammar=grammar, ignore_eos=False, max_tokens=max_tokens)
        text = lab.text(turn)
        if turn.finish.reason is FinishReason.STOP:
            assert language.holds(text), f"{text!r} is not in the language {grammar}"
            num_whole += 1
        else:
            assert language.may_begin(text), f"{text!r} begins nothing in the language {grammar}"
    if not num_whole:
        raise NotOffered(f"a text that ends within {max_tokens} tokens; {MOST_SEEDS} are well begun")


def grammar_laws() -> dict[str, Callable[[Lab], Awaitable[None]]]:
    """A law for each kind of grammar, and one for forced calls."""
    laws = {f"grammar_{kind}": partial(keeps_grammar, kind=kind) for kind in GrammarKind}
    return {**laws, "grammar_of_a_forced_call": forces_a_call}
