"""Gemini's methods as dialects: the two for generating are one, the one for counting another. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict
from urllib.parse import parse_qs

import msgspec

from stenograph.core.chat import ChatReply, ChatRequest, ReplyOptions, Spelling
from stenograph.core.errors import HistoryMismatch, InvalidRequest, StenographError
from stenograph.core.json_types import Count
from stenograph.core.types import SamplingParams
from stenograph.dialects.base import Body, Decoded, DialectCall, DialectRow, Incoming, Refusal, Spoken
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.common.reply_parts import TokenText, json_body
from stenograph.dialects.common.sampling import request_json
from stenograph.dialects.gemini.errors import GeminiErrorBody, gemini_refusal
from stenograph.dialects.gemini.fields import WireContent, WireGenerateRequest
from stenograph.dialects.gemini.reply import GeminiStream, GenerateContentResponse, encode_gemini
from stenograph.dialects.gemini.request import decode_count, decode_gemini
from stenograph.dialects.gemini.spelling import GEMINI, GeminiSpelling
from stenograph.dialects.settings import UnknownFields

STREAM = "streamGenerateContent"


class TokenCount(TypedDict):
    """Tokens of a prompt."""

    totalTokens: Count


_MODEL: dict[str, object] = {
    "name": "model",
    "in": "path",
    "description": "Any name: there is one model.",
    "schema": {"type": "string", "minLength": 1},
    "required": True,
}
_ALT: dict[str, object] = {
    "name": "alt",
    "in": "query",
    "description": "`sse` for a stream of events; else the stream is a JSON list.",
    "schema": {"enum": ["sse", "json"]},
}


def _call(
    method: str, reply: object, *, more: str = "", parameters: tuple[dict[str, object], ...] = (), **facts: Any
) -> DialectCall:
    """A method's row."""
    return DialectCall(
        path="/{version}/models/{model}:{method}",
        choices={"version": ("v1beta", "v1", "v1alpha"), "method": (method,)},
        id=method,
        summary=f"Gemini's {method} {{where}}{more}",
        body=WireGenerateRequest,
        reply=reply,
        error_body=GeminiErrorBody,
        parameters=(_MODEL, *parameters),
        **facts,
    )


_GENERATE = _call(
    "generateContent",
    GenerateContentResponse,
    about="The reply.",
    media=("application/json",),
    shapes=(WireContent,),
)
_STREAM = _call(
    STREAM,
    list[GenerateContentResponse],
    about="The reply's events; a stream that fails ends with an error.",
    media=("text/event-stream", "application/json"),
    parameters=(_ALT,),
)
_COUNT = _call(
    "countTokens",
    TokenCount,
    more=": the tokens of the prompt that the same request would have",
    errors=(HistoryMismatch,),
    counts=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiDialect:
    """Gemini's chats, for one server."""

    token_text: TokenText
    model: str
    unknown_fields: UnknownFields
    name: str = GEMINI
    paths: tuple[str, ...] = (_GENERATE.pattern, _STREAM.pattern)

    def decode(self, incoming: Incoming) -> Decoded:
        model, method = incoming.at["model"], incoming.at["method"]
        request = decode_gemini(
            incoming.body,
            model=model,
            stream=method == STREAM,
            is_sse=_is_sse(incoming.query),
            unknown_fields=self.unknown_fields,
            media=incoming.media,
        )
        path = f"/{incoming.at['version']}/models/{model}:{method}"
        return request, request_json(path, model, request.recorded, request.sent)

    def steps(self, incoming: Incoming) -> None:
        return None

    def whole(self, reply_id: str, options: ReplyOptions, replies: Sequence[ChatReply], *, spelling: Spelling) -> Body:
        (reply,) = replies
        return json_body(encode_gemini(reply, _gemini(spelling), self._token_text_of(options)), reply)

    def stream(
        self, reply_id: str, options: ReplyOptions, *, created: int, spelling: Spelling, params: SamplingParams
    ) -> GeminiStream:
        return GeminiStream(
            reply_id=reply_id,
            model=self.model,
            spelling=_gemini(spelling),
            token_text=self._token_text_of(options),
        )

    def refusal(self, error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
        return gemini_refusal(error, spelling)

    def _token_text_of(self, options: ReplyOptions) -> TokenText | None:
        return self.token_text if options.logprobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiCounter:
    """Gemini's `countTokens`, for one server."""

    unknown_fields: UnknownFields
    name: str = GEMINI
    paths: tuple[str, ...] = (_COUNT.pattern,)

    def decode(self, incoming: Incoming) -> ChatRequest:
        return decode_count(
            incoming.body, model=incoming.at["model"], unknown_fields=self.unknown_fields, media=incoming.media
        )

    def counted(self, num_tokens: int) -> Body:
        body: TokenCount = {"totalTokens": num_tokens}
        return json_body(msgspec.json.encode(body))

    def refusal(self, error: StenographError, spelling: Spelling | None) -> Refusal:
        return gemini_refusal(error, spelling)


def _is_sse(query: str) -> bool:
    """Whether a stream is to be of events. Raises InvalidRequest for another framing than there is."""
    framing = parse_qs(query, keep_blank_values=True).get("alt", ["json"])[-1]
    if framing not in ("json", "sse"):
        raise InvalidRequest(f"alt must be 'sse' for a stream of events, or 'json', got {shown(framing)}.")
    return framing == "sse"


def _gemini(spelling: Spelling) -> GeminiSpelling:
    assert isinstance(spelling, GeminiSpelling), "a dialect answers requests that it has read"
    return spelling


def _spoken(*, token_text: TokenText, model: str, unknown_fields: UnknownFields) -> Spoken:
    """Gemini's methods."""
    return Spoken(
        turns=(GeminiDialect(token_text=token_text, model=model, unknown_fields=unknown_fields),),
        counters=(GeminiCounter(unknown_fields=unknown_fields),),
    )


ROW = DialectRow(speak=_spoken, calls=((_GENERATE, _STREAM, _COUNT),))
