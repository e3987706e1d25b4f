"""What an OpenAI chat request may hold: the structs that are decoded, and the rule of each top-level field.

docs/http-api.md lists the same fields by the same rules; a test compares them.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.protocol.openai_sampling_fields import Recorded, WireSampling, field_rules


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


class WireChatRequest(WireSampling, forbid_unknown_fields=True, kw_only=True):
    """The whole body. `messages` stay bytes at first: an engine that parses replies gets them as the client spelled
    them."""

    messages: Raw
    tools: list[WireTool] | None = None
    tool_choice: str | WireNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None

    verbosity: Recorded = UNSET

    audio: Recorded = UNSET
    modalities: Recorded = UNSET
    prediction: Recorded = UNSET
    web_search_options: Recorded = UNSET
    functions: Recorded = UNSET
    function_call: Recorded = UNSET
    best_of: Recorded = UNSET
    echo: Recorded = UNSET
    continue_final_message: Recorded = UNSET
    add_generation_prompt: Recorded = UNSET


CHAT_FIELDS = field_rules(
    WireChatRequest,
    recorded=("verbosity",),
    refused={
        "audio": "audio is not supported",
        "modalities": "only text is supported; leave it out",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "web search is not supported",
        "functions": "deprecated by OpenAI; send 'tools'",
        "function_call": "deprecated by OpenAI; send 'tool_choice'",
        "best_of": "one reply is sampled",
        "echo": "not supported for chat",
        "continue_final_message": "not supported: a turn begins with the generation prompt",
        "add_generation_prompt": "a turn always begins with the generation prompt",
    },
)

NESTED_NAMES: tuple[str, ...] = tuple(
    field.name
    for struct in (WireMessage, TextPart, WireToolCall, WireFunction)
    for field in msgspec.structs.fields(struct)
)
"""Names of what is inside of messages, for hints."""
