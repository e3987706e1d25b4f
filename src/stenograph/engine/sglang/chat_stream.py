"""SGLang's chat route as a stream: events to the pieces of a reply, and to its tokens once the stream has ended. Pure.

An event has a step's addition to the message, and the log-probabilities of the step's tokens; where a step adds no
text, they come alone, from a server with a parser. All ids come in one event after the finish, then the counts; the
names of the weights not at all, so the server is asked for them at both ends (`SGLangChatStream`). The laws here,
beside those of `engine/rows.py` and `chat_wire.py`:

    has_ids                 all ids come in one list, once
    finish_is_last          nothing is added to the message, and no token, after the finish
    max_tokens              no more tokens come than were asked for
    streams                 a stream is answered with one

Field names: SGLang's `entrypoints/openai/sse_utils.py`, `protocol.py` and `serving_chat.py` (`_generate_chat_stream`).
"""

from array import array
from collections.abc import Callable, Sequence

import msgspec

from stenograph.core.errors import UpstreamError, UpstreamInvalid
from stenograph.core.messages import ReplyDelta, ToolCallDelta
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    MixedWeights,
    SamplingParams,
    WeightSpan,
    WrittenPiece,
    token_ids,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.columns import Columns
from stenograph.engine.http.adapter import Ask, EngineReading, stated_version
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.rows import (
    EngineUsage,
    ErrorWithin,
    Natural,
    SampledTokens,
    check_ids,
    check_request,
    decoded,
    error_of,
    laws,
    reason_of,
)
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.control import INFO_PATH
from stenograph.engine.sglang.generate_wire import refused_within
from stenograph.engine.validate import new_logprobs

STREAM_PARTS = (
    b',"stream":true,"stream_options":{"include_usage":true},"return_output_ids_in_sglext":true'
    b',"return_cached_tokens_details":true'
)
"""The members to ask for a stream with everything of a turn."""
OVERLAPPED = "its weights change while turns run: chats come whole, with the weights of each token"


def streams_whole(params: SamplingParams, replay: ReplayKind) -> bool:
    """Whether a stream lacks nothing of such a turn, and shows nothing to be cut off later, as a stop string."""
    return replay is ReplayKind.NONE and not (params.support or params.num_top_logprobs or params.stop)


class _TokenTold(msgspec.Struct, gc=False):
    logprob: float


class _StepLogprobs(msgspec.Struct):
    content: list[_TokenTold]


class _FunctionPiece(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPiece(msgspec.Struct):
    index: Natural
    function: _FunctionPiece
    id: str | None = None


class _MessagePiece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallPiece] | None = None


class _EventChoice(msgspec.Struct):
    delta: _MessagePiece
    logprobs: _StepLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _CachedTokens(msgspec.Struct, gc=False):
    device: Natural = 0
    host: Natural = 0
    storage: Natural | None = None


class _SGLangExtension(msgspec.Struct):
    output_ids: list[list[Natural]] | None = None
    cached_tokens_details: _CachedTokens | None = None


class _ChatEvent(msgspec.Struct):
    id: str | None = None
    choices: list[_EventChoice] = []
    usage: EngineUsage | None = None
    sglext: _SGLangExtension | None = None
    error: ErrorWithin | str | None = None


_EVENT = msgspec.json.Decoder(_ChatEvent)
_LAWS = laws(
    (r"logprobs\.content\[\d+\]\.logprob`$", "logprob_is_finite"),
    (r"logprobs", "has_logprobs"),
    (r"output_ids", "has_ids"),
    (r"usage", "has_completion_tokens"),
    (r"tool_calls", "tool_calls_shape"),
    (r"content`$", "content_is_text"),
    (r"finish_reason", "finish_reason"),
    (r"choices", "one_choice"),
)


