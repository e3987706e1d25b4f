"""Fields of a Gemini request: the decoded structs, and the rule of each field. Pure.

Names are Google's in JSON. docs/http-api.md lists the honoured fields, docs/parameters.md the others; tests compare.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.dialects.common.sampling_fields import Recorded, Seed, Unread, field_rules, in_schema, list_of

NotShown = Annotated[Unread, in_schema(type="null")]
"""Data other than text. Another value than null is refused after decoding, with a clearer message."""
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Args = Annotated[Unread, in_schema(type=["object", "null"])]
Response = Annotated[Raw, in_schema(type=["object", "null"])]
Mode = Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"]
Level = Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH"]
MAX_STOPS = 64


class WireFunctionCall(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A call that the model made. Google gives some calls no `id`; this server's have one."""

    name: Name
    args: Args = UNSET
    id: str | None = None
    partial_args: NotShown = UNSET
    will_continue: NotShown = UNSET


class WireBlob(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """The bytes of an image, in base64."""

    mime_type: str
    data: str
    display_name: Unread = UNSET


class WireFunctionResponse(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """The result of a call. Without an `id` it answers the first open call of its name. Its `parts` are images."""

    name: Name
    response: Response
    id: str | None = None
    will_continue: NotShown = UNSET
    scheduling: NotShown = UNSET
    parts: "list[WirePart] | None" = None


class WirePart(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A part of a content: a text, an image, a call or a result. `thought` says that the text is reasoning."""

    text: str | None = None
    thought: bool | None = None
    function_call: WireFunctionCall | None = None
    function_response: WireFunctionResponse | None = None
    thought_signature: Unread = UNSET
    part_metadata: Unread = UNSET
    inline_data: WireBlob | None = None
    file_data: NotShown = UNSET
    executable_code: NotShown = UNSET
    code_execution_result: NotShown = UNSET
    tool_call: NotShown = UNSET
    tool_response: NotShown = UNSET
    video_metadata: NotShown = UNSET
    media_resolution: NotShown = UNSET


class WireContent(msgspec.Struct, forbid_unknown_fields=True):
    """A message, or a part of one. `role` is `user`, `model`, or `function` for results; without it, `user`."""

    parts: list[WirePart] | None = None
    role: str | None = None


class WireSystemInstruction(msgspec.Struct, forbid_unknown_fields=True):
    """The system text. Its role means nothing."""

    parts: list[WirePart]
    role: str | None = None


class WireDeclaration(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A function that the model may call; its schema in one of the two spellings."""

    name: Name
    description: str | None = None
    parameters: dict[str, object] | None = None
    parameters_json_schema: dict[str, object] | None = None
    response: Unread = UNSET
    response_json_schema: Unread = UNSET
    behavior: NotShown = UNSET


class WireGeminiTool(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Functions that the model may call. Tools that a vendor's server runs are refused."""

    function_declarations: list[WireDeclaration] | None = None
    google_search: NotShown = UNSET
    google_search_retrieval: NotShown = UNSET
    google_maps: NotShown = UNSET
    code_execution: NotShown = UNSET
    url_context: NotShown = UNSET
    computer_use: NotShown = UNSET
    file_search: NotShown = UNSET
    retrieval: NotShown = UNSET
    enterprise_web_search: NotShown = UNSET
    parallel_ai_search: NotShown = UNSET
    exa_ai_search: NotShown = UNSET
    mcp_servers: NotShown = UNSET


class WireCallingConfig(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Whether a function must be called. `ANY` may name one function, or all."""

    mode: Mode | None = None
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: NotShown = UNSET


class WireToolConfig(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """`toolConfig`."""

    function_calling_config: WireCallingConfig | None = None
    retrieval_config: NotShown = UNSET
    include_server_side_tool_invocations: NotShown = UNSET


class WireThinkingConfig(msgspec.Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """`thinkingConfig`. `includeThoughts` shows the reasoning; a budget of 0 asks for none, others are recorded."""

    include_thoughts: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    thinking_level: Level | None = None


class WireGenerationConfig(
    msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True, omit_defaults=True
):
    """`generationConfig`. At most one of the schemas, and only with a MIME type that it is for."""

    temperature: Annotated[float, in_schema(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, in_schema(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[float, in_schema(type="integer", minimum=0, exclusiveMaximum=2**31)] | None = None
    seed: Seed | None = None
    max_output_tokens: Annotated[int, in_schema(minimum=1, exclusiveMaximum=2**31)] | None = None
    stop_sequences: Annotated[list[str], in_schema(maxItems=MAX_STOPS)] | None = None
    presence_penalty: Annotated[float, in_schema(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[float, in_schema(minimum=-2, maximum=2)] | None = None
    candidate_count: Annotated[int, in_schema(minimum=1, maximum=1)] | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, in_schema(minimum=0, maximum=20)] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, object] | None = None
    response_json_schema: dict[str, object] | None = None
    thinking_config: WireThinkingConfig | None = None
    response_modalities: Unread = UNSET
    response_format: Unread = UNSET
    speech_config: Unread = UNSET
    media_resolution: Unread = UNSET
    audio_timestamp: Unread = UNSET
    audio_transcription_config: Unread = UNSET
    translation_config: Unread = UNSET
    image_config: Unread = UNSET
    enable_affective_dialog: Unread = UNSET
    enable_enhanced_civic_answers: Unread = UNSET
    routing_config: Unread = UNSET
    model_selection_config: Unread = UNSET


class WireGenerateRequest(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """A Gemini request. `null` means absent.

    The server also checks what this schema cannot say: a result answers a call before it, the last content is not a
    reply that the session generated, the model's template can render every message, and the prompt fits its context.
    """

    contents: Annotated[Raw, list_of("WireContent")]
    system_instruction: WireSystemInstruction | None = None
    tools: list[WireGeminiTool] | None = None
    tool_config: WireToolConfig | None = None
    generation_config: WireGenerationConfig | None = None
    safety_settings: Recorded = UNSET
    labels: Recorded = UNSET
    service_tier: Recorded = UNSET
    store: Recorded = UNSET
    model: Unread = UNSET
    cached_content: Unread = UNSET


_MEDIA = "only text is supported"

GEMINI_FIELDS = field_rules(
    WireGenerateRequest,
    refused={
        "model": "the path names the model",
        "cachedContent": "contents are not cached by name; send them all, and the engine reuses what it knows",
    },
    as_all={},
)
CONFIG_FIELDS = field_rules(
    WireGenerationConfig,
    refused={
        "responseModalities": _MEDIA,
        "responseFormat": "send 'responseMimeType' and 'responseJsonSchema'",
        "speechConfig": _MEDIA,
        "mediaResolution": _MEDIA,
        "audioTimestamp": _MEDIA,
        "audioTranscriptionConfig": _MEDIA,
        "translationConfig": _MEDIA,
        "imageConfig": _MEDIA,
        "enableAffectiveDialog": _MEDIA,
        "enableEnhancedCivicAnswers": "there is one model, which answers as it does",
        "routingConfig": "there is one model",
        "modelSelectionConfig": "there is one model",
    },
    as_all={},
)

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "responseModalities": (["TEXT"], ["text"], []),
    "mediaResolution": ("MEDIA_RESOLUTION_UNSPECIFIED",),
}
"""Values beside null and false with which a refused field asks for nothing."""

STRUCT_AT: dict[str, type[msgspec.Struct]] = {
    "": WireGenerateRequest,
    "generateContentRequest": WireGenerateRequest,
    "systemInstruction": WireSystemInstruction,
    "contents": WireContent,
    "parts": WirePart,
    "inlineData": WireBlob,
    "functionCall": WireFunctionCall,
    "functionResponse": WireFunctionResponse,
    "tools": WireGeminiTool,
    "functionDeclarations": WireDeclaration,
    "toolConfig": WireToolConfig,
    "functionCallingConfig": WireCallingConfig,
    "generationConfig": WireGenerationConfig,
    "thinkingConfig": WireThinkingConfig,
}
"""The struct of the objects, or lists of them, under a name; of a whole request under the empty one."""


def names_at(pointer: str) -> tuple[str, ...]:
    """The allowed fields of the object at a pointer, for hints."""
    steps = [step for step in pointer.split("/") if not step.isdigit()]
    struct = STRUCT_AT.get(steps[-1])
    if struct is None:
        return ()
    unwanted = {*GEMINI_FIELDS.refused, *CONFIG_FIELDS.refused}
    fields = [field for field in msgspec.structs.fields(struct) if field.type != NotShown]
    return tuple(field.encode_name for field in fields if field.encode_name not in unwanted)
