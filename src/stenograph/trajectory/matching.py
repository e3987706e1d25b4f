"""Matchers: they decide whether a message sent back by a client is the stored one. Pure.

Clients reserialize, trim and decorate the messages they replay (docs/http-api.md lists how). A matcher says which
changes leave a message the same. On a match the stored spelling and the stored tokens win.
"""

import enum
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol, cast

import msgspec
from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import StartupError
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.trajectory.text_calls import CALLS_END, added_text, comparable, read_calls, rewrites_of
from stenograph.trajectory.turn import Node

_THOUGHT = re.compile(r"<(?:think|thinking|budget:thinking)>(.*?)</(?:think|thinking|budget:thinking)>(.*)", re.DOTALL)
"""LiteLLM takes this part out of the beginning of a text, and sends it back as reasoning."""
_MAX_EXACT_INT = 2**53
"""Above it a client with doubles for numbers (JavaScript) sends back another spelling."""


class Matcher(Protocol):
    """Whether a message of a request is the stored one."""

    def matches(self, stored: Message, given: Message) -> bool:
        """Compare one stored message with the one in its place in a request."""
        ...


class MatcherName(enum.StrEnum):
    """Matchers to create a session with."""

    HARNESS = "harness"
    STRICT = "strict"
    LOOSE_TOOL_CALL = "loose_tool_call"
    ROLE_CONTENT = "role_content"


class HarnessMatcher:
    """Same for a real client: role; text, outer whitespace aside; tool calls by id, name, order and count, with
    arguments equal as JSON; reasoning only where the client sends it back. Calls may come back as text (text_calls.py).
    """

    def matches(self, stored: Message, given: Message) -> bool:
        if self._is_same(stored, given):
            return True
        if stored.role is not Role.ASSISTANT or given.role is not Role.ASSISTANT:
            return False
        if added := added_text(stored, given):
            as_given = replace(stored, content=given.content, tool_calls=given.tool_calls)
            return self._is_same(as_given, given) and _are_in_text(stored.tool_calls, added)
        if stored.reasoning:
            return False
        thought = _THOUGHT.match(stored.content or "")
        return thought is not None and self._is_same(replace(stored, reasoning=thought[1], content=thought[2]), given)

    @staticmethod
    def _is_same(stored: Message, given: Message) -> bool:
        return (
            stored.role is given.role
            and stored.tool_call_id == given.tool_call_id
            and (stored.content or "").strip() == (given.content or "").strip()
            and (not given.reasoning or (stored.reasoning or "").strip() == given.reasoning.strip())
            and (stored.tool_calls == given.tool_calls or _same_calls(stored.tool_calls, given.tool_calls))
        )


class StrictMatcher:
    """Role, content, reasoning and tool calls as spelled; None is "" is no list."""

    def matches(self, stored: Message, given: Message) -> bool:
        return _same_texts(stored, given) and stored.tool_calls == given.tool_calls


class LooseToolCallMatcher:
    """`StrictMatcher`, but arguments are equal as JSON."""

    def matches(self, stored: Message, given: Message) -> bool:
        return _same_texts(stored, given) and _same_calls(stored.tool_calls, given.tool_calls)


class RoleContentMatcher:
    """Role and content, nothing else."""

    def matches(self, stored: Message, given: Message) -> bool:
        return stored.role is given.role and (stored.content or "") == (given.content or "")


class FunctionMatcher:
    """A plain function of (stored, given) as a matcher."""

    def __init__(self, matches: Callable[[Message, Message], bool]) -> None:
        self._matches = matches

    def matches(self, stored: Message, given: Message) -> bool:
        return bool(self._matches(stored, given))


MATCHERS: dict[str, Matcher] = {
    MatcherName.HARNESS: HarnessMatcher(),
    MatcherName.STRICT: StrictMatcher(),
    MatcherName.LOOSE_TOOL_CALL: LooseToolCallMatcher(),
    MatcherName.ROLE_CONTENT: RoleContentMatcher(),
}


