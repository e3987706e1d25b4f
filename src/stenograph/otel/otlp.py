"""Sends spans to a collector by OTLP over HTTP, with OpenTelemetry's SDK. The only module that imports it.

Owns the SDK's provider. Its thread exports a bounded queue: a slow or absent collector costs
spans, each of them counted, and never a turn. Configures itself as every use of the SDK does from the environment:
headers and certificates of the exporter, the sampler, the resource (`OTEL_…`).
"""

import asyncio
import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanKind as SdkSpanKind
from opentelemetry.trace.span import TraceState
from yarl import URL

from stenograph.core.trace_context import TraceContext
from stenograph.otel.spans import Attribute, SpanKind, TraceSpan

log = logging.getLogger(__name__)

TRACES_PATH = "v1/traces"
"""Of a collector's address. Source: OTLP specification 1.8, "OTLP/HTTP Request"."""

MAX_WAITING = 16_384
"""Spans waiting for the collector: those of a thousand turns and more."""
BATCH_SPANS = 512
"""Spans in one request to the collector: the SDK's default."""
FLUSH_S = 2.0
"""Seconds for a stop to wait for the last spans to be sent."""
MAX_REASON_CHARS = 300
MAX_TEXT_CHARS = 1024
"""Length of a text in a span: paths and errors may have a client's words."""
_INT64 = range(-(2**63), 2**63)

_SDK_LOG = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
_KINDS = {
    SpanKind.SERVER: SdkSpanKind.SERVER,
    SpanKind.CLIENT: SdkSpanKind.CLIENT,
    SpanKind.INTERNAL: SdkSpanKind.INTERNAL,
}


class _Reasons(logging.Filter):
    """Keeps the first line of the SDK's exporter about a batch, and lets none through: an outage has one line,
    ours."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def begin(self, exporter: "_CountedExporter") -> None:
        """Take this thread's log lines from now on for this exporter's."""
        self._of_thread.exporter = exporter

    def filter(self, record: logging.LogRecord) -> bool:
        exporter: _CountedExporter | None = getattr(self._of_thread, "exporter", None)
        if exporter is not None and not exporter.reason:
            exporter.reason = " ".join(record.getMessage().split())[:MAX_REASON_CHARS]
        return False


_REASONS = _Reasons()
_SDK_LOG.addFilter(_REASONS)


class _GivenIds(IdGenerator):
    """The ids of the next span: made from the request's, not drawn here."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id

    def is_trace_id_random(self) -> bool:
        """The last seven bytes of a random UUID are random."""
        return True


