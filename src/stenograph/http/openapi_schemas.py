"""The schemas of all bodies, made from the structs that read them (`protocol`) and those that show replies
(reply_shapes.py). Pure.

What the structs leave to later checks is added here, as far as JSON Schema can say it: ranges, spellings, what a
message of each role has. What it cannot say is in the descriptions. Knows no routes.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, cast

import msgspec

from stenograph.core.messages import Role
from stenograph.core.settings import HistoryKind, UnknownFields
from stenograph.http.reply_shapes import REPLIES
from stenograph.protocol.openai_chat_fields import CHAT_FIELDS, WireChatRequest, WireMessage
from stenograph.protocol.openai_completions_fields import COMPLETION_FIELDS, WireCompletionRequest
from stenograph.protocol.openai_sampling_fields import FieldRules, Rule
from stenograph.protocol.sessions import (
    SAMPLE_FORMATS,
    AbortRequest,
    CreateSession,
    Detokenize,
    Nothing,
    SamplesRequest,
    Tokenize,
)
from stenograph.protocol.template_kwargs import RESERVED

Schema = dict[str, Any]

REF = "#/components/schemas/"

_REQUESTS = (
    AbortRequest,
    CreateSession,
    Detokenize,
    Nothing,
    SamplesRequest,
    Tokenize,
    WireChatRequest,
    WireCompletionRequest,
    WireMessage,
)
_NULL: Schema = {"type": "null"}
_EMPTY_TEXT: Schema = {"anyOf": [{"type": "string", "maxLength": 0}, _NULL]}
"""What an absent text may look like."""

_NOT_BLANK = r"\S"
_CHOICES: Schema = {"minItems": 1, "items": {"type": "string", "minLength": 1}}

_RANGES: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "exclusiveMaximum": 2**31},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "exclusiveMaximum": 2**64},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "max_tokens": {"minimum": 1, "exclusiveMaximum": 2**31},
    "max_completion_tokens": {"minimum": 1, "exclusiveMaximum": 2**31},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "n": {"minimum": 1, "maximum": 1},
    "stop_token_ids": {"items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "regex": {"pattern": _NOT_BLANK},
    "ebnf": {"pattern": _NOT_BLANK},
    "guided_regex": {"pattern": _NOT_BLANK},
    "guided_grammar": {"pattern": _NOT_BLANK},
    "guided_choice": _CHOICES,
    "echo": {"const": False},
    "suffix": {"maxLength": 0},
    "best_of": {"minimum": 1, "maximum": 1},
    "truncate_prompt_tokens": {"not": {"const": 0}},
    "add_special_tokens": {"const": False},
}
"""Of `core.types.SamplingParams`, whose numbers they are, and of the decoders."""

_GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)

_CHAT_TEXT = """An OpenAI chat request. `null` means absent.

At most one field asks for a grammar: {grammars}.

Not said by this schema: `top_logprobs` needs `logprobs`; `stream_options` needs `stream`; `max_tokens` and
`max_completion_tokens` do not disagree; `tool_choice` names a tool that is there, and `required` needs one; a forced
call and a grammar exclude each other; grammars, and the schemas of tools, are ones that guided decoding knows; a tool
message answers a call before it; a message's `reasoning` and `reasoning_content` do not disagree; the last message is
not a reply that the session generated; the model's template can show every message; nothing is nested deeper than 64
levels; it fits the context. Fields that docs/http-api.md lists as refused may come as null, which the schema leaves
out."""

_COMPLETION_TEXT = """An OpenAI completions request. `null` means absent.

At most one field asks for a grammar: {grammars}.

