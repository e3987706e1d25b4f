"""`POST …/v1/completions`: what this route says. Sockets are turn_route.py's."""

from collections.abc import Iterator
from dataclasses import dataclass

from stenograph.core.chat import CompletionRequest, KnownMessages, TurnRequest
from stenograph.core.settings import UnknownFields
from stenograph.http.turn_route import Body
from stenograph.protocol.openai_completions import completion_steps, decode_completion
from stenograph.protocol.openai_completions_reply import CompletionStreamEncoder, encode_completion
from stenograph.protocol.openai_reply_parts import TokenText
from stenograph.protocol.openai_sampling import request_json
from stenograph.session.session import Session
from stenograph.session.turn import TurnOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDialect:
    """OpenAI's completions, for one server."""

    token_text: TokenText
    model: str
    unknown_fields: UnknownFields
    name: str = "completions"

    def known(self, session: Session) -> KnownMessages | None:
        return None

    def decode(self, body: bytes, known: KnownMessages | None) -> tuple[CompletionRequest, bytes]:
        request = decode_completion(body, unknown_fields=self.unknown_fields)
        return request, request_json(request.model, request.recorded)

    def steps(self, body: bytes) -> Iterator[tuple[CompletionRequest, bytes] | None]:
        for request in completion_steps(body, unknown_fields=self.unknown_fields):
            yield None if request is None else (request, request_json(request.model, request.recorded))

    def whole(self, reply_id: str, request: TurnRequest, outcome: TurnOutcome) -> Body:
        content = encode_completion(reply_id, outcome.replies, request.reply, self.token_text)
        return Body(content=content, headers=[("content-type", "application/json")])

    def stream(self, reply_id: str, request: TurnRequest, *, created: int) -> CompletionStreamEncoder:
        return CompletionStreamEncoder(
            reply_id=reply_id, created=created, model=self.model, options=request.reply, token_text=self.token_text
        )
