"""The routes of many sessions at once: their samples in one answer, their deletion. Starlette endpoints.

One session after the other: memory holds one session's samples, however many are asked for. A failed session has its
error in its place, and spoils no other.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import InvalidRequest, SessionNotFound, WorkerUnavailable
from stenograph.core.json_types import Count, Hex32
from stenograph.core.kinds import HistoryKind
from stenograph.core.loaded import entry
from stenograph.dialects.sessions import SESSION_STATES, BulkSamplesRequest, decode_bulk_samples
from stenograph.export.arrow import MEDIA_TYPE, ArrowMissing, bulk_arrow
from stenograph.export.records import DiscardedTurns, WireOutcome, outcome_json
from stenograph.http.auth import PASSED_ON
from stenograph.http.bulk_parts import OwnParts, Pieces, SessionParts, is_whole, sized
from stenograph.http.closed_stream import ClosedStream
from stenograph.http.create_route import decoded
from stenograph.http.query import is_forced
from stenograph.http.responses import json_in_pieces, json_response
from stenograph.http.route import (
    DELETES,
    ID,
    STORED,
    TEXT,
    All,
    Asking,
    Reach,
    Schema,
    one_answer,
    parameter,
    route,
    sees,
)
from stenograph.http.session_routes import (
    FORCE,
    LIMIT,
    MAX_PAGE,
    REVISION_HEADER,
    SessionRoutes,
    check_known,
    filter_of,
)
from stenograph.http.wire import ClientLink, count_error, delivery_of, header_value
from stenograph.offload.pool import INLINE_BELOW_BYTES, CpuPool
from stenograph.session.selection import SessionFilter, SessionState, selected
from stenograph.session.storage import FORGOTTEN_TURNS, Listed

if TYPE_CHECKING:
    from stenograph.export.tree import TreeJoin

log = logging.getLogger(__name__)

FRAMES_TYPE = "application/vnd.stenograph.samples"
"""The media type of length-prefixed safetensors payloads."""
_STATE: Schema = {"type": "string", "enum": list(SESSION_STATES)}
_FILTER = (
    parameter(
        "query",
        "group",
        "Only sessions of this group. `metadata.KEY=VALUE`, for each of some keys, is a filter too: only sessions whose"
        " metadata has these values, of which those that are no text are written as JSON.",
        TEXT,
    ),
    parameter("query", "state", "Only sessions in this state.", _STATE),
)
_PAGE = (
    parameter("query", "limit", "The most sessions that a page has.", LIMIT),
    parameter("query", "after", "The page begins after this session.", ID),
)
_DELETED_AT_ONCE = 100
"""Sessions of one group, for one sync; each is read before it goes."""


class SessionSummary(TypedDict):
    """A session in a list. `created_at` is in seconds of the epoch."""

    session_id: Hex32
    created_at: float
    history: HistoryKind
    num_turns: Count
    num_strands: Count
    num_tokens: Count
    discarded: DiscardedTurns
    busy: bool | None
    group: str | None
    outcome: WireOutcome | None
    metadata: Mapping[str, object]


class SessionPage(TypedDict):
    """Sessions, oldest first. `next` is the `after` of the next page, or null at the end."""

    sessions: Sequence[SessionSummary]
    next: Hex32 | None


class Deleted(TypedDict):
    """The number of sessions that were deleted, and of those that stay because a trainer has claimed them."""

    deleted: Count
    claimed: Count


class _Told(msgspec.Struct):
    """Counts of an answer while it is written, for its last piece."""

    sessions: int = 0
    failed: int = 0
    deleted: int = 0
    not_deleted: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRoutes:
    """The routes of many sessions on one server."""

    sessions: SessionRoutes
    parts: SessionParts

    @route(
        "GET /sessions",
        "listSessions",
        "List sessions, oldest first",
        SessionPage,
        parameters=(*_PAGE, *_FILTER),
        errors=(InvalidRequest, SessionNotFound, *STORED),
        who=All(ask=Asking.PAGES, reach=Reach.NOBODY),
    )
    async def list_sessions(self, request: Request) -> Response:
        """`GET /sessions?limit=&after=&group=&state=&metadata.KEY=`."""
        wanted = filter_of(request, "limit", "after")
        check_known(self.sessions.manager, wanted)
        limit = request.query_params.get("limit", "100")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4) or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be a number from 1 to {MAX_PAGE}, got {limit[:20]!r}.", param="/limit")
        after = request.query_params.get("after")
        found: list[Listed] = []
        if after is not None and not sees(request.scope, after):
            raise SessionNotFound(after)
        if wanted.is_empty and not wanted.tag:
            found = await self.sessions.manager.sessions.page_kept(limit=int(limit) + 1, after=after)
        else:
            async for one in selected(self.sessions.manager, wanted, after=after):
                found.append(one)
                if len(found) > int(limit):
                    break
        shown = found[: int(limit)]
        more = shown[-1].id if len(found) > len(shown) else None
        page: SessionPage = {"sessions": [session_summary(session) for session in shown], "next": more}
        return json_in_pieces(self.sessions.share, page)

    @route(
        "DELETE /sessions",
        "deleteSessions",
        "Delete the sessions that a filter selects",
        Deleted,
        parameters=(*_FILTER, FORCE),
        errors=(InvalidRequest, *STORED),
        who=All(merge="stenograph.http.merging:sums", reach=Reach.NOBODY),
    )
    async def delete(self, request: Request) -> Response:
        """`DELETE /sessions?group=&state=&metadata.KEY=&force=`."""
        wanted, manager, force = filter_of(request, "force"), self.sessions.manager, is_forced(request)
        if wanted.is_empty:
            raise InvalidRequest("Say which sessions: give group, state or metadata.KEY in the query.")
        check_known(manager, wanted)
        sizes = [(one.id, one.totals.num_turns) async for one in selected(manager, wanted)]
        parts, gone = self.parts.asked_by(request.scope), list[BaseException | bool]()
        for some in _groups(sizes):
            gone += await asyncio.gather(*(parts.remove(one, force=force) for one in some), return_exceptions=True)
        for failed in gone:  # somebody else has deleted those not found
            if isinstance(failed, BaseException) and not isinstance(failed, SessionNotFound):
                raise failed
        body: Deleted = {"deleted": gone.count(True), "claimed": gone.count(False)}
        return json_response(body)

    @route(
        "POST /samples",
        "getManySamples",
        "Get the training samples of many sessions",
        body=BulkSamplesRequest,
        answers=one_answer(
            "A safetensors payload for each session, behind a head and sizes (docs/samples.md), or one Arrow stream.",
            {FRAMES_TYPE: {}, MEDIA_TYPE: {}},
        ),
    )
    async def samples(self, request: Request) -> Response:
        """`POST /samples`."""
        wire = await decoded(request, decode_bulk_samples, self.sessions.pool, self.sessions.max_body_bytes)
        request.scope[DELETES] = bool(wire.delete)
        if wire.format == "arrow":
            try:
                await self.sessions.pool.run(bulk_arrow, num_bytes=INLINE_BELOW_BYTES)
            except ArrowMissing as error:
                raise InvalidRequest(str(error), param="/format") from error
        media_type = MEDIA_TYPE if wire.format == "arrow" else FRAMES_TYPE
        link = delivery_of(request.scope)
        if header_value(request.scope, PASSED_ON) is not None and wire.sessions:  # another process, for the bare part
            own = OwnParts(sessions=self.sessions).asked_by(request.scope)
            part = await own.made(wire.sessions[0], wire)
            headers = {} if part.revision is None else {REVISION_HEADER: part.revision}
            return ClosedStream(link, part.pieces, media_type=media_type, headers=headers)
        check_known(self.sessions.manager, wanted_by(wire))
        return ClosedStream(link, self._answer(wire, link, self.parts.asked_by(request.scope)), media_type=media_type)

    async def _answer(self, wire: BulkSamplesRequest, link: ClientLink, parts_of: SessionParts) -> Pieces:
        """One session's part after the other, and at the end the outcome of all."""
        told, arrow, ids = _Told(), bulk_arrow() if wire.format == "arrow" else None, _ids(wire, parts_of)
        if arrow is not None:
            yield arrow.head()
        parts = _parts(ids, wire, link, told, parts_of, self.sessions.pool)
        try:
            async with aclosing(ids), aclosing(parts):
                async for piece in parts:
                    yield piece
        except WorkerUnavailable as error:
            count_error(self.sessions.metrics, error)
            log.warning("an answer of POST /samples was cut: %s", error)
            link.cut()
            await asyncio.get_running_loop().create_future()  # the connection's end ends this
        facts = msgspec.structs.asdict(told)
        if arrow is not None:
            yield arrow.end(facts)
        else:
            yield sized(msgspec.json.encode({"done": True, **facts})) + sized(b"")


