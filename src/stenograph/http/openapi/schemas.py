"""The schemas of all bodies, made from the structs of requests and the typed dictionaries of replies. Pure.

Adds the rules between fields, checked by the server after decoding, as far as JSON Schema can say them. The structs
have the ranges of single fields, and their docstrings the rest. Knows no routes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from itertools import combinations
from typing import cast, get_args, get_type_hints, is_typeddict

import msgspec

from stenograph.core.messages import Role
from stenograph.dialects.anthropic.fields import (
    MESSAGES_FIELDS,
    WireTextBlock,
    WireThinkingBlock,
    WireToolResultBlock,
    WireToolUseBlock,
)
from stenograph.dialects.common.media import BASE64_TEXT, IMAGE_TYPES
from stenograph.dialects.common.sampling import NOT_SAMPLING
from stenograph.dialects.common.sampling_fields import FieldRules, Rule
from stenograph.dialects.gemini.fields import CONFIG_FIELDS, GEMINI_FIELDS, STRUCT_AT, NotShown
from stenograph.dialects.openai.chat_fields import CHAT_FIELDS
from stenograph.dialects.openai.completions import COMPLETION_FIELDS
from stenograph.dialects.responses.fields import RESPONSES_FIELDS
from stenograph.dialects.settings import UnknownFields
from stenograph.http.openapi.responses import RESPONSES_PARTS, describe_responses
from stenograph.http.part import Part
from stenograph.http.route import REF, Schema, ref
from stenograph.session.rewrite_rules import DEFAULT, OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The facts of a server behind its document.

    `matchers` and `rewrites` are the names allowed when a session is opened. `forwards`: the engine is a server, so the
    allow-list's paths are passed on to it, and it may write replies itself; else this server answers some.
    """

    has_keys: bool
    dialects: tuple[str, ...]
    unknown_fields: UnknownFields
    matchers: tuple[str, ...]
    rewrites: tuple[str, ...]
    vocab_size: int
    proxy_allow: tuple[str, ...]
    forwards: bool
    parts: tuple[Part, ...] = ()


_NULL: Schema = {"type": "null"}
_GIVEN: Schema = {"not": _NULL}

_RULES = {
    "ChatRequest": CHAT_FIELDS,
    "CompletionRequest": COMPLETION_FIELDS,
    "MessagesRequest": MESSAGES_FIELDS,
    "ResponsesRequest": RESPONSES_FIELDS,
    "GenerateRequest": GEMINI_FIELDS,
    "GenerationConfig": CONFIG_FIELDS,
}
_GRAMMAR_FIELDS = (
    "response_format", "structured_outputs", "regex", "ebnf", "json_schema",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


def components(kinds: Iterable[type], shapes: Iterable[type], described: Described) -> dict[str, Schema]:
    """The schemas of bodies, and of `shapes` within other content, by name. They accept what the server accepts."""
    more = sorted(shapes, key=lambda kind: kind.__name__)
    kinds = list(dict.fromkeys((*kinds, *more, *RESPONSES_PARTS)))
    _, made = msgspec.json.schema_components(kinds, schema_hook=_any_value, ref_template=REF + "{name}")
    for kind in _typed_dictionaries(kinds):
        _in_order(made[kind.__name__], tuple(kind.__annotations__))
    schemas = _renamed(made)
    for schema in schemas.values():
        schema["description"] = _unwrapped(schema["description"])
    for name, rules in _RULES.items():
        _leave_out_refused(schemas[name], rules, described.unknown_fields)
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        _narrow_sampling(schemas[name])
    _narrow_param(schemas["MessageParam"])
    _require(schemas["MessagesTool"], "input_schema")
    describe_responses(schemas)
    _narrow_grammars(schemas["ResponseFormat"], schemas["StructuredOutputs"])
    _narrow_message(schemas["Message"])
    _narrow_gemini(schemas)
    _narrow_part(schemas["ContentPart"])
    _narrow_source(schemas["ImageSource"])
    _require(schemas["Tool"], "function")
    _describe_bytes(schemas, described.vocab_size)
    _describe_sent(schemas)
    options: Schema = schemas["CreateSession"]["properties"]
    for option in ("group", "support", "cache_salt"):  # the order in which documents have had them
        options[option] = options.pop(option)
    _first(schemas["CreateSession"], "matcher")["enum"] = list(described.matchers)
    rewrite = f"({'|'.join(map(re.escape, described.rewrites))})"
    _first(schemas["CreateSession"], "canonical")["pattern"] = f"^({DEFAULT}|{OFF}|{rewrite}(,{rewrite})*)$"
    return schemas


def _describe_bytes(schemas: dict[str, Schema], vocab_size: int) -> None:
    """Add the fields kept as bytes in a struct, because they are decoded in pieces."""
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}}
    prompts = (text, {**ids, "minItems": 1})
    several = [{"type": "array", "minItems": 1, "items": prompt} for prompt in prompts]
    schemas["Detokenize"]["properties"]["tokens"] = ids
    schemas["CompletionRequest"]["properties"]["prompt"] = {
        "description": "A text, token ids, or a list of either, whose items are a prompt each.",
        "anyOf": [*prompts, *several],
    }
    blocks: Schema = {"type": "array", "items": {"$ref": ref(WireTextBlock)}}
    schemas["MessagesRequest"]["properties"]["system"] = {"anyOf": [{"type": "string"}, blocks, _NULL]}


