"""The sessions of all processes, for an answer of many: each makes the parts of its own sessions, and deletes them.

The process of the request asks for one part after the other, and reads it as its client takes it; so no process is
ahead by more than the buffers of a socket, and a leaving client ends the one part in the making. A process is asked
with the asker's keys. The list of all is in the shared database; without one each worker has its
own.
"""

import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from starlette.types import Scope

from stenograph.cluster.peers import Peer, Peers, for_asker, named
from stenograph.core.errors import NobodyError, SessionClaimed, SessionNotFound, StenographError, WorkerUnavailable
from stenograph.dialects.sessions import BulkSamplesRequest
from stenograph.export.group_rollouts import GroupRollout, RolloutFacts
from stenograph.http.bulk_parts import SIZE_BYTES, OneAnswer, OwnParts, SessionParts, sized
from stenograph.http.session_routes import REVISION_HEADER
from stenograph.session.rollout_points import RolloutPoint
from stenograph.session.selection import SessionFilter

IDS_PATH, ROLLOUT_PATH, POINTS_PATH = "/workers/ids", "/workers/rollout", "/workers/points"

_POINT = msgspec.json.Decoder(RolloutPoint | None)

_NO_ASKER: Scope = {"headers": [], "query_string": b""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The sessions of a database, for the request `asker`. `peer_of` names the other process of one. `own` reads all
    of them, and writes the errors of those without a reachable process."""

    own: OwnParts
    peers: Peers
    peer_of: Callable[[str], Awaitable[Peer | None]]
    timeout_s: float
    asker: Scope = field(default_factory=lambda: _NO_ASKER)

    def asked_by(self, scope: Scope) -> SessionParts:
        return replace(self, asker=scope, own=self.own.asked_by(scope))

    def shows(self, session_id: str) -> bool:
        return self.own.shows(session_id)

    def ids(self, wanted: SessionFilter) -> AsyncGenerator[str, None]:
        return self.own.ids(wanted)

    def points(self) -> AsyncGenerator[RolloutPoint | None, None]:
        """As the database has them, but for this process's own."""
        return self.own.points()

    async def rollout(self, session_id: str) -> RolloutFacts | None:
        """As the database has it, whoever has the session: each of its turns is there. Whether one runs is not, where
        another process has it."""
        found = await self.own.rollout(session_id)
        if found is None or await self.peer_of(session_id) is None:
            return found
        return replace(found, row={**found.row, "busy": None})

    @asynccontextmanager
    async def part(self, session_id: str, wire: BulkSamplesRequest) -> AsyncGenerator[OneAnswer, None]:
        """The part from the session's process, or as it is read here if it has none; an error in its place
        where the process cannot be asked."""
        async with AsyncExitStack() as stack:
            try:
                peer = await self.peer_of(session_id) if self.shows(session_id) else None  # which refuses it
                part = await stack.enter_async_context(
                    self.own.part(session_id, wire) if peer is None else self._part_of(peer, session_id, wire)
                )
            except NobodyError as error:
                failed = self.own.failed(session_id, wire, error)
                part = OneAnswer(None, await stack.enter_async_context(aclosing(failed.pieces)))
            yield part

    @asynccontextmanager
    async def _part_of(self, peer: Peer, session_id: str, wire: BulkSamplesRequest) -> AsyncGenerator[OneAnswer, None]:
        asked = msgspec.structs.replace(wire, sessions=[session_id], group=None, state=None, where=None, delete=None)
        target, headers = for_asker(self.asker, "/samples", passed_on=session_id)
        timeout_s = self.timeout_s if isinstance(peer, str) else None
        reading = self.peers.reading(peer, target, msgspec.json.encode(asked), headers, timeout_s=timeout_s)
        async with reading as answer, aclosing(answer.pieces()) as pieces:
            yield OneAnswer(answer.header(REVISION_HEADER), pieces)

    async def passed_on(self, session_id: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        peer = await self.peer_of(session_id) if self.shows(session_id) else None
        if peer is None:
            return await self.own.passed_on(session_id, path, body)
        target, headers = for_asker(self.asker, path)
        timeout_s = self.timeout_s if isinstance(peer, str) else None
        answer = await self.peers.ask(peer, "POST", target, headers, body, timeout_s=timeout_s)
        return answer.status, answer.body

    async def delete(self, session_id: str, revision: str) -> bool:
        """False also where its process does not answer: whether the session has gone is not known then."""
        try:
            peer = await self.peer_of(session_id)
            if peer is None:
                return await self.own.delete(session_id, revision)
            return await self._deleted(peer, session_id, (REVISION_HEADER.encode(), revision.encode())) == 204
        except StenographError:
            return False

    async def remove(self, session_id: str, *, force: bool) -> bool:
        peer = await self.peer_of(session_id)
        if peer is None:
            return await self.own.remove(session_id, force=force)
        status = await self._deleted(peer, f"{session_id}?force=true" if force else session_id)
        if status == 404:
            raise SessionNotFound(session_id)
        if status not in (204, SessionClaimed.status):
            raise WorkerUnavailable(f"{named(peer)} did not delete a session: {status}.")
        return status == 204

    async def _deleted(self, peer: Peer, target: str, *more: tuple[bytes, bytes]) -> int:
        """The answer to a deletion by the session's process. Raises WorkerUnavailable."""
        target, headers = for_asker(self.asker, f"/sessions/{target}")
        return (await self.peers.ask(peer, "DELETE", target, [*headers, *more], timeout_s=self.timeout_s)).status


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts(SharedParts):
    """The sessions of a server of several workers; each knows its own."""

    async def ids(self, wanted: SessionFilter) -> AsyncGenerator[str, None]:
        """The lists of all workers, merged by the sessions' opening times."""
        asked = msgspec.json.encode(replace(wanted, tag=wanted.tag or self.own.tag))
        async with AsyncExitStack() as stack:
            lists: list[AsyncGenerator[bytes, None]] = []
            for worker in range(self.peers.num):
                stream = await stack.enter_async_context(self.peers.reading(worker, IDS_PATH, asked))
                lists.append(await stack.enter_async_context(aclosing(stream.lines())))
            firsts: list[tuple[float, int, str]] = []
            for worker, lines in enumerate(lists):
                await _push_next(firsts, worker, lines)
            while firsts:
                _, worker, session_id = heapq.heappop(firsts)
                yield session_id
                await _push_next(firsts, worker, lists[worker])

    async def points(self) -> AsyncGenerator[RolloutPoint | None, None]:
        """Those of each worker, as it makes them."""
        for worker in range(self.peers.num):
            async with (
                self.peers.reading(worker, POINTS_PATH, self.own.tag.encode()) as stream,
                aclosing(stream.lines()) as lines,
            ):
                async for line in lines:
                    yield _POINT.decode(line)

    async def rollout(self, session_id: str) -> RolloutFacts | None:
        """As the session's worker makes it."""
        if not self.shows(session_id) or (worker := await self.peer_of(session_id)) is None:
            return await self.own.rollout(session_id)
        asked = msgspec.json.encode(session_id)
        answer = await self.peers.ask(worker, "POST", ROLLOUT_PATH, body=asked, timeout_s=self.timeout_s)
        if answer.status != 200:
            raise WorkerUnavailable(f"{named(worker)} cannot read session {session_id}: it answered {answer.status}.")
        return decoded_rollout(answer.body)


def encoded_rollout(rollout: RolloutFacts | None) -> bytes:
    """A rollout for another process: its row, then its ids as they are in memory; nothing for None."""
    return b"" if rollout is None else sized(msgspec.json.encode(rollout.row)) + rollout.ids.tobytes()


def decoded_rollout(body: bytes) -> RolloutFacts | None:
    """A rollout as another process of this machine has encoded it."""
    if not body:
        return None
    end = SIZE_BYTES + int.from_bytes(body[:SIZE_BYTES], "little")
    row = msgspec.json.decode(body[SIZE_BYTES:end], type=GroupRollout)
    return RolloutFacts(row=row, ids=np.frombuffer(body, np.int32, offset=end))


async def _push_next(firsts: list[tuple[float, int, str]], worker: int, lines: AsyncGenerator[bytes, None]) -> None:
    if (line := await anext(lines, None)) is not None:
        opened_at, session_id = msgspec.json.decode(line, type=tuple[float, str])
        heapq.heappush(firsts, (opened_at, worker, session_id))
