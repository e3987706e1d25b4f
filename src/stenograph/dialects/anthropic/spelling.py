"""Spells the parts of a request to Messages as JSON pointers into it. Pure.

A message may have become several: a user's results are a message each, and the system text is the first one.
"""

import base64
from dataclasses import dataclass

from stenograph.core.blame import Blame, RequestPart
from stenograph.dialects.common.pointers import pointer_to

MESSAGES = "messages"
ID_PREFIX = "msg_"
SIGNATURE_PREFIX = "stg1."
"""Marks a signature as one of this server's; the id of its request follows."""

_MAX_SIGNATURE_CHARS = 256

_FIELDS = {
    RequestPart.MESSAGES: "/messages",
    RequestPart.PROMPT: "/messages",
    RequestPart.TOOL_CHOICE: "/tool_choice",
    RequestPart.TEMPLATE_KWARGS: "/chat_template_kwargs",
    RequestPart.MAX_TOKENS: "/max_tokens",
    RequestPart.TOOLS: "/tools",
}
_NAMES = {"stop": "stop_sequences"}
"""Anthropic's names of fields with another one here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesSpelling:
    """The spelling of one request, and its facts for the writer of its reply.

    `places` has the pointer of each message, and `tools` the index of each shown tool. `grammar` is the pointer of the
    answer's format. `max_tokens` is the client's limit; with `omits_thinking` it wants to see no thinking.
    """

    dialect: str = MESSAGES
    id_prefix: str = ID_PREFIX
    keeps_engine_id: bool = False
    places: tuple[str, ...] = ()
    tools: tuple[int, ...] = ()
    grammar: str = "/output_config/format"
    max_tokens: int | None = None
    omits_thinking: bool = False

    def pointer(self, blame: Blame) -> str | None:
        """The JSON pointer of a part of the request."""
        match blame.part:
            case RequestPart.MESSAGES if blame.index is not None and blame.index < len(self.places):
                return self._in_message(self.places[blame.index], blame.path)
            case RequestPart.TOOLS if blame.index is not None and blame.index < len(self.tools):
                path = ("input_schema" if step == "parameters" else step for step in blame.path)
                return pointer_to("tools", self.tools[blame.index], *path)
            case RequestPart.TEMPLATE_KWARGS:
                return _of_argument(blame.path)
            case RequestPart.GRAMMAR:
                return self.grammar
            case RequestPart.SAMPLING if blame.path:
                name = str(blame.path[0])
                return pointer_to(_NAMES.get(name, name), *blame.path[1:])
            case _:
                return _FIELDS.get(blame.part)

    @staticmethod
    def _in_message(place: str, path: tuple[str | int, ...]) -> str:
        """A message's field. Calls are blocks of the content, and a result's role is its type; the system text has
        blocks alone."""
        if place == "/system":
            return place + pointer_to(*path[1:])
        if not path:
            return place
        is_block = "/content/" in place
        name = "content" if path[0] == "tool_calls" else path[0]
        if is_block and name == "role":
            name = "type"
        return f"{place}/{name}"


def signature_of(request_id: str) -> str:
    """The signature of the reasoning in the reply to a request. It names the request, and protects nothing."""
    return base64.urlsafe_b64encode(f"{SIGNATURE_PREFIX}{request_id}".encode()).decode()


def signed_request(signature: str) -> str | None:
    """The id of the request with this signature on its reply; None if it is not one of ours."""
    if len(signature) > _MAX_SIGNATURE_CHARS:
        return None
    try:
        text = base64.b64decode(signature, altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
    return text.removeprefix(SIGNATURE_PREFIX) if text.startswith(SIGNATURE_PREFIX) else None


def _of_argument(path: tuple[str | int, ...]) -> str:
    """An argument of the template; it may have come as a field of its own."""
    if path[:1] == ("reasoning_effort",):
        return "/output_config/effort"
    return pointer_to("chat_template_kwargs", *path)
