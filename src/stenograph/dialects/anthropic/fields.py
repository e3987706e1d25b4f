"""Fields of an Anthropic Messages request: the decoded structs, and the rule of each top-level field.

docs/http-api.md lists the honoured fields, docs/parameters.md the others; tests compare them.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.dialects.common.sampling_fields import (
    REFUSED,
    AtLeastOne,
    Biases,
    NotNegative,
    Penalty,
    Recorded,
    Seed,
    Stop,
    Unread,
    field_rules,
    in_schema,
    list_of,
)
from stenograph.dialects.common.template_input import TemplateKwargs

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class WireTextBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text. What only decorates it is dropped."""

    text: str
    cache_control: Unread = UNSET
    citations: Unread = UNSET


class WireThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning that is sent back. Empty, it is not sent back; the signature says of which reply it is."""

    thinking: str
    signature: str | None = None
    cache_control: Unread = UNSET


class WireToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A tool call that is sent back."""

    id: Name
    name: Name
    input: Annotated[Raw, in_schema(type="object")]
    cache_control: Unread = UNSET
    caller: Unread = UNSET
    toolset_name: Unread = UNSET


class WireToolReference(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_reference"):
    """A deferred tool, which the model sees from here on."""

    tool_name: Name
    cache_control: Unread = UNSET


class WireImageSource(msgspec.Struct, forbid_unknown_fields=True):
    """The bytes of an image: `data` in base64 with its `media_type`, or the `url` of a host that is fetched from."""

    type: Literal["base64", "url"]
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class WireImageBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """An image of a user or of a tool."""

    source: WireImageSource
    cache_control: Unread = UNSET


class WireToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """A tool's result. `is_error` is recorded: templates have no place for it."""

    tool_use_id: Name
    content: str | list[WireTextBlock | WireImageBlock | WireToolReference] | None = None
    is_error: bool | None = None
    cache_control: Unread = UNSET


WireBlock = WireTextBlock | WireImageBlock | WireThinkingBlock | WireToolUseBlock | WireToolResultBlock


class WireMessageParam(msgspec.Struct, forbid_unknown_fields=True):
    """A message. A user's has text, images and results, an assistant's text, thinking and calls, a system's text."""

    role: Annotated[str, in_schema(enum=["user", "assistant", "system"])]
    content: str | list[WireBlock]


class WireMessagesTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool. Types other than `custom` are refused."""

    name: Name
    type: Annotated[str, in_schema(const="custom")] | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    defer_loading: bool | None = None
    strict: Unread = UNSET
    eager_input_streaming: Unread = UNSET
    cache_control: Unread = UNSET
    allowed_callers: Unread = UNSET
    input_examples: Unread = UNSET


class WireMessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`; `name` belongs to the type `tool`."""

    type: Annotated[str, in_schema(enum=["auto", "any", "tool", "none"])]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class WireThinking(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`thinking`. `budget_tokens` has no effect."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class WireOutputFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`output_config.format`: the schema that the answer is held to."""

    type: Literal["json_schema"]
    schema: dict[str, object]
    name: str | None = None


class WireOutputConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: WireOutputFormat | None = None
    task_budget: Unread = UNSET


class WireMessagesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request to Anthropic's Messages. `null` means absent.

    `max_tokens` is required for a reply, not for counting. The server also checks what this schema cannot say:

    - The last message is not the assistant's: a reply is not continued.
    - `tool_choice` names one of the `tools`, and `any` needs at least one. A forced call excludes a format.
    - A `tool_reference` names one of the `tools`.
    - A result answers a call before it. The model's template can render every message.
    """

    messages: Annotated[Raw, list_of("WireMessageParam")]
    max_tokens: AtLeastOne | None = None
    model: str | None = None
    system: str | list[WireBlock] | None = None
    tools: list[WireMessagesTool] | None = None
    tool_choice: WireMessagesToolChoice | None = None
    stop_sequences: Annotated[list[Stop], in_schema(maxItems=64)] | None = None
    temperature: Annotated[float, in_schema(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, in_schema(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, in_schema(minimum=-1, exclusiveMaximum=2**31)] | None = None
    stream: bool | None = None
    thinking: WireThinking | None = None
    output_config: WireOutputConfig | None = None
    output_format: WireOutputFormat | None = None

    min_p: Annotated[float, in_schema(minimum=0, maximum=1)] | None = None
    seed: Seed | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, in_schema(minimum=0.01, maximum=100)] | None = None
    logit_bias: Biases | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_ids: bool | None = None

    metadata: Recorded = UNSET
    service_tier: Recorded = UNSET
    speed: Recorded = UNSET
    inference_geo: Recorded = UNSET
    diagnostics: Recorded = UNSET
    cache_control: Recorded = UNSET
    user_profile_id: Recorded = UNSET
    workspace_id: Recorded = UNSET
    betas: Recorded = UNSET
    context_management: Recorded = UNSET
    billing_policy: Recorded = UNSET
    fallback_credit_token: Recorded = UNSET

    mcp_servers: Unread = UNSET
    container: Unread = UNSET
    fallbacks: Unread = UNSET
    compaction: Unread = UNSET
    thread: Unread = UNSET
    n: Unread = UNSET
    input_ids: Unread = UNSET
    prompt_token_ids: Unread = UNSET
    return_meta_info: Unread = UNSET
    return_hidden_states: Unread = UNSET
    return_routed_experts: Unread = UNSET
    rid: Unread = UNSET
    request_id: Unread = UNSET


_SERVERS_OWN = (
    *("input_ids", "prompt_token_ids", "return_meta_info", "return_hidden_states", "return_routed_experts"),
    *("rid", "request_id"),
)
"""Fields reserved to the server, on any route."""

MESSAGES_FIELDS = field_rules(
    WireMessagesRequest,
    refused={
        "mcp_servers": "the agent calls its own tools",
        "container": "no code is run here",
        "fallbacks": "one model is served",
        "compaction": "the agent rewrites its own history",
        "thread": "a session is named by its path or its header",
        "n": "a turn has one reply",
    },
    as_all={name: REFUSED[name] for name in _SERVERS_OWN},
)


def names_in_params(pointer: str) -> tuple[str, ...]:
    """The allowed fields of the object at a pointer into the messages, for hints."""
    match pointer.split("/")[1:]:
        case ["messages", _]:
            return ("role", "content")
        case ["messages", _, "content", *_]:
            return (
                "type",
                "text",
                "thinking",
                "signature",
                "id",
                "name",
                "input",
                "tool_use_id",
                "content",
                "is_error",
                "source",
            )
        case _:
            return ()