def _describe_sent(schemas: dict[str, Schema]) -> None:
    """Add to a record's request the sampling fields of all routes' requests: it has them as they were sent."""
    recorded: Schema = schemas["RecordedRequest"]["properties"]
    for request, rules in _RULES.items():
        if request.startswith("Gen"):  # a record has Gemini's whole configuration as one field
            continue
        asked: Schema = schemas[request]["properties"]
        for name in rules.names:
            if name in NOT_SAMPLING or name not in asked or rules.rule_of(name) is not Rule.HONOURED:
                continue
            before = recorded.get(name, asked[name])
            recorded[name] = before if before == asked[name] else {"anyOf": [before, asked[name]]}


def _typed_dictionaries(kinds: Iterable[object]) -> set[type]:
    """The typed dictionaries among the types and the types of their fields."""
    found: set[type] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and is_typeddict(kind) and kind not in found:
            found.add(kind)
            waiting += get_type_hints(kind, include_extras=True).values()
    return found


def _in_order(schema: Schema, names: tuple[str, ...]) -> None:
    """Put the fields in the order of writing; msgspec sorts those of a typed dictionary."""
    schema["properties"] = {name: schema["properties"][name] for name in names}
    schema["required"].sort(key=names.index)


def _any_value(kind: type) -> Schema:
    if kind is object:
        return {"title": "Any JSON value"}
    raise NotImplementedError  # tells msgspec that there is no schema: a new type in a struct fails at the start


def _renamed(made: dict[str, Schema]) -> dict[str, Schema]:
    """The schemas under their public names: the struct's without `Wire`."""
    text = msgspec.json.encode(made)
    return msgspec.json.decode(re.sub(rb'(?<=["/])Wire(?=[A-Z])', b"", text), type=dict[str, Schema])


def _unwrapped(docstring: str) -> str:
    """A docstring with each paragraph and list item on a line."""
    return re.sub(r"(?<!\n)\n *(?![\n -])", " ", cleandoc(docstring))


def _first(schema: Schema, name: str) -> Schema:
    """A property's schema; of a nullable one, the other choice."""
    found: Schema = schema["properties"][name]
    return cast("Schema", found["anyOf"][0]) if "anyOf" in found else found


def _narrow_sampling(request: Schema) -> None:
    """Add the rules common to a chat, a completion and a response."""
    fields: dict[str, Schema] = request["properties"]
    for name in ("json_schema", "guided_json"):
        _only_objects(fields[name])
    spaced: Schema = {"spaces_between_special_tokens": {"const": True}, "skip_special_tokens": {"const": False}}
    pairs = combinations(map(_asks_for_a_grammar, _GRAMMAR_FIELDS), 2)
    excluded: list[Schema] = [{"allOf": pair} for pair in pairs]
    excluded.append({"properties": spaced, "required": [*spaced]})
    request["allOf"] = [{"not": one} for one in excluded]


