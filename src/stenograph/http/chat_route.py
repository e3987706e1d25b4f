"""`POST …/v1/chat/completions`: what this route says. Sockets are turn_route.py's.

A reply that the engine wrote goes out as it came.
"""

from dataclasses import dataclass

from stenograph.core.chat import ChatReply, ChatRequest, KnownMessages, ReplyOptions, TurnRequest
from stenograph.core.settings import ReplyMode, UnknownFields
from stenograph.core.types import EngineReply
from stenograph.engine.sglang_wire import cut_replay
from stenograph.http.turn_route import OUR_HEADERS, Body
from stenograph.protocol.openai_chat import decode_chat
from stenograph.protocol.openai_chat_reply import StreamEncoder, encode_reply, with_token_ids
from stenograph.protocol.openai_reply_parts import TokenText
from stenograph.protocol.openai_sampling import request_json
from stenograph.session.session import Session
from stenograph.session.turn import TurnOutcome

_OF_THE_BYTES = frozenset({"etag", "content-md5", "content-digest", "repr-digest", "digest"})
"""Headers that are true of the engine's bytes alone, not of another copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDialect:
    """OpenAI's chats, for one server."""

    token_text: TokenText
    model: str
    unknown_fields: UnknownFields
    reply_mode: ReplyMode
    name: str = "chat"

    def known(self, session: Session) -> KnownMessages | None:
        return session.recent.known

    def decode(self, body: bytes, known: KnownMessages | None) -> tuple[ChatRequest, bytes]:
        request = decode_chat(body, unknown_fields=self.unknown_fields, known=known)
        return request, request_json(request.model, request.recorded)

    def steps(self, body: bytes) -> None:
        return None

    def whole(self, reply_id: str, request: TurnRequest, outcome: TurnOutcome) -> Body:
        written = outcome.reply.written
        if written is None:
            content = encode_reply(outcome.reply, request.reply, self.token_text)
            return Body(content=content, headers=[("content-type", "application/json")])
        content = self._client_copy(written, outcome.reply, request.reply)
        replaced = OUR_HEADERS if content is written.body else OUR_HEADERS | _OF_THE_BYTES
        theirs = [(name, value) for name, value in written.headers if name not in replaced]
        return Body(content=content, headers=[("content-type", written.content_type), *theirs])

    def _client_copy(self, written: EngineReply, reply: ChatReply, options: ReplyOptions) -> bytes:
        """The engine's own bytes, but for what the server's settings leave out and the client asks to be added."""
        body = written.body if self.reply_mode is ReplyMode.PASSTHROUGH else cut_replay(written.body)
        return with_token_ids(body, reply) if options.return_token_ids else body

    def stream(self, reply_id: str, request: TurnRequest, *, created: int) -> StreamEncoder:
        return StreamEncoder(
            reply_id=reply_id, created=created, model=self.model, options=request.reply, token_text=self.token_text
        )
