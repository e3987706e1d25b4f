"""llama.cpp's `/completion` as bytes: a `GenerateRequest` to a body, an event or a reply to a checked value. Pure.

Owns the names of llama.cpp's fields and the laws of one event, or of one whole reply; the laws between events are
adapter.py's. An engine's word is not trusted: each `decode_…` returns the truth, or raises `UpstreamInvalid` with the
broken law, for any bytes at all. The laws:

    utf8                    all of it is UTF-8, also where nobody reads it
    json                    it is JSON, with nothing after it
    shape                   its fields have the types that llama.cpp gives them
    has_logprobs            a sampled token comes with its logprob
    ids_agree               the tokens and the logprobs are of the same ids
    id_in_vocab             a token's id is an integer in [0, vocabulary)
    logprob_is_finite       a logprob is a finite number, and not llama.cpp's number for ln 0
    count_agrees            there are `tokens_predicted` tokens
    prompt_agrees           `tokens_evaluated` is the number of sent ids

Found by trying (docs/engines.md has it all): logprobs are raw, and the sampled token's own is always there, also where
it is not among the `n_probs` largest. A token is in no event, and has no logprob, if the text after it ends within a
UTF-8 character; only `tokens_predicted` counts it. A whole reply has its id, and no logprob. `prompt_progress` events
carry a token 0, never sampled.

Field names: llama.cpp's `tools/server/README.md` and `server-task.cpp`.
"""

import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest, UpstreamInvalid
from stenograph.core.ids_json import encode_ids, join_ids, prompt_json
from stenograph.core.types import Grammar, GrammarKind, Prompt, SamplingParams, TopLogprob, token_ids
from stenograph.engine.base import GenerateRequest
from stenograph.engine.llamacpp.schema import choice_grammar, object_as_sent, schema_as_sent
from stenograph.engine.rows import check_ids, decoded, laws

GRAMMARS = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.EBNF})
"""Grammars taken by every llama.cpp. It knows regular expressions and Lark only if built with llguidance."""
SAMPLERS = ("penalties", "temperature", "min_p", "top_k", "top_p")
"""All operations on the logits, in this order, after `logit_bias`; the order of the embedded engine."""
NO_SEED = 2**32 - 1
"""The seed that llama.cpp replaces with a random one."""
LONGEST_CONTEXT = 2**20
"""For a server that does not report its own."""
LN_ZERO = -3.0e38
"""llama.cpp writes the lowest float32 where a probability is 0 in float32."""
FORCING_BIAS = 1e6
FINAL_FIELDS = (
    "content",
    "tokens",
    "tokens_predicted",
    "tokens_evaluated",
    "stop",
    "stop_type",
    "stopping_word",
    "completion_probabilities",
    "timings/cache_n",
)
"""Fields asked of the last event, to keep the whole prompt as text out of it."""

NATURAL = msgspec.Meta(ge=0, lt=2**62)
"""A bound on counts and ids: no server's are as large."""

# -- requests


def encode_request(request: GenerateRequest, *, vocab_size: int, max_context_tokens: int | None = None) -> bytes:
    """The body of a generation, streamed. Raises InvalidRequest for anything llama.cpp cannot do as meant."""
    fields = {**_sampling_fields(request, vocab_size, max_context_tokens), "stream": True, "return_progress": True}
    return _body(fields, request)


def encode_repetition(
    request: GenerateRequest, num_tokens: int, *, vocab_size: int, max_context_tokens: int | None = None
) -> bytes:
    """The body to sample the first tokens of the same generation again, in one reply."""
    fields = {**_sampling_fields(request, vocab_size, max_context_tokens), "stream": False, "return_progress": False}
    return _body({**fields, "n_predict": num_tokens}, request)


