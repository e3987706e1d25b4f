"""Gemini requests with names in snake case; Google's servers take them too. Pure.

Google's own package writes `parameters_json_schema` beside names in camel case, and so do many examples for curl. Only
the API's own names are respelled: arguments, results and schemas are a client's own.
"""

import re
from functools import partial

import msgspec
from msgspec import Raw

from stenograph.core.errors import InvalidRequest
from stenograph.dialects.common.json_bodies import convert_errors
from stenograph.dialects.gemini.fields import STRUCT_AT

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_AFTER_UNDERSCORE = re.compile(r"_([a-z])")


def in_camel_case(body: bytes) -> bytes:
    """The body with the API's names in camel case. Raises InvalidJson; InvalidRequest for a name given twice."""
    return bytes(convert_errors(partial(_respelled, name="", at=""), Raw(body), at=""))


MAX_STEPS = 12
"""Steps from a body to the deepest name of this API, and more: each copies everything below it."""


def _respelled(raw: Raw, name: str, at: str) -> Raw:
    """A value under `name`."""
    text = bytes(raw).lstrip()
    if at.count("/") > MAX_STEPS:
        return raw
    if text.startswith(b"["):
        items = [_respelled(one, name, f"{at}/{index}") for index, one in enumerate(_LIST.decode(raw))]
        return Raw(msgspec.json.encode(items))
    if not text.startswith(b"{"):
        return raw
    known = {field.encode_name for field in msgspec.structs.fields(STRUCT_AT[name])}
    made: dict[str, Raw] = {}
    for key, value in _OBJECT.decode(raw).items():
        camel = _AFTER_UNDERSCORE.sub(lambda found: found[1].upper(), key)
        spelled = camel if camel in known or camel in STRUCT_AT else key
        if spelled in made:
            raise InvalidRequest(f"{spelled!r} comes twice, in two spellings; send one.", param=f"{at}/{key}")
        made[spelled] = _respelled(value, spelled, f"{at}/{key}") if spelled in STRUCT_AT else value
    return Raw(msgspec.json.encode(made))
