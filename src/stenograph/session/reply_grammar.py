"""What a reply is held to: the grammar that was asked for, or the calls that are forced. Pure.

Owns the rule that a grammar which a client asks for is of the answer: where the prompt opened the reasoning, free
reasoning and its close come before it, in llguidance's Lark dialect. Forced calls bring their own (`tool_grammar`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stenograph.core.errors import InvalidRequest
from stenograph.core.types import Grammar, GrammarKind
from stenograph.engine.base import Capabilities
from stenograph.render.parsers.call_syntax import quoted
from stenograph.render.parsers.reply_syntax import ReasoningMarks

_SCHEMA = msgspec.json.Decoder(dict[str, object])
_CHOICES = msgspec.json.Decoder(list[str])
_JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""As the embedded engine holds JSON that comes without reasoning."""
_IN_SLASHES = re.compile(r"\\.|/", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReasoning:
    """Reasoning that a prompt has opened. `close_id`: the token that is its close, None where that is plain text."""

    close: str
    close_id: int | None
    after_close: str


def open_reasoning(
    marks: ReasoningMarks | None, added_tokens: Mapping[str, int], prompt_end: str
) -> OpenReasoning | None:
    """The reasoning that a prompt which ends with this text has opened; None for any other."""
    if marks is None or not prompt_end.rstrip().endswith(marks.open):
        return None
    return OpenReasoning(close=marks.close, close_id=added_tokens.get(marks.close), after_close=marks.after_close)


def reply_grammar(
    asked: Grammar | None,
    forced: Grammar | None,
    reasoning: OpenReasoning | None,
    capabilities: Capabilities,
    *,
    param: str,
) -> Grammar | None:
    """What the engine is asked to hold the reply to. `asked` is the client's, from the field `param`.

    Raises InvalidRequest: both are there, or the engine cannot do it.
    """
    if forced is not None and asked is not None:
        raise InvalidRequest(
            f"{param.split('/')[1]} cannot be held together with a forced tool call.", param="/tool_choice"
        )
    # An engine that parses forces calls itself, and holds a grammar back until the reasoning that it parses has ended.
    grammar = asked if capabilities.parses else forced or asked
    if grammar is None:
        return None
    at = "/tools" if asked is None else param
    if grammar.kind not in capabilities.grammars:
        raise InvalidRequest(f"The engine {capabilities.engine} has no {grammar.kind} grammars.", param=at)
    if grammar is forced or capabilities.parses or reasoning is None:
        return grammar
    if GrammarKind.LARK not in capabilities.grammars:
        raise InvalidRequest(
            f"The model's prompt opens its reasoning, and the engine {capabilities.engine} cannot hold only what comes"
            " after that to a grammar. If the chat template can do without reasoning, ask for that.",
            param=at,
        )
    return _after(reasoning, grammar, param=at)


def _after(reasoning: OpenReasoning, answer: Grammar, *, param: str) -> Grammar:
    """Free reasoning up to the first spelling of its close, as the parser reads it, then the answer."""
    close = re.escape(reasoning.close).replace("/", "\\/")
    gap = f" {quoted(reasoning.after_close)}" if reasoning.after_close else ""
    lines = [f"start: reasoning{gap} answer"]
    if reasoning.close_id is None:
        lines.append(f"reasoning[lazy]: /(?s:.*){close}/")
    else:
        lines += [
            f"reasoning: REASONING_TEXT? <[{reasoning.close_id}]>",
            f"REASONING_TEXT: /(?s:.)+/ & ~/(?s:.*){close}(?s:.*)/",
        ]
    return Grammar(kind=GrammarKind.LARK, source="\n".join([*lines, *_answer(answer, param)]))


def _answer(grammar: Grammar, param: str) -> list[str]:
    """Rules whose `answer` is the grammar's language. Raises InvalidRequest for one that cannot be part of another."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return [_json_rule({"type": "object"})]
        case GrammarKind.JSON_SCHEMA:
            return [_json_rule(_SCHEMA.decode(grammar.source))]
        case GrammarKind.CHOICE:
            choices = " | ".join(map(json.dumps, _CHOICES.decode(grammar.source)))
            return ["answer: ANSWER", f"ANSWER: {choices}"]
        case GrammarKind.REGEX if "\n" not in grammar.source:
            return ["answer: ANSWER", f"ANSWER: /{_IN_SLASHES.sub(_escaped, grammar.source)}/"]
        case GrammarKind.REGEX:
            raise InvalidRequest("The model's prompt opens its reasoning: write a line feed as \\n here.", param=param)
        case GrammarKind.EBNF | GrammarKind.LARK:
            raise InvalidRequest(
                f"The model's prompt opens its reasoning, and {grammar.kind} grammars cannot be put behind that. A JSON"
                " Schema, a regular expression or choices can; so can any grammar that begins with the reasoning, as a"
                " completion.",
                param=param,
            )


def _json_rule(schema: Mapping[str, object]) -> str:
    return f"answer: %json {json.dumps({**schema, 'x-guidance': _JSON_STYLE}, ensure_ascii=False)}"


def _escaped(found: "re.Match[str]") -> str:
    return "\\/" if found[0] == "/" else found[0]
