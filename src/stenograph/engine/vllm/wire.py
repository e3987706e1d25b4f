"""vLLM's answers: the bytes of its two routes for token ids, of a reply or of one event of it, as values. Pure.

Owns the names of vLLM's reply fields, and the laws of one body by itself; `reply` has those of a whole reply. For any
bytes, `read` returns their content or raises `UpstreamInvalid` with the broken law:

    utf8                    the whole body is UTF-8, also where nobody reads it
    json                    it is JSON, with nothing after it
    shape                   its fields have vLLM's types
    one_choice              there is no more than one choice, the first
    has_ids, has_logprobs   what was sampled is there
    ids_agree               a logprob is of the sampled token
    logprob_is_finite       a logprob is a finite number
    id_in_vocab             a token's id is an integer in [0, 2^31)
    finish_reason, weight_spans, routed_experts_shape, support_of_token     these have vLLM's types

An error in place of a reply, in a stream also under the status 200, is `UpstreamRefused` with the status named in it.
Field names: as for `request`. Recordings of a real one: tests/service/recordings/vllm.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import msgspec

from stenograph.core.errors import UpstreamInvalid, UpstreamRefused
from stenograph.core.messages import MediaKind
from stenograph.core.types import EffectivePrompt, MediaRange, TopLogprob, token_ids
from stenograph.engine.http.adapter import told_too_long
from stenograph.engine.rows import EngineUsage, Natural, decoded, laws, short
from stenograph.engine.vllm.request import VLLMRoute, abort_ids

NO_LOGPROB = -9999.0
"""vLLM's logprob of a token without one (it is NaN, or was not computed)."""

_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Candidate(msgspec.Struct, gc=False):
    token_id: _Id
    logprob: float


class _VLLMRow(msgspec.Struct, gc=False):
    """A sampled token; vLLM repeats it in `top_logprobs`, left unread where it was not asked for."""

    token_id: _Id
    logprob: float


class _RankedRow(_VLLMRow):
    top_logprobs: list[_Candidate] = []


R = TypeVar("R", _VLLMRow, _RankedRow)


class _Logprobs(msgspec.Struct, Generic[R]):
    content: list[R] | None = None


class VLLMSpan(msgspec.Struct, gc=False):
    version: str
    start: Natural
    end: Natural


class _VLLMError(msgspec.Struct):
    code: int


class _GeneratedChoice(msgspec.Struct, Generic[R]):
    index: int = 0
    token_ids: list[_Id] | None = None
    logprobs: _Logprobs[R] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VLLMSpan] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[_Id]] | None = None


class _VLLMRange(msgspec.Struct, gc=False):
    offset: Natural
    length: Natural


class _VLLMGenerated(msgspec.Struct, Generic[R]):
    """A reply of the generate route, or one event of it."""

    choices: list[_GeneratedChoice[R]] = []
    request_id: str | None = None
    usage: EngineUsage | None = None
    error: _VLLMError | None = None
    prompt_token_ids: list[_Id] | None = None
    mm_placeholders: dict[str, list[_VLLMRange]] | None = None


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None = None


class _CompletionChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[_Id] | None = None
    logprobs: _CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None


class _VLLMCompletion(msgspec.Struct):
    """A reply of the completions route, or one event of it."""

    choices: list[_CompletionChoice] = []
    id: str | None = None
    usage: EngineUsage | None = None
    error: _VLLMError | None = None


class _VLLMCard(msgspec.Struct):
    id: str
    max_model_len: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None


class _VLLMModels(msgspec.Struct):
    data: Annotated[list[_VLLMCard], msgspec.Meta(min_length=1)]


_PLAIN = msgspec.json.Decoder(_VLLMGenerated[_VLLMRow])
_RANKED = msgspec.json.Decoder(_VLLMGenerated[_RankedRow])
_COMPLETION = msgspec.json.Decoder(_VLLMCompletion)
_MODELS = msgspec.json.Decoder(_VLLMModels)

