"""The `tojson` of chat templates, as transformers has it, for both template engines. Pure."""

import json
import re
from contextlib import suppress

import msgspec

_EXPONENT = re.compile(rb"[0-9]e-?[0-9]")
"""A float that Python writes otherwise than msgspec: 1e16 is 1e+16 there."""


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; the engine's own filter would escape HTML.

    Lists and objects, which a client's JSON may have hundreds of thousands of, are written by msgspec: `json.dumps`
    makes a string of each first, in one call that keeps the GIL.
    """
    if isinstance(value, dict | list) and not (ensure_ascii or sort_keys) and indent is None and separators is None:
        with suppress(TypeError, ValueError, OverflowError, RecursionError):  # `json.dumps` takes it, or says why not
            text = msgspec.json.format(msgspec.json.encode(value), indent=0)
            if _EXPONENT.search(text) is None:
                return text.decode()
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
