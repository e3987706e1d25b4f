"""A grammar whose language is tool calls in a family's syntax, arguments held to each tool's schema.

Owns the text of the grammar, in llguidance's Lark dialect. Does not compile it: whether a schema is one that the
grammar engine knows is found out there.
"""

from collections.abc import Collection, Sequence

import msgspec

from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.core.types import Grammar, GrammarKind
from stenograph.render.parsers.call_syntax import CallSyntax, ForcedTool, quoted

_SPELLING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""Fixed white space: with free white space a small model fills its budget with blanks (measured)."""


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    syntax: CallSyntax | None,
    added_tokens: Collection[str],
) -> Grammar | None:
    """One call, or with `parallel` one or more, of the tools that `choice` allows; None where it forces nothing.

    Raises InvalidRequest: no such tool, parameters that are not the JSON Schema of an object, or a syntax in which
    calls cannot be forced.
    """
    if choice.mode in (ToolMode.AUTO, ToolMode.NONE):
        return None
    allowed = [(i, tool) for i, tool in enumerate(tools) if choice.name in (None, tool.name)]
    if not allowed:
        wanted = "there are no tools" if choice.name is None else f"there is no tool {choice.name!r}"
        raise InvalidRequest(f"tool_choice asks for a call, but {wanted}", param="/tool_choice")
    if syntax is None:
        raise InvalidRequest("tool_choice asks for a call, but the model makes none", param="/tool_choice")
    forced = [ForcedTool(number=i, name=tool.name, schema=_schema(i, tool)) for i, tool in allowed]
    source = syntax.grammar(forced, parallel, lambda text: _marker(text, added_tokens))
    return Grammar(kind=GrammarKind.LARK, source=source)


def _schema(index: int, tool: Tool) -> dict[str, object]:
    param = f"/tools/{index}/function/parameters"
    try:
        schema = msgspec.json.decode(tool.parameters_json, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"The parameters of {tool.name!r} are not a JSON Schema object.", param=param) from error
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest(f"The parameters of {tool.name!r} must be of type object.", param=param)
    return {**schema, "x-guidance": _SPELLING}


def _marker(text: str, added_tokens: Collection[str]) -> str:
    """A marker of the syntax: bare where it is a token of its own, else plain text. A client's text never is bare."""
    return text if text in added_tokens else quoted(text)
