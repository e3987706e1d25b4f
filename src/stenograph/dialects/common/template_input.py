"""Template input from a client, in any dialect: arguments, and the functions open to the model. Pure.

One function has one text in every dialect: a session that goes on in another has the same prompt.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from stenograph.core.errors import InvalidRequest
from stenograph.core.json_shape import num_levels
from stenograph.core.messages import Tool

RESERVED = ("messages", "tools", "add_generation_prompt", "strftime_now")
"""Arguments set by the server alone."""

TemplateKwargs = Annotated[
    dict[str, object],
    Meta(
        description="Arguments of the chat template, except those that the server alone sets.",
        extra_json_schema={"propertyNames": {"not": {"enum": list(RESERVED)}}},
    ),
]
"""`chat_template_kwargs` of a request. `check_template_kwargs` checks it after decoding."""

MAX_DEPTH = 64
"""Deepest nesting of a JSON value from a client: deeper than any schema written by people, far from any stack's end."""


MAX_VALUES = 16384
"""Most values in the arguments of a template: they live as long as the turn, and the garbage collector sees each."""


def check_template_kwargs(kwargs: Mapping[str, object], *, at: str) -> None:
    """Raise InvalidRequest for an argument reserved to the server, for nesting too deeply, or too many values."""
    for name in RESERVED:
        if name in kwargs:
            raise InvalidRequest(f"The server sets {name!r}; leave it out.", param=f"{at}/{name}")
    num_values = check_depth(kwargs, at=at)
    if num_values > MAX_VALUES:
        raise InvalidRequest(f"The arguments have at most {MAX_VALUES} values together, these {num_values}.", param=at)


def template_kwargs(given: Mapping[str, object] | None, *, effort: str | None = None) -> dict[str, object]:
    """`chat_template_kwargs` of a request, with an effort that has a field of its own. Raises InvalidRequest."""
    kwargs = dict(given or {})
    check_template_kwargs(kwargs, at="/chat_template_kwargs")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


def check_depth(value: object, *, at: str) -> int:
    """Raise InvalidRequest if a decoded JSON value nests deeper than MAX_DEPTH; the values in it, on all levels."""
    level: list[object] = [value]
    num_values = 0
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return num_values
        num_values += len(level)
    raise InvalidRequest(f"The value is nested deeper than {MAX_DEPTH} levels.", param=at)


def check_json_depth(text: bytes | Raw, *, at: str) -> None:
    """The same of a value as JSON, without decoding it: one of many megabytes would keep the GIL for long."""
    if num_levels(text) > MAX_DEPTH:
        raise InvalidRequest(f"The value is nested deeper than {MAX_DEPTH} levels.", param=at)


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def function_tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, object] | None,
    *,
    at: str,
    strict: bool | None = None,
) -> Tool:
    """The tool of a function, as OpenAI writes it and templates show it.

    Raises InvalidRequest for parameters nested too deeply; they are `at` this pointer.
    """
    check_depth(parameters, at=at)
    function: dict[str, object] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return Tool(
        name=name,
        json=msgspec.json.encode({"type": "function", "function": function}).decode(),
        parameters_json=msgspec.json.encode(parameters or {"type": "object"}).decode(),
    )
