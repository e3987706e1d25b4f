"""Gemini requests: bytes to `ChatRequest`. Pure.

Every field is honoured, recorded or refused (fields.py); nothing is accepted and ignored. A field at fault is named by
its JSON pointer.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from stenograph.core.chat import ChatRequest, ReplyOptions, ToolChoice, ToolMode
from stenograph.core.errors import CallerError, InvalidRequest
from stenograph.core.message_json import encode_messages
from stenograph.core.messages import MEDIA_LIMITS, MediaLimits, Tool
from stenograph.core.types import Grammar, GrammarKind, ParamOutOfRange, SamplingParams
from stenograph.dialects.common.json_bodies import check_rest, decode_json, wire_messages
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.common.sampling_fields import NEUTRAL, FieldRules
from stenograph.dialects.common.template_input import check_depth, function_tool
from stenograph.dialects.gemini.contents import ReadContents, check_part_count, check_shown, read_contents
from stenograph.dialects.gemini.fields import (
    CONFIG_FIELDS,
    GEMINI_FIELDS,
    MAX_STOPS,
    NEUTRAL_VALUES,
    WireContent,
    WireDeclaration,
    WireGenerateRequest,
    WireGenerationConfig,
    WireThinkingConfig,
    WireToolConfig,
    names_at,
)
from stenograph.dialects.gemini.schemas import json_schema
from stenograph.dialects.gemini.snake_case import in_camel_case
from stenograph.dialects.gemini.spelling import GeminiSpelling, config_name
from stenograph.dialects.settings import UnknownFields

_REQUEST = msgspec.json.Decoder(WireGenerateRequest)
_CONTENTS = msgspec.json.Decoder(list[WireContent])
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_CONFIG = "/generationConfig"
_CALLING = "/toolConfig/functionCallingConfig"
_JSON_VALUE = '{"anyOf":[{"type":"object"},{"type":"array"}]}'
"""The schema of JSON without a schema; Google does not hold it to an object."""
_EFFORTS = {"MINIMAL": "low", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}
_HOW_TO_RECORD = "A server that is started with --unknown-fields record takes such fields and only records them."


def decode_gemini(
    body: bytes,
    *,
    model: str,
    stream: bool = False,
    is_sse: bool = False,
    unknown_fields: UnknownFields = UnknownFields.REFUSE,
    media: MediaLimits = MEDIA_LIMITS,
) -> ChatRequest:
    """Read a request; `media` limits its media. Raises InvalidJson, InvalidRequest or UnrenderableMessage, with a JSON
    pointer."""
    read = _read(body, unknown_fields, media)
    wire = read.wire
    config = wire.generation_config or WireGenerationConfig()
    found = read.contents
    tools = list(_tools(wire))
    thinking = config.thinking_config or WireThinkingConfig()
    params, said, grammar_at = _sampling(config)
    return ChatRequest(
        messages=tuple(found.messages),
        messages_json=encode_messages(found.messages) if tools else b"[]",
        model=model,
        tools=tuple(tool for tool, _ in tools),
        tool_choice=_tool_choice(wire.tool_config, [tool.name for tool, _ in tools]),
        params=params,
        said=said,
        thinks=False if thinking.thinking_budget == 0 else None,
        effort=_effort(thinking),
        spelling=GeminiSpelling(
            messages=tuple(found.pointers),
            tools=tuple(at for _, at in tools),
            grammar=grammar_at,
            shows_thoughts=bool(thinking.include_thoughts),
            is_sse=is_sse,
        ),
        reply=ReplyOptions(stream=stream, logprobs=bool(config.response_logprobs)),
        recorded=read.recorded,
        sent=read.sent,
        rewrites=tuple(found.rewrites),
        media=found.media.items,
    )


def decode_count(
    body: bytes,
    *,
    model: str,
    unknown_fields: UnknownFields = UnknownFields.REFUSE,
    media: MediaLimits = MEDIA_LIMITS,
) -> ChatRequest:
    """Read a request to count: contents alone, or a whole `generateContentRequest`. Raises as `decode_gemini`.

    Pointers are into the client's body.
    """
    sent = _camel_fields(body)
    whole = sent.get("generateContentRequest")
    if whole is None or bytes(whole) == b"null":
        return decode_gemini(body, model=model, unknown_fields=unknown_fields, media=media)
    if len(sent) > 1:
        raise InvalidRequest(
            "generateContentRequest is a whole request: send it alone, or send its fields without it.",
            param="/generateContentRequest",
        )
    try:
        # Within a counted request the model is named again.
        fields = decode_json(bytes(whole), _OBJECT)
        inner = msgspec.json.encode({name: raw for name, raw in fields.items() if name != "model"})
        return decode_gemini(inner, model=model, unknown_fields=unknown_fields, media=media)
    except CallerError as error:
        error.param = f"/generateContentRequest{error.param or ''}"
        raise


class _ReadRequest(NamedTuple):
    """A body after reading, and its recorded fields: those without effect, and the sampling fields as sent."""

    wire: WireGenerateRequest
    contents: ReadContents
    recorded: dict[str, str]
    sent: dict[str, str]


def _read(body: bytes, unknown_fields: UnknownFields, media: MediaLimits) -> _ReadRequest:
    extra: dict[str, str] = {}
    if unknown_fields is UnknownFields.RECORD:
        body, extra = _without_unknown(body)
    check_rest(body, "contents")
    wire, contents = _decoded(body, media)
    _check_refused(wire, GEMINI_FIELDS, "")
    config = wire.generation_config
    if config is not None:
        _check_refused(config, CONFIG_FIELDS, _CONFIG)
    recorded = {
        field.encode_name: bytes(value).decode()
        for field in msgspec.structs.fields(wire)
        if field.encode_name in GEMINI_FIELDS.recorded and isinstance(value := getattr(wire, field.name), Raw)
    }
    sent = {} if config is None else {"generationConfig": msgspec.json.encode(config).decode()}
    return _ReadRequest(wire, contents, {**recorded, **extra}, sent)


def _decoded(body: bytes, media: MediaLimits) -> tuple[WireGenerateRequest, ReadContents]:
    """The fields of a body, and its contents as messages."""
    try:
        wire = decode_json(body, _REQUEST, known=names_at)
        found = wire_messages(wire.contents, _CONTENTS, known=names_at, check_parts=check_part_count, at="/contents")
        return wire, read_contents(wire.system_instruction, found, media)
    except InvalidRequest as error:
        field = _unknown_field(error)
        if "_" in field and (respelled := in_camel_case(body)) != body:
            return _decoded(respelled, media)
        if field and (error.param or "") in (f"/{field}", f"{_CONFIG}/{field}"):
            raise InvalidRequest(f"{error} {_HOW_TO_RECORD}", param=error.param) from error
        raise


def _unknown_field(error: InvalidRequest) -> str:
    """The name of an unknown field, if that is the error."""
    return (error.param or "").rpartition("/")[2] if error.message.startswith("Unknown field") else ""


def _check_refused(wire: msgspec.Struct, rules: FieldRules, at: str) -> None:
    for field in msgspec.structs.fields(wire):
        name, value = field.encode_name, getattr(wire, field.name)
        if name not in rules.refused or not isinstance(value, Raw) or bytes(value).strip() == b"null":
            continue
        neutral = [msgspec.json.encode(one) for one in (*NEUTRAL, *NEUTRAL_VALUES.get(name, ()))]
        if b"".join(bytes(value).split()) not in neutral:
            raise InvalidRequest(f"Field {name!r} is refused: {rules.refused[name]}.", param=f"{at}/{name}")


def _without_unknown(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The body without unknown fields, of the request and of its configuration, and those fields."""
    fields = _camel_fields(body)
    extra = {name: bytes(raw).decode() for name, raw in fields.items() if name not in GEMINI_FIELDS.names}
    known = {name: raw for name, raw in fields.items() if name in GEMINI_FIELDS.names}
    config = known.get("generationConfig")
    if config is not None and bytes(config).lstrip().startswith(b"{"):
        inner = _OBJECT.decode(config)
        extra |= {name: bytes(raw).decode() for name, raw in inner.items() if name not in CONFIG_FIELDS.names}
        left = {name: raw for name, raw in inner.items() if name in CONFIG_FIELDS.names}
        known["generationConfig"] = Raw(msgspec.json.encode(left))
    return (msgspec.json.encode(known), extra) if extra else (body, extra)


