"""SGLang's own route, `/generate`, as bytes: a `GenerateRequest` to a body, a reply or a stream to chunks. Pure.

Owns the names of that route's fields and how its stream is read. The stream's events have all tokens so far, or only
new ones where the server runs with `--incremental-streaming-output`; both are read, event by event, and held to the
laws of `engine/rows.py`. One more law is here:

    finish_is_last          nothing follows the part with the finish reason

The server's `text` is ignored: replies are made of ids. Sources: SGLang's `managers/io_struct.py`
(`GenerateReqInput`), `managers/tokenizer_manager.py`, `sampling/sampling_params.py`.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from stenograph.core.errors import ContextLengthExceeded, StenographError, UpstreamInvalid, UpstreamRefused
from stenograph.core.ids_json import prompt_json
from stenograph.core.loaded import entry
from stenograph.core.replay import Replay
from stenograph.core.types import (
    Chunk,
    EffectivePrompt,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    PromptMedia,
    SamplingParams,
    token_ids,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.adapter import EngineReading, told_too_long
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.reported import ReportedSupport, alternatives, payload_apart, replay_of, weight_spans
from stenograph.engine.rows import (
    LARGE_PAYLOAD_BYTES,
    META_LAWS,
    ErrorWithin,
    MetaFinish,
    MetaInfo,
    Natural,
    Rows,
    SampledTokens,
    check_ids,
    check_request,
    decoded,
    decoded_apart,
    error_of,
    laws,
    other_prompt,
    reason_of,
    short,
)
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.grammar import pattern_field
from stenograph.engine.sglang.request import (
    as_json,
    policy_parts,
    replay_parts,
    routing_parts,
    salt_parts,
    sampling_fields,
    support_parts,
)

JSON_TYPE = "application/json"
_PROMPT_LAWS = laws((r"", "prompt_agrees"))
_ANY_OBJECT = '{"type":"object"}'
_TOKENS_KEPT_BACK = 1
"""Some versions refuse a request that fills SGLang's context to the last token; others cut it by one."""

# -- the request


def encode_generate(request: GenerateRequest, *, replay: ReplayKind) -> bytes:
    """The body of a request. Raises InvalidRequest for a grammar not taken by SGLang."""
    params = request.params
    parts = [b'{"rid":', as_json(request.request_id), b',"stream":', as_json(request.streams)]
    parts.append(b',"return_logprob":true,"logprob_start_len":-1,"return_text_in_logprobs":false')
    if params.num_top_logprobs:
        parts += [b',"top_logprobs_num":', as_json(params.num_top_logprobs)]
    if request.routing is not None:
        parts += routing_parts(request.routing)
    parts += salt_parts(request.cache_salt)
    parts += policy_parts(request.policy)
    if request.affinity_key is not None:
        parts += [b',"session_id":', as_json(request.affinity_key)]
    parts += replay_parts(replay, request.prompt.first_new_row)
    if params.support:
        parts += support_parts(params)
    if request.prompt.media:
        parts += _media_parts(request.prompt.media)
    parts += [b',"sampling_params":', as_json(_sampling_fields(params))]
    parts += [b',"input_ids":[', *prompt_json(request.prompt), b"]}"]
    return b"".join(parts)


def _media_parts(media: Sequence[PromptMedia]) -> Iterator[bytes]:
    """Members for the images, in order of their placeholders, each with a comma before it. SGLang puts the expansions
    in their place and reports the ids it ran, in a stream with each event.

    Hashes are its own: `mm_hashes` takes 64 bits alone, too few where clients choose the content.
    """
    yield b',"return_prompt_token_ids":true,"image_data":['
    for number, one in enumerate(media):
        yield b'%b"data:%b;base64,' % (b"," if number else b"", one.item.ref.media_type.encode())
        yield one.item.base64
        yield b'"'
    yield b"]"