class _CountedExporter(SpanExporter):
    """The SDK's exporter, with its successes and failures counted; called on the SDK's thread alone."""

    def __init__(self, url: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._url = url
        self._is_down = False
        self._is_closed = False
        self.num_exported = 0
        self.num_failed = 0
        self.reason = ""
        """The reason why the present or the last batch was not taken; empty where nothing is wrong."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _REASONS.begin(self)
        self.reason = ""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_exported += len(spans)
            else:
                self.num_failed += len(spans)
            self._tell(is_down=result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._is_closed = True
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # in 1.45

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _tell(self, *, is_down: bool) -> None:
        """Log where an outage of the collector begins and ends."""
        if self._is_closed:
            return
        if is_down and not self._is_down:
            log.warning("the collector at %s does not take traces, whose spans are lost: %s", self._url, self.reason)
        elif self._is_down and not is_down:
            log.info("the collector at %s takes traces again", self._url)
        self._is_down = is_down


class OtlpExport:
    """The way of a server's spans to the collector at `endpoint`. A `SpanExport`."""

    def __init__(
        self, endpoint: str, *, version: str, flush_s: float = FLUSH_S, max_waiting: int = MAX_WAITING
    ) -> None:
        """`flush_s` is how long its end waits for the last spans to be taken, and `max_waiting` how many may wait."""
        url = URL(endpoint, encoded=True)
        if not url.path.endswith(TRACES_PATH):
            url = url.with_path(f"{url.path.rstrip('/')}/{TRACES_PATH}", encoded=True)
        self._url = str(url)
        self._flush_s = flush_s
        self._max_waiting = max_waiting
        self._exporter = _CountedExporter(self._url)
        self._ids = _GivenIds()
        self._provider = TracerProvider(resource=_resource(version), id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=MAX_WAITING, max_export_batch_size=BATCH_SPANS)
        )
        self._tracer = self._provider.get_tracer("stenograph", version)
        self._num_sent = 0
        self._num_dropped = 0

    def __repr__(self) -> str:
        return f"<OtlpExport {self._url} {self.num_waiting} waiting>"

    @property
    def num_waiting(self) -> int:
        """Spans neither exported nor lost yet."""
        return self._num_sent - self._exporter.num_exported - self._exporter.num_failed

    @property
    def counts(self) -> Mapping[str, int]:
        """Spans by their fate."""
        return {
            "exported": self._exporter.num_exported,
            "failed": self._exporter.num_failed,
            "dropped": self._num_dropped,
        }

    def samples(self, parent: TraceContext | None, trace_id: str, name: str) -> bool:
        """Whether the SDK's sampler takes this trace: by default one recorded by its client, or begun here."""
        around = _around(parent, is_remote=True)
        decision = self._provider.sampler.should_sample(around, int(trace_id, 16), name).decision
        return decision is Decision.RECORD_AND_SAMPLE

    def send(self, spans: Sequence[TraceSpan]) -> None:
        """Put spans into the queue of the SDK's thread; where there is no room for all, none."""
        if self.num_waiting + len(spans) > self._max_waiting:
            self._num_dropped += len(spans)
            return
        for span in spans:
            self._ids.trace_id = int(span.context.trace_id, 16)
            self._ids.span_id = int(span.context.span_id, 16)
            made = self._tracer.start_span(
                span.name,
                _around(span.parent, is_remote=span.is_remote_parent),
                kind=_KINDS[span.kind],
                attributes={name: _writable(value) for name, value in span.attributes.items()},
                start_time=int(span.start_s * 1e9),
                record_exception=False,
                set_status_on_exception=False,
            )
            if span.fault:
                made.set_status(Status(StatusCode.ERROR, _text(span.fault)))
            self._num_sent += made.is_recording()
            made.end(int(span.end_s * 1e9))

    async def aclose(self) -> None:
        """Send the waiting spans, if the collector takes them in time; the rest is lost with the process."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=close, name="otlp-close", daemon=True).start()
        try:
            async with asyncio.timeout(0 if self._exporter.reason else self._flush_s):
                await closed.wait()
        except TimeoutError:
            if self.num_waiting:
                log.warning("the collector at %s did not take the last %d spans", self._url, self.num_waiting)
            self._exporter.shutdown()  # it tries no more


def _around(parent: TraceContext | None, *, is_remote: bool) -> Context:
    """The SDK's context of a span with this parent."""
    if parent is None:
        return Context()
    context = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote,
        TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
        TraceState.from_header([parent.state]) if parent.state else None,
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


def _writable(value: Attribute) -> Attribute:
    """A value fit for protobuf: any other would cost its whole batch."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, tuple):
        return tuple(map(_text, value))
    return value if not isinstance(value, int) or value in _INT64 else str(value)


def _text(text: str) -> str:
    """Text cut to its longest length, and in UTF-8."""
    return text[:MAX_TEXT_CHARS] if text.isascii() else text[:MAX_TEXT_CHARS].encode(errors="replace").decode()


def _resource(version: str) -> Resource:
    """This process of a server; the environment's attributes win."""
    ours = Resource(
        {"service.name": "stenograph", "service.version": version, "service.instance.id": str(uuid.uuid4())}
    )
    found = Resource.create()
    name = str(found.attributes.get("service.name", ""))
    return found.merge(ours) if name.startswith("unknown_service") else ours.merge(found)
