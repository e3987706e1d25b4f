"""The routes of scores: one session's, and many sessions' one after the other as lines of JSON."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import NotRequired, TypedDict, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import (
    Draining,
    EngineUnavailable,
    LimitExceeded,
    SamplesInconsistent,
    StenographError,
    UnrenderableMessage,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
    WorkerUnavailable,
)
from stenograph.core.json_types import Count, Hex32, Logprob, TokenIds
from stenograph.core.outcome import Annotation
from stenograph.http.bulk_parts import SessionParts
from stenograph.http.closed_stream import ClosedStream
from stenograph.http.create_route import decoded
from stenograph.http.late_routes import Late
from stenograph.http.responses import json_in_pieces
from stenograph.http.route import STORED, one_answer, route
from stenograph.http.session_routes import SessionRoutes
from stenograph.http.wire import ClientGone, ClientLink, count_error, delivery_of
from stenograph.parts import ScoreSettings, settings_of
from stenograph.scores.desk import ScoreDesk
from stenograph.scores.requests import (
    ScoreManyBody,
    ScoreRequestBody,
    decode_score,
    decode_score_many,
    one_of,
)
from stenograph.session.selection import SessionFilter, SessionState

T = TypeVar("T")

NDJSON = "application/x-ndjson"
ENGINE_FAULTS = (EngineUnavailable, UpstreamInvalid, UpstreamTimeout, UpstreamUnreachable)


class ScoredTurn(TypedDict):
    """Scores of a turn's sampled tokens, in nats. `top_ids` and `top_log_probs` have the likeliest ids of each token,
    row after row, each row as long as `top_k`."""

    node_id: Count
    log_probs: Sequence[Logprob]
    top_ids: NotRequired[TokenIds]
    top_log_probs: NotRequired[Sequence[Logprob]]


class AnnotationView(TypedDict):
    """An annotation without its numbers. `scored_at` is in seconds of the epoch; `tokens` are log-probabilities of
    named tokens. `was_scored`: it was there already."""

    name: str
    digest: str
    engine: str
    policy: str | None
    weight_version: str | None
    scored_at: float
    num_scored: Count
    tokens: Mapping[str, Logprob]
    was_scored: NotRequired[bool]


class ScoresView(AnnotationView):
    """The scores of a session's tokens: raw log-probabilities, under the model alone."""

    session_id: Hex32
    turns: Sequence[ScoredTurn]


class AnnotationList(TypedDict):
    """A session's annotations."""

    session_id: Hex32
    scores: Sequence[AnnotationView]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRoutes:
    """The routes of scores of one server."""

    sessions: SessionRoutes
    parts: SessionParts
    desk: ScoreDesk
    timeout_s: float | None

    @route(
        "POST /sessions/{id}/scores",
        "scoreSession",
        "Score a session's recorded tokens by a teacher-forced pass",
        ScoresView,
        body=ScoreRequestBody,
        errors=(SamplesInconsistent, UnrenderableMessage, LimitExceeded, Draining, *ENGINE_FAULTS, *STORED),
    )
    async def score(self, request: Request) -> Response:
        """`POST /sessions/{id}/scores`."""
        session_id, manager = request.path_params["id"], self.sessions.manager
        await manager.sessions.peek(session_id)  # 404 comes before a body that is wrong
        wire = await decoded(request, decode_score, self.sessions.pool, self.sessions.max_body_bytes)
        link = delivery_of(request.scope)
        annotation, was_scored = await _while_there(link, partial(self._scored, session_id, wire))
        view = annotation_view(annotation)
        shown: ScoresView = {
            **view,
            "was_scored": was_scored,
            "session_id": session_id,
            "turns": [_turn(node, annotation) for node in annotation.turns],
        }
        return json_in_pieces(self.sessions.share, shown)

    @route(
        "GET /sessions/{id}/scores",
        "listScores",
        "List the annotations of a session",
        AnnotationList,
        errors=STORED,
    )
    async def list_scores(self, request: Request) -> Response:
        """`GET /sessions/{id}/scores`."""
        session = await self.sessions.manager.sessions.peek(request.path_params["id"])
        found: AnnotationList = {
            "session_id": session.id,
            "scores": [annotation_view(one) for one in session.annotations.values()],
        }
        return json_in_pieces(self.sessions.share, found)

    @route(
        "POST /scores",
        "scoreSessions",
        "Score the recorded tokens of many sessions",
        body=ScoreManyBody,
        answers=one_answer("A line of JSON for each session as it is scored, and one at the end.", {NDJSON: {}}),
    )
    async def score_many(self, request: Request) -> Response:
        """`POST /scores`."""
        wire = await decoded(request, decode_score_many, self.sessions.pool, self.sessions.max_body_bytes)
        link = delivery_of(request.scope)
        lines = self._lines(wire, link, self.parts.asked_by(request.scope))
        return ClosedStream(link, lines, media_type=NDJSON)

    async def _lines(self, wire: ScoreManyBody, link: ClientLink, parts: SessionParts) -> AsyncGenerator[bytes, None]:
        """A line for each session, those of one round at once, then the sums."""
        one, num_sessions, num_failed, num_scored = one_of(wire), 0, 0, 0
        async with aclosing(_ids(wire, parts)) as ids:
            while some := [id_ async for id_ in _some(ids, self.desk.in_flight)]:
                told = await _while_there(link, partial(self._round, some, one, parts))
                for line in told:
                    num_sessions += 1
                    num_failed += "error" in line
                    num_scored += 0 if line.get("was_scored") else _count(line.get("num_scored"))
                    yield msgspec.json.encode(line) + b"\n"
        end = {"done": True, "sessions": num_sessions, "failed": num_failed, "scored_tokens": num_scored}
        yield msgspec.json.encode(end) + b"\n"

    async def _round(self, ids: Sequence[str], wire: ScoreRequestBody, parts: SessionParts) -> list[dict[str, object]]:
        return list(await asyncio.gather(*(self._line(session_id, wire, parts) for session_id in ids)))

    async def _line(self, session_id: str, wire: ScoreRequestBody, parts: SessionParts) -> dict[str, object]:
        """The line of one session; another process makes that of its own."""
        try:
            answer = await parts.passed_on(session_id, f"/sessions/{session_id}/scores", msgspec.json.encode(wire))
            if answer is not None:
                return {"session_id": session_id, **_told(*answer)}
            annotation, was_scored = await self._scored(session_id, wire)
            return {"session_id": session_id, **annotation_view(annotation), "was_scored": was_scored}
        except StenographError as error:
            count_error(self.sessions.metrics, error)
            told_error = {"code": error.code, "status": error.status, "message": str(error)}
            return {"session_id": session_id, "error": told_error}

    async def _scored(self, session_id: str, wire: ScoreRequestBody) -> tuple[Annotation, bool]:
        """The annotation of one session, in time. Raises UpstreamTimeout, and as `ScoreDesk.score`."""
        wait = asyncio.timeout(self.timeout_s)
        try:
            async with wait:
                return await self.desk.score(await self.sessions.manager.sessions.peek(session_id), wire)
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise UpstreamTimeout(f"The engine did not score the tokens within {self.timeout_s:g} s.") from error


