"""The adapter of vLLM's token-in, token-out routes: a server's route, its aborts, the requests to it.

The generate route reports more (weight versions) but is off in a vLLM started without `--enable-scale-out`; its
completions route also takes ids and gives them back. A server's routes are found each time it comes up, by requests
that begin nothing. Tokens sampled under a grammar are scored afterwards, because their own logprobs are not the model's
(scores.py).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from stenograph.core.errors import ContextLengthExceeded, UpstreamInvalid
from stenograph.core.kinds import SaltMode
from stenograph.core.logprobs import has_support
from stenograph.core.messages import MediaKind
from stenograph.core.routing import RoutingHint
from stenograph.core.types import Chunk, LogprobsKind, LogprobsReport, RequestId, SamplingParams, token_ids
from stenograph.core.weights import WeightCommand
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http.adapter import (
    AdapterOptions,
    Ask,
    Call,
    ControlReply,
    EngineAdapter,
    EngineReading,
    known,
    list_models,
    loras_in,
    passed_through,
)
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.scoring import ScoreRequest, Scores
from stenograph.engine.settings import ReplayKind
from stenograph.engine.vllm.control import INFO_PATH, vllm_calls, vllm_reply
from stenograph.engine.vllm.reply import Expected, VLLMReader
from stenograph.engine.vllm.request import (
    EMPTY_GENERATION,
    GRAMMARS,
    VLLMRoute,
    encode_abort,
    encode_request,
    request_headers,
)
from stenograph.engine.vllm.scores import decode_scores, encode_given, encode_scoring, scoring_id, with_last
from stenograph.engine.vllm.wire import TOO_LONG, decode_models
from stenograph.offload.in_pieces import in_pieces

ABORT_PATHS = ("/inference/v1/abort_requests", "/abort_requests")
"""The first comes with the generate route; the second with `VLLM_SERVER_DEV_MODE=1`, or with `--tokens-only`."""
SCORING_TOKENS = 1
"""Tokens to be sampled by a scoring request, after all tokens sampled before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _VLLMFound:
    """Abilities found at a server. `abort_path` None: a generation ends early only by hanging up."""

    route: VLLMRoute
    abort_path: str | None
    model: str


