"""The shape of an engine's answer, by which a stand-in's is held to a recorded one."""

import json
from collections.abc import Iterator
from typing import Any

ALIKE = ("weight_versions", "permission", "prompt_token_ids")
"""Lists of any length, of things that are alike."""


def shape(value: object) -> object:
    """A value with types in place of what is in it; `token_id:7` as a key is any token."""
    if isinstance(value, dict):
        return {key.partition(":")[0]: _shape_of(key, one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return "number" if type(value) in (int, float) else type(value).__name__


def _shape_of(key: str, value: Any) -> object:
    if key == "bytes":
        return "of a token's text"
    return shape(value[:1] if key in ALIKE and isinstance(value, list) else value)


def differences(real: Any, other: Any, at: str = "") -> Iterator[str]:
    """The places where the shape `other` is not `real`."""
    if isinstance(real, dict) and isinstance(other, dict):
        yield from (f"{at}.{key} is not there" for key in real if key not in other)
        yield from (f"{at}.{key} is new" for key in other if key not in real)
        for key in real.keys() & other.keys():
            yield from differences(real[key], other[key], f"{at}.{key}")
    elif isinstance(real, list) and isinstance(other, list) and len(real) == len(other):
        for one, another in zip(real, other, strict=True):
            yield from differences(one, another, f"{at}[]")
    elif isinstance(real, list) and isinstance(other, list):
        yield f"{at} has {len(other)} for {len(real)}"
    elif real != other:
        yield f"{at} is {other} for {real}"


def parsed(text: str) -> Any:
    """A body: events as the list of what they say, JSON as what it says, anything else as it is."""
    if text.startswith("data: "):
        events = (event.removeprefix("data: ") for event in text.split("\n\n") if event)
        return [json.loads(event) for event in events if event != "[DONE]"]
    return json.loads(text) if text[:1] in ("{", "[") else text
