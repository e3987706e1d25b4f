"""Fields of an OpenAI completions request: the struct that is decoded, and the rule of each top-level field.

docs/http-api.md lists the same fields by the same rules; a test compares them.
"""

from typing import Annotated

from msgspec import UNSET, Raw

from stenograph.dialects.common.sampling_fields import (
    NumTop,
    One,
    Unread,
    WirePromptSampling,
    field_rules,
    in_schema,
)

OnlyFalse = Annotated[bool, in_schema(const=False)]


class WireCompletionRequest(WirePromptSampling, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI completions request. `null` means absent.

    At most one field asks for a grammar: `response_format`, `structured_outputs`, `regex`, `ebnf`, `json_schema`,
    `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.

    The server also checks what this schema cannot say:

    - `stream_options` needs `stream`, and `truncation_side` needs `truncate_prompt_tokens`.
    - These pairs do not disagree: `seed` and `sampling_seed`, `min_tokens` and `min_new_tokens`,
      `include_stop_str_in_output` and `no_stop_trim`.
    - `min_tokens` is at most `max_tokens`.
    - Guided decoding supports the grammar, and the engine supports the sampling fields.
    - A linear session takes one prompt, and the prompt does not end with a reply that the session generated.
    - The request fits the model's context.

    A field that docs/http-api.md lists as refused may have a value that asks for nothing, such as null; this schema
    leaves such values out.
    """

    prompt: Raw  # bytes at first: many ids are read some at a time
    logprobs: NumTop | None = None
    echo: OnlyFalse | None = None
    suffix: Annotated[str, in_schema(maxLength=0)] | None = None
    best_of: One | None = None
    add_special_tokens: OnlyFalse | None = None

    prompt_embeds: Unread = UNSET


COMPLETION_FIELDS = field_rules(
    WireCompletionRequest,
    refused={"prompt_embeds": "a prompt is text or ids"},
)