def _camel_fields(body: bytes) -> dict[str, Raw]:
    """The fields of a body by their names in camel case. Raises InvalidJson, InvalidRequest."""
    fields = decode_json(body, _OBJECT)
    return decode_json(in_camel_case(body), _OBJECT) if b"_" in body else fields


# --- tools ----------------------------------------------------------------------------------------------------------


def _tools(wire: WireGenerateRequest) -> Iterator[tuple[Tool, str]]:
    """The functions declared by a request, and their pointers."""
    for index, tool in enumerate(wire.tools or ()):
        check_shown(tool, f"/tools/{index}", "tool")
        for number, one in enumerate(tool.function_declarations or ()):
            at = f"/tools/{index}/functionDeclarations/{number}"
            yield _tool(one, at), at


def _tool(wire: WireDeclaration, at: str) -> Tool:
    if wire.parameters is not None and wire.parameters_json_schema is not None:
        raise InvalidRequest(
            "parameters and parametersJsonSchema are two spellings of one; send one.",
            param=f"{at}/parametersJsonSchema",
        )
    check_shown(wire, at, "function")
    name = "parameters" if wire.parameters_json_schema is None else "parametersJsonSchema"
    given = wire.parameters if wire.parameters_json_schema is None else wire.parameters_json_schema
    check_depth(given, at=f"{at}/{name}")
    return function_tool(wire.name, wire.description, None if given is None else json_schema(given), at=f"{at}/{name}")


