"""The trace of one request: begun when it comes, sent when it is answered and its turns are over, whichever is later.

Owns nothing beyond the request's own facts, and makes no span before its end. It is the `RequestTrace` of its
turns. A request joined to another's turn, or refused, has a span of its own and no others.
"""

import uuid
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from stenograph.core.clock import Clock
from stenograph.core.errors import StenographError
from stenograph.core.telemetry import TurnEnd, TurnReport
from stenograph.core.trace_context import TraceContext
from stenograph.core.types import RequestId
from stenograph.otel.spans import (
    DIALECT,
    ERROR_TYPE,
    GEN_AI_CONVERSATION,
    HTTP_METHOD,
    HTTP_ROUTE,
    HTTP_STATUS,
    REQUEST_ID,
    TURN_END,
    URL_PATH,
    USER_AGENT,
    Attribute,
    EngineName,
    SpanKind,
    TraceSpan,
    engine_span_id,
    request_end,
    request_span_id,
    turn_spans,
)
from stenograph.session.turn import RequestRun


class SpanSink(Protocol):
    """Takes spans away. All methods are synchronous, cheap, and never raise."""

    def samples(self, parent: TraceContext | None, trace_id: str, name: str) -> bool:
        """Whether a trace is to be recorded: its client has decided that, or a sampler by its id."""
        ...

    def send(self, spans: Sequence[TraceSpan]) -> None:
        """Hand on the spans of a request, or count those without room."""
        ...


class RequestFacts(Struct, frozen=True, kw_only=True, gc=False):
    """A request as its head says it. `route` is empty where the path has parts that differ from request to request."""

    method: str
    path: str
    route: str
    dialect: str
    user_agent: str
    session_id: str | None


class _EndedTurns(Struct, frozen=True, kw_only=True):
    run: RequestRun
    reports: Sequence[TurnReport]
    session_id: str | None
    error: BaseException | None
    at: float


class TracedRequest:
    """One request on its way. `parent` is the client's span."""

    __slots__ = (
        *("_clock", "_ended", "_engine", "_facts", "_is_running", "_is_sampled", "_parent", "_refusal", "_served_at"),
        *("_sink", "_span", "_started_at"),
    )

    def __init__(
        self, facts: RequestFacts, parent: TraceContext | None, *, engine: EngineName, clock: Clock, sink: SpanSink
    ) -> None:
        self._facts = facts
        self._parent = parent
        self._engine = engine
        self._clock = clock
        self._sink = sink
        self._started_at = clock.monotonic()
        self._served_at: float | None = None
        self._span: TraceContext | None = None
        self._is_running = False
        self._refusal: StenographError | None = None
        self._ended: _EndedTurns | None = None

    def __repr__(self) -> str:
        return f"<TracedRequest {self._facts.path} of {None if self._span is None else self._span.trace_id}>"

    def generation(self, request_id: RequestId) -> TraceContext:
        """The span of a turn at the engine. The first turn's id names the request's own."""
        self._is_running = True
        span = self._span or self._begin(request_id)
        return TraceContext(
            trace_id=span.trace_id, span_id=engine_span_id(request_id), is_sampled=span.is_sampled, state=span.state
        )

    def ended(
        self, run: RequestRun, reports: Sequence[TurnReport], session_id: str | None, error: BaseException | None
    ) -> None:
        """The turns are over."""
        self._is_running = False
        self._ended = _EndedTurns(
            run=run, reports=reports, session_id=session_id, error=error, at=self._clock.monotonic()
        )
        if self._served_at is not None:
            self._send(self._served_at)

    def refused(self, error: StenographError) -> None:
        """The request made no turn."""
        self._is_running = False
        self._refusal = error

    def served(self) -> None:
        """The request's handler is done: its client has the answer, or has left."""
        self._served_at = self._clock.monotonic()
        if not self._is_running:
            self._send(self._served_at)

    def _begin(self, request_id: RequestId) -> TraceContext:
        parent = self._parent
        trace_id = str(request_id) if parent is None else parent.trace_id
        self._span = TraceContext(
            trace_id=trace_id,
            span_id=request_span_id(request_id),
            is_sampled=self._sink.samples(parent, trace_id, self._name),
            state="" if parent is None else parent.state,
        )
        return self._span

    @property
    def _name(self) -> str:
        return f"{self._facts.method} {self._facts.route or self._facts.dialect}"

    def _send(self, served_at: float) -> None:
        span, ended = self._span or self._begin(RequestId(uuid.uuid4().hex)), self._ended
        if not span.is_sampled:
            return
        epoch = self._clock.wall() - self._clock.monotonic()
        error = self._refusal if ended is None else ended.error
        spans = [
            TraceSpan(
                name=self._name,
                kind=SpanKind.SERVER,
                context=span,
                parent=self._parent,
                is_remote_parent=True,
                start_s=epoch + self._started_at,
                end_s=epoch + served_at,
                attributes=self._attributes(error),
                fault="" if error is None or _status(error) < 500 else str(error),
            )
        ]
        if ended is not None:
            for index, (turn, report) in enumerate(zip(ended.run.turns, ended.reports, strict=True)):
                spans += turn_spans(
                    turn,
                    report,
                    request=ended.run.request,
                    parent=span,
                    engine=self._engine,
                    ended_at=ended.at,
                    epoch=epoch,
                    is_first=not index,
                )
        self._sink.send(spans)

    def _attributes(self, error: BaseException | None) -> dict[str, Attribute]:
        facts, ended = self._facts, self._ended
        attributes: dict[str, Attribute] = {
            HTTP_METHOD: facts.method,
            URL_PATH: facts.path,
            DIALECT: facts.dialect,
            USER_AGENT: facts.user_agent,
        }
        session_id = facts.session_id if ended is None else ended.session_id
        if facts.route:
            attributes[HTTP_ROUTE] = facts.route
        if session_id is not None:
            attributes[GEN_AI_CONVERSATION] = session_id
        if error is not None:
            attributes[ERROR_TYPE] = error.code if isinstance(error, StenographError) else "internal_error"
            if ended is None or not ended.run.request.reply.stream:  # a stream's status was sent before its error
                attributes[HTTP_STATUS] = _status(error)
        if ended is not None:
            end = request_end(ended.reports)
            attributes[REQUEST_ID] = ended.run.request_id
            attributes[TURN_END] = end.value
            if end in (TurnEnd.COMMITTED, TurnEnd.UNRECORDED):
                attributes[HTTP_STATUS] = 200
        return attributes


def _status(error: BaseException) -> int:
    return error.client_status if isinstance(error, StenographError) else 500