def _leave_out_refused(request: Schema, rules: FieldRules, unknown_fields: UnknownFields) -> None:
    """Leave out the refused fields; where unknown ones are recorded, mark these as refused."""
    request["additionalProperties"] = unknown_fields is UnknownFields.RECORD
    for name, why in rules.refused.items():
        del request["properties"][name]
        if unknown_fields is UnknownFields.RECORD:
            request["properties"][name] = {**_NULL, "description": f"Refused: {why}."}


def _narrow_param(message: Schema) -> None:
    """Add the blocks allowed in a message of each role."""
    own: tuple[tuple[str, str, tuple[type, ...]], ...] = (
        ("UserParam", "user", (WireTextBlock, WireToolResultBlock)),
        ("AssistantParam", "assistant", (WireTextBlock, WireThinkingBlock, WireToolUseBlock)),
        ("SystemParam", "system", (WireTextBlock,)),
    )
    text: Schema = {"type": "string"}
    message["anyOf"] = [
        {
            "title": title,
            "properties": {
                "role": {"const": role},
                "content": {
                    "anyOf": [text, {"type": "array", "items": {"anyOf": [{"$ref": ref(kind)} for kind in kinds]}}]
                },
            },
        }
        for title, role, kinds in own
    ]


def _only_objects(field: Schema) -> None:
    """Leave only objects: JSON Schema cannot say which texts are JSON Schemas."""
    field["anyOf"] = [choice for choice in field["anyOf"] if choice.get("type") != "string"]
    field["description"] = "A JSON Schema. Its JSON text is accepted too."


def _asks_for_a_grammar(name: str) -> Schema:
    value = _GIVEN
    if name == "response_format":
        value = {"type": "object", "properties": {"type": {"not": {"const": "text"}}}}
    return {"required": [name], "properties": {name: value}}


def _narrow_grammars(response_format: Schema, structured_outputs: Schema) -> None:
    """`response_format` has a schema if its type says so; `structured_outputs` has one grammar."""
    plain = {"properties": {"type": {"enum": ["text", "json_object"]}, "json_schema": _NULL}}
    held = {"properties": {"type": {"const": "json_schema"}, "json_schema": _GIVEN}, "required": ["json_schema"]}
    response_format["anyOf"] = [plain, held]
    fields: dict[str, Schema] = structured_outputs["properties"]
    _only_objects(fields["json"])
    asks: Schema = {"not": {"enum": [None, False]}}
    structured_outputs["oneOf"] = [{"properties": {name: asks}, "required": [name]} for name in fields]


def _narrow_message(message: Schema) -> None:
    """Add the required and forbidden fields of a message of each role. A null content is the same as none."""
    no_text: Schema = {"enum": ["", None]}
    no_call_id = {"tool_call_id": no_text}
    call_id = {"tool_call_id": {"type": "string", "minLength": 1}}
    not_assistant: Schema = {
        "reasoning_content": no_text,
        "reasoning": no_text,
        "tool_calls": {"enum": [[], None]},
        "content": _GIVEN,
    }
    own: tuple[tuple[str, list[Role], Schema, list[str]], ...] = (
        ("AssistantMessage", [Role.ASSISTANT], no_call_id, []),
        ("ToolMessage", [Role.TOOL], not_assistant | call_id, ["content", "tool_call_id"]),
        ("PromptMessage", [Role.SYSTEM, Role.DEVELOPER, Role.USER], not_assistant | no_call_id, ["content"]),
    )
    message["anyOf"] = [
        {"title": title, "properties": {"role": {"enum": roles}, **fields}, "required": required}
        for title, roles, fields, required in own
    ]


def _narrow_part(part: Schema) -> None:
    """Add the field that a content part of each type has, and no other."""
    shapes = {name: _first(part, name) for name in ("text", "image_url")}
    part["properties"] |= {name: {} for name in shapes}
    part["anyOf"] = [
        {
            "title": f"{title}Part",
            "properties": {"type": {"const": own}, own: shapes[own], other: _NULL},
            "required": [own],
        }
        for title, own, other in (("Text", "text", "image_url"), ("Image", "image_url", "text"))
    ]


