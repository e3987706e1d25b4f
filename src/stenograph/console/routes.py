"""The data of the console: given by no other route, or not in a form for a page. Starlette endpoints.

Read-only. Large answers are made on the CPU pool from a snapshot, or written in pieces; frequent ones (the moment, the
look at a live session) are kept for as long as they are true.
"""

import asyncio
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stenograph.console.groups import MAX_ROLLOUTS, GroupView, group_view
from stenograph.console.now import ConsoleNow
from stenograph.console.now_board import NowBoard
from stenograph.console.page_files import console_file, console_page
from stenograph.console.steps import MAX_POINTS, StepsView, steps_view
from stenograph.console.tokens import MAX_PAGE_TOKENS, LineTurns, TokenLook, token_page
from stenograph.console.views import (
    MAX_TURNS,
    ConsoleSession,
    DriftCounts,
    TurnPage,
    VocabularyRef,
    console_session,
    drift_counts,
    turn_page,
)
from stenograph.console.vocabulary import VocabularyBytes, VocabularyMaker
from stenograph.core.drift import DriftReport
from stenograph.core.errors import InvalidRequest, RouteNotFound
from stenograph.export.group_rollouts import RolloutFacts
from stenograph.http.bulk_parts import Pieces, SessionParts
from stenograph.http.closed_stream import ClosedStream
from stenograph.http.late_routes import Late
from stenograph.http.processes import Moments
from stenograph.http.query import check_query, number_of
from stenograph.http.responses import in_pieces, json_in_pieces, json_response
from stenograph.http.route import STORED, TEXT, Needs, Schema, in_json, one_answer, parameter, route
from stenograph.http.session_routes import SessionRoutes
from stenograph.http.wire import delivery_of
from stenograph.session.facts import session_facts
from stenograph.session.rollout_points import RolloutPoint
from stenograph.session.selection import SessionFilter
from stenograph.session.session import Session
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, leaves
from stenograph.trajectory.turn import Node

_BYTES_PER_TURN = 64
"""About the cost of a turn in a session's shape; only decides on work small enough for the loop."""
_KEPT_LINES = 16
MOST_COMPARED_TOKENS = 65_536
"""Lines of more tokens are not compared for a list unless somebody asks for it: it takes a thread for seconds."""
_SENT_BYTES = 256 * 1024
_NUMBER: Schema = {"type": "number"}
_HASH: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_START: Schema = {"type": "integer", "minimum": 0, "default": 0}
_LEAF = parameter(
    "query", "leaf", "The turn with which the line ends; by default that of the session's own line.",
    {"type": "integer", "minimum": 0},
)  # fmt: skip

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
        """The turns of a requested line; those of the last few are kept."""
        if leaf.id not in self.lines:
            if len(self.lines) >= _KEPT_LINES:
                self.lines.clear()
            self.lines[leaf.id] = LineTurns.of(leaf)
        return self.lines[leaf.id]


def console_groups(late: Late) -> Sequence[object]:
    """The object with the rows in its class."""
    moments = late.core.processes.moments(NowBoard(late.core))
    return (ConsoleRoutes(sessions=late.sessions, parts=late.all_parts, moments=moments),)


