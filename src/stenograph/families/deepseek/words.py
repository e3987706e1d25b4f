"""The words in which DeepSeek V3.2 and V4 read of their tools and the effort to make: those of the models' own files.

Owns how these are found in the source of an encoder, if the files bring one beside the tokenizer: it is read, never
run. Where there is none, the words are ours. Knows nothing of conversations.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stenograph.families.deepseek.dsml import MARK

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_FIELD = re.compile(r"\{\{|\}\}|\{(\w*)\}?|\}")
_FIELDS = {"dsml_token": MARK, "thinking_start_token": THINK_OPEN, "thinking_end_token": THINK_CLOSE}
_TOOLS = "tool_schemas"
_MAX_EFFORT = "REASONING_EFFORT_MAX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Text before and after the tools, each on a line; and before all, to ask for the highest effort.

    `max_effort` is None where these words are not known.
    """

    before_tools: str
    after_tools: str
    max_effort: str | None = None


def own_words(block: str) -> Words:
    """Our own words. `block` is the name of the element around the calls."""
    return Words(
        before_tools="## Tools\n\nThese functions can be called; each line describes one in JSON:\n",
        after_tools=(
            "\n\nTo call functions, end the reply with one block of calls, which looks like this:\n\n"
            f'<{MARK}{block}>\n<{MARK}invoke name="NAME">\n'
            f'<{MARK}parameter name="ARGUMENT" string="true">TEXT</{MARK}parameter>\n'
            f'<{MARK}parameter name="ARGUMENT" string="false">JSON</{MARK}parameter>\n'
            f"</{MARK}invoke>\n</{MARK}{block}>\n\n"
            'An argument that is text is written as it is, with string="true"; any other as JSON, with string="false".'
        ),
    )


def published_words(source: str) -> Words | None:
    """The words in an encoder's source: a constant with one place for the tools, filled as `str.format` would.

    None where there is no such constant, or more than one.
    """
    constants = dict(_constants(source))
    found = [filled for text in constants.values() if (filled := _filled(text)) is not None]
    if len(found) != 1:
        return None
    before, after = found[0]
    return Words(before_tools=before, after_tools=after, max_effort=constants.get(_MAX_EFFORT))


def _constants(source: str) -> Iterator[tuple[str, str]]:
    """The module's texts by their names. None if the source is not Python."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for statement in module.body:
        match statement:
            case ast.Assign(targets=targets, value=ast.Constant(value=str(text))):
                names = targets
            case ast.AnnAssign(target=target, value=ast.Constant(value=str(text))):
                names = [target]
            case _:
                continue
        yield from ((name.id, text) for name in names if isinstance(name, ast.Name))


def _filled(text: str) -> tuple[str, str] | None:
    """The text around the place of the tools; None where it has not one, or fields that are not known here."""
    pieces, at = [""], 0
    for found in _FIELD.finditer(text):
        pieces[-1] += text[at : found.start()]
        at = found.end()
        name = found[1]
        if found[0] in ("{{", "}}"):
            pieces[-1] += found[0][0]
        elif found[0] == f"{{{_TOOLS}}}":
            pieces.append("")
        elif name in _FIELDS and found[0].endswith("}"):
            pieces[-1] += _FIELDS[name]
        else:
            return None
    pieces[-1] += text[at:]
    return (pieces[0], pieces[1]) if len(pieces) == 2 else None
