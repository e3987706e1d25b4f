"""What an OpenAI completions request may hold: the struct that is decoded, and the rule of each top-level field.

docs/http-api.md lists the same fields by the same rules; a test compares them.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw

from stenograph.protocol.openai_sampling_fields import Recorded, WireSampling, field_rules


class WireCompletionRequest(WireSampling, forbid_unknown_fields=True, kw_only=True):
    """The whole body. `prompt` stays bytes at first: many ids are read some at a time."""

    prompt: Raw
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    prompt_logprobs: Recorded = UNSET
    prompt_embeds: Recorded = UNSET


COMPLETION_FIELDS = field_rules(
    WireCompletionRequest,
    refused={
        "prompt_logprobs": "only what is sampled has logprobs",
        "prompt_embeds": "a prompt is text or ids",
    },
)
