"""The spelling of a request to Responses: pointers into its fields and items, and the fields its reply repeats. Pure.

The turn's record keeps `ReplyForm` too, for writing its reply anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from stenograph.core.blame import Blame, RequestPart
from stenograph.dialects.common.pointers import ENGINES_NAMES, pointer_to
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

    `calls` are the forms of calls by the model's names for their tools, where they differ from the functions' own;
    `head` has the response's copies of request fields, as JSON text by name. `instructions`: the first message is the
    request's instructions, not inherited by a later turn.
    """

    calls: Mapping[str, CallForm] = {}
    head: Mapping[str, Raw] = {}
    instructions: bool = False
    seals_reasoning: bool = False


PLAIN = ReplyForm()
"""The form of a reply to a request without wishes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSpelling:
    """The spelling of one request.

    `places` are those of its messages, `tools` the pointers of the shown tools. `max_tokens` is the field for the
    completion's limit, and `grammar` the pointer of the reply's grammar. `other_names` has the fields given by the
    client under another name, by their first one.
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
