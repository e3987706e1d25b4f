"""A grammar whose language is tool calls in a family's syntax, arguments held to each tool's schema.

Owns the text of the grammar, in llguidance's Lark dialect, and what may come before the calls: the reasoning that the
prompt has opened, or that the model may open itself. Does not compile it: whether a schema is one that the grammar
engine knows is found out there.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.core.types import Grammar, GrammarKind
from stenograph.render.parsers.call_syntax import CallGrammar, ForcedTool, quoted
from stenograph.render.parsers.reply_syntax import ReasoningMarks, ReplySyntax

_SPELLING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""Fixed white space: with free white space a small model fills its budget with blanks (measured)."""

_START = "start:"

_NAMED_TOKEN = re.compile(r"<[^<>\s\[\]]+>")
"""What the dialect takes for the name of a token."""


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    syntax: ReplySyntax,
    added_tokens: Mapping[str, int],
    *,
    prompt_end: str = "",
    forced_calls: CallGrammar | None = None,
) -> Grammar | None:
    """One call, or with `parallel` one or more, of the tools that `choice` allows; None where it forces nothing.

    `prompt_end` is the text of the prompt's last tokens: where it opened the reasoning, the calls come after its close.
    Raises InvalidRequest: no such tool, parameters that are not the JSON Schema of an object, or a syntax in which
    calls cannot be forced.
    """
    if choice.mode in (ToolMode.AUTO, ToolMode.NONE):
        return None
    allowed = [(i, tool) for i, tool in enumerate(tools) if choice.name in (None, tool.name)]
    if not allowed:
        wanted = "there are no tools" if choice.name is None else f"there is no tool {choice.name!r}"
        raise InvalidRequest(f"tool_choice asks for a call, but {wanted}", param="/tool_choice")
    spelling = forced_calls or syntax.calls
    if spelling is None:
        raise InvalidRequest("tool_choice asks for a call, but the model makes none", param="/tool_choice")
    forced = [ForcedTool(number=i, name=tool.name, schema=_schema(i, tool)) for i, tool in allowed]
    source = spelling.grammar(forced, parallel, lambda text: _marker(text, added_tokens))
    if syntax.reasoning is not None:
        source = _after_reasoning(source, syntax.reasoning, added_tokens, prompt_end)
    return Grammar(kind=GrammarKind.LARK, source=source)


def _after_reasoning(calls: str, marks: ReasoningMarks, added_tokens: Mapping[str, int], prompt_end: str) -> str:
    """The grammar of calls, with reasoning before them where the prompt opened it, or where the model may.

    The reasoning is free text up to the first spelling of its close, as the parser reads it. A model may open it where
    the opening marker is a token of its own: one that has no such token was not made to reason, and a small one would
    stray. A prompt that has closed the reasoning has it behind it, but maybe not what follows the close.
    """
    assert calls.startswith(_START), "a syntax's grammar begins with its rule `start`"
    forced_calls = f"forced_calls:{calls.removeprefix(_START)}"
    if prompt_end.endswith(marks.close) and marks.after_close:
        return f"{_START} {quoted(marks.after_close)} forced_calls\n{forced_calls}"
    is_open = prompt_end.rstrip().endswith(marks.open)
    if not is_open and (prompt_end.rstrip().endswith(marks.close) or marks.open not in added_tokens):
        return calls
    close = re.escape(marks.close).replace("/", "\\/")
    opening = _marker(marks.open, added_tokens)
    if marks.lead:
        opening = f"{quoted(marks.lead)}? {opening}"
    text = f"/(?s:.)+/ & ~/(?s:.*){close}(?s:.*)/"
    lines = [
        f"{_START} reasoning forced_calls" if is_open else f"{_START} ({opening} reasoning)? forced_calls",
        f"reasoning: reasoning_text {quoted(marks.after_close)}" if marks.after_close else "reasoning: reasoning_text",
    ]
    if marks.close in added_tokens:
        lines += [f"reasoning_text: REASONING_TEXT? {_marker(marks.close, added_tokens)}", f"REASONING_TEXT: {text}"]
    else:
        lines.append(f"reasoning_text[lazy]: /(?s:.*){close}/")
    return "\n".join([*lines, forced_calls])


def _schema(index: int, tool: Tool) -> dict[str, object]:
    param = f"/tools/{index}/function/parameters"
    try:
        schema = msgspec.json.decode(tool.parameters_json, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"The parameters of {tool.name!r} are not a JSON Schema object.", param=param) from error
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest(f"The parameters of {tool.name!r} must be of type object.", param=param)
    return {**schema, "x-guidance": _SPELLING}


def _marker(text: str, added_tokens: Mapping[str, int]) -> str:
    """A marker of the syntax: bare, or by its id, where it is a token of its own, else plain text.

    A client's text never is bare.
    """
    if text not in added_tokens:
        return quoted(text)
    return text if _NAMED_TOKEN.fullmatch(text) else f"<[{added_tokens[text]}]>"