Not said by this schema: `stream_options` needs `stream`; `truncation_side` needs `truncate_prompt_tokens`; a grammar is
one that guided decoding knows; a linear session takes one prompt; the prompt does not end with a reply that the session
generated; it fits the context. Fields that docs/http-api.md lists as refused may come as null, which the schema leaves
out."""

_MESSAGE_TEXT = "A message. Fields that only decorate it are taken and dropped. Content parts are joined."


def components(*, unknown_fields: UnknownFields, matchers: Sequence[str], vocab_size: int) -> dict[str, Schema]:
    """The schemas by name. They accept what the server with these settings accepts."""
    structs = (*_REQUESTS, *REPLIES)
    _, made = msgspec.json.schema_components(structs, schema_hook=_any_value, ref_template=REF + "{name}")
    schemas = {_public(name): cast("Schema", _renamed(schema)) for name, schema in made.items()}
    for schema in schemas.values():
        schema["description"] = " ".join(schema["description"].split())
    _narrow_sampling(schemas["ChatRequest"], CHAT_FIELDS, unknown_fields)
    _narrow_sampling(schemas["CompletionRequest"], COMPLETION_FIELDS, unknown_fields)
    _split_response_format(schemas)
    _split_structured_outputs(schemas)
    _narrow_chat(schemas)
    _narrow_completion(schemas, vocab_size)
    _narrow_message(schemas)
    _narrow_sessions(schemas, matchers)
    token_id = {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}
    schemas["Detokenize"]["properties"]["tokens"] = {"type": "array", "items": token_id}
    return schemas


def _any_value(kind: type) -> Schema:
    if kind is object:
        return {"title": "Any JSON value"}
    raise NotImplementedError  # msgspec's word for "no schema of mine": a new type in a struct is found at the start


def _public(name: str) -> str:
    return name.removeprefix("Wire")


def _renamed(value: object) -> object:
    """A schema under the names that it has outside, of itself and of those it refers to."""
    if isinstance(value, list):
        return [_renamed(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    renamed = {key: _renamed(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(ref := renamed.get("$ref"), str):
        renamed["$ref"] = REF + _public(ref.removeprefix(REF))
    if isinstance(title := renamed.get("title"), str):
        renamed["title"] = _public(title)
    return renamed


def _first(schema: Schema, name: str) -> Schema:
    """A property's schema; of one that may be null, the other choice."""
    found: Schema = schema["properties"][name]
    return cast("Schema", found["anyOf"][0]) if "anyOf" in found else found


def _narrow_sampling(request: Schema, rules: FieldRules, unknown_fields: UnknownFields) -> None:
    """What a chat and a completion have in common."""
    fields: dict[str, Schema] = request["properties"]
    request["additionalProperties"] = unknown_fields is UnknownFields.RECORD
    for name in rules.names:
        if rules.rule_of(name) is Rule.RECORDED:
            fields[name] = {"description": "Recorded, without effect."}
    for name, why in rules.refused.items():
        del fields[name]
        if unknown_fields is UnknownFields.RECORD:
            fields[name] = {**_NULL, "description": f"Refused: {why}."}
    for name, narrower in _RANGES.items():
        if name in fields:
            _first(request, name).update(narrower)
    text, texts, null = fields["stop"]["anyOf"]
    text["minLength"] = texts["items"]["minLength"] = 1
    fields["stop"]["anyOf"] = [text, {**texts, "maxItems": 64}, null]
    for name in ("json_schema", "guided_json"):
        _only_objects(fields[name])
    request["allOf"] = [{"not": {"allOf": pair}} for pair in combinations(map(_asks_for_a_grammar, _GRAMMAR_FIELDS), 2)]


def _only_objects(field: Schema) -> None:
    """A JSON Schema as an object; as a text it may be one too, but what text is one cannot be said here."""
    field["anyOf"] = [choice for choice in field["anyOf"] if choice.get("type") != "string"]
    field["description"] = "A JSON Schema; its text will do as well."


def _asks_for_a_grammar(name: str) -> Schema:
    value: Schema = {"not": _NULL}
    if name == "response_format":
        value = {"type": "object", "properties": {"type": {"not": {"const": "text"}}}}
    return {"required": [name], "properties": {name: value}}


def _narrow_chat(schemas: dict[str, Schema]) -> None:
    chat = schemas["ChatRequest"]
    chat["description"] = _CHAT_TEXT.format(grammars=", ".join(f"`{name}`" for name in _GRAMMAR_FIELDS))
    chat["properties"]["messages"] = {"type": "array", "minItems": 1, "items": {"$ref": f"{REF}Message"}}
    _first(chat, "tool_choice")["enum"] = ["auto", "none", "required"]
    _without_reserved(_first(chat, "chat_template_kwargs"))
    schemas["NamedChoice"]["properties"]["type"] = {"const": "function"}
    schemas["ToolCall"]["properties"]["type"]["enum"] = ["function"]
    tool = schemas["Tool"]
    tool["properties"] |= {"type": {"const": "function"}, "function": {"$ref": f"{REF}ToolFunction"}}
    tool["required"] = ["type", "function"]


def _narrow_completion(schemas: dict[str, Schema], vocab_size: int) -> None:
    request = schemas["CompletionRequest"]
    request["description"] = _COMPLETION_TEXT.format(grammars=", ".join(f"`{name}`" for name in _GRAMMAR_FIELDS))
    text: Schema = {"type": "string", "minLength": 1}
    id_: Schema = {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}
    ids: Schema = {"type": "array", "minItems": 1, "items": id_}
    several: Schema = {"type": "array", "minItems": 1}
    request["properties"]["prompt"] = {
        "description": "A text, ids, or a list of either; of a list each is a prompt of its own.",
        "anyOf": [text, ids, {**several, "items": text}, {**several, "items": ids}],
    }
    _first(request, "logprobs").update({"minimum": 0, "maximum": 20})


