"""Pinned openings: openings that differ only in text named by a rule are one, in the stored spelling. Pure.

Owns the comparison of two openings, and the replacement in a request. Nothing is invented: the client sent the
replacement before, and it was rendered. A request stays as it is if no turn has its opening.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import cast

import msgspec
import xxhash
from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.trajectory.canonical import PinPlace, PinRule
from stenograph.trajectory.opening_key import add_texts, is_before_reply
from stenograph.trajectory.turn import Node, PromptContext

MAX_CHARS = 256 * 1024
"""The longest text searched by a rule."""

_TOOL = msgspec.json.Decoder(dict[str, object])


class PinnedOpenings:
    """The openings of one session's turns. `strips`: white space around a text makes no difference."""

    def __init__(self, rules: Sequence[PinRule], *, strips: bool) -> None:
        self._rules = {place: [rule for rule in rules if rule.place is place] for place in PinPlace}
        self._strips = strips
        self._roots: dict[bytes, list[Node]] = {}
        self._keys: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<PinnedOpenings {len(self._keys)}>"

    def keep(self, node: Node, agent_id: str) -> None:
        """Keep the opening of a turn at the beginning of a line; other turns have none."""
        if node.parent is None:
            key = self._key(node.turn.messages, node.turn.context, agent_id)
            self._roots.setdefault(key, []).append(node)
            self._keys[node.id] = key

    def forget(self, node: Node) -> None:
        """Forget the opening of a removed turn."""
        key = self._keys.pop(node.id, None)
        if key is not None:
            self._roots[key].remove(node)
            if not self._roots[key]:
                del self._roots[key]

    def pinned(self, request: ChatRequest, agent_id: str) -> ChatRequest:
        """The request with the stored spelling of its opening; the same object where nothing is to be replaced."""
        context = PromptContext(tools=request.tools, template_kwargs=request.template_kwargs)
        roots = self._roots.get(self._key(request.messages, context, agent_id), ())
        found: ChatRequest | None = None
        for root in roots:
            as_stored = self._as_stored(request, root)
            if as_stored is request:
                return request  # its own spelling is stored
            found = found or as_stored
        return found or request

    def _key(self, messages: Sequence[Message], context: PromptContext, agent_id: str) -> bytes:
        """XXH3 of 128 bits of an opening, with the name of a rule in place of each of its matches."""
        key = xxhash.xxh3_128(context.kwargs_json)
        add_texts(key, (agent_id, *map(self._tool_print, context.tools)))
        for message, rules in self._opening(messages):
            text, at = self._text(message), 0
            add_texts(key, (message.role, message.tool_call_id or ""))
            for start, end, rule in _found(text, rules):
                add_texts(key, (text[at:start], rule.name))
                at = end
            add_texts(key, (text[at:], ""))
        return key.digest()

    def _opening(self, messages: Sequence[Message]) -> Iterator[tuple[Message, Sequence[PinRule]]]:
        """Each message before the first reply, with the rules for it."""
        is_beginning, has_user = True, False
        for message in takewhile(is_before_reply, messages):
            is_beginning &= message.role in (Role.SYSTEM, Role.DEVELOPER)
            rules: Sequence[PinRule] = ()
            if is_beginning:
                rules = self._rules[PinPlace.SYSTEM]
            elif message.role is Role.USER and not has_user:
                has_user, rules = True, self._rules[PinPlace.FIRST_USER]
            yield message, rules

    def _text(self, message: Message) -> str:
        content = message.content or ""
        return content.strip() if self._strips else content

    def _tool_print(self, tool: Tool) -> str:
        """A tool, without its description where descriptions may differ."""
        if not self._rules[PinPlace.TOOL_TEXT]:
            return tool.json
        return msgspec.json.encode(_without_description(_decoded(tool)), order="sorted").decode()

    def _as_stored(self, request: ChatRequest, root: Node) -> ChatRequest:
        """The request with the opening of a line under the same key."""
        messages, rewrites = list(request.messages), list[AppliedRewrite]()
        openings = zip(self._opening(request.messages), self._opening(root.turn.messages), strict=True)
        for index, ((given, rules), (stored, _)) in enumerate(openings):
            changed = list(_changed(self._text(given), self._text(stored), rules))
            if changed:
                messages[index] = stored
            place = Blame(RequestPart.MESSAGES, request.place_of(index), ("content",))
            rewrites += [_rewrite(request, rule, place, before, after) for rule, before, after in changed]
        tools = root.turn.context.tools
        for rule in self._rules[PinPlace.TOOL_TEXT][:1]:
            for index, (given_tool, stored_tool) in enumerate(zip(request.tools, tools, strict=True)):
                if given_tool.json != stored_tool.json:
                    texts = (str(_function(_decoded(one)).get("description", "")) for one in (given_tool, stored_tool))
                    place = Blame(RequestPart.TOOLS, index, ("description",))
                    rewrites.append(_rewrite(request, rule, place, *texts))
        if not rewrites:
            return request
        return replace(
            request,
            messages=tuple(messages),
            tools=tools,
            text_print=None,  # by its text it would be known as what is stored, and no rewrite would be recorded
            rewrites=(*request.rewrites, *rewrites),
        )


def _found(text: str, rules: Sequence[PinRule]) -> list[tuple[int, int, PinRule]]:
    """The stretches `[start, end)` of a text matched by rules, in order; where two overlap, the first."""
    if not rules or len(text) > MAX_CHARS:
        return []
    all_found = [
        (match.start(), match.end(), rule)
        for rule in rules
        if rule.pattern is not None and (rule.begins is None or rule.begins.match(text) is not None)
        for match in rule.pattern.finditer(text)
        if match.end() > match.start()
    ]
    kept: list[tuple[int, int, PinRule]] = []
    for one in sorted(all_found, key=lambda found: found[0]):
        if not kept or one[0] >= kept[-1][1]:
            kept.append(one)
    return kept


def _changed(given: str, stored: str, rules: Sequence[PinRule]) -> Iterator[tuple[PinRule, str, str]]:
    """The differences of two texts; these differ only in matches of rules."""
    for one, other in zip(_found(given, rules), _found(stored, rules), strict=True):
        before, after = given[one[0] : one[1]], stored[other[0] : other[1]]
        if before != after:
            yield one[2], before, after


def _rewrite(request: ChatRequest, rule: PinRule, place: Blame, before: str, after: str) -> AppliedRewrite:
    where = request.spelling.pointer(place) or ""
    return AppliedRewrite(rule=rule.name, where=where, before=kept_text(before), after=kept_text(after))


def _decoded(tool: Tool) -> dict[str, object]:
    """A tool as JSON; its own text if that is not JSON."""
    try:
        return _TOOL.decode(tool.json)
    except (msgspec.DecodeError, RecursionError):
        return {"json": tool.json}


def _function(tool: dict[str, object]) -> dict[str, object]:
    function = tool.get("function")
    return cast("dict[str, object]", function) if isinstance(function, dict) else {}


def _without_description(tool: dict[str, object]) -> dict[str, object]:
    function = {name: value for name, value in _function(tool).items() if name != "description"}
    return {**tool, "function": function} if function else tool
