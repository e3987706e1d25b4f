"""`POST /sessions/{id}/fork`: new sessions that begin with another's exact tokens."""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import Draining, IdempotencyMismatch, LimitExceeded, SessionAbandoned, SessionNotFound
from stenograph.core.json_types import Count
from stenograph.core.messages import MediaItem
from stenograph.engine.base import Engine
from stenograph.fork.beginning import Beginning, ForkPlace
from stenograph.fork.requests import ForkBody, decode_fork
from stenograph.http.auth import Authenticator
from stenograph.http.create_route import OpenedSession, decoded, opened_session
from stenograph.http.late_routes import Late
from stenograph.http.responses import json_response
from stenograph.http.route import STORED, TEXT, parameter, route
from stenograph.http.session_routes import SessionRoutes
from stenograph.http.wire import header_value
from stenograph.session.kept_media import find_media, keep_media
from stenograph.session.keyed_sessions import KeyedSessions
from stenograph.session.session import Session

_BYTES_PER_TURN = 4096
"""The approximate cost of writing a turn without its tokens; only decides whether that is small enough for the loop."""
_BYTES_PER_TOKEN = 12


class Forks(TypedDict):
    """The forks of a session, all at one place, with as many turns and tokens."""

    forks: Sequence[OpenedSession]
    num_turns: Count
    num_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRoute:
    """The route of one server. A session's own process makes its forks, and has them."""

    sessions: SessionRoutes
    keyed: KeyedSessions
    authenticator: Authenticator
    engine: Engine

    @route(
        "POST /sessions/{id}/fork",
        "forkSession",
        "Open sessions that begin with this one's exact tokens, up to a turn or a sampled token",
        Forks,
        parameters=(
            parameter(
                "header",
                "Idempotency-Key",
                "A retry sends the key and the body of its first request, and gets the same forks.",
                TEXT,
            ),
        ),
        body=ForkBody,
        errors=(LimitExceeded, Draining, IdempotencyMismatch, *STORED),
    )
    async def fork(self, request: Request) -> Response:
        """`POST /sessions/{id}/fork`."""
        await self._look(request)  # 404 comes before a body that is wrong
        body, wire = await decoded(
            request, lambda body: (body, decode_fork(body)), self.sessions.pool, self.sessions.max_body_bytes
        )
        session = await self._look(request)
        place, key = ForkPlace.of(session, wire.turn, wire.token), header_value(request.scope, b"idempotency-key")
        opened: list[OpenedSession] = []
        items = await self._media(session, place)
        made = await self._beginning(session, place, wire)
        for number in range(wire.n or 1):
            session_id = await self.keyed.open(
                made.options,
                key=f"{key} {session.id} {number}" if key else None,
                body=body,
                begin=partial(self._begin, made, session.id, items),
            )
            opened.append(opened_session(request, session_id, self.authenticator.tokens))
            await asyncio.sleep(0)  # others have the loop between two forks
        shown: Forks = {"forks": opened, "num_turns": len(place.line), "num_tokens": place.num_tokens}
        return json_response(shown)

    async def _look(self, request: Request) -> Session:
        """The session. Raises SessionNotFound, and its refusal where its tokens are no longer to be gone on with."""
        session = await self.sessions.manager.sessions.peek(request.path_params["id"])
        if session.is_closing:
            raise SessionNotFound(session.id)
        if session.refusal is not None and not isinstance(session.refusal, SessionAbandoned):
            raise session.refusal
        return session

    async def _media(self, session: Session, place: ForkPlace) -> list[MediaItem]:
        """The media of the line to the place."""
        storage, items = self.sessions.manager.sessions.storage, list[MediaItem]()
        for ref in place.media:
            if (item := await find_media(session, storage, ref.sha256)) is not None:
                items.append(item)
        return items

    async def _beginning(self, session: Session, place: ForkPlace, wire: ForkBody) -> Beginning:
        options, storage = session.options, self.sessions.manager.sessions.storage
        if wire.group is not None:
            options = dataclasses.replace(options, stated=structs.replace(options.stated, group=wire.group))
        num_bytes = 0 if storage is None else _BYTES_PER_TURN * place.node.depth + _BYTES_PER_TOKEN * place.num_tokens
        work = partial(
            Beginning.of, place, session.id, options, replays=wire.replay is True, writes=storage is not None
        )
        return await self.sessions.pool.run(work, num_bytes=num_bytes)

    async def _begin(self, made: Beginning, parent: str, items: Sequence[MediaItem], session: Session) -> None:
        storage = self.sessions.manager.sessions.storage
        try:
            if items:
                await keep_media(session, storage, items)
            await made.give(storage, session)
        except BaseException:
            if storage is not None:
                storage.discard(session)
            raise
        self.engine.share_home(parent, session.id)


def fork_groups(late: Late) -> Sequence[object]:
    """The object with the row in its class."""
    core = late.core
    keyed, engine = KeyedSessions(core.manager), core.services.engine
    return (ForkRoute(sessions=late.sessions, keyed=keyed, authenticator=core.authenticator, engine=engine),)