def encode_ranking(prompt: Prompt, sampled: "array[int]", num_top: int) -> bytes:
    """The body to ask for the `num_top` most likely tokens after `prompt` and `sampled`.

    llama.cpp ranks only where it samples, and reports it only if the sample is whole text: it is made to sample "a".
    """
    fields: dict[str, object] = {
        **_fixed_fields(),
        "n_predict": 1,
        "n_probs": num_top,
        "temperature": 0.0,
        "logit_bias": [("a", FORCING_BIAS)],
        "seed": 0,
        "stream": False,
        "return_progress": False,
    }
    ids = join_ids((b"".join(prompt_json(prompt)), encode_ids(sampled)))
    return b'%s,"prompt":[%s]}' % (_json(fields)[:-1], ids)


def seed_of(request: GenerateRequest) -> int:
    """llama.cpp's seed of 32 bits: the request's, folded; without one, made of its id, hence known."""
    seed = request.params.seed
    return (zlib.crc32(request.request_id.encode()) if seed is None else seed) % NO_SEED


def _body(fields: dict[str, object], request: GenerateRequest) -> bytes:
    """The prompt is long, and is joined as it is."""
    parts = [_json({**_fixed_fields(), **fields})[:-1]]
    if request.params.grammar is not None:
        parts += _grammar_parts(request.params.grammar)
    parts += [b',"prompt":[', *prompt_json(request.prompt), b"]}"]
    return b"".join(parts)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _fixed_fields() -> dict[str, object]:
    """Every field with a default that could change the sampled tokens or their report; the server's defaults never
    apply.

    Samplers outside `samplers` are not applied, but mirostat would replace them all. `n_cache_reuse` would shift cached
    keys, inexactly, and `n_keep` and `n_discard` belong to the context shift.
    """
    return {
        "return_tokens": True,
        "response_fields": FINAL_FIELDS,
        "cache_prompt": True,
        "samplers": SAMPLERS,
        "mirostat": 0,
        "dynatemp_range": 0.0,
        "min_keep": 0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n_keep": 0,
        "n_discard": 0,
        "n_cache_reuse": 0,
        "n_indent": 0,
        "t_max_predict_ms": 0,
        "post_sampling_probs": False,
    }


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(params, name):
            raise InvalidRequest(
                f"llama.cpp applies {name} to prompt tokens too, not only to sampled ones.",
                blame=Blame(RequestPart.SAMPLING, path=(name,)),
            )
    if params.min_tokens:
        raise InvalidRequest(
            "llama.cpp does not support min_tokens.", blame=Blame(RequestPart.SAMPLING, path=("min_tokens",))
        )
    foreign = params.foreign_id(vocab_size)
    if foreign is not None:
        name, id_ = foreign
        raise InvalidRequest(
            f"{id_} is not a token id: the vocabulary has {vocab_size} ids.",
            blame=Blame(RequestPart.SAMPLING, path=(name,)),
        )


def _sampling_fields(request: GenerateRequest, vocab_size: int, max_context_tokens: int | None) -> dict[str, object]:
    params = request.params
    _check_params(params, vocab_size)
    return {
        "n_predict": params.max_tokens or -1,
        "seed": seed_of(request),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": _num_penalized(request, max_context_tokens),
        "ignore_eos": params.ignore_eos,
        "stop": params.stop,
        "logit_bias": params.logit_bias,
        "n_probs": max(1, params.num_top_logprobs),
    }


def _num_penalized(request: GenerateRequest, max_context_tokens: int | None) -> int:
    """Number of last tokens under a repetition penalty: all. llama.cpp allocates as many as are asked for."""
    params = request.params
    if params.repetition_penalty == 1.0:
        return 0
    limit = max_context_tokens or LONGEST_CONTEXT
    return min(limit, request.prompt.num_tokens + (params.max_tokens or limit))


def _grammar_parts(grammar: Grammar) -> list[bytes]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return [b',"json_schema":', object_as_sent()]
        case GrammarKind.JSON_SCHEMA:
            return [b',"json_schema":', schema_as_sent(grammar.source)]
        case GrammarKind.CHOICE:
            return [b',"grammar":', _json(choice_grammar(grammar.source))]
        case GrammarKind.EBNF:
            if grammar.source.startswith("%"):
                raise InvalidRequest("An EBNF grammar cannot begin with a percent sign.")
            return [b',"grammar":', _json(grammar.source)]
        case GrammarKind.REGEX | GrammarKind.LARK:
            raise InvalidRequest(f"llama.cpp takes no grammar of the kind {grammar.kind.value!r}.")


