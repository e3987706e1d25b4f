"""The routes to count the tokens of a prompt, as raw ASGI. They make no turn, and wait for none.

A dialect owns request and answer; the counting is session/counting.py's.
"""

from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

from stenograph.core.chat import ChatRequest, Spelling
from stenograph.core.errors import StenographError
from stenograph.core.messages import MediaLimits
from stenograph.dialects.base import CountDialect, Incoming
from stenograph.http.part import Core
from stenograph.http.turn_route import DECODED_OFF_LOOP_BYTES, RequestPath, client_name, sought_headers
from stenograph.http.wire import ClientGone, count_error, headers_of, read_json, send_refusal, send_whole
from stenograph.offload.body_slots import BodySlots
from stenograph.session.admission import Caller
from stenograph.session.counting import num_prompt_tokens
from stenograph.session.ledger import NO_ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRoute:
    """One dialect's counting on one server. `sought_headers` are the headers read by rules, in lower case."""

    dialect: CountDialect
    core: Core
    body_slots: BodySlots
    sought_headers: frozenset[bytes]
    media: MediaLimits

    async def handle(self, scope: Scope, receive: Receive, send: Send, path: RequestPath) -> None:
        """Serve one request to `path`."""
        row, spelling = NO_ROW, None
        await self.body_slots.small()
        try:
            session = await self.core.authenticator.session_of(scope)
            name = client_name(headers_of(scope))
            if session is not None:
                row = session.ledger.open_row(
                    self.core.services.clock, path=path.route, dialect=self.dialect.name, client=name
                )
            body = await read_json(
                scope, receive, max_bytes=self.core.settings.max_body_bytes, body_slots=self.body_slots
            )
            request = await self._decode(Incoming(body=body, at=path.at, media=self.media))
            spelling = request.spelling
            headers = sought_headers(headers_of(scope), self.sought_headers)
            caller = Caller(name=name, path=path.route, headers=headers, row=row)
            num_tokens = await num_prompt_tokens(self.core.manager, self.core.services, session, request, caller)
            row.counted(num_tokens)
            answer = self.dialect.counted(num_tokens)
            content = answer.content if isinstance(answer.content, bytes) else b"".join(answer.content)
            await send_whole(send, 200, content, answer.headers)
        except StenographError as error:
            row.refused(error)
            await self._send_error(send, error, spelling)
        except ClientGone:
            pass
        finally:
            row.close()

    async def _decode(self, incoming: Incoming) -> ChatRequest:
        """Read the request, a large one on a worker and in a body's slot."""
        if len(incoming.body) < DECODED_OFF_LOOP_BYTES:
            return self.dialect.decode(incoming)
        async with self.body_slots.decoding():
            return await self.core.services.pool.run(
                partial(self.dialect.decode, incoming), num_bytes=len(incoming.body)
            )

    async def _send_error(self, send: Send, error: StenographError, spelling: Spelling | None) -> None:
        count_error(self.core.metrics, error)
        await send_refusal(send, self.dialect.refusal(error, spelling))