def _require(schema: Schema, name: str) -> None:
    """Demand a field beyond the struct's demands: a later check refuses its absence with a better message."""
    schema["properties"][name] = _first(schema, name)
    schema["required"].append(name)


# --- Gemini's requests

_TEXT: Schema = {"text": {"type": "string"}}
_IMAGE: Schema = {"inlineData": {"$ref": "#/components/schemas/Blob"}}
_CALL: Schema = {"functionCall": {"$ref": "#/components/schemas/FunctionCall"}}
_RESULT: Schema = {"functionResponse": {"$ref": "#/components/schemas/FunctionResponse"}}
_ON_ANY_PART: Schema = {"thoughtSignature": {}, "partMetadata": {}}
_NO_THOUGHT: Schema = {"thought": {"enum": [False, None]}}
_MAYBE_THOUGHT: Schema = {"thought": {"type": ["boolean", "null"]}}


def _narrow_source(source: Schema) -> None:
    """Add the fields that an image's source of each type has."""
    shapes: dict[str, dict[str, Schema]] = {
        "base64": {"media_type": {"enum": list(IMAGE_TYPES)}, "data": BASE64},
        "url": {"url": {"type": "string", "pattern": f"^data:({'|'.join(IMAGE_TYPES)});base64,{BASE64_TEXT}$"}},
    }
    source["anyOf"] = [
        {"properties": {"type": {"const": kind}, **fields}, "required": list(fields)} for kind, fields in shapes.items()
    ]


BASE64: Schema = {"type": "string", "pattern": f"^{BASE64_TEXT}$"}
"""Bytes, at least one."""


def _narrow_gemini(schemas: dict[str, Schema]) -> None:
    """Narrow the schemas of a Gemini request, made from its structs."""
    for struct in dict.fromkeys(STRUCT_AT.values()):
        schema = schemas[struct.__name__.removeprefix("Wire")]
        for field in msgspec.structs.fields(struct):
            if field.type == NotShown:
                del schema["properties"][field.encode_name]
    config: Schema = schemas["GenerationConfig"]["properties"]
    config["responseMimeType"] = {"enum": ["text/plain", "application/json", "text/x.enum", None]}
    config["stopSequences"]["anyOf"][0]["items"]["minLength"] = 1
    calling: Schema = schemas["CallingConfig"]["properties"]
    calling["mode"] = {"enum": ["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", None]}
    text_only = _part(_TEXT | _NO_THOUGHT)
    schemas["SystemInstruction"]["properties"]["parts"]["items"] = text_only
    schemas["Part"]["anyOf"] = [{"required": list(one)} for one in (_TEXT, _IMAGE, _CALL, _RESULT)]
    schemas["Blob"]["properties"] |= {"mimeType": {"enum": list(IMAGE_TYPES)}, "data": BASE64}
    schemas["FunctionResponse"]["properties"]["parts"] = {
        "anyOf": [{"type": "array", "items": _part(_IMAGE | _NO_THOUGHT)}, _NULL]
    }
    user, model = ["user", "function", None], ["model"]
    schemas["Content"] = {
        "title": "Content",
        "description": schemas["Content"]["description"],
        "anyOf": [
            _content(
                "UserContent",
                user,
                [text_only, _part(_IMAGE | _NO_THOUGHT), _part(_RESULT | _NO_THOUGHT)],
                required=["parts"],
            ),
            _content("ModelContent", model, [_part(_TEXT | _MAYBE_THOUGHT), _part(_CALL | _MAYBE_THOUGHT)]),
        ],
    }


def _part(fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields | _ON_ANY_PART,
        "required": [next(iter(fields))],
        "additionalProperties": False,
    }


def _content(
    title: str, roles: Sequence[str | None], parts: Sequence[Schema], required: Sequence[str] = ("role", "parts")
) -> Schema:
    listed: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": [*parts]}}
    return {
        "title": title,
        "type": "object",
        "properties": {"role": {"enum": [*roles]}, "parts": listed},
        "required": [*required],
        "additionalProperties": False,
    }