# -- replies


class _Alternative(msgspec.Struct, gc=False):
    id: Annotated[int, NATURAL]
    logprob: float


class _LlamaCppRow(msgspec.Struct, gc=False):
    id: Annotated[int, NATURAL]
    logprob: float
    top_logprobs: list[_Alternative] = []


class _Timings(msgspec.Struct):
    cache_n: Annotated[int, NATURAL] = 0


class _PromptProgress(msgspec.Struct):
    cache: Annotated[int, NATURAL] = 0


class _Failure(msgspec.Struct):
    code: int = 500
    message: str = ""


class _LlamaCppEvent(msgspec.Struct):
    content: str = ""
    tokens: list[Annotated[int, NATURAL]] = []
    stop: bool = False
    tokens_predicted: Annotated[int, NATURAL] | None = None
    tokens_evaluated: Annotated[int, NATURAL] | None = None
    completion_probabilities: list[_LlamaCppRow] = []
    stop_type: str | None = None
    stopping_word: str = ""
    prompt_progress: _PromptProgress | None = None
    timings: _Timings | None = None
    num_cached: Annotated[int, NATURAL] | None = msgspec.field(default=None, name="timings/cache_n")
    error: _Failure | None = None


_EVENT = msgspec.json.Decoder(_LlamaCppEvent)
_LAWS = laws((r"logprob`", "logprob_is_finite"), (r"\.id`$|\.tokens\[\d+\]`$", "id_in_vocab"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppToken:
    """A token as llama.cpp reported it. `logprob` is raw, in nats; `top` are the likeliest, best first."""

    id: int
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppEvent:
    """One event. `num_predicted` counts all tokens up to and with its own; None where it has no count. `text` is the
    addition of its tokens, and of those left out before them; a possible beginning of a stop string comes later.

    `stop_type` is set in the last event, one without tokens. `num_cached` is None where it is not reported.
    """

    text: str
    sampled: tuple[LlamaCppToken, ...]
    num_predicted: int | None
    num_cached: int | None
    stop_type: str | None
    stopping_word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """An error in the middle of a stream, with the status it would have had before."""

    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppReply:
    """A whole reply: all ids, and the tokens among them with a reported logprob, in order."""

    ids: "array[int]"
    sampled: tuple[LlamaCppToken, ...]
    num_cached: int
    stop_type: str


def decode_event(data: bytes, *, vocab_size: int, num_prompt: int) -> LlamaCppEvent | EngineFailure:
    """Read one event of a stream. Raises UpstreamInvalid, naming the broken law, and nothing else."""
    event = decoded(_EVENT, data, _LAWS)
    if event.error is not None:
        return EngineFailure(status=event.error.code if 400 <= event.error.code <= 599 else 500)
    _check_prompt(event, num_prompt)
    is_progress = event.prompt_progress is not None
    if event.stop and event.stop_type is None:
        raise UpstreamInvalid("shape", "the last event does not say why the generation ended")
    if not is_progress and event.tokens_predicted is None:
        raise UpstreamInvalid("shape", "an event does not report tokens_predicted")
    rows = () if is_progress or event.stop else _rows(event, vocab_size)
    if not is_progress and not event.stop and [row.id for row in rows] != event.tokens:
        law = "ids_agree" if len(rows) == len(event.tokens) else "has_logprobs"
        raise UpstreamInvalid(
            law, f"an event has {len(event.tokens)} tokens and the logprobs of {len(rows)}, or others"
        )
    return LlamaCppEvent(
        text=event.content,
        sampled=rows,
        num_predicted=None if is_progress else event.tokens_predicted,
        num_cached=_num_cached(event),
        stop_type=event.stop_type if event.stop else None,
        stopping_word=event.stopping_word,
    )


def decode_reply(body: bytes, *, vocab_size: int, num_prompt: int) -> LlamaCppReply:
    """Read a whole reply. Raises UpstreamInvalid, naming the broken law, and nothing else."""
    reply = decoded(_EVENT, body, _LAWS)
    _check_prompt(reply, num_prompt)
    if reply.stop_type is None:
        raise UpstreamInvalid("shape", "the reply does not say why the generation ended")
    if len(reply.tokens) != reply.tokens_predicted:
        detail = f"tokens_predicted is {reply.tokens_predicted}, but there are {len(reply.tokens)} tokens"
        raise UpstreamInvalid("count_agrees", detail)
    check_ids(reply.tokens, vocab_size)
    return LlamaCppReply(
        ids=token_ids(reply.tokens),
        sampled=_rows(reply, vocab_size),
        num_cached=_num_cached(reply) or 0,
        stop_type=reply.stop_type,
    )


def decode_ranking(body: bytes, *, vocab_size: int, num_prompt: int) -> tuple[TopLogprob, ...]:
    """The answer to `encode_ranking`: the likeliest tokens, best first. Raises UpstreamInvalid."""
    reply = decode_reply(body, vocab_size=vocab_size, num_prompt=num_prompt)
    if len(reply.sampled) != 1:
        raise UpstreamInvalid("has_logprobs", f"one token was asked for, {len(reply.sampled)} came with a logprob")
    return reply.sampled[0].top


def decode_model(body: bytes) -> tuple[int | None, int | None]:
    """Size of the vocabulary and tokens of context per request, from `/v1/models`; None for a figure not reported.

    Raises UpstreamInvalid for anything but a list of models.
    """
    try:
        models = _MODELS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamInvalid("shape", f"GET /v1/models answered what is no list of models: {error}") from error
    meta = models.data[0].meta if models.data else None
    return (None, None) if meta is None else (meta.n_vocab, meta.n_ctx)


class _LlamaCppMeta(msgspec.Struct):
    n_vocab: Annotated[int, msgspec.Meta(ge=1)] | None = None
    n_ctx: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _LlamaCppCard(msgspec.Struct):
    meta: _LlamaCppMeta | None = None


class _LlamaCppModels(msgspec.Struct):
    data: list[_LlamaCppCard] = []


_MODELS = msgspec.json.Decoder(_LlamaCppModels)


TOO_LONG = (
    re.compile(
        rb"request (?:\((?P<prompt>\d{1,9}) tokens\) )?exceeds the available context size"
        rb"(?: \((?P<limit>\d{1,9}) tokens\))?"
    ),
)
"""llama.cpp's message for a prompt too long for a slot; older servers give no numbers."""


def _check_prompt(event: _LlamaCppEvent, num_prompt: int) -> None:
    if event.tokens_evaluated not in (None, num_prompt):
        detail = f"{num_prompt} ids were sent, but the engine reports {event.tokens_evaluated} prompt tokens"
        raise UpstreamInvalid("prompt_agrees", detail)


def _rows(event: _LlamaCppEvent, vocab_size: int) -> tuple[LlamaCppToken, ...]:
    rows = event.completion_probabilities
    check_ids((row.id for row in rows), vocab_size)
    for row in rows:
        check_ids((top.id for top in row.top_logprobs), vocab_size)
        if row.logprob <= LN_ZERO:
            raise UpstreamInvalid("logprob_is_finite", f"token {row.id} was sampled, but its reported probability is 0")
    return tuple(LlamaCppToken(id=row.id, logprob=row.logprob, top=_top(row.top_logprobs)) for row in rows)


def _top(rows: Sequence[_Alternative]) -> tuple[TopLogprob, ...]:
    """The possible alternatives: float32 has no probability for the others."""
    return tuple(TopLogprob(id=row.id, logprob=row.logprob) for row in rows if row.logprob > LN_ZERO)


def _num_cached(event: _LlamaCppEvent) -> int | None:
    if event.prompt_progress is not None:
        return event.prompt_progress.cache
    return event.num_cached if event.timings is None else event.timings.cache_n
