"""Traces of a server's requests: begins one for each request to a dialect, and owns their sink.

Without `--otlp-endpoint` there is no `Tracing`, and neither this module nor OpenTelemetry's SDK is imported.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from stenograph import __version__
from stenograph.core.clock import Clock
from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.core.trace_context import read_trace_context
from stenograph.engine.base import Engine
from stenograph.http.count_route import CountRoute
from stenograph.http.metric_table import COUNTER, row
from stenograph.http.metrics import Metrics
from stenograph.http.part import Core
from stenograph.http.turn_route import RequestPath, TurnRoute, client_name
from stenograph.http.wire import headers_of
from stenograph.otel.request import RequestFacts, SpanSink, TracedRequest
from stenograph.otel.spans import EngineName
from stenograph.parts import TraceSettings, settings_of


class SpanExport(SpanSink, Protocol):
    """A sink of spans for a collector, on a thread of its own."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Spans by outcome, as `TRACE_METRICS` names them. May be read on any thread."""
        ...

    async def aclose(self) -> None:
        """Send the waiting spans, for as long as a stop may take; then drop them."""
        ...


class Tracing:
    """Begins the traces of requests to an engine."""

    def __init__(self, export: SpanExport, *, engine: Engine, clock: Clock) -> None:
        self.export = export
        self._engine = engine
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Tracing to {self.export!r}>"

    def routes(self, turns: Sequence[TurnRoute | CountRoute]) -> "list[TracedRoute | CountRoute]":
        """Routes; those of turns have traces."""
        return [TracedRoute(route, self) if isinstance(route, TurnRoute) else route for route in turns]

    async def aclose(self) -> None:
        """Send the waiting spans, for as long as a stop may take."""
        await self.export.aclose()

    def begin(self, scope: Scope, path: RequestPath, dialect: str) -> TracedRequest:
        """The trace of a new request; the client's is continued if it sent a valid one."""
        capabilities = self._engine.capabilities
        facts = RequestFacts(
            method=scope["method"],
            path=scope["path"],
            route="" if path.at else path.route,
            dialect=dialect,
            user_agent=client_name(headers_of(scope)),
            session_id=path.session_id,
        )
        engine = EngineName(engine=capabilities.engine, model=capabilities.model, is_remote=self._engine.forwards)
        parent = read_trace_context(scope["headers"])
        return TracedRequest(facts, parent, engine=engine, clock=self._clock, sink=self.export)


TRACE_METRICS = (
    row(
        "stenograph_trace_spans_total",
        COUNTER,
        "Spans of traces, by outcome: exported; failed, because the collector did not take them; or dropped, because"
        " too many waited for it.",
        Tracing,
        lambda tracing: tracing.export.counts,
        label=("outcome", ("exported", "failed", "dropped")),
    ),
)


class TracedRoute:
    """A dialect's route with traces of its requests."""

    def __init__(self, route: TurnRoute, tracing: Tracing) -> None:
        self.dialect = route.dialect
        self._route = route
        self._tracing = tracing

    def __repr__(self) -> str:
        return f"<TracedRoute {self.dialect.name}>"

    async def handle(self, scope: Scope, receive: Receive, send: Send, path: RequestPath) -> None:
        """Serve one request to `path`."""
        trace = self._tracing.begin(scope, path, self.dialect.name)
        try:
            await self._route.handle(scope, receive, send, replace(path, trace=trace))
        finally:
            trace.served()


def opened_tracing(core: Core) -> Tracing:
    """The traces of requests to a server's engine, sent to the collector of `--otlp-endpoint`."""
    endpoint = settings_of(TraceSettings, core.settings).otlp_endpoint
    assert endpoint is not None
    return traced(endpoint, core.services.engine, core.services.clock, core.metrics)


def traced(endpoint: str, engine: Engine, clock: Clock, metrics: Metrics) -> Tracing:
    """The same, to the collector at `endpoint`.

    Its counts are among the `metrics`. Raises StartupError, one line, where the SDK is not installed.
    """
    try:
        export: SpanExport = entry("stenograph.otel.otlp:OtlpExport")(endpoint, version=__version__)
    except ImportError as error:
        raise StartupError(
            f"--otlp-endpoint needs OpenTelemetry's SDK and its exporter by HTTP, and {error.name or error} cannot be"
            " imported: pip install -e '.[otel]'"
        ) from error
    tracing = Tracing(export, engine=engine, clock=clock)
    metrics.show(TRACE_METRICS, tracing)
    return tracing
