"""Narrows the schemas of Gemini's requests to the accepted ones, as far as JSON Schema can say it. Pure."""

from collections.abc import Sequence

import msgspec

from stenograph.dialects.gemini.fields import STRUCT_AT, NotShown
from stenograph.http.route import Schema

_TEXT: Schema = {"text": {"type": "string"}}
_CALL: Schema = {"functionCall": {"$ref": "#/components/schemas/FunctionCall"}}
_RESULT: Schema = {"functionResponse": {"$ref": "#/components/schemas/FunctionResponse"}}
_ON_ANY_PART: Schema = {"thoughtSignature": {}, "partMetadata": {}}
_NO_THOUGHT: Schema = {"thought": {"enum": [False, None]}}
_MAYBE_THOUGHT: Schema = {"thought": {"type": ["boolean", "null"]}}


def narrow_gemini(schemas: dict[str, Schema]) -> None:
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
    schemas["Part"]["anyOf"] = [{"required": list(one)} for one in (_TEXT, _CALL, _RESULT)]
    user, model = ["user", "function", None], ["model"]
    schemas["Content"] = {
        "title": "Content",
        "description": schemas["Content"]["description"],
        "anyOf": [
            _content("UserContent", user, [text_only, _part(_RESULT | _NO_THOUGHT)], required=["parts"]),
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
