"""JSON bodies to typed structs, with errors that point at the field to blame. Pure."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from stenograph.core.errors import InvalidJson, InvalidRequest

T = TypeVar("T")

LONGEST_NAME = 64
"""Longer than any name of ours; what is longer is shown cut."""

_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<key>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`")


def check_utf8(body: bytes) -> None:
    """Raise InvalidJson unless the whole body is UTF-8: msgspec does not look into strings that it skips."""
    if body.isascii():  # four times as fast, and makes no copy
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[T]", *, known: Iterable[str] = ()) -> T:
    """Decode `body` into the decoder's type.

    Raises InvalidJson for what is not JSON, InvalidRequest with a JSON pointer for JSON of another shape; an unknown
    field is named together with the nearest of `known`.
    """
    check_utf8(body)
    return convert_errors(lambda: decoder.decode(body), at="", known=known)


def decode_part(
    raw: bytes | msgspec.Raw,
    decoder: "msgspec.json.Decoder[T]",
    *,
    at: str,
    known: Iterable[str] = (),
    first: int = 0,
) -> T:
    """Decode a part of a body that has passed `check_utf8`; `at` is its JSON pointer. Raises as `decode_json`.

    Of a list that begins in the middle, `first` is the index of its first element.
    """
    try:
        return convert_errors(lambda: decoder.decode(raw), at=at, known=known)
    except InvalidRequest as error:
        if first and error.param is not None and error.param.startswith(f"{at}/"):
            index, slash, rest = error.param[len(at) + 1 :].partition("/")
            error.param = f"{at}/{int(index) + first}{slash}{rest}"
        raise


def convert_errors(decode: Callable[[], T], *, at: str, known: Iterable[str] = ()) -> T:
    """Call `decode` and translate what msgspec raises; the one place that does."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        raise _invalid(str(error), at, known) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"The body is not valid JSON: {error}.", param=at or None) from error
    except RecursionError as error:
        raise InvalidJson("The body is nested too deeply.", param=at or None) from error


def shown(text: str) -> str:
    """A client's text in a message to it: quoted, and cut."""
    return repr(text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + "…")


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing if no known name is near."""
    if len(name) > LONGEST_NAME:  # the search costs as much as the name is long
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def _invalid(text: str, at: str, known: Iterable[str]) -> InvalidRequest:
    path = _PATH.search(text)
    pointer, message = at, text
    if path is not None:
        pointer, message = at + _pointer(path["path"]), text[: path.start()]
    if unknown := _UNKNOWN.match(message):
        pointer += "/" + _escape(unknown["name"][:LONGEST_NAME])
        hint = nearest(unknown["name"], known) if path is None or at else ""
        message = f"Unknown field {shown(unknown['name'])}.{hint}"
    elif missing := _MISSING.match(message):
        pointer += "/" + _escape(missing["name"])
        message = f"Required field {missing['name']!r} is missing."
    else:
        message = f"{message}."
    return InvalidRequest(message, param=pointer or None)


def _pointer(path: str) -> str:
    """`.a[1].b` to `/a/1/b`. A `[...]` hides a key that msgspec does not name: the pointer stops before it."""
    steps: list[str] = []
    for step in _STEP.finditer(path):
        if step["index"] == "...":
            break
        steps.append(step["index"] or _escape(step["key"]))
    return "".join(f"/{step}" for step in steps)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
