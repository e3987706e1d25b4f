"""The schemas of Responses' items and tools: the rules of their decoder by the type of each. Pure.

A request's input and tools are bytes in its struct, decoded one by one; here each type has its own schema.
"""

from collections.abc import Sequence
from typing import Any

from stenograph.dialects.responses.items import (
    REASONING_TYPES,
    TEXT_TYPES,
    CallOutputItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    ItemPart,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
    SearchCallItem,
    SearchOutputItem,
)
from stenograph.dialects.responses.reply import (
    CustomCallOutput,
    FunctionCallOutput,
    MessageOutput,
    ReasoningOutput,
    ResponseBody,
    SearchCallOutput,
)
from stenograph.dialects.responses.stream import ResponseEvent
from stenograph.dialects.responses.tools import (
    HOSTED,
    ChoiceSpec,
    CustomSpec,
    FunctionSpec,
    NamespaceSpec,
    SearchSpec,
)

Schema = dict[str, Any]

_ITEM_TYPES: dict[type, tuple[str, ...]] = {
    MessageItem: ("message",),
    ReasoningItem: ("reasoning",),
    FunctionCallItem: ("function_call",),
    CustomCallItem: ("custom_tool_call",),
    SearchCallItem: ("tool_search_call",),
    CallOutputItem: ("function_call_output",),
    CustomOutputItem: ("custom_tool_call_output",),
    SearchOutputItem: ("tool_search_output",),
    ReferenceItem: ("item_reference",),
}
_TOOL_TYPES: dict[type, str] = {
    FunctionSpec: "function",
    CustomSpec: "custom",
    NamespaceSpec: "namespace",
    SearchSpec: "tool_search",
}
_OUTPUTS = (ReasoningOutput, MessageOutput, FunctionCallOutput, CustomCallOutput, SearchCallOutput)

RESPONSES_PARTS = (*_ITEM_TYPES, *_TOOL_TYPES, *_OUTPUTS, ItemPart, ChoiceSpec, ResponseBody, ResponseEvent)
"""Types of JSON in Responses' requests and replies."""

_NULL: Schema = {"type": "null"}
_ROLES = ["user", "assistant", "system", "developer"]


def describe_responses(schemas: dict[str, Schema]) -> None:
    """Add the fields kept as bytes in the structs, and the rules of each type."""
    _describe_items(schemas)
    _describe_tools(schemas)
    request: Schema = schemas["ResponsesRequest"]
    fields: Schema = request["properties"]
    items: Schema = {"anyOf": [_ref(kind) for kind in _ITEM_TYPES]}
    fields["input"] = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": items}]}
    hosted: Schema = {"type": "object", "properties": {"type": {"enum": list(HOSTED)}}, "required": ["type"]}
    tools: Schema = {"anyOf": [*map(_ref, _TOOL_TYPES), hosted]}
    fields["tools"] = {"anyOf": [{"type": "array", "items": tools}, _NULL], "default": None}
    choices: list[Schema] = [{"enum": ["auto", "none", "required", None]}, _ref(ChoiceSpec)]
    fields["tool_choice"] = {"anyOf": choices, "default": None}
    plain: Schema = {"properties": {"type": {"enum": ["text", "json_object"]}, "schema": _NULL}}
    with_schema: Schema = {
        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
        "required": ["schema"],
    }
    schemas["TextFormat"]["anyOf"] = [plain, with_schema]
    outputs: Schema = {"anyOf": [_ref(kind) for kind in _OUTPUTS]}
    schemas["ResponseBody"]["properties"]["output"] = {"type": "array", "items": outputs}
    schemas["ResponseEvent"]["properties"]["item"] = outputs


def _describe_items(schemas: dict[str, Schema]) -> None:
    for kind, types in _ITEM_TYPES.items():
        schema = schemas[kind.__name__]
        may_be_left_out = kind in (MessageItem, ReferenceItem)
        schema["properties"]["type"] = {"enum": [*types, *((None,) if may_be_left_out else ())]}
        if may_be_left_out:
            schema["required"].remove("type")
    message, reference = schemas["MessageItem"], schemas["ReferenceItem"]
    message["properties"]["role"] = {"enum": _ROLES}
    message["properties"]["content"] = _text(TEXT_TYPES)
    reference["properties"]["id"] = {"type": "string"}
    reference.setdefault("required", []).append("id")
    for name in ("CallOutputItem", "CustomOutputItem"):
        schemas[name]["properties"]["output"] = _text(TEXT_TYPES)
    for name in ("summary", "content"):
        schemas["ReasoningItem"]["properties"][name] = {
            "anyOf": [_parts(REASONING_TYPES), _NULL],
            "default": None,
        }
    schemas["SearchOutputItem"]["properties"]["tools"] = {"type": "array", "items": _found_tool()}


def _describe_tools(schemas: dict[str, Schema]) -> None:
    for kind, named in _TOOL_TYPES.items():
        schema = schemas[kind.__name__]
        schema["properties"]["type"] = {"const": named}
        if "type" not in schema.setdefault("required", []):
            schema["required"].append("type")
    inner: Schema = {"anyOf": [_ref(FunctionSpec), _ref(CustomSpec)]}
    schemas["NamespaceSpec"]["properties"]["tools"] = {"type": "array", "items": inner}
    schemas["ChoiceSpec"]["properties"]["type"] = {"enum": ["function", "custom"]}
    grammar: Schema = {
        "properties": {
            "type": {"const": "grammar"},
            "syntax": {"enum": ["lark", "regex"]},
            "definition": {"type": "string", "minLength": 1},
        },
        "required": ["syntax", "definition"],
    }
    schemas["CustomFormat"]["anyOf"] = [{"properties": {"type": {"const": "text"}}}, grammar]


def _found_tool() -> Schema:
    """A tool found by a search: one to be shown, or a hosted one, left alone."""
    hosted: Schema = {"type": "object", "properties": {"type": {"enum": list(HOSTED)}}, "required": ["type"]}
    return {"anyOf": [*map(_ref, _TOOL_TYPES), hosted]}


def _text(types: Sequence[str]) -> Schema:
    """A text: a string, or parts; null is none."""
    return {"anyOf": [{"type": "string"}, _parts(types), _NULL]}


def _parts(types: Sequence[str]) -> Schema:
    part: Schema = {"allOf": [_ref(ItemPart), {"properties": {"type": {"enum": list(types)}}}]}
    return {"type": "array", "items": part}


def _ref(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
