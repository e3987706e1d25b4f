"""OpenAI's chats and completions as dialects. Pure.

An engine's own chat reply goes out as it came.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stenograph.core.chat import ChatReply, ReplyOptions, Spelling
from stenograph.core.errors import StenographError
from stenograph.core.types import SamplingParams
from stenograph.dialects.base import Body, Decoded, DialectCall, DialectRow, Incoming, Refusal, Spoken
from stenograph.dialects.common.errors import ErrorBody, refusal
from stenograph.dialects.common.reply_parts import TokenText, json_body
from stenograph.dialects.common.sampling import request_json
from stenograph.dialects.openai.chat import CHAT_PATH, decode_with_record
from stenograph.dialects.openai.chat_fields import WireChatRequest, WireMessage
from stenograph.dialects.openai.chat_reply import (
    ChatCompletion,
    ChatCompletionChunk,
    StreamEncoder,
    encode_reply,
    with_token_ids,
)
from stenograph.dialects.openai.completions import WireCompletionRequest, completion_steps, decode_completion
from stenograph.dialects.openai.completions_reply import CompletionStreamEncoder, TextCompletion, encode_completion
from stenograph.dialects.openai.spelling import CHAT, COMPLETIONS
from stenograph.dialects.settings import UnknownFields

COMPLETIONS_PATH = "/v1/completions"

_ABOUT = (
    "The reply. A stream has events with a `{}` each, then `[DONE]`."
    " A stream that fails ends with an `ErrorBody` instead of `[DONE]`."
)
_CHAT = DialectCall(
    path=CHAT_PATH,
    id="chat",
    summary="OpenAI chat {where}",
    body=WireChatRequest,
    reply=ChatCompletion,
    shapes=(ChatCompletionChunk, WireMessage),
    error_body=ErrorBody,
    about=_ABOUT.format("ChatCompletionChunk"),
    by_engine=True,
)
_COMPLETION = DialectCall(
    path=COMPLETIONS_PATH,
    id="complete",
    summary="OpenAI completions {where}",
    body=WireCompletionRequest,
    reply=TextCompletion,
    error_body=ErrorBody,
    about=_ABOUT.format("TextCompletion"),
    by_engine=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDialect:
    """OpenAI's chats, for one server."""

    token_text: TokenText
    model: str
    unknown_fields: UnknownFields
    name: str = CHAT
    paths: tuple[str, ...] = (_CHAT.pattern,)

    def decode(self, incoming: Incoming) -> Decoded:
        return decode_with_record(incoming.body, self.unknown_fields, incoming.known, incoming.media)

    def steps(self, incoming: Incoming) -> None:
        return None

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        (reply,) = replies
        written = reply.written
        if written is None:
            return json_body(encode_reply(reply, options, self.token_text))
        if options.return_token_ids:
            written = written.with_body(with_token_ids(written.body, reply))
        return Body(content=written.body, headers=[("content-type", written.content_type), *written.headers])

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> StreamEncoder:
        return StreamEncoder(
            reply_id=reply_id,
            created=created,
            model=self.model,
            options=options,
            token_text=self.token_text,
            spelling=spelling,
        )

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        return refusal(error, spelling)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDialect:
    """OpenAI's completions, for one server."""

    token_text: TokenText
    model: str
    unknown_fields: UnknownFields
    name: str = COMPLETIONS
    paths: tuple[str, ...] = (_COMPLETION.pattern,)

    def decode(self, incoming: Incoming) -> Decoded:
        request = decode_completion(incoming.body, unknown_fields=self.unknown_fields)
        return request, request_json(COMPLETIONS_PATH, request.model, request.recorded, request.sent)

    def steps(self, incoming: Incoming) -> Iterator[Decoded | None]:
        for request in completion_steps(incoming.body, unknown_fields=self.unknown_fields):
            if request is None:
                yield None
            else:
                yield request, request_json(COMPLETIONS_PATH, request.model, request.recorded, request.sent)

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        return json_body(encode_completion(reply_id, replies, options, self.token_text))

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> CompletionStreamEncoder:
        return CompletionStreamEncoder(
            reply_id=reply_id,
            created=created,
            model=self.model,
            options=options,
            token_text=self.token_text,
            spelling=spelling,
        )

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        return refusal(error, spelling)


def _spoken(*, token_text: TokenText, model: str, unknown_fields: UnknownFields) -> Spoken:
    """OpenAI's chats and completions."""
    chat = ChatDialect(token_text=token_text, model=model, unknown_fields=unknown_fields)
    return Spoken(turns=(chat, CompletionDialect(token_text=token_text, model=model, unknown_fields=unknown_fields)))


ROW = DialectRow(speak=_spoken, calls=((_CHAT,), (_COMPLETION,)))
