"""The data of the console: what no other route has, or has in a form that a page cannot show. Starlette endpoints.

Read-only. What is large is made on the CPU pool from a snapshot, or written in pieces; what is asked for again and
again (the moment, the look at a live session) is kept for as long as it is true.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stenograph.console.groups import MAX_ROLLOUTS, group_view
from stenograph.console.steps import MAX_POINTS, steps_view
from stenograph.console.tokens import MAX_PAGE_TOKENS, LineTurns, TokenLook, token_page
from stenograph.console.views import MAX_TURNS, VocabularyRef, console_session, drift_counts, turn_page
from stenograph.console.vocabulary import VocabularyBytes, VocabularyMaker
from stenograph.core.errors import InvalidRequest, RouteNotFound
from stenograph.export.group_rollouts import RolloutFacts
from stenograph.export.lines import leaves
from stenograph.export.strand_facts import SessionFacts, StrandFacts, session_facts
from stenograph.http.bulk_parts import Pieces, SessionParts
from stenograph.http.console_page import console_file, console_page
from stenograph.http.processes import Moments
from stenograph.http.session_routes import SessionRoutes, check_query, number_of
from stenograph.http.wire import ClosedStream, delivery_of, in_pieces, json_in_pieces, json_response
from stenograph.render.drift import DriftReport
from stenograph.session.rollout_points import RolloutPoint
from stenograph.session.selection import SessionFilter
from stenograph.session.session import Session
from stenograph.trajectory.turn import Node

_BYTES_PER_TURN = 64
"""About what a turn costs in a session's shape; only decides what is small enough for the loop."""
_KEPT_LINES = 16
MOST_COMPARED_TOKENS = 65_536
"""Lines of more tokens are not compared for a list unless somebody asks for it: that takes a thread for seconds."""
_SENT_BYTES = 256 * 1024
EVENTS_TYPE = "text/event-stream"
BYTES_TYPE = "application/octet-stream"
FOR_EVER = "private, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SessionLook:
    """A session as it was when its turns were those of `key`."""

    key: Hashable
    facts: SessionFacts
    tokens: TokenLook
    leaves: Sequence[Node]
    strand_of: Mapping[int, StrandFacts]
    lines: dict[int, LineTurns] = field(default_factory=dict[int, LineTurns])

    @staticmethod
    def of(key: Hashable, facts: SessionFacts) -> "_SessionLook":
        """The look at a session as it is now."""
        ends = leaves(facts.nodes)
        return _SessionLook(key=key, facts=facts, tokens=TokenLook.of(facts), leaves=ends, strand_of=facts.by_node())

    def line(self, leaf: Node) -> LineTurns:
        """The turns of a line that was asked for; those of the last few are kept."""
        if leaf.id not in self.lines:
            if len(self.lines) >= _KEPT_LINES:
                self.lines.clear()
            self.lines[leaf.id] = LineTurns.of(leaf)
        return self.lines[leaf.id]


