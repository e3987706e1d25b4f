"""Chapters: conversations continuing another's work after their client rewrote its history. Pure."""

from collections.abc import Collection, Sequence
from itertools import takewhile

from stenograph.core.messages import Message, Role
from stenograph.trajectory.turn import Node, PromptContext

LEAST_CHARS = 64
"""Length from which a reply's text identifies its line: a shorter one may be anybody's."""


def earlier_line(
    messages: Sequence[Message], lines: Sequence[Sequence[Node]], replies_of: Collection[str] = ()
) -> int | None:
    """The index of the first line with one of the replies in `messages`; None if no line generated one.

    A reply is known again by the ids of its calls, or by a text of at least 64 characters; or the client says that it
    holds the `replies_of` requests with these ids.
    """
    replies = [message for message in messages if message.role is Role.ASSISTANT]
    call_ids = {call.id for message in replies for call in message.tool_calls}
    texts = {text for message in replies if len(text := _text(message)) >= LEAST_CHARS}
    if not call_ids and not texts and not replies_of:
        return None
    for index, line in enumerate(lines):
        for node in reversed(line):
            reply = node.turn.reply.message
            is_known = node.turn.request_id in replies_of or _text(reply) in texts
            if is_known or any(call.id in call_ids for call in reply.tool_calls):
                return index
    return None


def has_frame_of(line: Sequence[Node], messages: Sequence[Message], context: PromptContext) -> bool:
    """Whether a conversation has the system text, the tools and the template arguments of a line."""
    if not line or not line[0].turn.context.is_same(context):
        return False
    return _system(line[0].turn.messages) == _system(messages)


def _system(messages: Sequence[Message]) -> list[str]:
    """The system texts at the beginning of a conversation. Later ones are of its turns."""
    return [_text(message) for message in takewhile(_instructs, messages)]


def _instructs(message: Message) -> bool:
    return message.role is Role.SYSTEM or message.role is Role.DEVELOPER


def _text(message: Message) -> str:
    return (message.content or "").strip()
