"""Replies sent back by a client with their calls written as text, in the way of smolagents. Pure.

smolagents replays no tool call: its assistant message is the reply's text, a line "Calling tools:" and the calls as
Python writes a list of dicts. It sorts parallel calls by id, and reads a string in the form of a JSON array or object
as one. To a reply without calls it adds the call made of the text; its code agent, also the code's closing tag.
Source: smolagents 1.26.0, memory.ActionStep.to_messages, utils.make_json_serializable, agents.CodeAgent.

Knows how such text is read, and its place in a message. matching.py decides whether it is the stored reply.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from stenograph.core.messages import Message, ToolCall

TEXT_CALLS = "text-calls"
"""The rule's name in records."""

CALLS_END = "}}]"
"""The end of every text with calls."""

_HEADING = "Calling tools:\n"
_CLOSING_TAGS = ("</code>", "```")
"""Ends of code: stop strings, added again by the code agent."""

_PYTHON_TOKEN = re.compile(
    r"""'[^'\\]*+(?:\\[\\'"nrtxuU][^'\\]*+)*+'|"[^"\\]*+(?:\\[\\'"nrtxuU][^"\\]*+)*+"|['"]|True|False|None|nan|inf"""
)
"""Everything spelled by `repr` otherwise than in JSON, and a quote that opens no string."""
_NAMES = {"True": "true", "False": "false", "None": "null", "nan": "NaN", "inf": "Infinity"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRewrite:
    """A named change to a message. `from_text` is the part sent by the client, `to_text` its replacement."""

    rule: str
    from_text: str
    to_text: str


def rewrites_of(stored: Message, given: Message) -> tuple[MessageRewrite, ...]:
    """The changes from `given` to the stored reply, once a matcher has accepted it. Reads no calls."""
    added = added_text(stored, given)
    if not added:
        return ()
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in stored.tool_calls]
    to_text = json.dumps(calls, ensure_ascii=False) if calls else ""
    return (MessageRewrite(rule=TEXT_CALLS, from_text=added, to_text=to_text),)


def added_text(stored: Message, given: Message) -> str:
    """The part of `given` after the stored reply's text: a closing tag, calls as text, or both.

    "" if there is none, or if the two differ in more. A closing tag is added to text alone, of a reply without calls.
    """
    text, own = (given.content or "").strip(), (stored.content or "").strip()
    if given.tool_calls or len(text) <= len(own) or not text.startswith(own):
        return ""
    added = text[len(own) :].lstrip()
    after_tag = _without_tag(added) if own and not stored.tool_calls else added
    is_whole = after_tag.startswith(_HEADING) or (after_tag == "" and added != "")
    return added if is_whole else ""


def read_calls(added: str) -> tuple[ToolCall, ...] | None:
    """The calls in an added text, with arguments as `comparable` gives them; None if it is nothing of the kind.

    Its Python is respelled as JSON, a token at a time, and not given to Python's own parser: `ast.literal_eval` takes a
    second for 1.2 MB, and has stack limits of its own.
    """
    text = _without_tag(added)
    if not text.startswith(_HEADING):
        return ()
    try:
        listed: object = json.loads(_PYTHON_TOKEN.sub(_as_json, text.removeprefix(_HEADING)))
        return tuple(map(_read_call, cast("list[object]", listed))) if isinstance(listed, list) else None
    except (KeyError, ValueError, RecursionError):
        return None


def comparable(calls: Sequence[ToolCall], *, like: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls with arguments spelled as `read_calls` spells them; sorted by id if those of `like` are not in order.

    Raises RecursionError for arguments nested too deeply to be written.
    """
    ordered = calls if [call.id for call in calls] == [call.id for call in like] else sorted(calls, key=lambda c: c.id)
    return tuple(ToolCall(id=c.id, name=c.name, arguments=_spelled(_loaded(c.arguments))) for c in ordered)


def _without_tag(added: str) -> str:
    for tag in _CLOSING_TAGS:
        if added.startswith(tag):
            return added.removeprefix(tag).lstrip()
    return added


def _as_json(token: re.Match[str]) -> str:
    """One token of Python as JSON. Raises ValueError for a token never written by `repr`."""
    text = token[0]
    if text in _NAMES:
        return _NAMES[text]
    if len(text) == 1:
        raise ValueError("a quote opens no string")
    inside = text[1:-1]
    if "\\" in inside:
        inside = inside.encode("latin-1", "backslashreplace").decode("unicode_escape")
    return json.dumps(inside)


def _read_call(value: object) -> ToolCall:
    match value:
        case {"id": str(id_), "type": "function", "function": {"name": str(name)}}:
            function = cast("dict[str, dict[str, object]]", value)["function"]
            return ToolCall(id=id_, name=name, arguments=_spelled(function["arguments"]))
        case _:
            raise ValueError("not a call")


def _spelled(arguments: object) -> str:
    return json.dumps(_unfolded(arguments))


def _unfolded(value: object) -> object:
    """A value as smolagents shows it: a string with a JSON array or object becomes the array or object."""
    if isinstance(value, str):
        if value[:1] + value[-1:] not in ("{}", "[]"):
            return value
        read = _loaded(value)
        return value if isinstance(read, str) else _unfolded(read)
    if isinstance(value, dict):
        return {key: _unfolded(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_unfolded(item) for item in cast("list[object]", value)]
    return value


def _loaded(text: str) -> object:
    """A JSON value; other text, as it is."""
    try:
        return cast("object", json.loads(text))
    except ValueError:
        return text