@dataclass(slots=True, kw_only=True)
class ConsoleRoutes:
    """The console of one server."""

    sessions: SessionRoutes
    parts: SessionParts
    moments: Moments
    _vocabulary: VocabularyBytes | None = None
    _comparing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """One session is compared for a list at a time, however many look at theirs: turns need the threads."""
    _looks: WeakKeyDictionary[Session, _SessionLook] = field(default_factory=WeakKeyDictionary[Session, _SessionLook])

    @route(
        "GET /console",
        "getConsole",
        "Get the console, a page for a browser",
        answers=one_answer("The page.", {"text/html": {"schema": TEXT}}),
        needs=Needs.NOTHING,
    )
    async def page(self, request: Request) -> Response:
        """`GET /console`: the page; its other files lie below it."""
        return console_page(request)

    @route(
        "GET /console/{file:path}",
        "getConsoleFile",
        "Get a file of the console's page",
        parameters=({**parameter("path", "file", "The file's path.", TEXT), "required": True},),
        answers=one_answer("The file.", {"*/*": {}}),
        errors=(RouteNotFound,),
        needs=Needs.NOTHING,
    )
    async def file(self, request: Request) -> Response:
        """`GET /console/{file}`: a file of the page; `/console/` leads to the page. Raises RouteNotFound."""
        return console_file(request)

    @route(
        "GET /console/api/now",
        "getNow",
        "Get what runs now, and figures of the last minute",
        answers=one_answer(
            "The moment; where the client accepts `text/event-stream`, one each second.",
            {**in_json(ConsoleNow), EVENTS_TYPE: {"schema": TEXT}},
        ),
        shapes=(ConsoleNow,),
        errors=(InvalidRequest,),
    )
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

    @route(
        "GET /console/api/sessions/{id}",
        "getSessionShape",
        "Get a session's shape: strands, lines and turns in columns",
        ConsoleSession,
        errors=(InvalidRequest, *STORED),
    )
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
            look.tokens,
            scores=tuple(session.annotations),
            created_at=session.created_at,
            busy=session.is_busy,
            num_requests=session.ledger.num_requests,
            vocabulary=ref,
        )
        shape = await self.sessions.pool.run(work, num_bytes=_BYTES_PER_TURN * len(session.nodes))
        return json_in_pieces(self.sessions.share, shape)

    @route(
        "GET /console/api/sessions/{id}/turns",
        "getTurns",
        "Get turns of a line with their texts",
        TurnPage,
        parameters=(
            _LEAF,
            parameter("query", "start", "The first turn, counted from 0.", _START),
            parameter(
                "query",
                "limit",
                "The most turns.",
                {"type": "integer", "minimum": 1, "maximum": MAX_TURNS, "default": 50},
            ),
            parameter("query", "whole", "`true` leaves no text out.", {"type": "string", "enum": ["true", "false"]}),
        ),
        errors=(InvalidRequest, *STORED),
    )
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

    @route(
        "GET /console/api/sessions/{id}/tokens",
        "getTokens",
        "Get tokens of a line, nine bytes each",
        parameters=(
            _LEAF,
            parameter("query", "start", "The first token, counted from 0.", _START),
            parameter(
                "query",
                "limit",
                "The most tokens.",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_TOKENS, "default": MAX_PAGE_TOKENS},
            ),
            parameter("query", "scores", "An annotation, in place of the recorded log-probabilities.", TEXT),
        ),
        answers=one_answer("Ids, then log-probabilities, then flags (docs/console.md).", {BYTES_TYPE: {}}),
        errors=(InvalidRequest, *STORED),
    )
    async def tokens(self, request: Request) -> Response:
        """`GET /console/api/sessions/{id}/tokens?leaf=&start=&limit=&scores=`: tokens of a line, nine bytes each."""
        session = await self._session(request)
        check_query(request, "leaf", "start", "limit", "scores")
        name = request.query_params.get("scores")
        if name is not None and name not in session.annotations:
            raise InvalidRequest(f"The session has no scores {name[:80]!r}.", param="/scores")
        scores = None if name is None else session.annotations[name]
        start = number_of(request, "start", 0, least=0)
        limit = number_of(request, "limit", MAX_PAGE_TOKENS, least=1)
        if limit > MAX_PAGE_TOKENS:
            raise InvalidRequest(f"limit must be at most {MAX_PAGE_TOKENS}, got {limit}.", param="/limit")
        look = await self._look(session)
        leaf = _leaf(request, session, look.facts)
        content = b""
        if leaf is not None:  # of few turns on the loop: that is quicker than a hop, and waits for no thread
            line, stop = look.line(leaf), start + limit
            work = partial(token_page, line, start, stop, look.tokens, scores)
            content = await self.sessions.pool.run(work, num_bytes=_BYTES_PER_TURN * line.num_turns(start, stop))
        return Response(content, media_type=BYTES_TYPE, headers={"cache-control": "no-store"})

    @route(
        "GET /console/api/sessions/{id}/drift",
        "getDriftCounts",
        "Get a session's drift, counted, if it is known or quickly found",
        DriftCounts,
        parameters=(
            parameter(
                "query",
                "most_tokens",
                "The most tokens of lines that are compared for it.",
                {"type": "integer", "minimum": 0, "default": MOST_COMPARED_TOKENS},
            ),
        ),
        errors=(InvalidRequest, *STORED),
    )
    async def drift(self, request: Request) -> Response:
        """`GET /console/api/sessions/{id}/drift?most_tokens=`: its drift, counted; unknown where it takes a comparison
        of lines of more tokens."""
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

    @route(
        "GET /console/api/vocabulary/{hash}",
        "getVocabulary",
        "Get the bytes of every token; by its hash it never changes",
        parameters=({**parameter("path", "hash", "The hash in a session's shape.", _HASH), "required": True},),
        answers=one_answer("The vocabulary (docs/console.md).", {BYTES_TYPE: {}}),
        errors=(RouteNotFound,),
    )
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

    @route(
        "GET /console/api/group",
        "getGroup",
        "Get a group's rollouts, and where their tokens part",
        GroupView,
        parameters=({**parameter("query", "name", "The group.", TEXT), "required": True},),
        errors=(InvalidRequest, *STORED),
    )
    async def group(self, request: Request) -> Response:
        """`GET /console/api/group?name=`: the rollouts of a group, and where their tokens part."""
        check_query(request, "name")
        name = request.query_params.get("name")
        if name is None:
            raise InvalidRequest("name must be there: the group whose rollouts are shown.", param="/name")
        parts = self.parts.asked_by(request.scope)
        found = [session_id async for session_id in parts.ids(SessionFilter(group=name))]
        rollouts: list[RolloutFacts] = []
        for session_id in found[:MAX_ROLLOUTS]:
            rollout = await parts.rollout(session_id)
            if rollout is not None:
                rollouts.append(rollout)
        num_left_out = max(0, len(found) - MAX_ROLLOUTS)
        work = partial(group_view, name, rollouts, num_left_out=num_left_out)
        return json_in_pieces(self.sessions.share, await self.sessions.pool.run(work, num_bytes=_SENT_BYTES))

    @route(
        "GET /console/api/groups",
        "getGroups",
        "Get all groups and steps in figures: rewards, lengths, staleness, pass@k",
        StepsView,
        parameters=(parameter("query", "passes_at", "The least reward of a rollout that passes; 1.", _NUMBER),),
        errors=(InvalidRequest, *STORED),
    )
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
        return await self.sessions.manager.sessions.look_again(request.path_params["id"])

    async def _look(self, session: Session) -> _SessionLook:
        """A session's facts, and those for all pages of its tokens: made again once its turns are others."""
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
    """The part of a moment read here."""

    weights: _Weights


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _leaf(request: Request, session: Session, facts: SessionFacts) -> Node | None:
    """The last turn of the wanted line: the one of `leaf`, else the session's own. Raises InvalidRequest."""
    if "leaf" not in request.query_params:
        return facts.latest if facts.latest is not None else session.latest
    wanted = number_of(request, "leaf", 0, least=0)
    found = next((node for node in facts.nodes if node.id == wanted), None)
    if found is None:
        raise InvalidRequest(f"leaf must be a turn of this session, got {wanted}.", param="/leaf")
    return found
