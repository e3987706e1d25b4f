"""The spans of a turn, as values, made of its stages when it has ended. Pure.

Knows OpenTelemetry's names of facts, and no library of it: otlp.py hands the spans over to one.
A turn's request id is 16 random bytes, as a trace id is. So the trace of a request without one has the id of
its first turn, and the ids of its spans are made of the turns' own: whoever has a record can find its trace.
"""

import enum
from collections.abc import Mapping, Sequence
from itertools import count

from msgspec import Struct

from stenograph.core.chat import ChatRequest, TurnRequest
from stenograph.core.stages import Stage
from stenograph.core.telemetry import TurnEnd, TurnReport
from stenograph.core.trace_context import TraceContext
from stenograph.core.types import RequestId
from stenograph.session.steps import RunningTurn

# Source: OpenTelemetry semantic conventions 1.37, docs/gen-ai/gen-ai-spans.md.
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_CONVERSATION = "gen_ai.conversation.id"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_STOP = "gen_ai.request.stop_sequences"
GEN_AI_REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# Source: OpenTelemetry semantic conventions 1.37, docs/http/http-spans.md and docs/general/recording-errors.md.
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
USER_AGENT = "user_agent.original"
ERROR_TYPE = "error.type"

# Ours.
REQUEST_ID = "stenograph.request.id"
DIALECT = "stenograph.dialect"
STRAND = "stenograph.strand"
NODE = "stenograph.node"
TURN_END = "stenograph.turn.end"
KEPT_TOKENS = "stenograph.prompt.kept_tokens"
WEIGHT_VERSIONS = "stenograph.weight_versions"

AT_ENGINE = frozenset({Stage.QUEUE, Stage.PREFILL, Stage.DECODE_TOKENS})
"""Stages of the call to the engine."""

OF_REQUEST = frozenset({Stage.RECEIVE, Stage.ADMIT, Stage.DECODE})
"""Stages common to all turns of a request: the first turn's stand for all."""

_PLACE = dict(zip(Stage, count(1), strict=False))

Attribute = str | int | float | bool | tuple[str, ...]


class SpanKind(enum.StrEnum):
    """A span's side of a call."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


class TraceSpan(Struct, frozen=True, kw_only=True, gc=False):
    """A part of a trace. Times are seconds since the Unix epoch, ids lower-case hexadecimal.

    `parent` None: it begins the trace. `is_remote_parent`: the parent is a client's. `fault` is why it failed, empty if
    it did not.
    """

    name: str
    kind: SpanKind = SpanKind.INTERNAL
    context: TraceContext
    parent: TraceContext | None
    is_remote_parent: bool = False
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = {}
    fault: str = ""


class EngineName(Struct, frozen=True, kw_only=True, gc=False):
    """The engine's kind, its model, and whether it is called over the network."""

    engine: str
    model: str
    is_remote: bool


def request_span_id(first_turn: RequestId) -> str:
    """The id of a request's span. Never zero: the digits of a UUID's version are in it."""
    return first_turn[:16]


def engine_span_id(turn: RequestId) -> str:
    """The id of the span of a turn's call to the engine. Never zero: the bits of a UUID's variant are in it."""
    return turn[16:]


def turn_spans(
    turn: RunningTurn,
    report: TurnReport,
    *,
    request: TurnRequest,
    parent: TraceContext,
    engine: EngineName,
    ended_at: float,
    epoch: float,
    is_first: bool,
) -> list[TraceSpan]:
    """The spans of a turn's stages, and of its call to the engine, the parent of some of them.

    `parent` is the request's span. `ended_at` is monotonic, and `epoch` is the zero of that clock in the other. A turn
    ended within a stage has no span of it, but for the engine's call.
    """
    at_engine = _context(parent, engine_span_id(turn.request_id))
    spans: list[TraceSpan] = []
    before = turn.stages.start
    called_at: float | None = None
    answered_at = before
    for name, end in sorted(turn.stages.ends.items(), key=lambda one: one[1]):
        stage, is_of_engine = Stage(name), name in AT_ENGINE
        if is_of_engine and called_at is None:
            called_at = before
        if is_first or stage not in OF_REQUEST:
            spans.append(
                TraceSpan(
                    name=name,
                    context=_context(parent, f"{int(at_engine.span_id, 16) ^ _PLACE[stage]:016x}"),
                    parent=at_engine if is_of_engine else parent,
                    start_s=epoch + before,
                    end_s=epoch + max(before, end),
                )
            )
        before = max(before, end)
        answered_at = before if is_of_engine else answered_at
    if turn.policy and called_at is None:  # it failed there, or was abandoned
        called_at, answered_at = before, max(before, ended_at)
    if called_at is not None:
        spans.append(
            TraceSpan(
                name=f"{_operation(request)} {engine.model}",
                kind=SpanKind.CLIENT if engine.is_remote else SpanKind.INTERNAL,
                context=at_engine,
                parent=parent,
                start_s=epoch + called_at,
                end_s=epoch + answered_at,
                attributes=_engine_facts(turn, report, request, engine),
                fault=report.code or "",
            )
        )
    return spans


