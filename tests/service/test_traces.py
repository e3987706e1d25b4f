"""Traces: what a collector gets of a request, and that no collector costs a turn anything."""

import asyncio
import re
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes, user_agent_attributes

import stenograph
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.clock import SystemClock
from stenograph.core.errors import EngineUnavailable, StartupError
from stenograph.core.trace_context import TraceContext
from stenograph.http.metrics import Metrics
from stenograph.otel import spans as names
from stenograph.otel import tracing
from stenograph.otel.otlp import OtlpExport
from stenograph.otel.spans import TraceSpan

from .collector import Collector, Span
from .conftest import Live, assistant, user
from .test_sglang_chat import Connect, connect  # noqa: F401 - a fixture

PRODUCT = Path(stenograph.__file__).parent

Serve = Callable[..., AbstractAsyncContextManager[Live]]

CLIENTS = TraceContext(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331", is_sampled=True)
"""A client's span: the example of the recommendation."""

STAGES = ("receive", "admit", "decode", "render", "decode_tokens", "validate", "commit", "reply")
"""Stages of a chat with the scripted engine, which has no times of its own."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK sends what it has at once, and straight to the collector."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("NO_PROXY", "*")


def by_name(spans: list[Span]) -> dict[str, Span]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def metrics_of(live: Live) -> str:
    return (await live.call("GET", "/metrics")).body.decode()


async def traced_of(live: Live) -> dict[str, int]:
    """The counts of spans by outcome."""
    prefix = 'stenograph_trace_spans_total{outcome="'
    lines = [line.removeprefix(prefix) for line in (await metrics_of(live)).splitlines() if line.startswith(prefix)]
    return {line.split('"')[0]: int(float(line.split()[1])) for line in lines}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_one_trace_with_the_ids_and_the_times_of_its_record(serve: Serve, stream: bool) -> None:
    async with Collector() as collector, serve(otlp_endpoint=collector.url) as live:
        session = await live.open()
        live.says("yes")
        answer = await live.chat(session, user("a question"), stream=stream, temperature=0.5, max_tokens=7)
        assert answer.status == 200, answer.body
        spans = by_name(await collector.trace(2 + len(STAGES)))
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]

    assert set(collector.paths) == {"/v1/traces"}
    assert set(spans) == {"POST /v1/chat/completions", "chat scripted", *STAGES}
    root, call = spans["POST /v1/chat/completions"], spans["chat scripted"]
    request_id = answer.headers["x-request-id"]
    assert record["request_id"] == record["trace_id"] == request_id
    assert {span.trace_id for span in spans.values()} == {request_id}
    assert (root.span_id, root.parent_id, root.kind) == (request_id[:16], "", "server")
    assert (call.span_id, call.parent_id, call.kind) == (request_id[16:], root.span_id, "internal")
    assert len({span.span_id for span in spans.values()}) == len(spans)
    parents = {name: spans[name].parent_id for name in STAGES}
    assert parents == {name: call.span_id if name == "decode_tokens" else root.span_id for name in STAGES}
    assert set(record["stage_seconds"]) == set(STAGES) - {"commit", "reply"}
    for name, recorded_s in record["stage_seconds"].items():
        took = (spans[name].end - spans[name].start) / 1e9
        assert took == pytest.approx(recorded_s, abs=1e-6)
    assert root.start <= min(span.start for span in spans.values())
    assert root.end >= max(span.end for span in spans.values())
    assert (call.start, call.end) == (spans["decode_tokens"].start, spans["decode_tokens"].end)

    assert root.resource["service.name"] == "stenograph"
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": f"/sessions/{session}/v1/chat/completions",
        "user_agent.original": root.attributes["user_agent.original"],
        "gen_ai.conversation.id": session,
        "stenograph.dialect": "chat",
        "stenograph.request.id": request_id,
        "stenograph.turn.end": "committed",
    }
    assert (
        call.attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "scripted",
            "gen_ai.request.model": "scripted",
            "gen_ai.request.stream": stream,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 7,
            "gen_ai.response.id": record["response"]["id"],
            "gen_ai.usage.input_tokens": record["response"]["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": record["response"]["usage"]["completion_tokens"],
            "stenograph.strand": 0,
            "stenograph.node": record["node_id"],
            "stenograph.prompt.kept_tokens": 0,
        }.items()
    )
    assert call.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert not any(span.is_error for span in spans.values())


async def test_a_clients_trace_is_continued_and_passed_on_to_the_engine(connect: Connect) -> None:  # noqa: F811
    async with Collector() as collector, connect(otlp_endpoint=collector.url) as rig:
        session = await rig.open()
        rig.sglang.plan(rig.script("yes"))
        traced = {**dict(CLIENTS.headers()), "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"}
        body = {"messages": [user("a question")]}
        answer = await rig.call("POST", f"/sessions/{session}/v1/chat/completions", body, **traced)
        assert answer.status == 200, answer.body
        request_id = answer.headers["x-request-id"]
        spans = by_name(await collector.trace(2 + len(STAGES)))
        (record,) = await rig.records(session)
        (asked,) = [asked for asked in rig.sglang.requests if asked.json.get("rid") == request_id]
    assert {span.trace_id for span in spans.values()} == {CLIENTS.trace_id} == {record["trace_id"]}
    assert {span.state for span in spans.values()} == {traced["tracestate"]}
    root, call = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert (root.parent_id, root.span_id) == (CLIENTS.span_id, request_id[:16])
    assert (call.parent_id, call.span_id, call.kind) == (root.span_id, request_id[16:], "client")
    assert root.attributes["stenograph.request.id"] == call.attributes["stenograph.request.id"] == request_id
    assert asked.header("traceparent") == f"00-{CLIENTS.trace_id}-{call.span_id}-01"
    assert asked.header("tracestate") == traced["tracestate"]


async def test_a_trace_that_its_client_does_not_record_is_passed_on_and_not_exported(serve: Serve) -> None:
    async with Collector() as collector, serve(otlp_endpoint=collector.url) as live:
        session = await live.open()
        for traceparent in (f"00-{CLIENTS.trace_id}-{CLIENTS.span_id}-00", "garbage"):
            live.says("yes")
            path = f"/sessions/{session}/v1/chat/completions"
            answer = await live.call("POST", path, {"messages": [user("a")]}, traceparent=traceparent)
            assert answer.status == 200
        not_recorded, own = live.engine.requests
        spans = await collector.trace(2 + len(STAGES))
        assert collector.num_left == 0
    assert not_recorded.trace is not None
    assert own.trace is not None
    assert (not_recorded.trace.trace_id, not_recorded.trace.is_sampled) == (CLIENTS.trace_id, False)
    assert {span.trace_id for span in spans} == {own.trace.trace_id} == {own.request_id}


async def test_each_turn_of_a_request_has_its_call_in_one_trace(serve: Serve) -> None:
    async with Collector() as collector, serve(otlp_endpoint=collector.url) as live:
        live.says("one")
        live.says("two")
        answer = await live.call("POST", "/v1/completions", {"prompt": ["a", "b"]})
        assert answer.status == 200, answer.body
        num_of_first, num_of_second = len(STAGES), len(STAGES) - 3  # received, admitted and decoded once
        spans = await collector.trace(1 + 2 + num_of_first + num_of_second)
        assert collector.num_left == 0
    root = next(span for span in spans if span.kind == "server")
    calls = [span for span in spans if span.name == "text_completion scripted"]
    assert {call.attributes["stenograph.request.id"][16:] for call in calls} == {call.span_id for call in calls}
    assert len(calls) == 2
    assert {call.parent_id for call in calls} == {root.span_id}
    assert {span.trace_id for span in spans} == {root.trace_id} == {answer.headers["x-request-id"]}
    assert len({span.span_id for span in spans}) == len(spans)


async def test_requests_that_fail_have_their_error_in_the_trace(serve: Serve) -> None:
    async with Collector() as collector, serve(otlp_endpoint=collector.url) as live:
        assert (await live.chat("missing", user("a"))).status == 404
        (refused,) = await collector.trace(1)
        live.engine.plan(Script(ids=(), error=EngineUnavailable("The engine is gone.")))
        session = await live.open()
        answer = await live.chat(session, user("a"))
        assert answer.status == 503
        failed = by_name(await collector.trace(6))
    assert (
        refused.attributes.items()
        >= {
            "error.type": "session_not_found",
            "http.response.status_code": 404,
            "gen_ai.conversation.id": "missing",
        }.items()
    )
    assert not refused.is_error  # a client's fault is none of the server's span: the conventions' own rule
    assert set(failed) == {"POST /v1/chat/completions", "chat scripted", "receive", "admit", "decode", "render"}
    root, call = failed["POST /v1/chat/completions"], failed["chat scripted"]
    assert root.is_error
    assert call.is_error
    assert root.attributes["http.response.status_code"] == 503
    assert call.attributes["error.type"] == root.attributes["error.type"] == "engine_unavailable"
    assert call.start == failed["render"].end
    assert call.attributes["stenograph.turn.end"] == "failed"


async def test_a_turn_whose_client_left_is_traced_to_its_end(serve: Serve) -> None:
    async with Collector() as collector, serve(otlp_endpoint=collector.url) as live:
        live.says("never", paused=True)
        chat = asyncio.ensure_future(live.chat(None, user("a")))
        await live.engine.begun(1)
        chat.cancel()
        await asyncio.wait({chat})
        spans = by_name(await collector.trace(6))
    assert spans["POST /v1/chat/completions"].attributes["stenograph.turn.end"] == "abandoned"
    assert spans["chat scripted"].attributes["stenograph.turn.end"] == "abandoned"


async def test_a_retry_that_joins_a_turn_has_a_span_of_its_own(serve: Serve) -> None:
    async with Collector() as collector, serve(otlp_endpoint=collector.url) as live:
        session = await live.open()
        live.says("yes", paused=True)
        path, body = f"/sessions/{session}/v1/chat/completions", {"messages": [user("a")]}
        first = asyncio.ensure_future(live.call("POST", path, body, idempotency_key="k"))
        await live.engine.begun(1)
        second = asyncio.ensure_future(live.call("POST", path, body, idempotency_key="k"))
        while 'stenograph_retries_total{answer="joined"} 1.0' not in await metrics_of(live):
            pass
        live.engine.step(5)
        answers = await asyncio.gather(first, second)
        assert {answer.status for answer in answers} == {200}
        spans = await collector.trace(1 + 2 + len(STAGES))
    roots = [span for span in spans if span.kind == "server"]
    assert len({root.trace_id for root in roots}) == 2
    assert sum("stenograph.request.id" in root.attributes for root in roots) == 1


@pytest.mark.parametrize("how", ["refuses", "hangs", "garbage"])
async def test_a_collector_that_is_no_use_costs_no_turn_anything(serve: Serve, how: str) -> None:
    """Every turn is answered while the collector has not taken a span, and the server stops."""
    async with Collector(hangs=how == "hangs", answer=b"\x00\xff nonsense\r\n\r\n") as collector:
        url = collector.url if how != "refuses" else f"http://127.0.0.1:{closed_port()}"
        async with serve(otlp_endpoint=url) as live:
            session = await live.open()
            live.says("one")
            assert (await live.chat(session, user("a"))).status == 200
            if how != "refuses":
                await collector.asked.wait()  # its export is under way: the next turns end meanwhile
            messages = [user("a"), assistant("one")]
            for number in range(5):
                live.says(f"reply {number}")
                messages.append(user(f"question {number}"))
                assert (await live.chat(session, *messages)).status == 200
                messages.append(assistant(f"reply {number}"))
            assert (await traced_of(live))["exported"] == 0
            assert (await live.call("GET", "/health")).status == 200


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_spans_that_a_collector_refuses_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Collector(answer=b"HTTP/1.1 400 Bad\r\ncontent-length: 0\r\n\r\n") as collector:
        export = OtlpExport(collector.url, version="1")
        for _ in range(3):
            collector.asked.clear()
            export.send([span_numbered(1)])
            await collector.asked.wait()
            while export.num_waiting:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)  # the answer is on its way to the SDK's thread
        await export.aclose()
    assert export.counts == {"exported": 0, "failed": 3, "dropped": 0}
    (line,) = [record.getMessage() for record in caplog.records if collector.url in record.getMessage()]
    assert line.startswith(f"the collector at {collector.url}/v1/traces does not take traces")
    assert "400" in line
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_spans_beyond_those_that_may_wait_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with Collector(hangs=True) as collector:
        export = OtlpExport(collector.url, version="1", flush_s=0.1, max_waiting=100)
        export.send([span_numbered(1)])
        await collector.asked.wait()
        export.send([span_numbered(number) for number in range(1, 100)])
        assert export.counts == {"exported": 0, "failed": 0, "dropped": 0}
        assert export.num_waiting == 100
        export.send([span_numbered(1), span_numbered(2)])
        assert export.counts["dropped"] == 2
        assert collector.url not in caplog.text  # neither the SDK nor we log each
        await export.aclose()
    assert f"{collector.url}/v1/traces did not take the last" in caplog.text


async def test_no_value_of_a_client_s_costs_a_batch() -> None:
    """Values that protobuf does not take, among the spans of others."""
    hostile: dict[str, names.Attribute] = {
        "large": 2**63,
        "least": -(2**63),
        "half": "a\ud800b",
        "halves": ("\udfff",),
        "long": "x" * 10**6,
        "flag": True,
    }
    async with Collector() as collector:
        export = OtlpExport(collector.url, version="1")
        export.send([span_numbered(1), span_numbered(2, fault="\ud800" * 2000, **hostile), span_numbered(3)])
        spans = await collector.trace(3)
        await export.aclose()
    assert spans[1].attributes == {
        "large": str(2**63),
        "least": -(2**63),
        "half": "a?b",
        "halves": ["?"],
        "long": "x" * 1024,
        "flag": True,
    }
    assert spans[1].is_error
    assert export.counts == {"exported": 3, "failed": 0, "dropped": 0}


def span_numbered(number: int, fault: str = "", **attributes: names.Attribute) -> TraceSpan:
    context = TraceContext(trace_id=f"{number:032x}", span_id=f"{number:016x}", is_sampled=True)
    return TraceSpan(name="a", context=context, parent=None, start_s=1.0, end_s=2.0, fault=fault, attributes=attributes)


def test_the_names_of_attributes_are_those_of_the_conventions() -> None:
    """Held to the conventions' own package; those of this server begin with its name."""
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes, url_attributes, user_agent_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    ours = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert len(ours) > 30
    assert {name for name in ours if name not in known} == {name for name in ours if name.startswith("stenograph.")}


def test_only_an_endpoint_imports_the_sdk() -> None:
    """One module imports it, and that one is imported by its name, where an endpoint is given."""
    importing = {
        str(path.relative_to(PRODUCT))
        for path in PRODUCT.rglob("*.py")
        if re.search(r"^\s*(from|import) opentelemetry|otel(\.| import )otlp", path.read_text(), re.MULTILINE)
    }
    assert importing == {"otel/otlp.py", "otel/tracing.py"}
    assert "opentelemetry" not in Path(tracing.__file__).read_text()


def test_without_the_sdk_an_endpoint_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stenograph.otel.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    with pytest.raises(StartupError, match="--otlp-endpoint needs OpenTelemetry's SDK") as refused:
        opened("http://127.0.0.1:1")
    assert "pip install -e '.[otel]'" in str(refused.value)


def opened(endpoint: str) -> tracing.Tracing:
    return tracing.traced(endpoint, ScriptedEngine(vocab_size=320), SystemClock(), Metrics())
