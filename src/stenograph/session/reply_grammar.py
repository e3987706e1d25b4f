"""What a reply is held to: the grammar that was asked for, or the calls that are forced. Pure.

Owns the rule that a grammar which a client asks for is of the answer: where the prompt opened the reasoning, free
reasoning and its close come before it, in harmony the frame of its channels too, in llguidance's Lark dialect. Forced
calls bring their own (`tool_grammar`).
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
from stenograph.render.parsers.harmony import ANALYSIS, CHANNEL, END, FINAL, MESSAGE, START
from stenograph.render.parsers.reply_syntax import ReasoningMarks

_SCHEMA = msgspec.json.Decoder(dict[str, object])
_CHOICES = msgspec.json.Decoder(list[str])
_JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""As the embedded engine holds JSON that comes without reasoning."""
_IN_SLASHES = re.compile(r"\\.|/", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAnswer:
    """What comes before an answer, as rules of a grammar: `start` among them, which ends with the rule `answer`."""

    rules: tuple[str, ...]


def open_reasoning(
    marks: ReasoningMarks | None, added_tokens: Mapping[str, int], prompt_end: str
) -> BeforeAnswer | None:
    """The reasoning that a prompt which ends with this text has opened; None for any other.

    It is free up to the first spelling of its close, as the parser reads it.
    """
    if marks is None or not prompt_end.rstrip().endswith(marks.open):
        return None
    close = re.escape(marks.close).replace("/", "\\/")
    gap = f" {quoted(marks.after_close)}" if marks.after_close else ""
    start = f"start: reasoning{gap} answer"
    if marks.close not in added_tokens:
        return BeforeAnswer(rules=(start, f"reasoning[lazy]: /(?s:.*){close}/"))
    text = f"REASONING_TEXT: /(?s:.)+/ & ~/(?s:.*){close}(?s:.*)/"
    return BeforeAnswer(rules=(start, f"reasoning: REASONING_TEXT? <[{added_tokens[marks.close]}]>", text))


def harmony_frame(added_tokens: Mapping[str, int]) -> BeforeAnswer:
    """A reply in harmony up to its answer: reasoning, if the model wants any, and the header of the final channel."""
    channel, message, end, start = (f"<[{added_tokens[mark]}]>" for mark in (CHANNEL, MESSAGE, END, START))
    thought = f"{channel} {quoted(ANALYSIS)} {message} THOUGHT? {end} {start} {quoted('assistant')}"
    return BeforeAnswer(rules=(f"start: ({thought})? {channel} {quoted(FINAL)} {message} answer", "THOUGHT: /(?s:.)+/"))


def reply_grammar(
    asked: Grammar | None,
    forced: Grammar | None,
    before: BeforeAnswer | None,
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
    if grammar.kind not in capabilities.grammars:
        if grammar is forced:
            raise InvalidRequest(
                f"The engine {capabilities.engine} cannot be made to call a tool: it has no {grammar.kind} grammars.",
                param="/tool_choice",
            )
        raise InvalidRequest(f"The engine {capabilities.engine} has no {grammar.kind} grammars.", param=param)
    if grammar is forced or capabilities.parses or before is None:
        return grammar
    if GrammarKind.LARK not in capabilities.grammars:
        raise InvalidRequest(
            f"The model's answer comes after its reasoning, and the engine {capabilities.engine} cannot hold the answer"
            " alone to a grammar. If the chat template can do without reasoning, ask for that.",
            param=param,
        )
    return Grammar(kind=GrammarKind.LARK, source="\n".join([*before.rules, *_answer(grammar, param)]))


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
            raise InvalidRequest(
                "The model's answer comes after its reasoning: write a line feed as \\n here.", param=param
            )
        case GrammarKind.EBNF | GrammarKind.LARK:
            raise InvalidRequest(
                f"The model's answer comes after its reasoning, and {grammar.kind} grammars cannot be put behind it. A"
                " JSON Schema, a regular expression or choices can; a completion takes a grammar that begins with the"
                " reasoning.",
                param=param,
            )


def _json_rule(schema: Mapping[str, object]) -> str:
    return f"answer: %json {json.dumps({**schema, 'x-guidance': _JSON_STYLE}, ensure_ascii=False)}"


def _escaped(found: "re.Match[str]") -> str:
    return "\\/" if found[0] == "/" else found[0]
