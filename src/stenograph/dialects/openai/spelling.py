"""Spells the parts of a request to OpenAI's routes as JSON pointers. Pure.

An engine's own reply goes out as it came, under the engine's id.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.dialects.common.pointers import ENGINES_NAMES, pointer_to

CHAT = "chat"
COMPLETIONS = "completions"

_FIELDS = {
    RequestPart.MESSAGES: "messages",
    RequestPart.TOOLS: "tools",
    RequestPart.TOOL_CHOICE: "tool_choice",
    RequestPart.TEMPLATE_KWARGS: "chat_template_kwargs",
    RequestPart.TRUNCATION: "truncate_prompt_tokens",
}


class OpenAISpelling(Struct, frozen=True, kw_only=True, gc=False):
    """The spelling of one request.

    `prompt` is the field of its prompts, a list of them with `has_prompts`. `max_tokens` is the field for the
    completion's limit, and `grammar` the pointer of the reply's grammar. `other_names` has the fields given by the
    client under another name, by their first one.
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
                return pointer_to(self.prompt, blame.index if self.has_prompts else None, *blame.path)
            case RequestPart.SAMPLING | RequestPart.TEXT_VIEW | RequestPart.REPLY_OPTIONS | RequestPart.ROUTING:
                name = ENGINES_NAMES.get(str(blame.path[0]), str(blame.path[0]))
                return pointer_to(self.other_names.get(name, name), *blame.path[1:])
            case RequestPart.TOOLS if blame.path:
                return pointer_to(_FIELDS[blame.part], blame.index, "function", *blame.path)
            case _:
                return pointer_to(_FIELDS[blame.part], blame.index, *blame.path)