@cache
def load_matcher(name: str) -> Matcher:
    """The matcher of this name, or the one at a dotted path: an object or a class with `matches`, or a function. All
    sessions have the same one.

    Imports the module named by the path, so it is for the server's own settings, never for a client's input. Raises
    StartupError, in a line.
    """
    if name in MATCHERS:
        return MATCHERS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise StartupError(f"matcher {name!r} is not one of {', '.join(MATCHERS)}, and not a dotted path")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
        found = found() if isinstance(found, type) else found
    except Exception as error:  # whatever another's module raises stops the start with one line
        raise StartupError(f"matcher {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if callable(getattr(found, "matches", None)):
        return cast("Matcher", found)
    if callable(found):
        return FunctionMatcher(cast("Callable[[Message, Message], bool]", found))
    raise StartupError(f"matcher {name!r} is not a function and has no method matches(stored, given)")


def _same_texts(stored: Message, given: Message) -> bool:
    return (
        stored.role is given.role
        and stored.tool_call_id == given.tool_call_id
        and (stored.content or "") == (given.content or "")
        and (stored.reasoning or "") == (given.reasoning or "")
    )


def _are_in_text(stored: tuple[ToolCall, ...], added: str) -> bool:
    """Whether an added text has these calls; for a reply without any, at most one, made of its text by the client."""
    given = read_calls(added)
    if given is None or not stored:
        return given is not None and len(given) <= 1
    try:
        return _same_calls(comparable(stored, like=given), given)
    except RecursionError:
        return False


def _same_calls(stored: tuple[ToolCall, ...], given: tuple[ToolCall, ...]) -> bool:
    return len(stored) == len(given) and all(
        a.id == b.id and a.name == b.name and same_json(a.arguments, b.arguments)
        for a, b in zip(stored, given, strict=True)
    )


def num_compared(messages: Iterable[Message]) -> int:
    """About how many bytes have to be read as JSON to compare these with the stored messages, if all are respelled."""
    num_bytes = 0
    for message in messages:
        for call in message.tool_calls:
            num_bytes += len(call.arguments)
        if message.role is Role.ASSISTANT and message.content and message.content.rstrip().endswith(CALLS_END):
            num_bytes += len(message.content)
    return num_bytes


def same_json(one: str, other: str) -> bool:
    """Whether two texts are the same JSON value; texts not in JSON are the same if they are equal.

    Unlike Python's `==`, keeps `true` and `1` apart; like JSON, takes `1` and `1.0` as one number, and whole numbers
    too large for a double's digits by the double.
    """
    if one == other:
        return True
    try:
        return _is_same(_read(one), _read(other))
    except (ValueError, OverflowError, RecursionError):
        return False


def _read(text: str) -> object:
    """A JSON value. msgspec is several times as fast; the other parser reads the rest (`NaN`, a lone surrogate)."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return json.loads(text)


def _is_same(one: object, other: object) -> bool:
    """Compare in Python, not in one call of C: on a worker this leaves the GIL to the loop in between."""
    pair: tuple[object, object] = (one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        ours, theirs = cast("dict[str, object]", one), cast("dict[str, object]", other)
        return ours.keys() == theirs.keys() and all(_is_same(value, theirs[key]) for key, value in ours.items())
    if isinstance(one, list) and isinstance(other, list):
        mine, yours = cast("list[object]", one), cast("list[object]", other)
        return len(mine) == len(yours) and all(map(_is_same, mine, yours))
    return _is_same_scalar(*pair)


def _is_same_scalar(one: object, other: object) -> bool:
    one, other = _number(one), _number(other)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


def _number(value: object) -> object:
    """A number as JSON knows it; anything else as it is."""
    if isinstance(value, int) and abs(value) > _MAX_EXACT_INT:
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def rewrites_after(request: ChatRequest, parent: Node | None) -> tuple[AppliedRewrite, ...]:
    """The changes kept by a turn after `parent`: those before matching, but for changes to messages already in the
    line, and those from the last reply, as the client sent it, to the stored one."""
    if parent is None:
        return request.rewrites
    place = request.place_of(parent.num_messages - 1)
    new = tuple(one for one in request.rewrites if one.message is None or one.message > place)
    where = request.spelling.pointer(Blame(RequestPart.MESSAGES, place, ("content",))) or ""
    of_reply = tuple(
        AppliedRewrite(rule=one.rule, where=where, before=kept_text(one.from_text), after=kept_text(one.to_text))
        for one in rewrites_of(parent.turn.reply.message, request.messages[parent.num_messages - 1])
    )
    return (*new, *of_reply)