def _engine_facts(
    turn: RunningTurn, report: TurnReport, request: TurnRequest, engine: EngineName
) -> Mapping[str, Attribute]:
    facts: dict[str, Attribute] = {
        GEN_AI_OPERATION: _operation(request),
        GEN_AI_PROVIDER: engine.engine,
        GEN_AI_REQUEST_MODEL: engine.model,
        GEN_AI_REQUEST_STREAM: request.reply.stream,
        **_sampling_facts(turn),
        GEN_AI_RESPONSE_ID: turn.reply_id,
        GEN_AI_RESPONSE_MODEL: turn.policy,
        GEN_AI_INPUT_TOKENS: report.num_prompt or turn.prompt.num_tokens,
        GEN_AI_OUTPUT_TOKENS: report.num_completion,
        GEN_AI_CACHED_TOKENS: report.num_cached,
        KEPT_TOKENS: turn.prompt.num_kept,
        REQUEST_ID: turn.request_id,
        TURN_END: report.end.value,
    }
    if report.finish is not None:
        facts[GEN_AI_RESPONSE_FINISH] = (report.finish,)
    if report.ttft_s is not None:
        facts[GEN_AI_RESPONSE_FIRST_CHUNK] = report.ttft_s
    if turn.node_id is not None and turn.builder.strand.number is not None:
        facts[STRAND], facts[NODE] = turn.builder.strand.number, turn.node_id
    if turn.sampled is not None and turn.sampled.weights:
        facts[WEIGHT_VERSIONS] = tuple(dict.fromkeys(span.version for span in turn.sampled.weights))
    if report.code is not None:
        facts[ERROR_TYPE] = report.code
    return facts


def _sampling_facts(turn: RunningTurn) -> Mapping[str, Attribute]:
    params = turn.params
    facts: dict[str, Attribute] = {
        GEN_AI_REQUEST_TEMPERATURE: params.temperature,
        GEN_AI_REQUEST_TOP_P: params.top_p,
        GEN_AI_REQUEST_PRESENCE_PENALTY: params.presence_penalty,
        GEN_AI_REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
    }
    if params.max_tokens is not None:
        facts[GEN_AI_REQUEST_MAX_TOKENS] = params.max_tokens
    if params.top_k:
        facts[GEN_AI_REQUEST_TOP_K] = params.top_k
    if params.seed is not None:
        facts[GEN_AI_REQUEST_SEED] = params.seed
    if params.stop:
        facts[GEN_AI_REQUEST_STOP] = params.stop
    return facts


def request_end(reports: Sequence[TurnReport]) -> TurnEnd:
    """The end of a request: the worst end among its turns."""
    ends = {report.end for report in reports}
    worst_first = (TurnEnd.FAILED, TurnEnd.ABANDONED, TurnEnd.UNRECORDED)
    return next((end for end in worst_first if end in ends), TurnEnd.COMMITTED)


def _operation(request: TurnRequest) -> str:
    return "chat" if isinstance(request, ChatRequest) else "text_completion"


def _context(of: TraceContext, span_id: str) -> TraceContext:
    return TraceContext(trace_id=of.trace_id, span_id=span_id, is_sampled=of.is_sampled, state=of.state)
