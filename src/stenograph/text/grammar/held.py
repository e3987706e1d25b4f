"""The one grammar of a constrained reply: its forced calls, or the form asked for its answer. Pure.

Owns the part before either, in llguidance's Lark dialect: the reasoning opened by the prompt, or by the model itself
before calls, or a family's own frame. Does not compile the grammar: the grammar engine finds out whether it knows a
schema.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ToolChoice
from stenograph.core.errors import GrammarBesideCall, InvalidRequest
from stenograph.core.loaded import entry
from stenograph.core.messages import Tool
from stenograph.core.types import Grammar, GrammarKind, PromptEnd
from stenograph.text.call_syntax import CallGrammar, ForcedTool
from stenograph.text.grammar.lark import STYLE_KEYWORD, json_value, marker, quoted
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_START = "start:"

_CAN_FORCE = (
    "Leave tool_choice to the model ('auto'), or serve with --engine vllm, --engine sglang, or --engine embedded."
)
"""The advice where a call cannot be forced: the engines able to do it."""

_SCHEMA = msgspec.json.Decoder(dict[str, object])
_CHOICES = msgspec.json.Decoder(list[str])
_IN_SLASHES = re.compile(r"\\.|/", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAnswer:
    """The part before an answer, as rules of a grammar: `start` among them, with the rule `answer` at its end."""

    rules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Grammars that an engine, named `engine`, can enforce. `parses`: it forces calls itself, and holds a grammar back
    until the end of the reasoning, by its own parser."""

    engine: str
    kinds: Collection[GrammarKind]
    parses: bool = False


def held_grammar(
    asked: Grammar | None, forced: Grammar | None, before: BeforeAnswer | None, holder: Holder
) -> Grammar | None:
    """The grammar for an engine. `asked` is the client's; it is of the answer alone.

    Raises GrammarBesideCall if both are there, InvalidRequest if the engine cannot do it.
    """
    if forced is not None and asked is not None:
        raise GrammarBesideCall
    grammar = asked if holder.parses else forced or asked
    if grammar is None:
        return None
    if grammar.kind not in holder.kinds:
        if grammar is forced:
            raise InvalidRequest(
                f"The engine {holder.engine} cannot be made to call a tool: it has no {grammar.kind} grammars."
                f" {_CAN_FORCE}",
                blame=Blame(RequestPart.TOOL_CHOICE),
            )
        raise InvalidRequest(
            f"The engine {holder.engine} has no {grammar.kind} grammars.", blame=Blame(RequestPart.GRAMMAR)
        )
    if grammar is forced or holder.parses or before is None:
        return grammar
    if GrammarKind.LARK not in holder.kinds:
        raise InvalidRequest(
            f"The model's answer comes after its reasoning, and the engine {holder.engine} cannot hold the answer"
            " alone to a grammar. If the chat template can do without reasoning, ask for that.",
            blame=Blame(RequestPart.GRAMMAR),
        )
    return Grammar(kind=GrammarKind.LARK, source="\n".join([*before.rules, *_answer(grammar)]))


def forced_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    syntax: ReplySyntax,
    added_tokens: Mapping[str, int],
    *,
    prompt_end: PromptEnd = PromptEnd.SILENT,
    calls: CallGrammar | None = None,
    holder: Holder | None = None,
) -> Grammar | None:
    """One call, or with `parallel` one or more, of the tools allowed by `choice`; None where it forces nothing.

    Where the prompt opened the reasoning, the calls come after its close. `calls` spells them where `syntax` does not.
    The grammar is Lark, or for a `holder` without Lark of one of its kinds. Raises InvalidRequest: no such tool,
    parameters other than the JSON Schema of an object, or a syntax in which calls cannot be forced; or the holder's
    kinds cannot tell them.
    """
    if not choice.forces:
        return None
    allowed = [(i, tool) for i, tool in enumerate(tools) if choice.name in (None, tool.name)]
    if not allowed:
        wanted = "there are no tools" if choice.name is None else f"there is no tool {choice.name!r}"
        raise InvalidRequest(f"tool_choice asks for a call, but {wanted}", blame=Blame(RequestPart.TOOL_CHOICE))
    spelling = calls or syntax.calls
    if spelling is None:
        raise InvalidRequest(
            "tool_choice asks for a call, but the model cannot make any.", blame=Blame(RequestPart.TOOL_CHOICE)
        )
    forced = [ForcedTool(number=i, name=tool.name, schema=_schema(i, tool)) for i, tool in allowed]
    source = spelling.grammar(forced, parallel, lambda text: marker(text, added_tokens))
    if syntax.reasoning is not None:
        source = _after_reasoning(source, syntax.reasoning, added_tokens, prompt_end)
    grammar = Grammar(kind=GrammarKind.LARK, source=source)
    if holder is None or holder.parses or GrammarKind.LARK in holder.kinds:
        return grammar
    made: Grammar | str = entry("stenograph.text.grammar.lark_patterns:in_kinds")(grammar, holder.kinds, added_tokens)
    if isinstance(made, Grammar):
        return made
    raise InvalidRequest(
        f"The engine {holder.engine} cannot be made to call a tool, as it has no lark grammars: {made}. {_CAN_FORCE}",
        blame=Blame(RequestPart.TOOL_CHOICE),
    )


