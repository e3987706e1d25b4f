"""OpenAI's Responses as a dialect. Pure. An engine's own reply for OpenAI's chats is written anew."""

from collections.abc import Sequence
from dataclasses import dataclass

from stenograph.core.chat import ChatReply, ReplyOptions, Spelling
from stenograph.core.errors import PreviousResponseNotFound, StenographError
from stenograph.core.types import SamplingParams
from stenograph.dialects.base import Body, Decoded, DialectCall, DialectRow, Incoming, Refusal, Spoken
from stenograph.dialects.common.errors import ErrorBody, refusal
from stenograph.dialects.common.reply_parts import TokenText, json_body
from stenograph.dialects.responses.fields import WireResponsesRequest
from stenograph.dialects.responses.ids import turn_of_response
from stenograph.dialects.responses.reply import ResponseBody, encode_response
from stenograph.dialects.responses.request import RESPONSES_PATH, decode_response
from stenograph.dialects.responses.spelling import PLAIN, RESPONSES, ReplyForm, ResponsesSpelling, form_of_record
from stenograph.dialects.responses.stream import ResponseWriter
from stenograph.dialects.settings import UnknownFields

_CALL = DialectCall(
    path=RESPONSES_PATH,
    id="respond",
    summary="OpenAI responses {where}",
    body=WireResponsesRequest,
    reply=ResponseBody,
    error_body=ErrorBody,
    about="The response. A stream has events with a `ResponseEvent` each, the last of them `response.completed`,"
    " `response.incomplete` or `response.failed`.",
    errors=(PreviousResponseNotFound,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesDialect:
    """OpenAI's Responses, for one server."""

    token_text: TokenText
    model: str
    unknown_fields: UnknownFields
    name: str = RESPONSES
    paths: tuple[str, ...] = (_CALL.pattern,)

    def decode(self, incoming: Incoming) -> Decoded:
        request, kept = decode_response(incoming, unknown_fields=self.unknown_fields)
        return request, kept

    def steps(self, incoming: Incoming) -> None:
        return None

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        (reply,) = replies
        return self._body(reply, options, _form(spelling))

    def turn_of(self, reply_id: str) -> str | None:
        return turn_of_response(reply_id)

    def held(self, reply: ChatReply, request_json: bytes) -> Body:
        """A held reply, written anew from the record of its request."""
        return self._body(reply, ReplyOptions(), form_of_record(request_json))

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> ResponseWriter:
        return ResponseWriter(
            reply_id=reply_id,
            created=created,
            model=self.model,
            options=options,
            form=_form(spelling),
            params=params,
            token_text=self.token_text,
        )

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        return refusal(error, spelling)

    def _body(self, reply: ChatReply, options: ReplyOptions, form: ReplyForm) -> Body:
        return json_body(encode_response(reply, options, form, self.model, self.token_text), reply)


def _form(spelling: Spelling) -> ReplyForm:
    return spelling.form if isinstance(spelling, ResponsesSpelling) else PLAIN


def _spoken(*, token_text: TokenText, model: str, unknown_fields: UnknownFields) -> Spoken:
    """OpenAI's Responses."""
    dialect = ResponsesDialect(token_text=token_text, model=model, unknown_fields=unknown_fields)
    return Spoken(turns=(dialect,), held=dialect)


ROW = DialectRow(speak=_spoken, calls=((_CALL,),))