class SGLangChatStream(EngineReading):
    """The reader of one stream. Its methods raise UpstreamInvalid, or the engine's error within a 200.

    `overlapped` is called where the weights were others at the end than at the beginning: the weights of each token are
    then unknown.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        vocab_size: int,
        num_prompt: int,
        overlapped: Callable[[], object],
    ) -> None:
        """`num_prompt`: as SGLang counts the prompt."""
        self._request_id = request.request_id
        self._vocab_size = vocab_size
        self._num_prompt = num_prompt
        self._max_tokens = request.params.max_tokens
        self._overlapped = overlapped
        self._logprobs = new_logprobs()
        self._ids: array[int] | None = None
        self._num_calls = 0
        self._num_cached = 0
        self._usage: EngineUsage | None = None
        self._finish: Finish | None = None
        self._versions: tuple[str | None, str | None] = (None, None)

    def __repr__(self) -> str:
        return f"<SGLangChatStream {len(self._logprobs)} tokens, finish={self._finish}>"

    async def begin(self, ask: Ask) -> None:
        self._versions = await stated_version(ask, INFO_PATH), None

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        raise UpstreamInvalid("streams", f"a stream was asked for, and {http.content_type[:80]!r} came")

    def event(self, data: bytes) -> Sequence[Chunk]:
        """An event's addition to the reply, if any."""
        event = decoded(_EVENT, data, _LAWS)
        if event.error is not None:
            error = error_of(event.error)
            raise refused_within(error.status, error.message, data)
        check_request(event.id, self._request_id)
        if event.usage is not None:
            self._usage = event.usage
        if event.sglext is not None:
            self._take_extension(event.sglext)
        if not event.choices:
            return ()
        if len(event.choices) != 1:
            raise UpstreamInvalid("one_choice", f"one choice was asked for, {len(event.choices)} came in an event")
        return self._piece(event.choices[0])

    async def settle(self, ask: Ask) -> Sequence[Chunk]:
        """Ask for the name of the weights once the reply is there; it stays unknown of an engine gone by then."""
        begun = self._versions[0]
        if self._finish is None:
            return ()
        try:
            self._versions = begun, await stated_version(ask, INFO_PATH)
        except UpstreamError:
            return ()
        if None not in self._versions and begun != self._versions[1]:
            self._overlapped()
        return ()

    def end(self) -> Sequence[Chunk]:
        """The chunk with all tokens, if the generation has ended."""
        finish, self._finish = self._finish, None
        if finish is None:
            return ()
        tokens = self._tokens(finish.reason)
        begun, ended = self._versions
        is_same, num_ids = begun == ended, len(tokens)
        spans = (WeightSpan(version=begun, start=0, end=num_ids),) if begun is not None and num_ids else ()
        chunk = Chunk(
            ids=tokens.ids,
            logprobs=tokens.logprobs,
            finish=finish,
            num_cached_tokens=self._num_cached,
            weights=(spans or None) if is_same else None,
            mixed=None if is_same else MixedWeights(oldest=begun),
            written=WrittenPiece(id=self._request_id, delta=ReplyDelta(), num_tokens=0),
        )
        return (chunk,)

    def _take_extension(self, told: _SGLangExtension) -> None:
        if told.cached_tokens_details is not None:
            cached = told.cached_tokens_details
            self._num_cached = cached.device + cached.host + (cached.storage or 0)
        if told.output_ids is None:
            return
        if len(told.output_ids) != 1 or self._ids is not None:
            raise UpstreamInvalid("has_ids", f"the ids come in one list, once; now there are {len(told.output_ids)}")
        (found,) = told.output_ids
        check_ids(found, self._vocab_size)
        self._ids = token_ids(found)

    def _piece(self, choice: _EventChoice) -> Sequence[Chunk]:
        if self._finish is not None:
            raise UpstreamInvalid("finish_is_last", "the engine went on after the event that ended the generation")
        step = [] if choice.logprobs is None else choice.logprobs.content
        self._logprobs.extend(token.logprob for token in step)
        if self._max_tokens is not None and len(self._logprobs) > self._max_tokens:
            raise UpstreamInvalid("max_tokens", f"the engine sampled more than max_tokens, {self._max_tokens}")
        if choice.finish_reason is not None:
            reason = reason_of(choice.finish_reason)
            matched = choice.matched_stop if reason is FinishReason.STOP else None
            self._finish = Finish(reason=reason, matched=matched)
        delta = ReplyDelta(
            content=choice.delta.content or "",
            reasoning=choice.delta.reasoning_content or "",
            tool_calls=tuple(map(self._call, choice.delta.tool_calls or ())),
        )
        if not delta and not step:
            return ()
        written = WrittenPiece(id=self._request_id, delta=delta, num_tokens=len(step))
        return (Chunk(ids=(), logprobs=(), written=written),)

    def _call(self, piece: _CallPiece) -> ToolCallDelta:
        """A piece of a tool call: the next one, with its id and name, or more of the arguments of one before."""
        is_next = piece.index == self._num_calls
        if piece.index > self._num_calls or (is_next and (piece.id is None or piece.function.name is None)):
            detail = f"the piece is of call {piece.index} after {self._num_calls} calls, with the id {piece.id!r}"
            raise UpstreamInvalid("tool_calls_shape", detail[:200])
        self._num_calls += is_next
        return ToolCallDelta(
            index=piece.index,
            id=piece.id if is_next else None,
            name=piece.function.name if is_next else None,
            arguments=piece.function.arguments or "",
        )

    def _tokens(self, reason: FinishReason) -> Columns:
        """All ids and logprobs, by all the engine's reports of them."""
        usage, is_abort = self._usage, reason is FinishReason.ABORT
        if usage is None:
            raise UpstreamInvalid("has_completion_tokens", "the stream has no usage")
        ids = self._ids
        if ids is None and (usage.completion_tokens or not is_abort):
            raise UpstreamInvalid("has_ids", "the stream has no output_ids: SGLang does not know them there")
        ids = token_ids() if ids is None else ids
        if len(ids) != len(self._logprobs):
            raise UpstreamInvalid(
                "count_agrees",
                f"{len(ids)} ids, but {len(self._logprobs)} log-probabilities in the stream (docs/engines.md#sglang)",
            )
        if usage.prompt_tokens_details is not None:
            self._num_cached = usage.num_cached
        # An abort of what waits is told without the prompt.
        num_prompt = None if is_abort and not usage.prompt_tokens else usage.prompt_tokens
        sampled = SampledTokens(vocab_size=self._vocab_size, num_prompt=self._num_prompt)
        columns = Columns(ids=ids, logprobs=self._logprobs)
        sampled.take(columns, num_sampled=usage.completion_tokens, reason=reason, num_prompt=num_prompt)
        return columns
