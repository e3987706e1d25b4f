"""`POST …/v1/chat/completions`, as raw ASGI: socket to turn, turn to socket.

A handler watches a turn; the manager runs it. If the client leaves, the turn is abandoned; if the handler ends in any
other way, too. The terminal event of a stream is sent after the commit.
"""

from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from stenograph.core.chat import ChatReply, ChatRequest
from stenograph.core.clock import Clock
from stenograph.core.errors import StenographError
from stenograph.core.settings import UnknownFields
from stenograph.core.types import Stage, StageTimes
from stenograph.http.auth import Doorman
from stenograph.http.wire import ClientGone, read_body, send_error, send_json, watching_disconnect
from stenograph.protocol.openai_chat import decode_chat, request_json
from stenograph.protocol.openai_chat_reply import StreamEncoder, TokenText, encode_reply
from stenograph.protocol.openai_errors import error_body
from stenograph.protocol.sse import data_event
from stenograph.session.manager import SessionManager, Turn, TurnAbandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRoute:
    """The chat route of one server."""

    manager: SessionManager
    doorman: Doorman
    clock: Clock
    token_text: TokenText
    model: str
    max_body_bytes: int
    unknown_fields: UnknownFields

    async def handle(self, scope: Scope, receive: Receive, send: Send, *, session_id: str | None) -> None:
        """Serve one request; `session_id` is what the path names."""
        stages = StageTimes(start=self.clock.monotonic())
        try:
            self.doorman.check_key(scope["headers"])
            session = self.doorman.session_of(session_id, scope["headers"])
            body = await read_body(scope, receive, max_bytes=self.max_body_bytes)
            stages.mark(Stage.RECEIVE, self.clock.monotonic())
            turn = self.manager.start(session, lambda: self._decode(body), started=stages)
        except ClientGone:
            return
        except StenographError as error:
            await send_error(send, error)
            return
        try:
            async with watching_disconnect(receive, turn.abandon):
                await (self._stream if turn.request.reply.stream else self._whole)(turn, send)
        finally:
            turn.abandon()

    def _decode(self, body: bytes) -> tuple[ChatRequest, bytes]:
        request = decode_chat(body, unknown_fields=self.unknown_fields)
        return request, request_json(request)

    async def _whole(self, turn: Turn, send: Send) -> None:
        try:
            outcome = await turn.result()
        except TurnAbandoned:
            return  # the client is gone
        except StenographError as error:
            await send_error(send, error)
        else:
            body = encode_reply(outcome.reply, turn.request.reply, self.token_text)
            headers = [("x-request-id", turn.request_id), ("server-timing", _server_timing(outcome.reply))]
            await send_json(send, 200, body, headers)

    async def _stream(self, turn: Turn, send: Send) -> None:
        piece = await turn.take()
        if piece is None:
            # It ended before anything was said: its error, if it has one, can still be a status.
            try:
                await turn.result()
            except TurnAbandoned:
                return None
            except StenographError as error:
                return await send_error(send, error)
        encoder = StreamEncoder(
            reply_id=f"chatcmpl-{turn.request_id}",
            created=int(self.clock.wall()),
            model=self.model,
            options=turn.request.reply,
            token_text=self.token_text,
        )
        await self._start_stream(turn, send)
        await _send_more(send, encoder.start())
        while piece is not None:
            if event := encoder.piece(piece):
                await _send_more(send, event)
            piece = await turn.take()
        await send({"type": "http.response.body", "body": await self._last_events(turn, encoder)})
        return None

    async def _last_events(self, turn: Turn, encoder: StreamEncoder) -> bytes:
        """What a stream ends with: the finish after the commit, or the error as an event, and then no `[DONE]`."""
        try:
            return encoder.end((await turn.result()).reply)
        except TurnAbandoned:
            return b""
        except StenographError as error:
            return data_event(error_body(error))

    async def _start_stream(self, turn: Turn, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", turn.request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _server_timing(reply: ChatReply) -> str:
    """Stage times in milliseconds. Source: W3C Server Timing, section 3."""
    return ", ".join(f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in reply.stages_s.items())
