"""Spells the parts of a request to OpenAI's routes as JSON pointers. Pure.

A reply that the engine wrote goes out as it came, under the engine's id.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.dialects.common.json_bodies import escaped

CHAT = "chat"
COMPLETIONS = "completions"

_FIELDS = {
    RequestPart.MESSAGES: "messages",
    RequestPart.TOOLS: "tools",
    RequestPart.TOOL_CHOICE: "tool_choice",
    RequestPart.TEMPLATE_KWARGS: "chat_template_kwargs",
    RequestPart.TRUNCATION: "truncate_prompt_tokens",
}
_NAMES = {
    "dp_rank": "routed_dp_rank",
    "prefill_dp_rank": "disagg_prefill_dp_rank",
    "num_top_logprobs": "top_logprobs",
    "keeps_stop": "include_stop_str_in_output",
    "separates_reasoning": "separate_reasoning",
    "tokens_as_ids": "return_tokens_as_token_ids",
}
"""OpenAI's names, vLLM's and SGLang's, of fields that have another one here."""


class OpenAISpelling(Struct, frozen=True, kw_only=True, gc=False):
    """The spelling of one request.

    `prompt` is the field that its prompts are in, a list of them with `has_prompts`. `max_tokens` is the field that
    limits the completion, and `grammar` the pointer of the reply's grammar. `other_names` has the fields that the
    client gave under another name, by their first one.
    """

    dialect: str = CHAT
    id_prefix: str = "chatcmpl-"
    keeps_engine_id: bool = True
    prompt: str = "messages"
    has_prompts: bool = False
    max_tokens: str = "max_tokens"
    grammar: str = "/response_format"
    other_names: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])

    def pointer(self, blame: Blame) -> str | None:
        """The JSON pointer of a part of the request."""
        match blame.part:
            case RequestPart.GRAMMAR:
                return self.grammar
            case RequestPart.MAX_TOKENS:
                return f"/{self.max_tokens}"
            case RequestPart.PROMPT:
                return _joined(self.prompt, blame.index if self.has_prompts else None, blame.path)
            case RequestPart.SAMPLING | RequestPart.TEXT_VIEW | RequestPart.REPLY_OPTIONS | RequestPart.ROUTING:
                name = _NAMES.get(str(blame.path[0]), str(blame.path[0]))
                return _joined(self.other_names.get(name, name), None, blame.path[1:])
            case RequestPart.TOOLS if blame.path:
                return _joined(_FIELDS[blame.part], blame.index, ("function", *blame.path))
            case _:
                return _joined(_FIELDS[blame.part], blame.index, blame.path)


def _joined(field_name: str, index: int | None, path: tuple[str | int, ...]) -> str:
    steps = (field_name, *(() if index is None else (index,)), *path)
    return "".join(f"/{escaped(str(step))}" for step in steps)
