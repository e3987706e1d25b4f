"""JSON bodies to typed structs, with errors that point at the field to blame. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec

from stenograph.core.errors import InvalidJson, InvalidRequest
from stenograph.core.nearest import LONGEST_NAME, nearest_name

T = TypeVar("T")

Known = Iterable[str] | Callable[[str], Iterable[str]]
"""The names that an object may have: of the whole value, or by the JSON pointer of the object that is to blame."""

OTHER_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "n_predict": "max_tokens",
        "num_predict": "max_tokens",
        "stop_sequences": "stop",
        "stop_strings": "stop",
        "random_seed": "seed",
        "repeat_penalty": "repetition_penalty",
    }
)
"""Other servers' names for our fields."""

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


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def type_at(body: bytes, steps: Iterable[str]) -> str | None:
    """The `type` of the object that these steps of a JSON pointer lead to; None if there is none, or it is no text."""
    value: bytes | msgspec.Raw = body
    try:
        for step in steps:
            value = _LIST.decode(value)[int(step)] if step.isdigit() else _OBJECT.decode(value)[step]
        kind: object = msgspec.json.decode(_OBJECT.decode(value)["type"])
    except (KeyError, IndexError, msgspec.DecodeError):
        return None
    return kind if isinstance(kind, str) else None


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[T]", *, known: Known = ()) -> T:
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
    known: Known = (),
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


def convert_errors(decode: Callable[[], T], *, at: str, known: Known = ()) -> T:
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


def nearest(name: str, known: Iterable[str], *, other_words: Mapping[str, str] = MappingProxyType({})) -> str:
    """` Did you mean 'x'?`, or nothing if no known name is clearly the one that was meant.

    `other_words` are names that elsewhere are used for known ones.
    """
    names = list(known)
    meant = other_words.get(name)
    near = meant if meant in names else nearest_name(name, names)
    return f" Did you mean {near!r}?" if near is not None else ""


def _invalid(text: str, at: str, known: Known) -> InvalidRequest:
    path = _PATH.search(text)
    pointer, message = at, text
    if path is not None:
        pointer, message = at + _pointer(path["path"]), text[: path.start()]
    if unknown := _UNKNOWN.match(message):
        parent = pointer
        pointer += "/" + escaped(unknown["name"][:LONGEST_NAME])
        is_known = path is None or at or callable(known)
        hint = nearest(unknown["name"], _known_in(known, parent), other_words=OTHER_WORDS) if is_known else ""
        message = f"Unknown field {shown(unknown['name'])}.{hint}"
    elif missing := _MISSING.match(message):
        pointer += "/" + escaped(missing["name"])
        message = f"Required field {missing['name']!r} is missing."
    else:
        message = f"{message}."
    return InvalidRequest(message, param=pointer or None)


def _known_in(known: Known, pointer: str) -> Iterable[str]:
    return known(pointer) if callable(known) else known


def _pointer(path: str) -> str:
    """`.a[1].b` to `/a/1/b`. A `[...]` hides a key that msgspec does not name: the pointer stops before it."""
    steps: list[str] = []
    for step in _STEP.finditer(path):
        if step["index"] == "...":
            break
        steps.append(step["index"] or escaped(step["key"]))
    return "".join(f"/{step}" for step in steps)


def escaped(key: str) -> str:
    """One step of a JSON pointer. Source: RFC 6901, section 3."""
    return key.replace("~", "~0").replace("/", "~1")