class VLLM(EngineAdapter):
    """A vLLM server, or a router before several of one kind."""

    too_long = TOO_LONG
    media_sampler = "stenograph.engine.vllm.lost_media:sampled_again"
    scorer = "stenograph.engine.vllm.adapter:scored"
    load_reader = "stenograph.engine.exposition:vllm_load"
    info_path = INFO_PATH

    def __init__(self, options: AdapterOptions) -> None:
        """Tokens sampled under a grammar are scored where its log-probabilities are raw."""
        self._eos_ids = frozenset(options.eos_token_ids)
        self._wants_experts = options.replay is ReplayKind.ROUTED_EXPERTS
        self._own_max_context_tokens = options.max_context_tokens
        self._found: _VLLMFound | None = None
        self.capabilities = Capabilities(
            engine="vllm",
            model=options.model,
            vocab_size=options.vocab_size,
            max_context_tokens=options.max_context_tokens,
            grammars=GRAMMARS,
            streams=True,
            takes_json=True,
            logprobs=LogprobsReport(kind=options.logprobs or LogprobsKind.RAW),
            salt_modes=frozenset(SaltMode),
            hints=frozenset({RoutingHint.DP_RANK}),
            media=frozenset(MediaKind),
        )

    def __repr__(self) -> str:
        return f"<VLLM {self.capabilities.model} {self._found}>"

    @property
    def target(self) -> tuple[VLLMRoute, str]:
        """The route that it is asked by, and its model's name. Raises EngineUnavailable before it is known."""
        found = known(self._found)
        return found.route, found.model

    async def discover(self, ask: Ask) -> None:
        """Find its model's name and context, its route for ids, and the one for aborts."""
        models = await list_models(ask)
        served = decode_models(models.body, wanted=self.capabilities.model)
        tried = await ask("POST", VLLMRoute.GENERATE.value, EMPTY_GENERATION)
        route = _route_by(tried)
        found = _VLLMFound(route=route, abort_path=await _abort_path(ask, route), model=served.name)
        limit = self._own_max_context_tokens if served.max_context_tokens is None else served.max_context_tokens
        self._found = found
        self.capabilities = replace(
            self.capabilities,
            max_context_tokens=limit,
            reports_support=route is VLLMRoute.GENERATE,
            media=frozenset(MediaKind) if route is VLLMRoute.GENERATE else frozenset(),
            policy=served.name,
            policies=loras_in(models.body),
            note=_note(found, status=tried.status),
        )

    def call(self, request: GenerateRequest) -> tuple[Call, EngineReading]:
        found = known(self._found)
        streams, model = self._streams(found, request), request.policy or found.model
        asked = structs.replace(request, params=self._leaving_room(request))
        call = Call(
            path=found.route.value,
            body=encode_request(
                asked, route=found.route, model=model, streams=streams, wants_experts=self._wants_experts
            ),
            headers=request_headers(request.request_id, request.routing),
            streams=streams,
        )
        expected = Expected(
            request_id=request.request_id,
            route=found.route,
            vocab_size=self.capabilities.vocab_size,
            num_prompt=request.prompt.num_tokens,
            num_top_logprobs=request.params.num_top_logprobs,
            eos_ids=self._eos_ids,
            wants_experts=self._wants_experts,
            first_row=request.prompt.first_new_row,
            wants_support=wants_support(request.params),
            has_media=bool(request.prompt.media),
        )
        reader = VLLMReader(expected)
        if not self._scores(request.params):
            return call, VLLMReading(reader)
        return call, VLLMGuidedReading(reader, request, route=found.route, model=model)

    def abort_call(self, request_id: RequestId) -> Call | None:
        found = known(self._found)
        if found.abort_path is None:
            return None
        return Call(path=found.abort_path, body=encode_abort(request_id, found.route))

    def control_calls(self, command: WeightCommand) -> Sequence[Call] | str:
        return vllm_calls(command)

    def control_reply(self, command: WeightCommand, call: Call, http: HttpReply) -> ControlReply:
        return vllm_reply(command, call, http)

    def _streams(self, found: _VLLMFound, request: GenerateRequest) -> bool:
        """Whether to ask for events: tokens sampled before the connection closes are otherwise lost."""
        if self._scores(request.params):
            return False  # nothing of it can be reported before its end
        if found.route is VLLMRoute.COMPLETIONS and self._wants_experts:
            return False  # its events do not report them
        if wants_support(request.params):
            return False  # only a whole reply has them
        return request.streams or found.abort_path is None

    def _scores(self, params: SamplingParams) -> bool:
        """Whether the sampled tokens are scored afterwards: scores are raw log-probabilities, and no others."""
        return params.grammar is not None and self.capabilities.logprobs.kind is LogprobsKind.RAW

    def _leaving_room(self, request: GenerateRequest) -> SamplingParams:
        """Parameters that leave one token of the context, to score tokens sampled under a grammar.

        Raises ContextLengthExceeded where none is left to sample.
        """
        params, limit, num_prompt = request.params, self.capabilities.max_context_tokens, request.prompt.num_expanded
        if not self._scores(params) or limit is None:
            return params
        room = limit - SCORING_TOKENS - num_prompt
        if room < 1:
            raise ContextLengthExceeded(
                num_prompt_tokens=num_prompt,
                max_tokens=params.max_tokens,
                max_context_tokens=limit - SCORING_TOKENS,
            )
        return structs.replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))


class VLLMReading(EngineReading):
    """A reply as chunks: one of a whole reply, or one an event."""

    def __init__(self, reader: VLLMReader) -> None:
        self._reader = reader

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        return (self._reader.whole(http.body),)

    def event(self, data: bytes) -> Sequence[Chunk]:
        chunk = self._reader.event(data)
        return () if chunk is None else (chunk,)


