"""The spelling of a request to Responses: pointers into its fields and items, and what its reply repeats. Pure.

`ReplyForm` is kept in the turn's record too, so that its reply can be written anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from stenograph.core.blame import Blame, RequestPart
from stenograph.dialects.common.json_bodies import ENGINES_NAMES, pointer_to
from stenograph.dialects.responses.ids import RESPONSE
from stenograph.dialects.responses.item_messages import MessagePlace, message_pointer
from stenograph.dialects.responses.tools import CallForm

RESPONSES = "responses"

_FIELDS = {
    RequestPart.TOOLS: "tools",
    RequestPart.TOOL_CHOICE: "tool_choice",
    RequestPart.TEMPLATE_KWARGS: "chat_template_kwargs",
    RequestPart.TRUNCATION: "truncate_prompt_tokens",
}


class ReplyForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a request's reply.

    `calls` are the forms of calls by the names that the model has for their tools, where they are not the functions'
    own; `head` is what the response repeats of its request, as JSON text by name. `instructions`: the first message is
    the request's instructions, which a later turn does not inherit.
    """

    calls: Mapping[str, CallForm] = {}
    head: Mapping[str, Raw] = {}
    instructions: bool = False
    seals_reasoning: bool = False


PLAIN = ReplyForm()
"""The form of a reply whose request asks for nothing of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSpelling:
    """The spelling of one request.

    `places` are those of its messages, `tools` the pointers of the tools that are shown. `max_tokens` is the field that
    limits the completion, and `grammar` the pointer of the reply's grammar. `other_names` has the fields that the
    client gave under another name, by their first one.
    """

    places: Sequence[MessagePlace] = ()
    tools: Sequence[str] = ()
    form: ReplyForm = PLAIN
    max_tokens: str = "max_output_tokens"
    grammar: str = "/text/format"
    other_names: Mapping[str, str] = field(default_factory=dict[str, str])
    dialect: str = RESPONSES
    id_prefix: str = RESPONSE
    keeps_engine_id: bool = False

    def pointer(self, blame: Blame) -> str | None:
        """The JSON pointer of a part of the request."""
        match blame.part:
            case RequestPart.MESSAGES:
                return message_pointer(self.places, blame.index, blame.path)
            case RequestPart.PROMPT | RequestPart.GRAMMAR | RequestPart.MAX_TOKENS:
                whole = {RequestPart.PROMPT: "/input", RequestPart.GRAMMAR: self.grammar}
                return whole.get(blame.part, f"/{self.max_tokens}")
            case RequestPart.SAMPLING | RequestPart.TEXT_VIEW | RequestPart.REPLY_OPTIONS | RequestPart.ROUTING:
                name = ENGINES_NAMES.get(str(blame.path[0]), str(blame.path[0]))
                return pointer_to(self.other_names.get(name, name), *blame.path[1:])
            case RequestPart.TOOLS if blame.index is not None and blame.index < len(self.tools):
                return self.tools[blame.index] + pointer_to(*blame.path)
            case _:
                return pointer_to(_FIELDS[blame.part], *blame.path)


def form_of_record(request_json: bytes) -> ReplyForm:
    """The form of a kept turn's reply; the plain one for a turn of another dialect."""
    return _RECORD.decode(request_json).wire


class KeptForm(msgspec.Struct):
    """The record of a request, as far as its reply's form goes."""

    wire: ReplyForm = PLAIN


_RECORD = msgspec.json.Decoder(KeptForm)
