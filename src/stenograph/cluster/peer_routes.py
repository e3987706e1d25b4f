"""The routes between the workers of one server, each about its own sessions and turns. A client's request never gets
here, by whichever worker it is passed on. Starlette endpoints.
"""

from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stenograph.cluster.all_moments import NOW_PATH, WATCH_PATH
from stenograph.cluster.other_workers import ABORT_PATH, ENGINES_PATH, FOLLOW_PATH
from stenograph.cluster.parts import IDS_PATH, POINTS_PATH, ROLLOUT_PATH, encoded_rollout
from stenograph.cluster.state_file import StateFile
from stenograph.core.errors import StartupError, StenographError
from stenograph.dialects.common.errors import refusal
from stenograph.http.bulk_parts import OwnParts, Pieces
from stenograph.http.closed_stream import ClosedStream
from stenograph.http.processes import Board, SharedEngines, SharedWeights
from stenograph.http.responses import json_response
from stenograph.http.wire import delivery_of
from stenograph.session.keyed_sessions import KeyedSessions
from stenograph.session.selection import SessionFilter
from stenograph.session.weights import SyncState

OPENED_PATH = "/workers/opened"
KEY_HEADER = "idempotency-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRoutes:
    """The routes of one worker."""

    keyed: KeyedSessions
    parts: OwnParts
    board: Board
    sync: SharedWeights
    engines: SharedEngines
    file: StateFile

    def app(self) -> Starlette:
        """The Starlette application."""
        return Starlette(
            routes=[
                Route(OPENED_PATH, self.opened, methods=["POST"]),
                Route(IDS_PATH, self.ids, methods=["POST"]),
                Route(ROLLOUT_PATH, self.rollout, methods=["POST"]),
                Route(POINTS_PATH, self.points, methods=["POST"]),
                Route(NOW_PATH, self.now, methods=["POST"]),
                Route(WATCH_PATH, self.watch, methods=["POST"]),
                Route(FOLLOW_PATH, self.follow_state, methods=["POST"]),
                Route(ENGINES_PATH, self.follow_engines, methods=["POST"]),
                Route(ABORT_PATH, self.abort, methods=["POST"]),
            ],
            exception_handlers={StenographError: _refused},
        )

    async def opened(self, request: Request) -> Response:
        """Whether this worker has opened a session with a key and a body."""
        return json_response(await self.keyed.find(request.headers[KEY_HEADER], await request.body()))

    async def ids(self, request: Request) -> Response:
        """The ids of the sessions within a filter, oldest first, each with its time: a line for each."""
        wanted = msgspec.json.decode(await request.body(), type=SessionFilter)
        return ClosedStream(delivery_of(request.scope), self._lines(wanted))

    async def _lines(self, wanted: SessionFilter) -> Pieces:
        async for dated in self.parts.dated_ids(wanted):
            yield msgspec.json.encode(dated) + b"\n"

    async def rollout(self, request: Request) -> Response:
        """A session as a rollout of its group."""
        found = await self.parts.rollout(msgspec.json.decode(await request.body(), type=str))
        return Response(encoded_rollout(found))

    async def points(self, request: Request) -> Response:
        """All sessions as points of their groups, or those with the tag in the body: a line for each."""
        parts = replace(self.parts, tag=(await request.body()).decode())
        return ClosedStream(delivery_of(request.scope), self._points(parts))

    async def _points(self, parts: OwnParts) -> Pieces:
        async with aclosing(parts.points()) as points:
            async for point in points:
                yield msgspec.json.encode(point) + b"\n"

    async def now(self, request: Request) -> Response:
        """This worker at this moment."""
        return Response(self.board.read())

    async def watch(self, request: Request) -> Response:
        """The same each second, a line for each, until it drains."""
        return ClosedStream(delivery_of(request.scope), self._moments())

    async def _moments(self) -> Pieces:
        async with aclosing(self.board.watch()) as moments:
            async for moment in moments:
                yield moment + b"\n"

    def follow(self) -> SyncState | None:
        """Be as the state in the file says; None if there is none."""
        state = self.file.read()
        if state is not None:
            self.sync.follow(state)
        return state

    async def follow_state(self, request: Request) -> Response:
        """Follow the first worker; says how many turns run here."""
        self.follow()
        return json_response(self.sync.weights.num_running)

    async def follow_engines(self, request: Request) -> Response:
        """Use the engines of the state; says why one cannot join, or nothing."""
        state = self.follow()
        try:
            await self.engines.follow(() if state is None else state.addresses)
        except StartupError as error:
            return json_response(str(error))
        return json_response("")

    async def abort(self, request: Request) -> Response:
        """End every turn of this worker with its tokens so far; says how many there were."""
        return json_response(await self.sync.abort_all())


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, StenographError)
    refused = refusal(error)
    return Response(refused.content, status_code=refused.status)
