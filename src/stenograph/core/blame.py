"""The part of a request at fault, as a value. Pure.

Whoever refuses a request below the dialects knows its parts, not how its client spelled them: a message may have been
two fields, or a part of one. The request's dialect spells a `Blame` as a pointer for its client.
"""

import enum
from dataclasses import dataclass


class RequestPart(enum.StrEnum):
    """A part of a request, by its purpose."""

    MESSAGES = "messages"
    TOOLS = "tools"
    TOOL_CHOICE = "tool_choice"
    TEMPLATE_KWARGS = "template_kwargs"
    PROMPT = "prompt"
    """The whole prompt continued by the turn: a prompt of a completion, or the messages of a chat together."""
    TRUNCATION = "truncation"
    MAX_TOKENS = "max_tokens"
    GRAMMAR = "grammar"
    SAMPLING = "sampling"
    """The path begins with the name of a field of `SamplingParams`."""
    TEXT_VIEW = "text_view"
    """The path begins with the name of a field of `TextView`."""
    REPLY_OPTIONS = "reply_options"
    """The path begins with the name of a field of `ReplyOptions`."""
    ROUTING = "routing"
    """The path begins with the name of a field of `Routing`."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A part, or something within it: the element `index` of a list, and `path` from there, by our names.

    The role of message 3 is `Blame(RequestPart.MESSAGES, 3, ("role",))`, the parameters of tool 2
    `Blame(RequestPart.TOOLS, 2, ("parameters",))`, and id 7 of prompt 1 `Blame(RequestPart.PROMPT, 1, (7,))`.
    """

    part: RequestPart
    index: int | None = None
    path: tuple[str | int, ...] = ()
