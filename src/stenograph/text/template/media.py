"""The content of a message with media, as chat templates take it. Pure; loaded by messages with media alone."""

from collections.abc import Callable

from stenograph.core.messages import Message


def content_parts(message: Message, seal: Callable[[str], str]) -> list[dict[str, str]]:
    """The text of a message in pieces, each sealed, and the media between them."""
    parts: list[dict[str, str]] = []
    text, end = message.content or "", 0
    for one in message.media:
        if one.at > end:
            parts.append({"type": "text", "text": seal(text[end : one.at])})
        parts.append({"type": one.ref.kind.value})
        end = one.at
    if end < len(text):
        parts.append({"type": "text", "text": seal(text[end:])})
    return parts