async def _while_there(link: ClientLink, work: Callable[[], Awaitable[T]]) -> T:
    """The result of work for a client that waits for it. Raises ClientGone, and as the work."""
    loop, wait = asyncio.get_running_loop(), asyncio.timeout(None)
    try:
        async with wait:
            link.when_gone(lambda: wait.reschedule(loop.time()))
            return await work()
    except TimeoutError as error:
        if not wait.expired():
            raise
        raise ClientGone from error
    finally:
        link.when_gone(None)


def score_groups(late: Late) -> Sequence[object]:
    """The object with the rows in its class."""
    core = late.core
    desk = ScoreDesk(
        core.services,
        core.manager.sessions,
        in_flight=settings_of(ScoreSettings, core.settings).scores_in_flight,
    )
    return (ScoreRoutes(sessions=late.sessions, parts=late.all_parts, desk=desk, timeout_s=core.services.timeout_s),)


def annotation_view(annotation: Annotation) -> AnnotationView:
    """An annotation without its numbers."""
    return {
        "name": annotation.name,
        "digest": annotation.digest,
        "engine": annotation.engine,
        "policy": annotation.policy,
        "weight_version": annotation.version,
        "scored_at": annotation.at,
        "num_scored": annotation.num_scored,
        "tokens": annotation.tokens,
    }


def _turn(node: int, annotation: Annotation) -> ScoredTurn:
    scores = annotation.turns[node]
    row: ScoredTurn = {"node_id": node, "log_probs": scores.logprobs}
    if scores.top_ids:
        row["top_ids"], row["top_log_probs"] = scores.top_ids, scores.top_logprobs
    return row


def _told(status: int, body: bytes) -> dict[str, object]:
    """The facts of a session's line in another process's answer. Raises WorkerUnavailable for one of another shape."""
    try:
        told = msgspec.json.decode(body, type=dict[str, object])
        told.pop("turns", None)
        if status == 200:
            return told
        error = cast("Mapping[str, object]", told["error"])
        return {"error": {"code": error["code"], "status": status, "message": error["message"]}}
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise WorkerUnavailable(f"The process of the session answered with {status}.") from error


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


async def _some(ids: AsyncGenerator[str, None], most: int) -> AsyncGenerator[str, None]:
    for _ in range(most):
        if (session_id := await anext(ids, None)) is None:
            return
        yield session_id


async def _ids(wire: ScoreManyBody, parts: SessionParts) -> AsyncGenerator[str, None]:
    """The ids of the requested sessions."""
    for session_id in dict.fromkeys(wire.sessions or ()):
        yield session_id
    if wire.sessions is None:
        state = None if wire.state is None else SessionState(wire.state)
        wanted = SessionFilter(group=wire.group, state=state, metadata=wire.where or {})
        async with aclosing(parts.ids(wanted)) as ids:
            async for session_id in ids:
                yield session_id
