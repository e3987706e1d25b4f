"""The sessions of a database that servers share, for an answer of many: listed and read here, but for those that
another process has, whose parts that one makes, and which it deletes.

That process is asked with the keys of whoever asked here.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
from starlette.types import Scope

from stenograph.cluster.nodes import Nodes
from stenograph.cluster.postgres.owner_name import OwnerName
from stenograph.core.errors import NobodyError, SessionNotFound, StenographError, WorkerUnavailable
from stenograph.dialects.sessions import BulkSamplesRequest
from stenograph.export.group_rollouts import RolloutFacts
from stenograph.http.bulk_parts import OneAnswer, OwnParts, SessionParts
from stenograph.http.session_routes import REVISION_HEADER
from stenograph.session.rollout_points import RolloutPoint
from stenograph.session.selection import SessionFilter

NO_ASKER: Scope = {"headers": [], "query_string": b""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The sessions of a shared database, for the request `asker`."""

    own: OwnParts
    nodes: Nodes
    asker: Scope = field(default_factory=lambda: NO_ASKER)

    def asked_by(self, scope: Scope) -> SessionParts:
        return replace(self, asker=scope)

    def ids(self, wanted: SessionFilter) -> AsyncGenerator[str, None]:
        """All are in the database."""
        return self.own.ids(wanted)

    @asynccontextmanager
    async def part(self, session_id: str, wire: BulkSamplesRequest) -> AsyncGenerator[OneAnswer, None]:
        """The part as whoever has the session makes it, or of what the database has if nobody does; an error in its
        place where that process cannot be asked."""
        async with AsyncExitStack() as stack:
            try:
                owner = await self.nodes.owner_of(session_id)
                part = await stack.enter_async_context(
                    self.own.part(session_id, wire) if owner is None else self._part_of(owner, session_id, wire)
                )
            except NobodyError as error:
                failed = self.own.failed(session_id, wire, error)
                part = OneAnswer(None, await stack.enter_async_context(aclosing(failed.pieces)))
            yield part

    @asynccontextmanager
    async def _part_of(
        self, owner: OwnerName, session_id: str, wire: BulkSamplesRequest
    ) -> AsyncGenerator[OneAnswer, None]:
        asked = msgspec.structs.replace(wire, sessions=[session_id], group=None, state=None, where=None, delete=None)
        named = {"x-session-id": session_id}  # by which its server finds the worker
        async with self.nodes.asked(owner, self.asker, "POST", "/samples", named, msgspec.json.encode(asked)) as answer:
            if answer.status != 200:
                raise WorkerUnavailable(f"The server at {owner.server} answered with {answer.status}.")
            async with aclosing(answer.pieces()) as pieces:
                yield OneAnswer(answer.header(REVISION_HEADER), pieces)

    def points(self) -> AsyncGenerator[RolloutPoint | None, None]:
        """As the database has them, but for those that this process has."""
        return self.own.points()

    async def rollout(self, session_id: str) -> RolloutFacts | None:
        """As the database has it, whoever has the session: each of its turns is there. Whether one runs is not, where
        another process has it."""
        found = await self.own.rollout(session_id)
        if found is None or await self.nodes.owner_of(session_id) is None:
            return found
        return replace(found, row={**found.row, "busy": None})

    async def delete(self, session_id: str, revision: str) -> bool:
        """False also where its process does not answer: whether the session has gone is not known then."""
        try:
            owner = await self.nodes.owner_of(session_id)
            if owner is None:
                return await self.own.delete(session_id, revision)
            return await self._deleted(owner, session_id, {REVISION_HEADER: revision}) == 204
        except StenographError:
            return False

    async def remove(self, session_id: str) -> None:
        owner = await self.nodes.owner_of(session_id)
        if owner is None:
            await self.own.remove(session_id)
            return
        status = await self._deleted(owner, session_id, {})
        if status == 404:
            raise SessionNotFound(session_id)
        if status != 204:
            raise WorkerUnavailable(f"The server at {owner.server} did not delete a session: {status}.")

    async def _deleted(self, owner: OwnerName, session_id: str, headers: dict[str, str]) -> int:
        """The answer to a deletion by the process that has the session. Raises WorkerUnavailable."""
        async with self.nodes.asked(owner, self.asker, "DELETE", f"/sessions/{session_id}", headers) as answer:
            return answer.status