class VLLMGuidedReading(EngineReading):
    """The same for tokens sampled under a grammar: one chunk, once the model has scored its tokens."""

    def __init__(self, reader: VLLMReader, request: GenerateRequest, *, route: VLLMRoute, model: str) -> None:
        self._reader = reader
        self._request = request
        self._route = route
        self._model = model
        self._sampled: Chunk | None = None

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        self._sampled = self._reader.whole(http.body)
        return ()

    async def settle(self, ask: Ask) -> Sequence[Chunk]:
        sampled = self._sampled
        if sampled is None or not sampled.ids:
            return () if sampled is None else (sampled,)
        ids = token_ids(sampled.ids)
        effective = sampled.effective
        num_prompt = self._request.prompt.num_tokens if effective is None else len(effective.ids)
        scores = await self._scores(ask, ids, num_prompt)
        versions = {span.version for span in sampled.weights or ()}
        if scores.version is not None and versions != {scores.version}:
            raise UpstreamInvalid(
                "one_version",
                f"the weights changed from {sorted(versions)} to {scores.version!r} before a guided turn was scored",
            )
        num_top = self._request.params.num_top_logprobs
        return (structs.replace(sampled, logprobs=scores.logprobs, top_logprobs=scores.top.rows(num_top)),)

    async def _scores(self, ask: Ask, ids: "array[int]", num_prompt: int) -> Scores:
        body = encode_scoring(self._request, ids, route=self._route, model=self._model)
        request_id = scoring_id(self._request)
        http = await ask("POST", self._route.value, body, request_headers(request_id, self._request.routing))
        if http.status != 200:
            raise passed_through(http)
        work = decode_scores(
            http.body,
            ids,
            request_id=request_id,
            route=self._route,
            num_prompt=num_prompt,
            num_top=self._request.params.num_top_logprobs,
        )
        return await in_pieces(work)


async def scored(adapter: VLLM, request: ScoreRequest, ask: Ask) -> Scores:
    """The scores of given tokens. Raises UpstreamError."""
    route, model = adapter.target
    limit, is_raw = adapter.capabilities.max_context_tokens, adapter.capabilities.logprobs.kind is LogprobsKind.RAW
    is_full = len(request.ids) == limit and is_raw  # others would be those among the allowed tokens
    body = encode_given(request, route=route, model=request.policy or model, is_full=is_full)
    http = await ask("POST", route.value, body, request_headers(request.request_id, None))
    if http.status != 200:
        raise passed_through(http)
    work = decode_scores(
        http.body,
        request.ids[request.start : -1 if is_full else None],
        request_id=request.request_id,
        route=route,
        num_prompt=request.start,
        num_top=request.num_top,
    )
    scores = await in_pieces(work)
    if is_full:
        scores = with_last(scores, http.body, request, route=route)
    return request.answered(scores.logprobs, scores.top, version=scores.version)


def wants_support(params: SamplingParams) -> bool:
    """Whether the reply has to have supports."""
    return params.support and has_support(params)


def _route_by(tried: HttpReply) -> VLLMRoute:
    """The route to use, by what the generate route answered to a request without ids."""
    if tried.status in (400, 422):
        return VLLMRoute.GENERATE
    if tried.status in (403, 404, 405):
        return VLLMRoute.COMPLETIONS
    if tried.status == 200:
        raise UpstreamInvalid("has_ids", f"POST {VLLMRoute.GENERATE.value} takes a prompt without ids: it is no vLLM")
    raise passed_through(tried)


async def _abort_path(ask: Ask, route: VLLMRoute) -> str | None:
    """The first abort route found. Only GET: a POST without ids aborts everything."""
    for path in ABORT_PATHS[0 if route is VLLMRoute.GENERATE else 1 :]:
        if (await ask("GET", path)).status == 405:
            return path
    return None


def _note(found: _VLLMFound, *, status: int) -> str:
    notes: list[str] = []
    if found.route is VLLMRoute.COMPLETIONS:
        notes.append(
            f"it is asked by {found.route.value}, without weight versions: {VLLMRoute.GENERATE.value} answers {status};"
            " start it with --enable-scale-out"
        )
    if found.abort_path is None:
        notes.append(
            "it has no abort route: closing the connection ends a generation, which then keeps nothing under a grammar"
        )
    return "; ".join(notes)
