"""Anthropic's Messages as a dialect, and the counting of a request's tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from stenograph.core.chat import ChatReply, ChatRequest, ReplyOptions, Spelling
from stenograph.core.errors import StenographError
from stenograph.core.json_types import Count
from stenograph.core.types import SamplingParams
from stenograph.dialects.anthropic.errors import MessagesErrorBody, messages_refusal
from stenograph.dialects.anthropic.fields import WireMessageParam, WireMessagesRequest
from stenograph.dialects.anthropic.reply import MessagesReply, MessagesStream, encode_message
from stenograph.dialects.anthropic.request import decode_messages
from stenograph.dialects.anthropic.spelling import MESSAGES
from stenograph.dialects.base import Body, Decoded, DialectCall, DialectRow, Incoming, Refusal, Spoken
from stenograph.dialects.common.reply_parts import FINISH_HEADER, json_body
from stenograph.dialects.common.sampling import request_json
from stenograph.dialects.settings import UnknownFields

MESSAGES_PATH = "/v1/messages"


class CountedTokens(TypedDict):
    """The tokens that a request's prompt has."""

    input_tokens: Count


_TURN = DialectCall(
    path=MESSAGES_PATH,
    id="message",
    summary="Anthropic Messages {where}",
    body=WireMessagesRequest,
    reply=MessagesReply,
    shapes=(WireMessageParam,),
    error_body=MessagesErrorBody,
    about="The reply. A stream has Anthropic's events, `message_stop` the last. One that fails ends with the event"
    " `error`, a `MessagesErrorBody`.",
    headers={FINISH_HEADER: {"description": "`abort` of a reply that was aborted.", "schema": {"const": "abort"}}},
)
_COUNT = DialectCall(
    path=f"{MESSAGES_PATH}/count_tokens",
    id="countMessageTokens",
    summary="Count the tokens of a request to Messages {where}",
    body=WireMessagesRequest,
    reply=CountedTokens,
    error_body=MessagesErrorBody,
    counts=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesDialect:
    """Anthropic's Messages, for one server."""

    model: str
    unknown_fields: UnknownFields
    name: str = MESSAGES
    paths: tuple[str, ...] = (_TURN.pattern,)

    def decode(self, incoming: Incoming) -> Decoded:
        request = decode_messages(
            incoming.body, unknown_fields=self.unknown_fields, headers=incoming.headers, media=incoming.media
        )
        return request, request_json(MESSAGES_PATH, request.model, request.recorded, request.sent)

    def steps(self, incoming: Incoming) -> None:
        return None

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        (reply,) = replies
        return json_body(encode_message(reply, options, self.model, spelling), reply)

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> MessagesStream:
        return MessagesStream(reply_id=reply_id, model=self.model, options=options, spelling=spelling)

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        return messages_refusal(error, spelling, request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokensDialect:
    """Requests for the length, in tokens, of the prompt of a request to Messages."""

    unknown_fields: UnknownFields
    name: str = MESSAGES
    paths: tuple[str, ...] = (_COUNT.pattern,)

    def decode(self, incoming: Incoming) -> ChatRequest:
        return decode_messages(
            incoming.body, unknown_fields=self.unknown_fields, only_counts=True, media=incoming.media
        )

    def counted(self, num_tokens: int) -> Body:
        body: CountedTokens = {"input_tokens": num_tokens}
        return json_body(msgspec.json.encode(body))

    def refusal(self, error: StenographError, spelling: Spelling | None) -> Refusal:
        return messages_refusal(error, spelling)


def _spoken(*, token_text: object, model: str, unknown_fields: UnknownFields) -> Spoken:
    """Anthropic's Messages, and the counting of their tokens."""
    return Spoken(
        turns=(MessagesDialect(model=model, unknown_fields=unknown_fields),),
        counters=(CountTokensDialect(unknown_fields=unknown_fields),),
    )


ROW = DialectRow(speak=_spoken, calls=((_TURN,), (_COUNT,)))