def _groups(sizes: Sequence[tuple[str, int]]) -> Iterator[list[str]]:
    """Ids of sessions deleted together, of ids and numbers of turns."""
    some, num_turns = list[str](), 0
    for session_id, num in sizes:
        some.append(session_id)
        num_turns += num
        if len(some) == _DELETED_AT_ONCE or num_turns >= FORGOTTEN_TURNS:
            yield some
            some, num_turns = [], 0
    if some:
        yield some


async def _parts(
    ids: AsyncGenerator[str, None],
    wire: BulkSamplesRequest,
    link: ClientLink,
    told: _Told,
    parts: SessionParts,
    pool: CpuPool,
) -> Pieces:
    """Each session's part, and its deletion once the part has left. Raises WorkerUnavailable."""
    tree: TreeJoin | None = entry("stenograph.export.tree:TreeJoin")() if wire.format == "tree" else None
    async for session_id in ids:
        async with parts.part(session_id, wire) as part, aclosing(_joined(part.pieces, tree, pool)) as pieces:
            async for piece in pieces:
                yield piece
        await asyncio.sleep(0)  # of a small session the loop makes every part itself
        told.sessions += 1
        if part.revision is None:
            told.failed += 1
        elif wire.delete:
            has_gone = await link.has_left() and await parts.delete(session_id, part.revision)
            told.deleted += has_gone
            told.not_deleted += [] if has_gone else [session_id]


