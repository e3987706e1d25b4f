"""The beginning of a conversation, as a key: requests with one key are of one strand. Pure.

A turn, a retry and another try at a reply begin as the conversation did; a title request, a router's question, a
summary or a sub-agent never does.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

import xxhash

from stenograph.core.messages import Message, Role
from stenograph.trajectory.turn import PromptContext


def opening_key(messages: Sequence[Message], context: PromptContext, agent_id: str, *, strips: bool) -> bytes:
    """XXH3 of 128 bits of the messages before the first reply, of all else in the prompt, and of the client's agent id.

    `strips`: white space around a text makes no difference. It protects no secret: a client that makes two openings
    with one key confuses only its own session, and the matcher still decides whether one turn follows another.
    """
    key = xxhash.xxh3_128(context.kwargs_json)
    add_texts(key, (agent_id, *(tool.json for tool in context.tools)))
    for message in takewhile(is_before_reply, messages):
        content = message.content or ""
        add_texts(key, (message.role, message.tool_call_id or "", content.strip() if strips else content))
        if message.media:
            add_texts(key, (one.ref.sha256 for one in message.media))
    return key.digest()


def is_before_reply(message: Message) -> bool:
    """Whether a message may be of an opening: a reply ends it."""
    return message.role is not Role.ASSISTANT


def add_texts(key: xxhash.xxh3_128, texts: Iterable[str]) -> None:
    """Add texts, each with its length: nothing else keeps "a", "b" and "ab", "" apart."""
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        key.update(b"%d:" % len(encoded))
        key.update(encoded)
