"""The routes for an administrator to add engines to a running fleet and take them from it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import Forbidden, InvalidRequest, LastEngine, RouteNotFound, StartupError, StenographError
from stenograph.dialects.sessions import AddEngine, decode_engine
from stenograph.engine.base import Engine, EngineRow, EngineState
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.settings import URLS
from stenograph.http.query import check_query, is_forced
from stenograph.http.responses import json_response
from stenograph.http.route import All, Asking, Needs, Who, parameter, route
from stenograph.http.wire import read_json
from stenograph.weights.sync import WeightSync


class EngineList(TypedDict):
    """The engines."""

    engines: Sequence[EngineRow]


class EngineLeft(TypedDict):
    """An engine that is not asked any more."""

    name: str
    removed: Literal[True]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoutes:
    """The routes of one server."""

    engine: Engine
    sync: WeightSync
    max_body_bytes: int

    @route(
        "GET /engines",
        "listEngines",
        "List the engines",
        EngineList,
        errors=(Forbidden,),
        needs=Needs.ADMIN,
        who=All(merge="stenograph.http.merging:engines", ask=Asking.BRIEFLY),
    )
    async def list_engines(self, request: Request) -> Response:
        """`GET /engines`."""
        engines: EngineList = {"engines": [status.shown() for status in self.engine.statuses()]}
        return json_response(engines)

    @route(
        "POST /engines",
        "addEngine",
        "Add an engine to the fleet",
        EngineRow,
        body=AddEngine,
        errors=(Forbidden, RouteNotFound),
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def add(self, request: Request) -> Response:
        """`POST /engines`. The engine joins before this is answered, but gets no turns before it has the weights."""
        wire = decode_engine(await read_json(request.scope, request.receive, max_bytes=self.max_body_bytes))
        fleet = self._fleet()
        assert fleet.make is not None, "a fleet of addresses"
        try:
            (url,) = cast("tuple[str, ...]", URLS.read(wire.url))
        except ValueError as error:
            raise InvalidRequest(f"url must be one of {URLS.expected}.", param="/url") from error
        try:
            member = fleet.make(url)
        except ValueError as error:
            raise InvalidRequest(f"url {url[:200]!r} is no address: {error}.", param="/url") from error
        try:
            await self._join(fleet, member)
        except StartupError as error:
            raise InvalidRequest(f"The engine cannot join: {error}.", param="/url") from error
        try:
            await self.sync.change_engines()
        except StenographError:
            fleet.dismiss(member.name)
            await asyncio.gather(fleet.leave(member.name), self.sync.change_engines())
            raise
        status = next(status for status in fleet.statuses() if status.name == member.name)
        return json_response(status.shown())

    @route(
        "DELETE /engines/{name:path}",
        "removeEngine",
        "Take an engine from the fleet, when its turns have ended",
        EngineLeft,
        parameters=(
            {
                "name": "name",
                "in": "path",
                "required": True,
                "description": "The engine's name, its address as a rule.",
                "schema": {"type": "string"},
            },
            parameter("query", "force", "`true` takes the only usable engine too.", {"enum": ["true", "false"]}),
        ),
        errors=(Forbidden, InvalidRequest, LastEngine, RouteNotFound),
        needs=Needs.ADMIN,
        who=Who.SERVER,
    )
    async def remove(self, request: Request) -> Response:
        """`DELETE /engines/{name}?force=true|false`, answered when its turns have ended.

        Raises LastEngine for the only one, and unless forced for the only usable one.
        """
        check_query(request, "force")
        name, fleet = str(request.path_params["name"]), self._fleet()
        forced = is_forced(request)
        statuses = fleet.statuses()
        usable = [status.name for status in statuses if status.health.state is EngineState.READY]
        if not forced and len(statuses) > 1 and usable == [name]:
            raise LastEngine(
                f"{name} is the only engine that is usable now: without it no turn can be sampled. Wait until another"
                " one is ready, add one, or remove it all the same with ?force=true."
            )
        try:
            found = fleet.dismiss(name)
        except StartupError as error:
            raise LastEngine(f"The engine cannot leave: {error}.") from error
        if not found:
            raise RouteNotFound(f"There is no engine {name[:200]!r}; GET /engines lists them.")
        await asyncio.gather(fleet.leave(name), self.sync.change_engines())
        left: EngineLeft = {"name": name, "removed": True}
        return json_response(left)

    async def follow(self, addresses: Sequence[str]) -> None:
        """Use the engines at these addresses, as another process does; return when the turns at the leaving ones have
        ended. Raises StartupError."""
        if not isinstance(self.engine, Fleet) or self.engine.make is None:
            return
        fleet = self.engine
        gone = [name for url, name in fleet.addresses.items() if url not in addresses]
        for url in addresses:
            if url not in fleet.addresses:
                await self._follow_one(fleet, self.engine.make(url))
        await asyncio.gather(*map(fleet.leave, gone))

    async def _follow_one(self, fleet: Fleet, member: FleetMember) -> None:
        """Start an engine with its weights from another process, and let it join, unless it has meanwhile."""
        try:
            self._follow_version(member.engine)
            await member.engine.start()
            if member.url in fleet.addresses:
                await member.engine.aclose()
            else:
                self._follow_version(member.engine)  # others may have come meanwhile
                fleet.join(member)
        except BaseException:
            await member.engine.aclose()
            raise

    def _follow_version(self, engine: Engine) -> None:
        state = self.sync.state()
        if state.num_taken:
            engine.follow_version(state.version, state.lacking)

    async def _join(self, fleet: Fleet, member: FleetMember) -> None:
        """Start an engine, give it the weights, and let it join. Raises StartupError; nothing is left behind then."""
        try:
            await member.engine.start()
            await self.sync.bring_up(member.engine, lambda: fleet.join(member))
        except BaseException:
            await member.engine.aclose()
            raise

    def _fleet(self) -> Fleet:
        if not isinstance(self.engine, Fleet) or self.engine.make is None:
            raise RouteNotFound(
                "This server has one engine, without an address: to add engines, start it with --engine-url."
            )
        return self.engine
