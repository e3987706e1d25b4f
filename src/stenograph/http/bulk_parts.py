"""The pieces of an answer of many sessions: their ids in order, and each session's part of it.

A server of one process makes every part itself (`OwnParts`); of several, each makes those of its own sessions
(cluster/parts.py). Knows nothing of the answer around the parts.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.types import Scope

from stenograph.core.errors import SessionClaimed, SessionNotFound, StenographError
from stenograph.core.stated_options import TAG
from stenograph.dialects.sessions import BulkSamplesRequest
from stenograph.export.arrow import bulk_arrow
from stenograph.export.group_rollouts import RolloutFacts
from stenograph.export.safetensors import to_safetensors
from stenograph.http.responses import tree_payload
from stenograph.http.route import tag_seen_by
from stenograph.http.session_routes import SessionRoutes, delete_as_it_was, revision_of
from stenograph.http.wire import count_error
from stenograph.session.facts import session_facts
from stenograph.session.rollout_points import RolloutPoint, point_of
from stenograph.session.selection import SessionFilter, selected

Pieces = AsyncGenerator[bytes | memoryview, None]

SIZE_BYTES = 8

_BYTES_PER_TURN = 256
_TOKENS_PER_BYTE = 32
"""The approximate cost of turns and tokens in a rollout; only decides whether work is small enough for the loop."""


@dataclass(frozen=True, slots=True)
class OneAnswer:
    """One session's part of an answer. `revision` differs after each committed turn of the session; None: the session
    failed, and the part is its error."""

    revision: str | None
    pieces: Pieces


class SessionParts(Protocol):
    """The sessions of a server."""

    def ids(self, wanted: SessionFilter) -> AsyncGenerator[str, None]:
        """The ids of the passing sessions, oldest first. Raises WorkerUnavailable where the rest of them is lost."""
        ...

    def part(self, session_id: str, wire: BulkSamplesRequest) -> AbstractAsyncContextManager[OneAnswer]:
        """A session's part. Its pieces raise WorkerUnavailable where the rest of them is lost."""
        ...

    async def delete(self, session_id: str, revision: str) -> bool:
        """Delete a session if it is still of this revision and runs no turn; returns whether it has gone."""
        ...

    async def remove(self, session_id: str, *, force: bool) -> bool:
        """Delete a session, and end its turns; False if a trainer has claimed it. Raises as `SessionManager.delete`,
        and WorkerUnavailable."""
        ...

    async def passed_on(self, session_id: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        """The status and the answer of a session's process to a POST of JSON; None where it is this one. Raises
        WorkerUnavailable."""
        ...

    def asked_by(self, scope: Scope) -> "SessionParts":
        """The same, for a request: its keys go to each process asked for a part. A tenant's has its own sessions."""
        ...

    def shows(self, session_id: str) -> bool:
        """Whether the request may know of a session with this id."""
        ...

    def points(self) -> AsyncGenerator[RolloutPoint | None, None]:
        """All sessions as points of their groups, None for one without a group. Raises WorkerUnavailable, and as
        `selected`."""
        ...

    async def rollout(self, session_id: str) -> RolloutFacts | None:
        """A session as a rollout of its group; None if it has gone meanwhile. Raises WorkerUnavailable, and as
        `Sessions.look`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    """The sessions of this process; those of a tenant alone for a request of its own, by the `tag`."""

    sessions: SessionRoutes
    tag: str = ""

    def asked_by(self, scope: Scope) -> "OwnParts":
        tag = tag_seen_by(scope)
        return replace(self, tag=tag) if tag else self

    def shows(self, session_id: str) -> bool:
        return not self.tag or session_id[TAG] == self.tag

    async def passed_on(self, session_id: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        if not self.shows(session_id):
            raise SessionNotFound(session_id)
        return None

    async def remove(self, session_id: str, *, force: bool) -> bool:
        if not self.shows(session_id):
            raise SessionNotFound(session_id)
        try:
            await self.sessions.manager.delete(session_id, force=force)
        except SessionClaimed:
            return False
        return True

    async def ids(self, wanted: SessionFilter) -> AsyncGenerator[str, None]:
        async for _, session_id in self.dated_ids(wanted):
            yield session_id

    async def dated_ids(self, wanted: SessionFilter) -> AsyncGenerator[tuple[float, str], None]:
        """The ids of the passing sessions, oldest first, each with the time of its opening."""
        async for session in selected(self.sessions.manager, replace(wanted, tag=wanted.tag or self.tag)):
            yield session.created_at, session.id

    @asynccontextmanager
    async def part(self, session_id: str, wire: BulkSamplesRequest) -> AsyncGenerator[OneAnswer, None]:
        part = await self.made(session_id, wire)
        async with aclosing(part.pieces):
            yield part

    async def made(self, session_id: str, wire: BulkSamplesRequest) -> OneAnswer:
        """A session's part; whoever takes it closes its pieces."""
        try:
            if not self.shows(session_id):
                raise SessionNotFound(session_id)
            return await (self._rows if wire.format == "arrow" else self._frame)(session_id, wire)
        except StenographError as error:
            return self.failed(session_id, wire, error)

    def failed(self, session_id: str, wire: BulkSamplesRequest, error: StenographError) -> OneAnswer:
        """The part of a session without samples because of an error."""
        count_error(self.sessions.metrics, error)
        if wire.format == "arrow":
            return OneAnswer(None, _all_of(bulk_arrow().failed(session_id, code=error.code, message=str(error))))
        facts = {"code": error.code, "status": error.status, "message": str(error)}
        return OneAnswer(
            None, _all_of(sized(msgspec.json.encode({"session_id": session_id, "error": facts})), sized(b""))
        )

    async def delete(self, session_id: str, revision: str) -> bool:
        return self.shows(session_id) and await delete_as_it_was(self.sessions.manager, session_id, revision)

    async def points(self) -> AsyncGenerator[RolloutPoint | None, None]:
        async for session in selected(self.sessions.manager, SessionFilter(tag=self.tag)):
            yield point_of(session)
            await asyncio.sleep(0)  # one of many turns takes tens of microseconds

    async def rollout(self, session_id: str) -> RolloutFacts | None:
        if not self.shows(session_id):
            return None
        try:
            session = await self.sessions.manager.sessions.peek(session_id)
        except SessionNotFound:
            return None
        facts = session_facts(session)
        work = partial(RolloutFacts.of, facts, created_at=session.created_at, busy=session.is_busy)
        num_tokens = 0 if facts.latest is None else facts.latest.num_tokens
        return await self.sessions.pool.run(
            work, num_bytes=_BYTES_PER_TURN * len(facts.nodes) + num_tokens // _TOKENS_PER_BYTE
        )

    async def _frame(self, session_id: str, wire: BulkSamplesRequest) -> OneAnswer:
        """A head and a payload, each behind its size: whole before the first byte leaves, since an error must not
        follow it. Raises StenographError."""
        session = await self.sessions.manager.sessions.peek(session_id)
        revision = revision_of(session)
        made, metadata, num_bytes = await self.sessions.made_samples(session, self.sessions.wishes(wire))
        if wire.format == "tree":
            payload = await tree_payload(self.sessions.pool, made, metadata, num_bytes)
        else:
            payload = to_safetensors(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)
        pieces = [piece async for piece in self.sessions.share.pieces(payload) if piece]
        head = msgspec.json.encode({"session_id": session_id, "num_samples": len(made.samples)})

        async def sent() -> Pieces:
            yield sized(head)
            yield sum(map(len, pieces)).to_bytes(SIZE_BYTES, "little")
            for piece in pieces:
                yield piece
            self.sessions.manager.sessions.note_trained(session, made.num_trained)

        return OneAnswer(revision, sent())

    async def _rows(self, session_id: str, wire: BulkSamplesRequest) -> OneAnswer:
        """A row for each sample; a session without samples has one with its reason alone. Raises StenographError."""
        session = await self.sessions.manager.sessions.peek(session_id)
        revision = revision_of(session)
        made, _, num_bytes = await self.sessions.made_samples(session, self.sessions.wishes(wire))
        rows = bulk_arrow().rows(session_id, made)

        async def sent() -> Pieces:
            while (row := await self.sessions.pool.run(_next_of(rows), num_bytes=num_bytes)) is not None:
                yield row
            self.sessions.manager.sessions.note_trained(session, made.num_trained)

        return OneAnswer(revision, sent())


def sized(content: bytes) -> bytes:
    """Bytes behind their size."""
    return len(content).to_bytes(SIZE_BYTES, "little") + content


def is_whole(frame: bytes | bytearray) -> bool:
    """Whether a head and a payload, each behind its size, are there."""
    at = 0
    for _ in range(2):
        at += SIZE_BYTES + int.from_bytes(frame[at : at + SIZE_BYTES], "little")
        if len(frame) < at:
            return False
    return True


async def _all_of(*pieces: bytes | memoryview) -> Pieces:
    for piece in pieces:
        yield piece


def _next_of(rows: Iterator[memoryview]) -> Callable[[], Any]:
    return lambda: next(rows, None)
