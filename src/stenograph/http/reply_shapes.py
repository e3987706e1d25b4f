"""What the routes answer, as types. Nothing is decoded or encoded with them: openapi_schemas.py makes schemas of them,
and a test holds every reply of a live server against those. Knows neither routes nor statuses.

A field that is left out where it has nothing to say is `… | UnsetType`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Role
from stenograph.core.settings import HistoryKind
from stenograph.core.types import FinishReason
from stenograph.engine.base import EngineState
from stenograph.export.samples import EmptyReason
from stenograph.render.drift import DriftClass
from stenograph.session.history import TurnStatus

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, Meta(ge=0)]
TokenIds = list[Count]
Logprob = float
AnyValue = msgspec.Raw
"""Any JSON value."""

ReplyFinish = Literal["stop", "length", "tool_calls", "abort"]


class ErrorFacts(msgspec.Struct):
    """What went wrong. `param` is the JSON pointer of the field to blame."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(msgspec.Struct):
    """The one shape of an error."""

    error: ErrorFacts


class Health(msgspec.Struct):
    """Alive."""

    status: Literal["ok"]
    instance_id: Hex32
    session_server_instance_id: Hex32


class EngineStatus(msgspec.Struct):
    """One engine. `name` is its address, or what it is; `detail` says in a line why it is not ready, or what whoever
    runs it may want to know; `num_running` counts this server's turns there, null where nobody counts."""

    engine: str
    name: str
    state: EngineState
    detail: str
    num_running: Count | None


class Readiness(msgspec.Struct):
    """Whether an engine is usable."""

    ready: bool
    engines: list[EngineStatus]


class Model(msgspec.Struct):
    """A model in OpenAI's shape; `max_model_len` counts prompt and completion, null where the engine decides."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """The one model."""

    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    """A text as tokens."""

    tokens: TokenIds
    count: Count
    max_model_len: int | None


class Text(msgspec.Struct):
    """Tokens as text, control tokens included."""

    prompt: str


class OpenedSession(msgspec.Struct):
    """A new session; `base_url` is an OpenAI client's."""

    session_id: Hex32
    base_url: str


class SessionSummary(msgspec.Struct):
    """A session in a list. `created_at` is in seconds of the epoch."""

    session_id: Hex32
    created_at: float
    history: HistoryKind
    num_turns: Count
    num_tokens: Count
    busy: bool
    metadata: dict[str, AnyValue]


class SessionPage(msgspec.Struct):
    """Sessions, oldest first; `next` is what to ask for as `after`, null at the end."""

    sessions: list[SessionSummary]
    next: Hex32 | None


class Aborted(msgspec.Struct):
    """How many running turns were told to end."""

    aborted: Count


class RepliedFunction(msgspec.Struct):
    """What is called; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class RepliedToolCall(msgspec.Struct):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: RepliedFunction


class RepliedMessage(msgspec.Struct):
    """A message as OpenAI writes it."""

    role: Role
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[RepliedToolCall] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    """A token's logprob in nats; `bytes` is null where the token is no UTF-8 by itself."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None


class SampledLogprob(TokenLogprob):
    """The sampled token, and the alternatives that were asked for."""

    top_logprobs: list[TokenLogprob]


class ReplyLogprobs(msgspec.Struct):
    """A logprob for each sampled token."""

    content: list[SampledLogprob]


class PromptDetails(msgspec.Struct):
    """How many of the prompt's tokens the engine had."""

    cached_tokens: Count


class CompletionDetails(msgspec.Struct):
    """How many of the completion's tokens are reasoning."""

    reasoning_tokens: Count


class ReplyUsage(msgspec.Struct):
    """Tokens of a turn."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ReplyChoice(msgspec.Struct):
    """The reply. `stop_reason` is the token id or string that ended it; `token_ids` with `return_token_ids`."""

    index: Literal[0]
    message: RepliedMessage
    logprobs: ReplyLogprobs | None
    finish_reason: ReplyFinish
    stop_reason: int | str | None
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A reply. `prompt_token_ids` with `return_token_ids`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Annotated[list[ReplyChoice], Meta(min_length=1, max_length=1)]
    usage: ReplyUsage
    prompt_token_ids: TokenIds | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """A piece of a call; `name` comes with the first."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPiece(msgspec.Struct):
    """A piece of the tool call number `index`; `id` and `type` come with the first."""

    index: Count
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct):
    """What an event adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """What an event says of the reply; `stop_reason` comes with the finish."""

    index: Literal[0]
    delta: MessageDelta
    logprobs: ReplyLogprobs | None
    finish_reason: ReplyFinish | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """The data of one event. The usage, where it was asked for, comes last, with no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[list[ChunkChoice], Meta(max_length=1)]
    usage: ReplyUsage | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct):
    """OpenAI's lists: a token's text, its logprob, the alternatives by their texts, and where its text begins."""

    tokens: list[str]
    token_logprobs: list[Logprob]
    top_logprobs: list[dict[str, Logprob]]
    text_offset: list[Count]


