"""Messages and tools as a chat template wants them: dictionaries in the form of the OpenAI wire.

Owns the field names that templates read, and that every string of a client is sealed on the way. Roles come from
the Role enum only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Tool, ToolCall
from stenograph.render.seal import Sealer, strings_in


def client_strings(messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]) -> Iterator[str]:
    """Every string of a client that a rendering may show, decoded: what a seal's mark must not occur in."""
    for message in messages:
        texts = (message.content, message.reasoning, message.tool_call_id, message.name)
        yield from (text for text in texts if text is not None)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
            yield from strings_in(_decoded_object(call.arguments))
    for tool in tools:
        yield from strings_in(_tool_value(tool))
    yield from strings_in(kwargs)


def message_dict(message: Message, sealer: Sealer) -> dict[str, object]:
    """One message. Content is always a string: some templates can only add to one."""
    value: dict[str, object] = {"role": message.role.value, "content": sealer.seal(message.content or "")}
    if message.reasoning:
        value["reasoning_content"] = sealer.seal(message.reasoning)
    if message.tool_calls:
        value["tool_calls"] = [_call_dict(call, sealer) for call in message.tool_calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = sealer.seal(message.tool_call_id)
    if message.name is not None:
        value["name"] = sealer.seal(message.name)
    return value


def tool_values(tools: Sequence[Tool], sealer: Sealer) -> list[object] | None:
    """The tool list, or None where there is none, which is what templates test for."""
    return [sealer.seal_value(_tool_value(tool)) for tool in tools] or None


def _call_dict(call: ToolCall, sealer: Sealer) -> dict[str, object]:
    """A call. `arguments` is decoded, as templates expect; `arguments_json` keeps the spelling.

    Arguments that are no JSON object are shown as a JSON string.
    """
    decoded = _decoded_object(call.arguments)
    spelled = call.arguments if decoded is not None else json.dumps(call.arguments, ensure_ascii=False)
    function = {
        "name": sealer.seal(call.name),
        "arguments": sealer.seal(call.arguments) if decoded is None else sealer.seal_value(decoded),
        "arguments_json": sealer.seal(spelled),
    }
    return {"id": sealer.seal(call.id), "type": "function", "function": function}


def _decoded_object(text: str) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def _tool_value(tool: Tool) -> object:
    try:
        return msgspec.json.decode(tool.json)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UnrenderableMessage(f"The tool {tool.name!r} is not JSON: {error}", param="/tools") from error
