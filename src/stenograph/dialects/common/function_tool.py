"""A function that the model may call, as every dialect's clients declare it. Pure.

One function has one text, whatever dialect it came in: a session that goes on in another has the same prompt.
"""

from collections.abc import Mapping

import msgspec

from stenograph.core.messages import Tool
from stenograph.dialects.common.template_kwargs import check_depth


def function_tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, object] | None,
    *,
    at: str,
    strict: bool | None = None,
) -> Tool:
    """The tool of a function, as OpenAI writes it and templates show it.

    Raises InvalidRequest for parameters that nest too deeply; they are `at` this pointer.
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