class TextChoice(msgspec.Struct):
    """The continuation of the prompt number `index`, or in a stream what an event adds to it. The ids come with
    `return_token_ids`: those of the prompt with a choice's first event."""

    index: Count
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    """A reply to a completions request, or the data of one event. In a stream the usage, where it was asked for, comes
    last, with no choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: ReplyUsage | UnsetType = UNSET


class Span(msgspec.Struct):
    """Tokens `[start, end)` were drawn by weights `version`."""

    version: str
    start: Count
    end: Count


class RecordedRequest(msgspec.Struct):
    """A request as it went to the engine; the two counts come with `records=delta`."""

    messages: list[RepliedMessage]
    input_ids: TokenIds
    tools: list[AnyValue]
    parameters: dict[str, AnyValue]
    num_kept_ids: Count | UnsetType = UNSET
    num_kept_messages: Count | UnsetType = UNSET


class RecordedFinish(msgspec.Struct):
    """Why the turn ended, and on what."""

    type: FinishReason
    matched: int | str | None


class MetaInfo(msgspec.Struct):
    """As SGLang writes it; a triple is `[raw logprob, id, null]`. The replay payloads are base64."""

    id: Hex32
    finish_reason: RecordedFinish
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    output_token_logprobs: list[tuple[Logprob, int, None]]
    output_token_sampling_logprobs: list[Logprob] | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    indexer_topk: str | UnsetType = UNSET


class RecordedFault(msgspec.Struct):
    """One thing that was wrong with a reply as a message: its text, cut, and its ids `[start, end)` of the reply."""

    problem: ParseProblem
    seen: str
    start: Count
    end: Count


class RecordedChoice(msgspec.Struct):
    """The reply as it is kept: a chat's `message`, or a completion's `text`."""

    index: Literal[0]
    parse_problem: ParseProblem
    parse_faults: list[RecordedFault]
    finish_reason: ReplyFinish
    stop_reason: int | str | None
    meta_info: MetaInfo
    message: RepliedMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET


class RecordedUsage(msgspec.Struct):
    """Token counts of a turn."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class RecordedResponse(msgspec.Struct):
    """A reply in the shape of SGLang's chat route."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    choices: Annotated[list[RecordedChoice], Meta(min_length=1, max_length=1)]
    usage: RecordedUsage


class Record(msgspec.Struct):
    """One turn. `stages` are monotonic seconds, `stage_seconds` durations."""

    timestamp: float
    request_timestamp: float
    method: Literal["POST"]
    path: str
    status_code: Literal[200]
    request_id: Hex32
    node_id: Count
    status: TurnStatus
    request: RecordedRequest
    response: RecordedResponse
    weight_versions: list[Span]
    stages: dict[str, float]
    stage_seconds: dict[str, float]


class DriftFacts(msgspec.Struct):
    """One difference between a line and what the template makes of its messages."""

    type: DriftClass
    segment_index: Count
    expected_text: str
    actual_text: str
    detail: str
    start: Count
    end: Count


class SessionMetadata(msgspec.Struct):
    """The session's own metadata, and the server's keys over it; on a tree also `tree` (docs/samples.md)."""

    accumulated_token_ids: TokenIds
    max_trim_tokens: Count
    tito_session_mismatch: list[DriftFacts] | UnsetType = UNSET


class SessionView(msgspec.Struct):
    """A session: the records of its latest line, and what a trainer wants beside."""

    session_id: Hex32
    records: list[Record]
    metadata: SessionMetadata


class DriftedLine(msgspec.Struct):
    """The drift of one line. `unrenderable` says why nothing was compared; `mismatches` is null then."""

    leaf: Count
    path_node_ids: list[Count]
    num_tokens: Count
    counts: dict[str, Count]
    unrenderable: str | None
    mismatches: list[DriftFacts] | None


class DriftReports(msgspec.Struct):
    """The drift of each line."""

    session_id: Hex32
    lines: list[DriftedLine]


class PrefixCacheInfo(msgspec.Struct):
    """Sums over a sample's turns."""

    cached_tokens: Count
    total_prompt_tokens: Count


class JsonSample(msgspec.Struct):
    """A sample (docs/samples.md)."""

    tokens: TokenIds
    response_length: Count
    loss_mask: list[Annotated[int, Meta(ge=0, le=1)]]
    rollout_log_probs: list[Logprob]
    sampling_log_probs: list[Logprob] | None
    rollout_routed_experts: list[AnyValue] | None
    rollout_indexer_topk: list[AnyValue] | None
    response: str
    status: TurnStatus
    weight_versions: list[Span]
    prefix_cache_info: PrefixCacheInfo
    metadata: dict[str, AnyValue]
    token_texts: list[str] | UnsetType = UNSET


class JsonSamples(msgspec.Struct):
    """A session's samples; `empty_reason` is set where there is none, and only there."""

    samples: list[JsonSample]
    session_metadata: dict[str, AnyValue]
    empty_reason: EmptyReason | None


REPLIES: tuple[type[msgspec.Struct], ...] = (
    Aborted,
    ChatCompletion,
    ChatCompletionChunk,
    DriftReports,
    ErrorBody,
    Health,
    JsonSamples,
    ModelList,
    OpenedSession,
    Readiness,
    SessionPage,
    SessionView,
    Text,
    TextCompletion,
    Tokens,
)
"""What a whole reply, or an event of a stream, is."""

OPEN_REPLIES = ("SessionMetadata",)
"""Shapes in which there may be more than is listed: a client's own keys."""
