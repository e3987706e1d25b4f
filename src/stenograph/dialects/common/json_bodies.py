"""JSON bodies to typed structs, with errors that point at the field to blame. Pure.

Owns the size limits of a request's list of messages, and of each message in it; a list is decoded in portions, because
a decoder holds the GIL for the whole of its input. Knows no dialect's fields but `messages`.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec
from msgspec import Raw

from stenograph.core.errors import InvalidJson, InvalidRequest
from stenograph.dialects.common.pointers import Known, invalid

S = TypeVar("S")
T = TypeVar("T")


MAX_MESSAGES = 32768
"""A decoder and a template hold the GIL for the whole of their input, so a conversation has a limit."""

MAX_REST_BYTES = 2 * 2**20
"""Size limit of a request without its messages. Tools and arguments become objects, are looked into and rendered."""

MAX_PARTS = 32768
"""Most parts of one message's content, or tool calls in it: one decoder's call makes them all."""

MAX_ARGUMENTS_CHARS = 2 * 2**20
"""Longest arguments of one tool call: they become objects at once, to render and compare. A model writes no more."""

_MESSAGES_AT_ONCE = 1024
_BYTES_AT_ONCE = 2**20
_SMALL_BYTES = 64 * 1024


def check_utf8(body: bytes) -> None:
    """Raise InvalidJson unless the whole body is UTF-8: msgspec does not look into skipped strings."""
    if body.isascii():  # four times as fast, and makes no copy
        return
    start, view = 0, memoryview(body)
    while start < len(body):
        end = start + _BYTES_AT_ONCE
        try:
            start += utf_8_decode(view[start:end], "strict", end >= len(body))[1]
        except UnicodeDecodeError as error:
            raise InvalidJson(f"The body is not UTF-8: {error.reason} at byte {start + error.start}.") from error


_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])


def type_at(body: bytes, steps: Iterable[str]) -> str | None:
    """The `type` of the object at these steps of a JSON pointer; None if there is none, or it is no text."""
    value: bytes | Raw = body
    try:
        for step in steps:
            value = _LIST.decode(value)[int(step)] if step.isdigit() else _OBJECT.decode(value)[step]
        kind: object = msgspec.json.decode(_OBJECT.decode(value)["type"])
    except (KeyError, IndexError, msgspec.DecodeError):
        return None
    return kind if isinstance(kind, str) else None


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[T]", *, known: Known = ()) -> T:
    """Decode `body` into the decoder's type.

    Raises InvalidJson for anything but JSON, InvalidRequest with a JSON pointer for JSON of another shape; an unknown
    field is named together with the nearest of `known`.
    """
    check_utf8(body)
    return convert_errors(decoder.decode, body, at="", known=known)


def decode_part(
    raw: bytes | Raw,
    decoder: "msgspec.json.Decoder[T]",
    *,
    at: str,
    known: Known = (),
    first: int = 0,
) -> T:
    """Decode a part of a body after `check_utf8`; `at` is its JSON pointer. Raises as `decode_json`.

    For a list from the middle of another, `first` is the index of its first element.
    """
    try:
        return convert_errors(decoder.decode, raw, at=at, known=known)
    except InvalidRequest as error:
        if first and error.param is not None and error.param.startswith(f"{at}/"):
            index, slash, rest = error.param[len(at) + 1 :].partition("/")
            error.param = f"{at}/{int(index) + first}{slash}{rest}"
        raise


def convert_errors(decode: Callable[[S], T], text: S, *, at: str, known: Known = ()) -> T:
    """Decode a text and translate msgspec's errors, in this one place. Raises as `decode_part`."""
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise invalid(str(error), at, known) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"The body is not valid JSON: {error}.", param=at or None) from error
    except RecursionError as error:
        raise InvalidJson("The body is nested too deeply.", param=at or None) from error


def check_arguments(text: str, at: str, *, what: str = "A tool call's arguments") -> None:
    """Raise InvalidRequest for arguments of a tool call that are too long."""
    if len(text) > MAX_ARGUMENTS_CHARS:
        message = f"{what} have at most {MAX_ARGUMENTS_CHARS} characters, these {len(text)}."
        raise InvalidRequest(message, param=at)


class OnlyMessages(msgspec.Struct):
    """A body's messages; nothing else is looked into."""

    messages: Raw


class _OnlyContents(OnlyMessages, rename={"messages": "contents"}):
    """The same of a body with its messages under `contents`."""

    messages: Raw  # an inherited field would keep its name


class _OnlyInput(OnlyMessages, rename={"messages": "input"}):
    """The same of a body with its messages under `input`."""

    messages: Raw


ONLY_MESSAGES = msgspec.json.Decoder(OnlyMessages)
_ONLY: Mapping[str, msgspec.json.Decoder[OnlyMessages]] = {
    "messages": ONLY_MESSAGES,
    "contents": msgspec.json.Decoder(_OnlyContents),
    "input": msgspec.json.Decoder(_OnlyInput),
}


def check_rest(body: bytes, name: str = "messages", called: str = "messages") -> None:
    """Raise InvalidRequest, before anything is made of it, for a body with more beside its messages than it may have.

    The messages are under `name`, and `called` so to the client. A body of another shape is for the decoder to refuse.
    """
    if len(body) <= MAX_REST_BYTES:
        return
    try:
        num_bytes = len(body) - len(memoryview(_ONLY[name].decode(body).messages))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if num_bytes > MAX_REST_BYTES:
        raise InvalidRequest(f"Beside its {called}, the request has {num_bytes} bytes; at most {MAX_REST_BYTES}.")


def wire_messages(
    text: bytes | Raw,
    decoder: "msgspec.json.Decoder[list[T]]",
    *,
    known: Known,
    check_parts: Callable[[Raw, str], None],
    at: str = "/messages",
) -> Iterator[T]:
    """Decode a list of messages, a large one some at a time. Raises InvalidJson or InvalidRequest, with a JSON pointer.

    `check_parts` refuses a message, by its pointer, if it has too many parts. The list is `at` this pointer.
    """
    if len(memoryview(text)) < _SMALL_BYTES:
        return iter(convert_errors(decoder.decode, text, at=at, known=known))
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
    """Stretches [start, end) of messages to decode at once; a long message is alone."""
    start = num_bytes = 0
    for index, raw in enumerate(raws):
        size = len(memoryview(raw))
        if index > start and (index - start >= _MESSAGES_AT_ONCE or num_bytes + size > _BYTES_AT_ONCE):
            yield start, index
            start, num_bytes = index, 0
        num_bytes += size
    yield start, len(raws)