def open_reasoning(
    marks: ReasoningMarks | None, added_tokens: Mapping[str, int], prompt_end: PromptEnd
) -> BeforeAnswer | None:
    """The reasoning opened by a prompt with this end; None for any other."""
    if marks is None or not prompt_end.is_reasoning:
        return None
    return BeforeAnswer(rules=(f"{_START} reasoning answer", *_reasoning_rules(marks, added_tokens)))


def _after_reasoning(calls: str, marks: ReasoningMarks, added_tokens: Mapping[str, int], prompt_end: PromptEnd) -> str:
    """The grammar of calls, with reasoning before them where the prompt opened it, or where the model may.

    A model may open it where the opening marker is a token of its own: one without such a token was not made to reason,
    and a small one would stray. After a prompt that has closed the reasoning, only the text after the close may still
    be missing.
    """
    assert calls.startswith(_START), "a syntax's grammar begins with its rule `start`"
    renamed = f"forced_calls:{calls.removeprefix(_START)}"
    match prompt_end:
        case PromptEnd.OPENS | PromptEnd.OPENED:
            start = "reasoning forced_calls"
        case PromptEnd.CLOSES if marks.after_close:
            return f"{_START} {quoted(marks.after_close)} forced_calls\n{renamed}"
        case PromptEnd.CLOSES | PromptEnd.CLOSED:
            return calls
        case PromptEnd.SILENT if marks.open not in added_tokens:
            return calls
        case PromptEnd.SILENT:
            start = f"({_may_begin(marks, added_tokens)})? forced_calls"
    return "\n".join([f"{_START} {start}", *_reasoning_rules(marks, added_tokens), renamed])


def _may_begin(marks: ReasoningMarks, added_tokens: Mapping[str, int]) -> str:
    """Reasoning opened by the model itself, or, in some families, only closed."""
    opening = marker(marks.open, added_tokens)
    if marks.lead:
        opening = f"{quoted(marks.lead)}? {opening}"
    bare = f" | {marker(marks.close, added_tokens)}" if marks.closes_bare else ""
    return f"{opening} reasoning{bare}"


def _reasoning_rules(marks: ReasoningMarks, added_tokens: Mapping[str, int]) -> list[str]:
    """The rule `reasoning` and those below it: free text up to the first spelling of its close, as the parser reads it,
    and the text after the close."""
    close = re.escape(marks.close).replace("/", "\\/")
    gap = f" {quoted(marks.after_close)}" if marks.after_close else ""
    rules = [f"reasoning: reasoning_text{gap}"]
    if marks.close not in added_tokens:
        return [*rules, f"reasoning_text[lazy]: /(?s:.*){close}/"]
    text = f"REASONING_TEXT: /(?s:.)+/ & ~/(?s:.*){close}(?s:.*)/"
    return [*rules, f"reasoning_text: REASONING_TEXT? {marker(marks.close, added_tokens)}", text]


def _schema(index: int, tool: Tool) -> dict[str, object]:
    blame = Blame(RequestPart.TOOLS, index, ("parameters",))
    try:
        schema = msgspec.json.decode(tool.parameters_json, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"The parameters of {tool.name!r} are not a JSON Schema object.", blame=blame) from error
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest(f"The parameters of {tool.name!r} must be of type object.", blame=blame)
    schema.pop(STYLE_KEYWORD, None)  # the style is ours
    return schema


def _answer(grammar: Grammar) -> list[str]:
    """Rules with the grammar's language as `answer`. Raises InvalidRequest if it cannot be part of another."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return [f"answer: {json_value({'type': 'object'})}"]
        case GrammarKind.JSON_SCHEMA:
            return [f"answer: {json_value(_SCHEMA.decode(grammar.source))}"]
        case GrammarKind.CHOICE:
            choices = " | ".join(map(json.dumps, _CHOICES.decode(grammar.source)))
            return ["answer: ANSWER", f"ANSWER: {choices}"]
        case GrammarKind.REGEX if "\n" not in grammar.source:
            return ["answer: ANSWER", f"ANSWER: /{_IN_SLASHES.sub(_escaped, grammar.source)}/"]
        case GrammarKind.REGEX:
            raise InvalidRequest(
                "The model's answer comes after its reasoning: write a line feed as \\n here.",
                blame=Blame(RequestPart.GRAMMAR),
            )
        case GrammarKind.EBNF | GrammarKind.LARK:
            raise InvalidRequest(
                f"The model's answer comes after its reasoning, and {grammar.kind} grammars cannot be put behind it. A"
                " JSON Schema, a regular expression or choices can; a completion takes a grammar that begins with the"
                " reasoning.",
                blame=Blame(RequestPart.GRAMMAR),
            )


def _escaped(found: "re.Match[str]") -> str:
    return "\\/" if found[0] == "/" else found[0]