def _tool_choice(wire: WireToolConfig | None, names: list[str]) -> ToolChoice:
    if wire is None:
        return ToolChoice()
    check_shown(wire, "/toolConfig", "toolConfig")
    if (calling := wire.function_calling_config) is None:
        return ToolChoice()
    check_shown(calling, _CALLING, "functionCallingConfig")
    allowed = calling.allowed_function_names or []
    if unknown := [name for name in allowed if name not in names]:
        raise InvalidRequest(
            f"allowedFunctionNames names a function that is not declared: {shown(unknown[0])}.",
            param=f"{_CALLING}/allowedFunctionNames",
        )
    match calling.mode:
        case "VALIDATED":
            raise InvalidRequest(
                "mode VALIDATED is not supported: calls are held to their schema where they are forced. Send AUTO or"
                " ANY.",
                param=f"{_CALLING}/mode",
            )
        case "ANY":
            return _forced(allowed, names)
        case _ if allowed:
            raise InvalidRequest(
                f"allowedFunctionNames needs the mode ANY, got {calling.mode or 'none'}.",
                param=f"{_CALLING}/allowedFunctionNames",
            )
        case mode:
            return ToolChoice(mode=ToolMode.NONE if mode == "NONE" else ToolMode.AUTO)


def _forced(allowed: list[str], names: list[str]) -> ToolChoice:
    if not names:
        raise InvalidRequest("mode ANY needs functions in tools.", param=f"{_CALLING}/mode")
    if not allowed or set(allowed) == set(names):
        return ToolChoice(mode=ToolMode.REQUIRED)
    if len(allowed) == 1:
        return ToolChoice(mode=ToolMode.NAMED, name=allowed[0])
    raise InvalidRequest(
        f"allowedFunctionNames has {len(allowed)} of {len(names)} functions: name one, or all.",
        param=f"{_CALLING}/allowedFunctionNames",
    )


# --- sampling -------------------------------------------------------------------------------------------------------


class _Sampling(NamedTuple):
    """Sampling parameters, the ones given by the client, and the source of their grammar."""

    params: SamplingParams
    said: frozenset[str]
    grammar_at: str