async def _joined(pieces: Pieces, tree: "TreeJoin | None", pool: CpuPool) -> Pieces:
    """The pieces of a part, of a tree whole, as one that goes on with those before it. The part ends once they have
    left: then its tokens are noted as trained."""
    if tree is not None:
        frame = bytearray()
        async for piece in pieces:
            frame += piece
            if is_whole(frame):
                break
        yield memoryview(await pool.run(lambda: tree.frame(bytes(frame)), num_bytes=len(frame)))
    async for piece in pieces:
        yield piece


async def _ids(wire: BulkSamplesRequest, parts: SessionParts) -> AsyncGenerator[str, None]:
    """The ids of the requested sessions."""
    if wire.sessions is not None:
        for session_id in dict.fromkeys(wire.sessions):
            yield session_id
        return
    async with aclosing(parts.ids(wanted_by(wire))) as ids:
        async for session_id in ids:
            yield session_id


def wanted_by(wire: BulkSamplesRequest) -> SessionFilter:
    """The filter of a request for samples."""
    state = None if wire.state is None else SessionState(wire.state)
    return SessionFilter(group=wire.group, state=state, metadata=wire.where or {})


def session_summary(session: Listed) -> SessionSummary:
    """One entry of `GET /sessions`."""
    options, totals = session.options, session.totals
    has_turns = bool(totals.num_turns or totals.num_discarded_turns)
    return {
        "session_id": session.id,
        "created_at": session.created_at,
        "history": options.history,
        "num_turns": totals.num_turns,
        "num_strands": totals.num_strands if options.history is HistoryKind.STRANDS else int(has_turns),
        "num_tokens": totals.num_tokens,
        "discarded": {"turns": totals.num_discarded_turns, "sampled_tokens": totals.num_discarded_tokens},
        "busy": session.is_busy,
        "group": options.stated.group,
        "outcome": outcome_json(session.outcome),
        "metadata": options.metadata,
    }