VLLM_LAWS = laws(
    (r"sampling_mask", "support_of_token"),
    (r"prompt_token_ids|mm_placeholders", "prompt_agrees"),
    (r"token_ids`|token_ids\[|token_id`$", "id_in_vocab"),
    (r"logprobs\[\.\.\.\]|logprobs\[\d+\]|\.logprob`$", "logprob_is_finite"),
    (r"logprobs", "has_logprobs"),
    (r"weight_versions", "weight_spans"),
    (r"routed_experts", "routed_experts_shape"),
    (r"finish_reason", "finish_reason"),
    (r"`\$\.choices`$", "one_choice"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model's name at its server, and how many tokens its context has there; None where that is not reported."""

    name: str
    max_context_tokens: int | None


def decode_models(body: bytes, *, wanted: str) -> ServedModel:
    """The model of this name from a list of models, else the first. Raises UpstreamInvalid."""
    models = decoded(_MODELS, body, VLLM_LAWS).data
    model = next((model for model in models if model.id == wanted), models[0])
    return ServedModel(name=model.id, max_context_tokens=model.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMTold:
    """The content of one body of either route. `tops` are not sorted, and as many as were asked for or one more.

    `has_choice`: False for the event at the end of a stream with the usage alone.
    """

    request_id: str | None
    has_choice: bool
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    tops: Sequence[Sequence[TopLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spans: Sequence[VLLMSpan] | None = None
    routed_experts: str | None = None
    supports: Sequence[Sequence[int]] | None = None
    usage: EngineUsage | None = None
    effective: EffectivePrompt | None = None


def read(route: VLLMRoute, body: bytes, *, with_tops: bool) -> VLLMTold:
    """Read a body of this route. `with_tops`: alternatives were asked for."""
    if route is VLLMRoute.COMPLETIONS:
        completion = decoded(_COMPLETION, body, VLLM_LAWS)
        _check_head(completion.error, completion.choices, body)
        if not completion.choices:
            return VLLMTold(request_id=completion.id, has_choice=False, usage=completion.usage)
        return _told_by_completion(completion.id, completion.choices[0], completion.usage)
    if with_tops:
        ranked = decoded(_RANKED, body, VLLM_LAWS)
        _check_head(ranked.error, ranked.choices, body)
        rows = _rows(ranked.choices[0]) if ranked.choices else ()
        tops = [[TopLogprob(id=top.token_id, logprob=top.logprob) for top in row.top_logprobs] for row in rows]
        return _told_by_generate(ranked, rows, tops)
    plain = decoded(_PLAIN, body, VLLM_LAWS)
    _check_head(plain.error, plain.choices, body)
    return _told_by_generate(plain, _rows(plain.choices[0]) if plain.choices else (), None)


def _check_head(
    error: _VLLMError | None, choices: Sequence[_GeneratedChoice[R]] | Sequence[_CompletionChoice], body: bytes
) -> None:
    """Raise UpstreamRefused or ContextLengthExceeded for an error in the place of a reply."""
    if error is not None:
        if not 400 <= error.code <= 599:
            raise UpstreamInvalid("shape", f"an error with the code {short(error.code)}")
        refused = told_too_long(body, TOO_LONG)
        raise refused or UpstreamRefused(status=error.code, content_type="application/json", headers=(), body=body)
    if len(choices) > 1 or (choices and choices[0].index != 0):
        raise UpstreamInvalid("one_choice", f"one choice was asked for, {len(choices)} came")


def _rows(choice: _GeneratedChoice[R]) -> Sequence[R]:
    if choice.logprobs is None or choice.logprobs.content is None:
        if choice.token_ids:
            raise UpstreamInvalid("has_logprobs", "the reply has ids without logprobs")
        return ()
    return choice.logprobs.content


def _told_by_generate(
    reply: _VLLMGenerated[R], rows: Sequence[_VLLMRow], tops: Sequence[Sequence[TopLogprob]] | None
) -> VLLMTold:
    if not reply.choices:
        return VLLMTold(request_id=reply.request_id, has_choice=False, usage=reply.usage)
    choice = reply.choices[0]
    ids = _ids(choice.token_ids)
    if [row.token_id for row in rows] != ids and len(rows) == len(ids):
        raise UpstreamInvalid("ids_agree", "a logprob is of another token than the one that was sampled")
    return VLLMTold(
        request_id=reply.request_id,
        has_choice=True,
        ids=ids,
        logprobs=[row.logprob for row in rows],
        tops=tops,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        spans=choice.weight_versions,
        routed_experts=choice.routed_experts,
        supports=choice.sampling_mask,
        usage=reply.usage,
        effective=None if reply.prompt_token_ids is None else _effective(reply.prompt_token_ids, reply.mm_placeholders),
    )


def _effective(ids: list[int], placeholders: dict[str, list[_VLLMRange]] | None) -> EffectivePrompt:
    """The prompt as it was run. Ranges of other media than images are left out, and so do not collapse."""
    told = (placeholders or {}).get(MediaKind.IMAGE, [])
    found = tuple(MediaRange(start=one.offset, length=one.length) for one in told)
    return EffectivePrompt(ids=token_ids(ids), ranges=found)


def _told_by_completion(request_id: str | None, choice: _CompletionChoice, usage: EngineUsage | None) -> VLLMTold:
    ids, logprobs = _ids(choice.token_ids), choice.logprobs
    if logprobs is None and ids:
        raise UpstreamInvalid("has_logprobs", "the reply has ids without logprobs")
    names = [] if logprobs is None else logprobs.tokens
    if names != [f"token_id:{id_}" for id_ in ids] and len(names) == len(ids):
        raise UpstreamInvalid("ids_agree", "a logprob is of another token than the one that was sampled")
    if logprobs is not None and len(names) != len(logprobs.token_logprobs):
        detail = f"{len(names)} tokens, but {len(logprobs.token_logprobs)} logprobs"
        raise UpstreamInvalid("count_agrees", detail)
    rows = None if logprobs is None or logprobs.top_logprobs is None else logprobs.top_logprobs
    return VLLMTold(
        request_id=request_id,
        has_choice=True,
        ids=ids,
        logprobs=() if logprobs is None else logprobs.token_logprobs,
        tops=None
        if rows is None
        else [[_named(name, logprob) for name, logprob in (row or {}).items()] for row in rows],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        routed_experts=choice.routed_experts,
        usage=usage,
    )


TOO_LONG = (
    re.compile(
        rb"maximum context length is (?P<limit>\d{1,9}) tokens\. However, you requested (?P<sampled>\d{1,9}) output"
        rb" tokens and your prompt contains (?:at least )?(?P<prompt>\d{1,9}) input tokens"
    ),
    re.compile(
        rb"maximum context length is (?P<limit>\d{1,9}) tokens\. However, your prompt contains (?:at least )?"
        rb"(?P<prompt>\d{1,9}) input tokens"
    ),
    re.compile(
        rb"prompt \(length (?P<prompt>\d{1,9})\)[^.]{0,80} longer than the maximum model length of (?P<limit>\d{1,9})"
    ),
)
"""vLLM's messages for a request too long for its context, of several versions. Source: its `renderers/params.py` and
`v1/engine/input_processor.py`."""


def _ids(told: list[int] | None) -> list[int]:
    if told is None:
        raise UpstreamInvalid("has_ids", "the reply has no token_ids: the engine does not know return_token_ids")
    return told


_NAME = re.compile(r"token_id:([0-9]{1,9})")


def _named(name: str, logprob: float) -> TopLogprob:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UpstreamInvalid("ids_agree", f"{name[:80]!r} is not the name of a token id")
    return TopLogprob(id=int(match[1]), logprob=logprob)


def check_request(told: str | None, request_id: str, route: VLLMRoute) -> None:
    """A reply is to the request sent: it has its id, as vLLM spells it. Raises UpstreamInvalid."""
    if told is None or told not in (request_id, *abort_ids(request_id, route)):
        raise UpstreamInvalid(
            "request_agrees",
            f"the request {request_id!r} is answered as {str(told)[:120]!r}:"
            " what is between here and vLLM must not change X-Request-Id",
        )
