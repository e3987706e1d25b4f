"""Fields of an OpenAI chat request: the decoded structs, and the rule of each top-level field.

docs/http-api.md lists the honoured fields, docs/parameters.md the others; tests compare them.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.dialects.common.sampling_fields import (
    AtLeastOne,
    NumTop,
    Recorded,
    Unread,
    WirePromptSampling,
    field_rules,
    in_schema,
    list_of,
)
from stenograph.dialects.common.template_input import TemplateKwargs

OnlyNull = Annotated[Unread, in_schema(type="null")]
"""Another value is refused after decoding, with a clearer message."""
FunctionType = Annotated[str, in_schema(enum=["function"])]
"""Another type is refused after decoding, with a clearer message."""


class WireImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """An image: a data URI with its bytes in base64, or a URL of a host from which the server fetches."""

    url: str
    detail: Unread = UNSET


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """Text, or an image of a user's or a tool's message. Parts of other types are refused."""

    type: Annotated[str, in_schema(enum=["text", "image_url"])]  # others: after decoding, with a clearer message
    text: str | None = None
    image_url: WireImageUrl | None = None
    cache_control: Unread = UNSET
    citations: Unread = UNSET
    annotations: Unread = UNSET
    input_audio: OnlyNull = UNSET
    file: OnlyNull = UNSET
    refusal: Unread = UNSET


class WireFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a tool call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str = ""
    parsed_arguments: Unread = UNSET


class WireToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call in an assistant message that is sent back."""

    id: str
    function: WireFunction
    type: FunctionType = "function"
    index: Unread = UNSET
    provider_specific_fields: Unread = UNSET
    extra_content: Unread = UNSET


class WireMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message. Fields that only decorate it are accepted and dropped. Texts of content parts are joined."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: None = None
    audio: None = None
    refusal: Unread = UNSET
    annotations: Unread = UNSET
    provider_specific_fields: Unread = UNSET
    cache_control: Unread = UNSET
    thinking_blocks: Unread = UNSET
    reasoning_details: Unread = UNSET
    images: Annotated[Unread, in_schema(type=["array", "null"], maxItems=0)] = UNSET
    parsed: Unread = UNSET


class WireToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function that a tool declares."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class WireTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool. Types other than `function` are refused."""

    type: Annotated[str, in_schema(const="function")]
    function: WireToolFunction | None = None
    cache_control: Unread = UNSET


class WireChoiceFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name in a named tool choice."""

    name: str


class WireNamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` as an object."""

    type: FunctionType
    function: WireChoiceFunction


class WireChatRequest(WirePromptSampling, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI chat request. `null` means absent.

    At most one field asks for a grammar: `response_format`, `structured_outputs`, `regex`, `ebnf`, `json_schema`,
    `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.

    The server also checks what this schema cannot say:

    - `top_logprobs` needs `logprobs`, and `stream_options` needs `stream`.
    - `truncate_prompt_tokens` needs a chat without a session, and `truncation_side` needs `truncate_prompt_tokens`.
    - These pairs do not disagree: `max_tokens` and `max_completion_tokens`, `seed` and `sampling_seed`, `min_tokens`
      and `min_new_tokens`, `include_stop_str_in_output` and `no_stop_trim`, and a message's `reasoning` and
      `reasoning_content`.
    - `min_tokens` is at most `max_tokens`.
    - `tool_choice` names one of the `tools`, and `required` needs at least one. A forced call excludes a grammar.
    - Guided decoding supports the grammar, and the schemas of the tools.
    - A tool message answers a tool call before it. The last message is not a reply that the session generated.
    - The model's template can render every message, and the engine supports the sampling fields.
    - Nothing is nested deeper than 64 levels, and the request fits the model's context.

    A field that docs/parameters.md lists as refused may have a value that asks for nothing, such as null; this schema
    leaves such values out.
    """

    messages: Annotated[Raw, list_of("WireMessage")]  # an engine that parses replies gets the client's bytes
    tools: list[WireTool] | None = None
    tool_choice: Annotated[str, in_schema(enum=["auto", "none", "required"])] | WireNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None

    verbosity: Recorded = UNSET
    return_logprob: Recorded = UNSET
    moderation: Recorded = UNSET
    prompt_cache_options: Recorded = UNSET

    audio: Unread = UNSET
    modalities: Unread = UNSET
    prediction: Unread = UNSET
    web_search_options: Unread = UNSET
    functions: Unread = UNSET
    function_call: Unread = UNSET
    best_of: Unread = UNSET
    echo: Unread = UNSET
    continue_final_message: Unread = UNSET
    add_generation_prompt: Unread = UNSET
    add_special_tokens: Unread = UNSET
    include_reasoning: Unread = UNSET
    chat_template: Unread = UNSET
    documents: Unread = UNSET
    mm_processor_kwargs: Unread = UNSET


CHAT_FIELDS = field_rules(
    WireChatRequest,
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
        "add_special_tokens": "the chat template writes all of them",
        "include_reasoning": "a reply has its reasoning",
        "chat_template": "the server's is used; send 'chat_template_kwargs'",
        "documents": "not supported; write them into a message",
        "mm_processor_kwargs": "images are processed as the engine is set up",
    },
)

_OF_NO_USE = ("function_call", "audio", "input_audio", "file", "images")
"""Names inside messages with only null or nothing as their value."""


def names_in_messages(pointer: str) -> tuple[str, ...]:
    """The allowed fields of the object at a pointer into the messages, for hints."""
    struct: type[msgspec.Struct]
    match pointer.split("/")[1:]:
        case ["messages", _]:
            struct = WireMessage
        case ["messages", _, "content", _, "image_url"]:
            struct = WireImageUrl
        case ["messages", _, "content", *_]:
            struct = ContentPart
        case ["messages", _, "tool_calls", _]:
            struct = WireToolCall
        case ["messages", _, "tool_calls", _, "function"]:
            struct = WireFunction
        case _:
            return ()
    return tuple(field.name for field in msgspec.structs.fields(struct) if field.name not in _OF_NO_USE)
