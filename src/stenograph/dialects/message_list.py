"""The messages of a request, decoded in portions: a decoder holds the GIL for what it is given at once. Pure.

Owns how large a request's list of messages may be, and each message in it. Knows no dialect's fields but `messages`.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Raw

from stenograph.core.errors import InvalidRequest
from stenograph.dialects.json_errors import Known, decode_part

T = TypeVar("T")

MAX_MESSAGES = 32768
"""A decoder and a template hold the GIL for what they are given at once, so a conversation has a limit."""

MAX_REST_BYTES = 2 * 2**20
"""Size limit of a request without its messages. Tools and arguments become objects, are looked into and rendered."""

MAX_PARTS = 32768
"""Most parts of one message's content, or tool calls in it: one decoder's call makes them all."""

MAX_ARGUMENTS_CHARS = 2 * 2**20
"""Longest arguments of one tool call: they become objects at once, to render and compare. A model writes no more."""

_MESSAGES_AT_ONCE = 1024
_BYTES_AT_ONCE = 2**20
_SMALL_BYTES = 64 * 1024
_LIST = msgspec.json.Decoder(list[Raw])


class OnlyMessages(msgspec.Struct):
    """A body's messages; nothing else is looked into."""

    messages: Raw


class OnlyContents(msgspec.Struct, rename={"messages": "contents"}):
    """The same of a body that calls them contents."""

    messages: Raw


ONLY_MESSAGES = msgspec.json.Decoder(OnlyMessages)
ONLY_CONTENTS = msgspec.json.Decoder(OnlyContents)


def check_rest(body: bytes, name: str = "messages") -> None:
    """Raise InvalidRequest, before anything is made of it, for a body with more beside its messages than it may have.

    The messages are under `name`. A body of another shape is for the decoder to refuse.
    """
    if len(body) <= MAX_REST_BYTES:
        return
    try:
        found = ONLY_CONTENTS.decode(body) if name == "contents" else ONLY_MESSAGES.decode(body)
        num_bytes = len(body) - len(memoryview(found.messages))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if num_bytes > MAX_REST_BYTES:
        raise InvalidRequest(f"Beside its messages, the request has {num_bytes} bytes; at most {MAX_REST_BYTES}.")


def wire_messages(
    text: bytes | Raw,
    decoder: "msgspec.json.Decoder[list[T]]",
    *,
    known: Known,
    check_parts: Callable[[Raw, str], None],
    at: str = "/messages",
) -> Iterator[T]:
    """Decode a list of messages, a large one some at a time. Raises InvalidJson or InvalidRequest, with a JSON pointer.

    `check_parts` refuses a message, by its pointer, that has more parts than it may. The list is `at` this pointer.
    """
    if len(memoryview(text)) < _SMALL_BYTES:
        messages: list[T] = decode_part(text, decoder, at=at, known=known)
        return iter(messages)
    return _in_portions(text, decoder, known, check_parts, at)


def _in_portions(
    text: bytes | Raw,
    decoder: "msgspec.json.Decoder[list[T]]",
    known: Known,
    check_parts: Callable[[Raw, str], None],
    at: str,
) -> Iterator[T]:
    raws = decode_part(text, _LIST, at=at)
    if len(raws) > MAX_MESSAGES:
        raise InvalidRequest(f"A conversation has at most {MAX_MESSAGES} messages, this one {len(raws)}.", param=at)
    for start, end in portions(raws):
        for index in range(start, end):
            if may_have_many(raws[index]):
                check_parts(raws[index], f"{at}/{index}")
        some = b"[" + b",".join(raws[start:end]) + b"]"
        yield from decode_part(some, decoder, at=at, known=known, first=start)


def may_have_many(raw: Raw) -> bool:
    """Whether a message may have more parts than it may have: mostly it is one long text."""
    return len(memoryview(raw)) > MAX_PARTS and bytes(raw).count(b"{") > MAX_PARTS


def portions(raws: list[Raw]) -> Iterator[tuple[int, int]]:
    """Stretches [start, end) of so many messages as are decoded at once; one that is long by itself is alone."""
    start = num_bytes = 0
    for index, raw in enumerate(raws):
        size = len(memoryview(raw))
        if index > start and (index - start >= _MESSAGES_AT_ONCE or num_bytes + size > _BYTES_AT_ONCE):
            yield start, index
            start, num_bytes = index, 0
        num_bytes += size
    yield start, len(raws)
