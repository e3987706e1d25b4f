"""The schemas of Responses' items and tools: the rules of their decoder by the type of each. Pure.

A request's input and tools are bytes in its struct, decoded one by one; here each type has its own schema.
"""

from collections.abc import Sequence

from stenograph.dialects.common.media import BASE64_TEXT, IMAGE_TYPES
from stenograph.dialects.responses.items import (
    IMAGE,
    KINDS,
    REASONING_TYPES,
    TEXT_TYPES,
    ItemPart,
    MessageItem,
    ReferenceItem,
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
from stenograph.http.route import Schema, ref

_TOOLS = (FunctionSpec, CustomSpec, NamespaceSpec, SearchSpec)
_OUTPUTS = (ReasoningOutput, MessageOutput, FunctionCallOutput, CustomCallOutput, SearchCallOutput)

RESPONSES_PARTS = (*KINDS, *_TOOLS, *_OUTPUTS, ItemPart, ChoiceSpec, ResponseBody, ResponseEvent)
"""Types of JSON in Responses' requests and replies."""

_NULL: Schema = {"type": "null"}
_HOSTED: Schema = {"type": "object", "properties": {"type": {"enum": list(HOSTED)}}, "required": ["type"]}


def _any_of(kinds: Sequence[type], *others: Schema) -> Schema:
    return {"anyOf": [*({"$ref": ref(kind)} for kind in kinds), *others]}


def describe_responses(schemas: dict[str, Schema]) -> None:
    """Add the fields kept as bytes in the structs, and the rules of each type."""
    _describe_items(schemas)
    _describe_tools(schemas)
    request: Schema = schemas["ResponsesRequest"]
    fields: Schema = request["properties"]
    fields["input"] = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _any_of(KINDS)}]}
    fields["tools"] = {"anyOf": [{"type": "array", "items": _any_of(_TOOLS, _HOSTED)}, _NULL], "default": None}
    choices: list[Schema] = [{"enum": ["auto", "none", "required", None]}, {"$ref": ref(ChoiceSpec)}]
    fields["tool_choice"] = {"anyOf": choices, "default": None}
    plain: Schema = {"properties": {"type": {"enum": ["text", "json_object"]}, "schema": _NULL}}
    with_schema: Schema = {
        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
        "required": ["schema"],
    }
    schemas["TextFormat"]["anyOf"] = [plain, with_schema]
    outputs = _any_of(_OUTPUTS)
    schemas["ResponseBody"]["properties"]["output"] = {"type": "array", "items": outputs}
    schemas["ResponseEvent"]["properties"]["item"] = outputs


def _describe_items(schemas: dict[str, Schema]) -> None:
    for kind in (MessageItem, ReferenceItem):  # their type may be left out
        schemas[kind.__name__]["properties"]["type"]["enum"].append(None)
        schemas[kind.__name__]["required"].remove("type")
    message, reference = schemas["MessageItem"], schemas["ReferenceItem"]
    message["properties"]["role"] = {"enum": ["user", "assistant", "system", "developer"]}
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
    schemas["SearchOutputItem"]["properties"]["tools"] = {"type": "array", "items": _any_of(_TOOLS, _HOSTED)}


def _describe_tools(schemas: dict[str, Schema]) -> None:
    for kind in _TOOLS:
        schema = schemas[kind.__name__]
        schema["properties"]["type"] = {"const": schema["properties"]["type"]["default"]}
        if "type" not in schema.setdefault("required", []):
            schema["required"].append("type")
    inner = _any_of((FunctionSpec, CustomSpec))
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


def _text(types: Sequence[str]) -> Schema:
    """A text: a string, or parts, some of them images; null is none."""
    return {"anyOf": [{"type": "string"}, _parts(types, image=True), _NULL]}


def _parts(types: Sequence[str], *, image: bool = False) -> Schema:
    text: Schema = {"properties": {"type": {"enum": list(types)}, "text": {"type": "string"}}, "required": ["text"]}
    kinds = [{**text, "not": {"required": ["image_url"]}}]
    if image:
        url = {"type": "string", "pattern": f"^data:({'|'.join(IMAGE_TYPES)});base64,{BASE64_TEXT}$"}
        kinds.append({"properties": {"type": {"const": IMAGE}, "image_url": url}, "required": ["image_url"]})
    return {"type": "array", "items": {"allOf": [{"$ref": ref(ItemPart)}, {"anyOf": kinds}]}}