def _split_response_format(schemas: dict[str, Schema]) -> None:
    """`response_format` with a schema, and without."""
    made = schemas["ResponseFormat"]
    plain = {"type": {"enum": ["text", "json_object"]}, "json_schema": _NULL}
    held = {"type": {"const": "json_schema"}, "json_schema": {"$ref": f"{REF}JsonSchema"}}
    schemas["ResponseFormat"] = {
        "title": made["title"],
        "description": made["description"],
        "anyOf": [
            {"type": "object", "properties": plain, "required": ["type"], "additionalProperties": False},
            {"type": "object", "properties": held, "required": [*held], "additionalProperties": False},
        ],
    }


def _split_structured_outputs(schemas: dict[str, Schema]) -> None:
    """`structured_outputs` with each of its fields; the others may be null."""
    made = schemas["StructuredOutputs"]
    fields: dict[str, Schema] = made["properties"]
    _only_objects(fields["json"])
    held = {name: _first(made, name) for name in fields}
    for name in ("regex", "grammar"):
        held[name]["pattern"] = _NOT_BLANK
    held["choice"].update(_CHOICES)
    held["json_object"] = {"const": True}
    nothing = {**dict.fromkeys(fields, _NULL), "json_object": {"enum": [False, None]}}
    schemas["StructuredOutputs"] = {
        "title": made["title"],
        "description": made["description"],
        "anyOf": [
            {
                "type": "object",
                "properties": {**nothing, name: schema},
                "required": [name],
                "additionalProperties": False,
            }
            for name, schema in held.items()
        ],
    }


def _narrow_message(schemas: dict[str, Schema]) -> None:
    """A message of each role: what it must have, and what it must not."""
    made, part = schemas["Message"], schemas["TextPart"]
    part["description"] = "Text. Parts of other types are refused."
    part["properties"] |= {"type": {"const": "text"}, "text": {"type": "string"}}
    part["required"] = ["type", "text"]
    for name in ("image_url", "input_audio", "file"):
        part["properties"][name] = _NULL
    nothing: Schema = {"anyOf": [{"type": "array", "maxItems": 0}, _NULL]}
    not_assistant = {"reasoning_content": _EMPTY_TEXT, "reasoning": _EMPTY_TEXT, "tool_calls": nothing}
    made["properties"]["images"] = nothing
    text, parts, _ = made["properties"]["content"]["anyOf"]
    content: Schema = {"anyOf": [text, parts]}
    no_call_id = {"tool_call_id": _EMPTY_TEXT}
    call_id: Schema = {"tool_call_id": {"type": "string", "minLength": 1}}
    # A null content is the same as none, which only an assistant's message may have.
    own: dict[str, tuple[list[Role], Schema, list[str]]] = {
        "AssistantMessage": ([Role.ASSISTANT], no_call_id, ["role"]),
        "ToolMessage": (
            [Role.TOOL],
            {**not_assistant, **call_id, "content": content},
            ["role", "content", "tool_call_id"],
        ),
        "PromptMessage": (
            [Role.SYSTEM, Role.DEVELOPER, Role.USER],
            {**not_assistant, **no_call_id, "content": content},
            ["role", "content"],
        ),
    }
    for name, (roles, properties, required) in own.items():
        schemas[name] = {
            "title": name,
            "type": "object",
            "properties": {**made["properties"], **properties, "role": {"enum": [role.value for role in roles]}},
            "required": required,
            "additionalProperties": False,
        }
    schemas["Message"] = {
        "title": "Message",
        "description": _MESSAGE_TEXT,
        "anyOf": [{"$ref": REF + name} for name in own],
    }


def _narrow_sessions(schemas: dict[str, Schema], matchers: Sequence[str]) -> None:
    opened, samples = schemas["CreateSession"], schemas["SamplesRequest"]
    opened["description"] = "What a session is opened with. `null` means absent."
    _first(opened, "history")["enum"] = [kind.value for kind in HistoryKind]
    _first(opened, "matcher")["enum"] = list(matchers)
    _without_reserved(_first(opened, "chat_template_kwargs"))
    samples["description"] = (
        "What samples are wanted. `null` means absent. `token_texts` needs `format` `json`; `arrow` needs pyarrow."
    )
    _first(samples, "format")["enum"] = list(SAMPLE_FORMATS)
    schemas["AbortRequest"]["description"] = "What is to end: every running turn."
    schemas["AbortRequest"]["properties"]["abort_all"] = {"const": True}
    schemas["Tokenize"]["description"] = "A text; the spellings of control tokens in it are recognized."
    schemas["Detokenize"]["description"] = "Token ids of the model."


def _without_reserved(kwargs: Schema) -> None:
    kwargs["description"] = "Arguments of the chat template, but for those that the server alone sets."
    kwargs["propertyNames"] = {"not": {"enum": list(RESERVED)}}