@dataclass(slots=True, kw_only=True)
class ConsoleRoutes:
    """The console's data of one server. Methods are endpoints; control_routes.py binds them to paths."""

    sessions: SessionRoutes
    parts: SessionParts
    moments: Moments
    _vocabulary: VocabularyBytes | None = None
    _comparing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """One session is compared for a list at a time, however many look at theirs: turns need the threads."""
    _looks: WeakKeyDictionary[Session, _SessionLook] = field(default_factory=WeakKeyDictionary[Session, _SessionLook])

    async def now(self, request: Request) -> Response:
        """`GET /console/api/now`: the moment; with `accept: text/event-stream` one each second, until the drain."""
        check_query(request)
        if EVENTS_TYPE not in request.headers.get("accept", ""):
            return Response(await self.moments.now(), media_type="application/json")
        link, headers = delivery_of(request.scope), {"cache-control": "no-store"}
        return ClosedStream(link, self._events(), media_type=EVENTS_TYPE, headers=headers)

    async def _events(self) -> Pieces:
        async with aclosing(self.moments.watch()) as moments:
            async for moment in moments:
                yield b"event: now\ndata: " + moment + b"\n\n"

    async def session(self, request: Request) -> Response:
        """`GET /console/api/sessions/{id}`: a session's shape."""
        check_query(request)
        session = await self._session(request)
        vocabulary = None if session.refusal is not None else await self._vocabulary_made()
        look = await self._look(session)
        ref: VocabularyRef | None = None
        if vocabulary is not None:
            ref = {"hash": vocabulary.digest, "size": self.sessions.renderer.tokenizer.vocab_size}
        work = partial(
            console_session,
            look.facts,
            session.strands.discarded,
            look.tokens,
            created_at=session.created_at,
            busy=session.is_busy,
            metadata=session.options.metadata,
            num_requests=session.ledger.num_requests,
            vocabulary=ref,
        )
        shape = await self.sessions.pool.run(work, num_bytes=_BYTES_PER_TURN * len(session.nodes))
        return json_in_pieces(self.sessions.share, shape)

    async def turns(self, request: Request) -> Response:
        """`GET /console/api/sessions/{id}/turns?leaf=&start=&limit=&whole=`: turns of a line, with their texts."""
        session = await self._session(request)
        check_query(request, "leaf", "start", "limit", "whole")
        start, limit = number_of(request, "start", 0, least=0), number_of(request, "limit", 50, least=1)
        if limit > MAX_TURNS:
            raise InvalidRequest(f"limit must be at most {MAX_TURNS}, got {limit}.", param="/limit")
        whole = request.query_params.get("whole", "false")
        if whole not in ("true", "false"):
            raise InvalidRequest(f"whole must be 'true' or 'false', got {whole[:20]!r}.", param="/whole")
        look = await self._look(session)
        leaf = _leaf(request, session, look.facts)
        line = () if leaf is None else look.line(leaf).nodes
        page = turn_page(session.id, line, look.strand_of, start=start, limit=limit, whole=whole == "true")
        return in_pieces(self.sessions.share, page, media_type="application/json")

    async def tokens(self, request: Request) -> Response:
        """`GET /console/api/sessions/{id}/tokens?leaf=&start=&limit=`: tokens of a line, nine bytes each."""
        session = await self._session(request)
        check_query(request, "leaf", "start", "limit")
        start = number_of(request, "start", 0, least=0)
        limit = number_of(request, "limit", MAX_PAGE_TOKENS, least=1)
        if limit > MAX_PAGE_TOKENS:
            raise InvalidRequest(f"limit must be at most {MAX_PAGE_TOKENS}, got {limit}.", param="/limit")
        look = await self._look(session)
        leaf = _leaf(request, session, look.facts)
        content = b""
        if leaf is not None:  # of few turns on the loop: that is quicker than a hop, and waits for no thread
            line, stop = look.line(leaf), start + limit
            work = partial(token_page, line, start, stop, look.tokens)
            content = await self.sessions.pool.run(work, num_bytes=_BYTES_PER_TURN * line.num_turns(start, stop))
        return Response(content, media_type=BYTES_TYPE, headers={"cache-control": "no-store"})

    async def drift(self, request: Request) -> Response:
        """`GET /console/api/sessions/{id}/drift?most_tokens=`: its drift, counted; unknown where lines of more tokens
        than that would have to be compared for it."""
        session = await self._session(request)
        check_query(request, "most_tokens")
        most_tokens = number_of(request, "most_tokens", MOST_COMPARED_TOKENS, least=0)
        look = await self._look(session)
        known = self.sessions.drifts.known
        unknown = [leaf for leaf in look.leaves if known(session.id, leaf) is None]
        reports: list[DriftReport] | None = None
        if sum(leaf.num_tokens for leaf in unknown) <= most_tokens:
            async with self._comparing if unknown else nullcontext():
                reports = [report for _, report in await self.sessions.drift_of(session, look.leaves)]
        return json_response(drift_counts(session.id, len(look.facts.nodes), len(look.leaves), reports))

    async def vocabulary(self, request: Request) -> Response:
        """`GET /console/api/vocabulary/{hash}`: the bytes of every token; by its hash it never changes."""
        made = await self._vocabulary_made()
        if request.path_params["hash"] != made.digest:
            raise RouteNotFound(
                "There is no vocabulary with this hash: a session of another model is shown by its ids."
            )
        starts = range(0, len(made.content), _SENT_BYTES)
        pieces = (made.content[start : start + _SENT_BYTES] for start in starts)
        response = in_pieces(self.sessions.share, pieces, media_type=BYTES_TYPE)
        response.headers["cache-control"] = FOR_EVER
        return response

    async def group(self, request: Request) -> Response:
        """`GET /console/api/group?name=`: the rollouts of a group, and where their tokens part."""
        check_query(request, "name")
        name = request.query_params.get("name")
        if name is None:
            raise InvalidRequest("name must be there: the group whose rollouts are shown.", param="/name")
        found = [session_id async for session_id in self.parts.ids(SessionFilter(group=name))]
        rollouts: list[RolloutFacts] = []
        for session_id in found[:MAX_ROLLOUTS]:
            rollout = await self.parts.rollout(session_id)
            if rollout is not None:
                rollouts.append(rollout)
        num_left_out = max(0, len(found) - MAX_ROLLOUTS)
        work = partial(group_view, name, rollouts, num_left_out=num_left_out)
        return json_in_pieces(self.sessions.share, await self.sessions.pool.run(work, num_bytes=_SENT_BYTES))

    async def groups(self, request: Request) -> Response:
        """`GET /console/api/groups?passes_at=`: all groups and steps in figures."""
        check_query(request, "passes_at")
        text = request.query_params.get("passes_at", "1")
        passes_at = _finite(text)
        if passes_at is None:
            raise InvalidRequest(f"passes_at must be a finite number, got {text[:20]!r}.", param="/passes_at")
        points: deque[RolloutPoint] = deque(maxlen=MAX_POINTS)
        num_points = num_ungrouped = 0
        async with aclosing(self.parts.asked_by(request.scope).points()) as found:
            async for point in found:
                if point is None:
                    num_ungrouped += 1
                else:
                    points.append(point)
                    num_points += 1
        moment = msgspec.json.decode(await self.moments.now(), type=_Moment)
        work = partial(
            steps_view,
            points,
            passes_at=passes_at,
            version=moment.weights.version,
            num_ungrouped=num_ungrouped,
            num_left_out=num_points - len(points),
        )
        view = await self.sessions.pool.run(work, num_bytes=_BYTES_PER_TURN * num_points)
        return json_in_pieces(self.sessions.share, view)

    async def _session(self, request: Request) -> Session:
        """The session of the path, to be read. Raises SessionNotFound."""
        return await self.sessions.manager.look_again(request.path_params["id"])

    async def _look(self, session: Session) -> _SessionLook:
        """A session's facts, and what all pages of its tokens need: made again once its turns are others."""
        strands, latest = session.strands, session.latest
        key = (strands.num_turns, strands.discarded, None if latest is None else latest.id, session.outcome)
        found = self._looks.get(session)
        if found is None or found.key != key:
            facts = session_facts(session)
            num_bytes = _BYTES_PER_TURN * strands.num_turns
            found = await self.sessions.pool.run(lambda: _SessionLook.of(key, facts), num_bytes=num_bytes)
            self._looks[session] = found
        return found

    async def _vocabulary_made(self) -> VocabularyBytes:
        if self._vocabulary is None:
            maker = VocabularyMaker(self.sessions.renderer.tokenizer)
            async for _ in self.sessions.share.pieces(maker.steps()):
                pass
            self._vocabulary = await self.sessions.pool.run(maker.made, num_bytes=_SENT_BYTES)
        return self._vocabulary


class _Weights(msgspec.Struct):
    version: str | None


class _Moment(msgspec.Struct):
    """The part of a moment that is read here."""

    weights: _Weights


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _leaf(request: Request, session: Session, facts: SessionFacts) -> Node | None:
    """The turn with which the wanted line ends: that of `leaf`, else the session's own. Raises InvalidRequest."""
    if "leaf" not in request.query_params:
        return facts.latest if facts.latest is not None else session.latest
    wanted = number_of(request, "leaf", 0, least=0)
    found = next((node for node in facts.nodes if node.id == wanted), None)
    if found is None:
        raise InvalidRequest(f"leaf must be a turn of this session, got {wanted}.", param="/leaf")
    return found


def console_endpoints(
    sessions: SessionRoutes, parts: SessionParts, moments: Moments
) -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
    """The endpoints of the console, by their names."""
    console = ConsoleRoutes(sessions=sessions, parts=parts, moments=moments)
    return {
        "page": console_page,
        "file": console_file,
        "now": console.now,
        "group": console.group,
        "groups": console.groups,
        "vocabulary": console.vocabulary,
        "session": console.session,
        "turns": console.turns,
        "drift": console.drift,
        "tokens": console.tokens,
    }
