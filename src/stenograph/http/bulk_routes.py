"""The routes that are of many sessions at once: their samples in one answer, their deletion. Starlette endpoints.

One session after the other: what is held is one session's samples, however many are asked for. A session that fails has
its error in its place, and spoils no other.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stenograph.core.errors import InvalidRequest, SessionNotFound, StenographError
from stenograph.core.json_types import Count
from stenograph.dialects.sessions import BulkSamplesRequest, decode_bulk_samples
from stenograph.export.arrow import MEDIA_TYPE, ArrowMissing, BulkArrow
from stenograph.export.safetensors import to_safetensors
from stenograph.http.delivery import ClientLink, delivery_of
from stenograph.http.session_routes import SessionRoutes, filter_of
from stenograph.http.wire import count_error, json_response
from stenograph.session.selection import SessionFilter, SessionState, id_of, selected
from stenograph.session.session import Session

FRAMES_TYPE = "application/vnd.stenograph.samples"
"""The media type of length-prefixed safetensors payloads."""
_DELETED_AT_ONCE = 32
_SIZE_BYTES = 8


class Deleted(TypedDict):
    """The number of sessions that were deleted."""

    deleted: Count


@dataclass(slots=True)
class _Told:
    """Counts of an answer while it is written, for its last frame."""

    num_sessions: int = 0
    num_failed: int = 0
    num_deleted: int = 0
    not_deleted: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRoutes:
    """The routes of one server that are of many sessions."""

    sessions: SessionRoutes

    async def delete(self, request: Request) -> Response:
        """`DELETE /sessions?group=&state=&metadata.KEY=`."""
        wanted, manager = filter_of(request), self.sessions.manager
        if wanted.is_empty:
            raise InvalidRequest("Say which sessions: give group, state or metadata.KEY in the query.")
        ids = [id_of(one) async for one in selected(manager, wanted)]
        gone: list[BaseException | None] = []
        for start in range(0, len(ids), _DELETED_AT_ONCE):
            some = ids[start : start + _DELETED_AT_ONCE]
            gone += await asyncio.gather(*map(manager.delete, some), return_exceptions=True)
        for failed in gone:
            if failed is not None and not isinstance(failed, SessionNotFound):  # somebody else has deleted that one
                raise failed
        body: Deleted = {"deleted": gone.count(None)}
        return json_response(body)

    async def samples(self, request: Request) -> Response:
        """`POST /samples`."""
        wire = await self.sessions.decoded(request, decode_bulk_samples)
        link, told = delivery_of(request.scope), _Told()
        if wire.format == "arrow":
            try:
                arrow = BulkArrow()
            except ArrowMissing as error:
                raise InvalidRequest(str(error), param="/format") from error
            return StreamingResponse(self._arrow(wire, arrow, link, told), media_type=MEDIA_TYPE)
        return StreamingResponse(self._frames(wire, link, told), media_type=FRAMES_TYPE)

    async def _ids(self, wire: BulkSamplesRequest) -> AsyncIterator[str]:
        """The ids of the sessions that are asked for."""
        for session_id in dict.fromkeys(wire.sessions or ()):
            yield session_id
        if wire.sessions is None:
            state = None if wire.state is None else SessionState(wire.state)
            wanted = SessionFilter(group=wire.group, state=state, metadata=wire.where or {})
            async for session in selected(self.sessions.manager, wanted):
                yield id_of(session)

    async def _frames(self, wire: BulkSamplesRequest, link: ClientLink, told: _Told) -> AsyncGenerator[bytes, None]:
        """A frame for each session, its head and its payload each behind their size; the last frame counts."""
        async for session_id in self._ids(wire):
            told.num_sessions += 1
            try:
                session = await self.sessions.manager.look(session_id)
                revision = _revision(session)
                made, metadata, _ = await self.sessions.made_samples(session, self.sessions.wishes(wire))
                payload = to_safetensors(made.samples, session_metadata=metadata, empty_reason=made.empty_reason)
                pieces = [piece async for piece in self.sessions.share.pieces(payload) if piece]
            except StenographError as error:
                yield self._failed(session_id, error, told)
                continue
            yield _sized(msgspec.json.encode({"session_id": session_id, "num_samples": len(made.samples)}))
            yield sum(map(len, pieces)).to_bytes(_SIZE_BYTES, "little")
            for piece in pieces:
                yield piece
            self.sessions.manager.note_trained(session, made.num_trained)
            if wire.delete:
                await self._delete(session_id, revision, link, told)
        yield _sized(_last_head(told)) + _sized(b"")

    async def _arrow(
        self, wire: BulkSamplesRequest, arrow: BulkArrow, link: ClientLink, told: _Told
    ) -> AsyncGenerator[bytes | memoryview, None]:
        """One stream of rows; a session without samples has one with its reason alone."""
        pool = self.sessions.pool
        yield arrow.head()
        async for session_id in self._ids(wire):
            try:
                session = await self.sessions.manager.look(session_id)
                revision = _revision(session)
                made, _, num_bytes = await self.sessions.made_samples(session, self.sessions.wishes(wire))
            except StenographError as error:
                count_error(self.sessions.metrics, error)
                yield arrow.failed(session_id, code=error.code, message=str(error))
                continue
            rows = arrow.rows(session_id, made)
            while (message := await pool.run(_next_of(rows), num_bytes=num_bytes)) is not None:
                yield message
            self.sessions.manager.note_trained(session, made.num_trained)
            if wire.delete:
                await self._delete(session_id, revision, link, told)
        yield arrow.end

    def _failed(self, session_id: str, error: StenographError, told: _Told) -> bytes:
        count_error(self.sessions.metrics, error)
        told.num_failed += 1
        facts = {"code": error.code, "status": error.status, "message": str(error)}
        return _sized(msgspec.json.encode({"session_id": session_id, "error": facts})) + _sized(b"")

    async def _delete(self, session_id: str, revision: Sequence[object], link: ClientLink, told: _Told) -> None:
        """Delete a session whose samples have left; one that went on meanwhile, or runs a turn, stays."""
        manager = self.sessions.manager
        with suppress(StenographError):
            if await link.has_left():
                session = await manager.look(session_id)
                if not session.is_busy and _revision(session) == revision:
                    await manager.delete(session_id)
                    told.num_deleted += 1
                    return
        told.not_deleted = [*(told.not_deleted or ()), session_id]


def _revision(session: Session) -> Sequence[object]:
    """A value that differs after each turn that a session commits."""
    return [len(session.nodes), None if session.latest is None else session.latest.id, session.strands.discarded]


def _next_of(rows: Iterator[memoryview]) -> Any:
    return lambda: next(rows, None)


def _sized(content: bytes) -> bytes:
    return len(content).to_bytes(_SIZE_BYTES, "little") + content


def _last_head(told: _Told) -> bytes:
    return msgspec.json.encode(
        {
            "done": True,
            "sessions": told.num_sessions,
            "failed": told.num_failed,
            "deleted": told.num_deleted,
            "not_deleted": told.not_deleted or [],
        }
    )
