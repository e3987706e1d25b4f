"""The schemas of openresponses.org, which every response and every event of a stream must pass.

They are of a part of OpenAI's protocol. Where its clients need what these schemas do not know, or have another name
for, the difference is named here, and everything else of the same response is checked.
"""

import json
from typing import Any

from openresponses_types import types
from pydantic import BaseModel

KNOWN_ITEMS = frozenset({"message", "function_call", "function_call_output", "reasoning", "compaction"})
"""Others are OpenAI's own: custom tools and the search for tools."""
OPENAI_EVENTS = frozenset({"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"})
"""Events of items that the schemas do not know."""
OTHER_NAMES = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
"""Events that OpenAI's clients know by another name."""
EVENTS: dict[str, type[BaseModel]] = {
    next(iter(kind.model_fields["type"].annotation)): kind  # type: ignore[arg-type]  # an enumeration of one value
    for name, kind in vars(types).items()
    if name.endswith("StreamingEvent")
}


def check_response(body: dict[str, Any]) -> None:
    """Raise pydantic's ValidationError for a response that the schemas refuse."""
    types.ResponseResource.model_validate_json(json.dumps(_known(body)), strict=True)


def check_event(event: dict[str, Any]) -> None:
    """Raise pydantic's ValidationError for an event that the schemas refuse, KeyError for one that nobody knows."""
    kind = event["type"]
    if kind in OPENAI_EVENTS or event.get("item", {"type": "message"})["type"] not in KNOWN_ITEMS:
        return
    event = {**event, "type": OTHER_NAMES.get(kind, kind)}
    if "response" in event:
        event["response"] = _known(event["response"])
    EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)


def _known(body: dict[str, Any]) -> dict[str, Any]:
    """A response without what the schemas do not know."""
    body = {**body, "output": [item for item in body["output"] if item["type"] in KNOWN_ITEMS]}
    wanted = body["text"]["format"]
    if "schema" in wanted:  # OpenAI's own type demands it; here it must be null
        body["text"] = {**body["text"], "format": {**wanted, "schema": None}}
    if isinstance(body["tool_choice"], dict) and body["tool_choice"]["type"] == "custom":
        body["tool_choice"] = {**body["tool_choice"], "type": "function"}
    return body