def _sampling(config: WireGenerationConfig) -> _Sampling:
    """The sampling of a request. Raises InvalidRequest, with a JSON pointer."""
    if config.candidate_count not in (None, 1):
        raise InvalidRequest(
            f"candidateCount must be 1, got {config.candidate_count}: a turn has one reply.",
            param=f"{_CONFIG}/candidateCount",
        )
    if config.logprobs and not config.response_logprobs:
        raise InvalidRequest("logprobs needs responseLogprobs: true.", param=f"{_CONFIG}/logprobs")
    values: dict[str, object] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": _top_k(config.top_k),
        "seed": config.seed,
        "max_tokens": config.max_output_tokens,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "stop": None if config.stop_sequences is None else _stops(config.stop_sequences),
    }
    given = {name: value for name, value in values.items() if value is not None}
    grammar, grammar_at = _grammar(config)
    try:
        params = SamplingParams(
            **given,  # type: ignore[arg-type]  # typed by the wire struct, under the same names
            grammar=grammar,
            num_top_logprobs=config.logprobs or 0,
        )
    except ParamOutOfRange as error:
        name = config_name(error.name)
        message = f"{str(error).replace(error.name, name, 1)}."
        raise InvalidRequest(message, param=f"{_CONFIG}/{name}") from error
    return _Sampling(params, frozenset(given), grammar_at)


def _top_k(value: float | None) -> int | None:
    """Google's own package writes a number with a point."""
    if value is None:
        return None
    if not value.is_integer():
        raise InvalidRequest(f"topK must be a whole number, got {value:g}.", param=f"{_CONFIG}/topK")
    return int(value)


def _stops(wire: list[str]) -> tuple[str, ...]:
    at = f"{_CONFIG}/stopSequences"
    if len(wire) > MAX_STOPS:
        raise InvalidRequest(f"At most {MAX_STOPS} stop strings, got {len(wire)}.", param=at)
    if not all(wire):
        raise InvalidRequest("A stop string is empty: it must have at least one character.", param=at)
    return tuple(wire)


def _grammar(config: WireGenerationConfig) -> tuple[Grammar | None, str]:
    """The requested grammar, and the pointer of its field."""
    names = {"responseSchema": config.response_schema, "responseJsonSchema": config.response_json_schema}
    given = [(f"{_CONFIG}/{name}", schema) for name, schema in names.items() if schema is not None]
    if len(given) > 1:
        raise InvalidRequest(
            "responseSchema and responseJsonSchema are two spellings of one; send one.", param=given[1][0]
        )
    mime, mime_at = config.response_mime_type, f"{_CONFIG}/responseMimeType"
    if mime in (None, "text/plain"):
        if given:
            raise InvalidRequest(
                f"{given[0][0].split('/')[-1]} needs responseMimeType 'application/json', got {mime!r}.", param=mime_at
            )
        return None, f"{_CONFIG}/responseSchema"
    if mime not in ("application/json", "text/x.enum"):
        raise InvalidRequest(
            f"responseMimeType must be 'text/plain', 'application/json' or 'text/x.enum', got {shown(mime or '')}.",
            param=mime_at,
        )
    if not given:
        if mime == "text/x.enum":
            raise InvalidRequest("responseMimeType 'text/x.enum' needs a responseSchema with an enum.", param=mime_at)
        return Grammar(kind=GrammarKind.JSON_SCHEMA, source=_JSON_VALUE), mime_at
    at, wire = given[0]
    check_depth(wire, at=at)
    schema = json_schema(wire)
    if mime == "text/x.enum":
        return _choice(schema, at), at
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=msgspec.json.encode(schema).decode()), at


def _choice(schema: Mapping[str, object], at: str) -> Grammar:
    try:
        choices = msgspec.convert(schema.get("enum"), list[str])
    except msgspec.ValidationError as error:
        raise InvalidRequest("The schema of 'text/x.enum' needs an enum of texts.", param=at) from error
    if not choices or not all(choices):
        raise InvalidRequest("There must be at least one choice, and none may be empty.", param=at)
    return Grammar(kind=GrammarKind.CHOICE, source=msgspec.json.encode(choices).decode())


def _effort(wire: WireThinkingConfig) -> str | None:
    """The effort of a level: the lowest two are one here."""
    return None if wire.thinking_level is None else _EFFORTS.get(wire.thinking_level)
