"""What an OpenAI chat request may hold: the structs that are decoded, and the rule of each top-level field.

docs/http-api.md lists the same fields by the same rules; a test compares them.
"""

import enum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

Recorded = Raw | UnsetType
"""A field that is kept in the record as it came, or that is refused; its value is not looked at."""


class Rule(enum.StrEnum):
    """What is done with a field of a request."""

    HONOURED = "honoured"
    RECORDED = "recorded"
    REFUSED = "refused"


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A content part. Any `type` but `text` is refused after decoding, with a clearer message."""

    type: str
    text: str | None = None
    cache_control: Recorded = UNSET
    citations: Recorded = UNSET
    annotations: Recorded = UNSET
    image_url: Recorded = UNSET
    input_audio: Recorded = UNSET
    file: Recorded = UNSET
    refusal: Recorded = UNSET


class WireFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a tool call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str = ""
    parsed_arguments: Recorded = UNSET


class WireToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call in an assistant message that is sent back."""

    id: str
    function: WireFunction
    type: str = "function"
    index: Recorded = UNSET
    provider_specific_fields: Recorded = UNSET
    extra_content: Recorded = UNSET


class WireMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of any role. What only decorates it is taken and dropped: it never reaches a template."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: None = None
    audio: None = None
    refusal: Recorded = UNSET
    annotations: Recorded = UNSET
    provider_specific_fields: Recorded = UNSET
    cache_control: Recorded = UNSET
    thinking_blocks: Recorded = UNSET
    reasoning_details: Recorded = UNSET
    images: Recorded = UNSET
    parsed: Recorded = UNSET


class WireToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function that a tool declares."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class WireTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool. Types other than `function` are refused after decoding."""

    type: str
    function: WireToolFunction | None = None
    cache_control: Recorded = UNSET


class WireChoiceFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name in a named tool choice."""

    name: str


class WireNamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` as an object."""

    type: str
    function: WireChoiceFunction


class WireJsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. `name`, `description` and `strict` have no effect: the schema always holds."""

    schema: dict[str, object]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class WireResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: str
    json_schema: WireJsonSchema | None = None


class WireStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`. `include_obfuscation` is OpenAI's padding of events, which we never send."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class WireChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The whole body. Honoured fields are typed, the others are only noticed.

    `messages` stay bytes at first: an engine that parses replies gets them as the client spelled them.
    """

    messages: Raw
    model: str | None = None
    tools: list[WireTool] | None = None
    tool_choice: str | WireNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: WireResponseFormat | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    return_token_ids: bool | None = None
    n: int | None = None

    user: Recorded = UNSET
    metadata: Recorded = UNSET
    session_id: Recorded = UNSET
    store: Recorded = UNSET
    service_tier: Recorded = UNSET
    prompt_cache_key: Recorded = UNSET
    prompt_cache_retention: Recorded = UNSET
    safety_identifier: Recorded = UNSET
    verbosity: Recorded = UNSET

    audio: Recorded = UNSET
    modalities: Recorded = UNSET
    prediction: Recorded = UNSET
    web_search_options: Recorded = UNSET
    functions: Recorded = UNSET
    function_call: Recorded = UNSET
    input_ids: Recorded = UNSET
    prompt_token_ids: Recorded = UNSET
    return_meta_info: Recorded = UNSET
    return_hidden_states: Recorded = UNSET
    return_routed_experts: Recorded = UNSET
    rid: Recorded = UNSET
    request_id: Recorded = UNSET
    best_of: Recorded = UNSET
    echo: Recorded = UNSET
    use_beam_search: Recorded = UNSET
    continue_final_message: Recorded = UNSET
    add_generation_prompt: Recorded = UNSET
    guided_json: Recorded = UNSET
    guided_regex: Recorded = UNSET
    guided_choice: Recorded = UNSET
    guided_grammar: Recorded = UNSET


RECORDED: tuple[str, ...] = (
    "user",
    "metadata",
    "session_id",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "verbosity",
)

REFUSED: dict[str, str] = {
    "audio": "audio is not supported",
    "modalities": "only text is supported; leave it out",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
    "functions": "deprecated by OpenAI; send 'tools'",
    "function_call": "deprecated by OpenAI; send 'tool_choice'",
    "input_ids": "the server alone decides which ids go to the engine",
    "prompt_token_ids": "the server alone decides which ids go to the engine",
    "return_meta_info": "the server alone sets it",
    "return_hidden_states": "not supported",
    "return_routed_experts": "the server alone sets it",
    "rid": "the server alone chooses request ids",
    "request_id": "the server alone chooses request ids",
    "best_of": "one reply is sampled",
    "echo": "not supported for chat",
    "use_beam_search": "tokens are sampled; beams have no rollout",
    "continue_final_message": "not supported: a turn begins with the generation prompt",
    "add_generation_prompt": "a turn always begins with the generation prompt",
    "guided_json": "engines ignore it; send 'response_format'",
    "guided_regex": "engines ignore it",
    "guided_choice": "engines ignore it",
    "guided_grammar": "engines ignore it",
}

NESTED_NAMES: tuple[str, ...] = tuple(
    field.name
    for struct in (WireMessage, TextPart, WireToolCall, WireFunction)
    for field in msgspec.structs.fields(struct)
)
"""Names of what is inside of messages, for hints."""

FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in msgspec.structs.fields(WireChatRequest))


def rule_of(name: str) -> Rule:
    """The rule of a known top-level field."""
    if name in REFUSED:
        return Rule.REFUSED
    return Rule.RECORDED if name in RECORDED else Rule.HONOURED