def _sampling_fields(params: SamplingParams) -> dict[str, object]:
    fields = sampling_fields(params)
    fields["max_new_tokens"] = params.max_tokens  # left out, it would be 128
    if params.min_tokens:
        fields["min_new_tokens"] = params.min_tokens
    # Nobody reads the text, but while it is made nothing is to be taken from it.
    fields |= {"skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True}
    if params.seed is not None:
        fields["sampling_seed"] = params.seed
    if params.grammar is not None:
        name, source = _grammar_field(params.grammar)
        fields[name] = source
    return fields


def _grammar_field(grammar: Grammar) -> tuple[str, str]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return "json_schema", _ANY_OBJECT
        case GrammarKind.JSON_SCHEMA:
            return "json_schema", grammar.source
        case _:
            return pattern_field(grammar)


# -- the reply


_NULL = msgspec.Raw(b"null")


class _GeneratePart(msgspec.Struct):
    """A whole reply, or an event of a stream."""

    meta_info: MetaInfo | None = None
    output_ids: list[Natural] | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    error: ErrorWithin | str | None = None


_PART = msgspec.json.Decoder(_GeneratePart)
_IDS = msgspec.json.Decoder(list[Natural])


def _meta_of(part: _GeneratePart) -> MetaInfo | None:
    return part.meta_info


class SGLangGenerateReading(EngineReading):
    """The reader of one reply. Its methods raise UpstreamInvalid, or the engine's error within a 200."""

    def __init__(
        self,
        *,
        request_id: str,
        vocab_size: int,
        num_prompt: int,
        replay: ReplayKind = ReplayKind.NONE,
        first_row: int = 0,
        row_size: int = 0,
        wants_support: bool = False,
        placeholder: int | None = None,
    ) -> None:
        """`replay` is the payload asked for, routed experts of `row_size` numbers a row from `first_row` on
        (`replay_of`); any other is left out. `wants_support`: supports were asked for. `placeholder` is the id that
        stands for each image of the prompt; None: it has none."""
        self._placeholder = placeholder
        self._effective: EffectivePrompt | None = None
        self._support = ReportedSupport(vocab_size) if wants_support else None
        self._request_id = request_id
        self._vocab_size = vocab_size
        self._replay = replay
        self._first_row, self._row_size, self._num_prompt = first_row, row_size, num_prompt
        self._sampled = SampledTokens(vocab_size=vocab_size, num_prompt=num_prompt if placeholder is None else None)
        self._apart: memoryview | None = None
        self._held: Chunk | None = None
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<SGLangGenerateReading {self._sampled!r}>"

    def event(self, data: bytes) -> Sequence[Chunk]:
        """The chunks of a part; the generation's last one is held until `end`."""
        self._apart = columns = None
        if len(data) > LARGE_PAYLOAD_BYTES:
            text, self._apart = payload_apart(data)
            part, columns = decoded_apart(_PART, text, META_LAWS, _meta_of)
        else:
            part = decoded(_PART, data, META_LAWS)
        if part.error is not None:
            error = error_of(part.error)
            raise refused_within(error.status, error.message, data)
        if part.meta_info is None:
            raise UpstreamInvalid("has_meta_info", "there is no meta_info")
        check_request(part.meta_info.id, self._request_id)
        effective = None
        if self._placeholder is not None and self._effective is None:
            effective = self._effective = self._reported(part.prompt_token_ids, part.meta_info, self._placeholder)
        if self._has_ended:
            raise UpstreamInvalid("finish_is_last", "the engine went on after the part that ended the generation")
        finish = _finish_of(part.meta_info.finish_reason, data)
        rows = part.meta_info.output_token_logprobs if columns is None else columns
        chunk = self._chunk(part.meta_info, rows, part.output_ids, finish)
        if effective is not None:
            chunk = replace(chunk, effective=effective)
        if finish is None:
            return (chunk,) if chunk.ids or effective is not None else ()
        self._has_ended, self._held = True, chunk
        return ()

    def _reported(self, told: msgspec.Raw, meta: MetaInfo, placeholder: int) -> EffectivePrompt | None:
        """The prompt as it was run; its images are where their placeholder is repeated."""
        ids = decoded(_IDS, bytes(told), _PROMPT_LAWS) if bytes(told) != b"null" else None
        if ids is None:
            return None
        check_ids(ids, self._vocab_size)
        if meta.prompt_tokens not in (None, len(ids)):
            raise other_prompt(len(ids), meta.prompt_tokens or 0)
        self._num_prompt, effective = len(ids), token_ids(ids)
        return EffectivePrompt(ids=effective, ranges=entry("stenograph.core.media:runs_of")(effective, placeholder))

    def end(self) -> Sequence[Chunk]:
        """The generation's last chunk, if it came."""
        held, self._held = self._held, None
        return () if held is None else (held,)

    def _chunk(
        self, meta: MetaInfo, rows: Rows | None, output_ids: Sequence[int] | None, finish: Finish | None
    ) -> Chunk:
        """The new tokens of a part. Spans of the weights come with the end, and cover all tokens."""
        reason = None if finish is None else finish.reason
        start = len(self._sampled.ids)
        ids, logprobs = self._sampled.take(
            rows, num_sampled=meta.completion_tokens, reason=reason, num_prompt=meta.prompt_tokens
        )
        self._sampled.check_output_ids(output_ids, num_new=len(ids), reason=reason)
        num_sampled = start + len(ids)
        top = alternatives(
            meta.output_top_logprobs, num_sampled=num_sampled, num_new=len(ids), vocab_size=self._vocab_size
        )
        replay, unasked = (None, ()) if finish is None or not meta.has_replay else self._replay_of(meta, num_sampled)
        support = self._support if ids else None
        if support is not None:
            support.take(meta, num_new=len(ids), num_sampled=num_sampled)
        spans = () if meta.weight_versions is None else weight_spans(meta, num_sampled=num_sampled)
        return Chunk(
            ids=ids,
            logprobs=logprobs,
            sampling_logprobs=None if support is None else support.logprobs(),
            support=None if support is None else support.piece(ids),
            top_logprobs=top,
            finish=finish,
            num_cached_tokens=meta.cached_tokens or 0,
            weight_version=None if meta.weight_version is None else str(meta.weight_version),
            is_version_of_reply=not spans,
            weights=(spans or None) if finish is not None else None,
            replay=replay,
            unasked_replay=unasked,
        )

    def _replay_of(self, meta: MetaInfo, num_sampled: int) -> tuple[Replay | None, tuple[str, ...]]:
        num_rows, first_row = self._num_prompt + num_sampled - 1, self._first_row
        return replay_of(
            meta, self._replay, num_rows=num_rows, first_row=first_row, row_size=self._row_size, apart=self._apart
        )


def _finish_of(told: MetaFinish | str | None, data: bytes) -> Finish | None:
    """The generation's end, if it ended. Raises an abort with a status as a refusal or a failure."""
    if told is None:
        return None
    if isinstance(told, str):
        told = MetaFinish(type=told)
    reason = reason_of(told.type)
    if reason is FinishReason.ABORT and told.status_code is not None:
        raise refused_within(told.status_code, told.message or "the engine refused the request", data)
    return Finish(reason=reason, matched=told.matched if reason is FinishReason.STOP else None)


def refused_within(status: int, message: str, data: bytes) -> StenographError:
    """The error in a part of a 200, by the status it would have had outside."""
    too_long = context_exceeded(message.encode())
    if too_long is not None:
        return too_long
    if not 400 <= status <= 599:
        return UpstreamInvalid(
            "error_status", f"an error within a reply has the status {short(status)}: {message[:200]}"
        )
    body = data if b'"error"' in data else as_json({"error": {"message": message, "code": status}})
    return UpstreamRefused(status=status, content_type=JSON_TYPE, headers=(), body=body, said=message)


# -- what is too long

_TOO_LONG = (
    re.compile(
        rb"maximum context length of (?P<limit>\d{1,9}) tokens.{0,80}?: (?P<prompt>\d{1,9}) tokens from the input"
        rb".{0,40}? and (?P<sampled>\d{1,9}) tokens for the completion",
        re.DOTALL,
    ),
    re.compile(
        rb"input \((?P<prompt>\d{1,9}) tokens\) is longer than the model's context length \((?P<limit>\d{1,9}) tokens"
    ),
    re.compile(
        rb"Input length \((?P<prompt>\d{1,9}) tokens\) exceeds the maximum allowed length \((?P<limit>\d{1,9}) tokens"
    ),
)
"""SGLang's messages for a request too long for its context."""


def context_exceeded(body: bytes) -> ContextLengthExceeded | None:
    """The error for SGLang's refusal, where it refuses for the length of the request."""
    return told_too_long(body, _TOO_LONG)


def too_long(http: HttpReply) -> ContextLengthExceeded | None:
    """The same of an answer of any status: SGLang refuses such a request with 400."""
    return context_exceeded(http.body) if http.status == 400 else None


class _SGLangCard(msgspec.Struct):
    max_model_len: Natural | None = None


class _SGLangModels(msgspec.Struct):
    data: list[_SGLangCard] = []


class ServerFacts(msgspec.Struct):
    """A server's account of itself: `/server_info` and `/model_info` have a part each; empty where neither is there."""

    context_length: Natural | None = None
    max_req_input_len: Natural | None = None
    enable_session_radix_cache: object = None
    tool_call_parser: str | None = None
    architectures: list[str] | None = None
    reasoning_parser: str | None = None
    return_output_ids: bool | None = None
    tokenizer_worker_num: int | None = None
    weight_version: str | int | None = None
    has_image_understanding: bool | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None

    @property
    def last_priority(self) -> int | None:
        """The priority of what is to come after everything else; None where the server takes none."""
        if not self.enable_priority_scheduling:
            return None
        return 2**31 - 1 if self.schedule_low_priority_values_first else -(2**31)

    @property
    def max_context_tokens(self) -> int | None:
        """The most tokens of a request in all, with its prompt still accepted; None where neither is reported.

        A prompt has to be shorter than `max_req_input_len`: six tokens below the context, or the cache's capacity."""
        limits = [self.context_length - _TOKENS_KEPT_BACK] if self.context_length else []
        limits += [self.max_req_input_len] if self.max_req_input_len else []
        return min(limits, default=None)

    @property
    def streams_chats(self) -> bool:
        """Whether a stream of the chat route has all of a turn. Without a parser the log-probabilities of steps without
        text are left out; several processes do not agree at once on the name of the weights."""
        has_parser = self.tool_call_parser is not None or self.reasoning_parser is not None
        return has_parser and self.return_output_ids is not None and self.tokenizer_worker_num == 1

    @property
    def keeps_sessions(self) -> bool:
        """Whether keys and values of a session are kept until it is closed."""
        return self.enable_session_radix_cache is True

    @property
    def num_unreported(self) -> int:
        """Tokens at the end of a prompt, not counted by the chat route: Kimi K3's generation prompt."""
        is_k3 = self.tool_call_parser == "kimi_k3" or "KimiK3" in "".join((self.architectures or [])[:1])
        return _KIMI_K3_STUB_TOKENS if is_k3 else 0


_MODELS = msgspec.json.Decoder(_SGLangModels)
_FACTS = msgspec.json.Decoder(ServerFacts)
_KIMI_K3_STUB_TOKENS = 3
"""SGLang's `entrypoints/openai/serving_chat.py`, 0.5.23; read, not run."""


def context_of_models(body: bytes) -> int | None:
    """Tokens of a request in all, from `/v1/models`; None where it does not say, as behind a router."""
    try:
        told = [card.max_model_len for card in _MODELS.decode(body).data if card.max_model_len]
    except (msgspec.DecodeError, RecursionError):
        return None
    return min(told) - _TOKENS_KEPT_BACK if told else None


def facts_of(body: bytes) -> ServerFacts:
    """The facts in an answer; none of any other body."""
    try:
        return _FACTS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ServerFacts()
