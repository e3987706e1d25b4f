"""A collector of traces on a socket of its own: reads OTLP over HTTP, and hands on the spans that come."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {1: "internal", 2: "server", 3: "client"}
"""Source: opentelemetry/proto/trace/v1/trace.proto, `Span.SpanKind`."""
ERROR = 2
"""Source: the same, `Status.StatusCode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span, as the collector got it. Ids are hexadecimal, times nanoseconds since the epoch."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """Takes exports. `hangs`: it reads them and never answers; `answer` is what it answers else."""

    def __init__(self, *, answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", hangs: bool = False) -> None:
        self.url = ""
        self.paths: list[str] = []
        self.asked = asyncio.Event()
        """An export has come."""
        self.answer = answer
        self._hangs = hangs
        self._spans: asyncio.Queue[Span] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    async def trace(self, num_spans: int) -> list[Span]:
        """Wait for that many more spans."""
        return [await self._spans.get() for _ in range(num_spans)]

    @property
    def num_left(self) -> int:
        """Spans that came and that no test has looked at."""
        return self._spans.qsize()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while head := await _head(reader):
                self.paths.append(head["path"])
                body = await reader.readexactly(int(head["content-length"]))
                self.asked.set()
                if self._hangs:
                    await asyncio.Event().wait()  # until the end
                for span in spans_of(body):
                    self._spans.put_nowait(span)
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side, or the test, has ended
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._serving.discard(task)


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """A request's path and headers; nothing at the connection's end."""
    line = await reader.readline()
    if not line:
        return {}
    found = {"path": line.split()[1].decode()}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        found[name.lower()] = value.strip()
    return found


def spans_of(body: bytes) -> list[Span]:
    """The spans of one export."""
    found = []
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            found += [
                Span(
                    name=span.name,
                    kind=KINDS[span.kind],
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    state=span.trace_state,
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    is_error=span.status.code == ERROR,
                    attributes=_attributes(span.attributes),
                    resource=resource,
                )
                for span in of_scope.spans
            ]
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, which)
