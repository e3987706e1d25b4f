"""Fields of a request to OpenAI's Responses: the decoded struct, and the rule of each top-level field.

docs/http-api.md lists the honoured fields, docs/parameters.md the others; tests compare them. Items are items.py's,
tools are tools.py's.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.dialects.common.sampling_fields import (
    AtLeastOne,
    NumTop,
    Recorded,
    Unread,
    WireSampling,
    field_rules,
    in_schema,
)
from stenograph.dialects.common.template_input import TemplateKwargs

ENCRYPTED_REASONING = "reasoning.encrypted_content"
OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""The names in `include` with an effect."""

FormatType = Annotated[str, in_schema(enum=["text", "json_object", "json_schema"])]
"""Another type is refused after decoding, with a clearer message."""


class WireTextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`. `name`, `description` and `strict` have no effect: the schema always holds."""

    type: FormatType
    schema: dict[str, object] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class WireTextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`text`: the form of the answer. `verbosity` is recorded."""

    format: WireTextFormat | None = None
    verbosity: Unread = UNSET


class WireReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`. The effort goes to the chat template as `reasoning_effort`; the rest is recorded."""

    effort: str | None = None
    summary: Unread = UNSET
    generate_summary: Unread = UNSET
    context: Unread = UNSET
    mode: Unread = UNSET


class WireResponsesRequest(WireSampling, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI Responses request. `null` means absent.

    At most one field asks for a grammar: `text.format`, `response_format`, `structured_outputs`, `regex`, `ebnf`,
    `json_schema`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.

    The server also checks what this schema cannot say:

    - `previous_response_id` names a turn of the session, and an `item_reference` an item of one.
    - `stream_options` needs `stream`, and `top_logprobs` is for a reply with text.
    - `truncate_prompt_tokens` needs a request without a session, and `truncation_side` needs `truncate_prompt_tokens`.
    - These pairs do not disagree: `max_tokens` and `max_output_tokens`, `seed` and `sampling_seed`, `min_tokens` and
      `min_new_tokens`, `include_stop_str_in_output` and `no_stop_trim`.
    - `min_tokens` is at most `max_output_tokens`.
    - `tool_choice` names one of the `tools`, and `required` needs at least one. A forced call excludes a grammar.
    - No two tools have one name, with a namespace `ns` written as `ns__name`.
    - Guided decoding supports the grammar, and the schemas of the tools.
    - The model's template can render every message, and the engine supports the sampling fields.
    - Nothing is nested deeper than 64 levels, and the request fits the model's context.

    A field that docs/parameters.md lists as refused may have a value that asks for nothing, such as null; this schema
    leaves such values out.
    """

    input: Raw
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    tools: Unread = UNSET
    tool_choice: Unread = UNSET
    parallel_tool_calls: bool | None = None
    text: WireTextConfig | None = None
    reasoning: WireReasoningConfig | None = None
    include: list[str] | None = None
    max_output_tokens: AtLeastOne | None = None
    top_logprobs: NumTop | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    client_metadata: Recorded = UNSET
    max_tool_calls: Recorded = UNSET
    prompt_cache_options: Recorded = UNSET
    moderation: Recorded = UNSET
    access_programs: Recorded = UNSET
    background_options: Recorded = UNSET
    image: Recorded = UNSET

    conversation: Unread = UNSET
    prompt: Unread = UNSET
    background: Unread = UNSET
    truncation: Unread = UNSET
    context_management: Unread = UNSET


RESPONSES_FIELDS = field_rules(
    WireResponsesRequest,
    refused={
        "conversation": "conversations are not kept; a session is one, send 'previous_response_id' or all items",
        "prompt": "prompt templates are not supported; send 'instructions' and 'input'",
        "background": "a response is made while its client waits",
        "truncation": "items are never dropped; 'truncate_prompt_tokens' cuts the ids of a request without a session",
        "context_management": "items are never compacted by the server",
    },
)

HostedTool = Literal[
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "image_generation", "mcp", "computer", "computer_use_preview", "local_shell", "shell",
    "apply_patch", "programmatic_tool_calling",
]  # fmt: skip
"""Types of tools run by the vendor's own servers: recorded, not shown, not callable."""
