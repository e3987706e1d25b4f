"""The adapter of SGLang's own route: ids in, ids and logprobs out, streamed or whole. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from stenograph.core.errors import StenographError
from stenograph.core.kinds import SaltMode
from stenograph.core.messages import MediaKind
from stenograph.core.routing import RoutingHint
from stenograph.core.types import LogprobsKind, LogprobsReport, Prompt, RepetitionOver, RequestId
from stenograph.core.weights import WeightCommand
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http.adapter import (
    MODELS_PATH,
    NOT_THERE,
    AdapterOptions,
    Ask,
    Call,
    ControlReply,
    EngineAdapter,
    EngineReading,
    in_our_shape,
    loras_in,
)
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.sglang.control import INFO_PATH, sglang_calls, sglang_reply
from stenograph.engine.sglang.generate_wire import (
    ServerFacts,
    SGLangGenerateReading,
    context_of_models,
    encode_generate,
    facts_of,
    too_long,
)
from stenograph.engine.sglang.grammar import GRAMMARS
from stenograph.engine.sglang.request import MAX_SUPPORT_TOP_K, encode_abort, encode_close, tells_support

GENERATE_PATH = "/generate"
ABORT_PATH = "/abort_request"
CLOSE_PATH = "/close_session"
PROBE_PATHS = ("/model_info", "/get_model_info", "/health", MODELS_PATH)
"""SGLang's `/health` is a generation by default: it waits behind a prefill, and fails while generation is paused. The
second is the older name; the others are for routers."""
SERVER_INFO_PATHS = ("/server_info", "/get_server_info")
"""The second is the older name."""
WORKERS_PATH = "/workers"
"""A router's route, absent from SGLang itself."""


def _placeholder(prompt: Prompt) -> int | None:
    """The id in the places of the prompt's images; None: it has none."""
    return prompt.ids[prompt.media[0].position] if prompt.media else None


class SGLangGenerate(EngineAdapter):
    """A server with the route `/generate`."""

    scorer = "stenograph.engine.sglang.scores:scored"
    load_reader = "stenograph.engine.sglang.load:sglang_load"
    probe_paths = PROBE_PATHS
    info_path = INFO_PATH

    def __init__(self, options: AdapterOptions) -> None:
        """Its log-probabilities are raw where it runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`; it takes them from
        penalized and masked logits."""
        self.capabilities = Capabilities(
            engine="sglang-generate",
            model=options.model,
            vocab_size=options.vocab_size,
            max_context_tokens=None,
            grammars=GRAMMARS,
            streams=True,
            takes_json=True,
            logprobs=LogprobsReport(kind=options.logprobs or LogprobsKind.TEMPERED, after_constraints=True),
            reports_support=True,
            max_support_top_k=MAX_SUPPORT_TOP_K,
            salt_modes=frozenset(SaltMode),
            repetition_over=RepetitionOver.TURN,
            hints=frozenset(RoutingHint),
            media=frozenset(MediaKind),
            places_media_by_text=True,
        )
        self._replay = options.replay
        self._route_size = options.route_size
        self._keeps_sessions = False
        self.last_priority: int | None = None
        """Of scores; a request with one is refused where the server has no priority scheduling."""
        self._streams_chats = False
        """Whether streams of its chat route lack nothing."""
        self._num_unreported = 0
        """Tokens at the end of a prompt, not counted by its chat route."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.capabilities.model}>"

    async def discover(self, ask: Ask) -> None:
        """Find the context's length, and the server's other facts. A router may not report it; then the engine refuses
        requests that do not fit."""
        models, server, model = await ask("GET", MODELS_PATH), ServerFacts(), await ask("GET", INFO_PATH)
        for path in SERVER_INFO_PATHS:
            info = await ask("GET", path)
            if info.status == 200:
                server = facts_of(info.body)
                break
        limit = context_of_models(models.body) if models.status == 200 else None
        self._keeps_sessions, self.last_priority = server.keeps_sessions, server.last_priority
        told = facts_of(model.body) if model.status == 200 else ServerFacts()
        # A router's workers change their weights one by one, and the one that answers may not be the one that samples.
        is_alone = (await ask("GET", WORKERS_PATH)).status in NOT_THERE
        self._streams_chats = server.streams_chats and told.weight_version is not None and is_alone
        self._num_unreported = max(server.num_unreported, told.num_unreported)
        limits = [one for one in (limit, server.max_context_tokens) if one is not None]
        self.capabilities = replace(
            self.capabilities,
            max_context_tokens=min(limits, default=None),
            media=frozenset(MediaKind) if told.has_image_understanding else frozenset(),
            policies=loras_in(models.body),
        )

    def call(self, request: GenerateRequest) -> tuple[Call, EngineReading]:
        call = Call(
            path=GENERATE_PATH,
            body=encode_generate(self._fitting(request) if request.prompt.media else request, replay=self._replay),
            streams=request.streams,
        )
        return call, SGLangGenerateReading(
            request_id=request.request_id,
            vocab_size=self.capabilities.vocab_size,
            num_prompt=request.prompt.num_tokens,
            replay=self._replay,
            first_row=request.prompt.first_new_row,
            row_size=self._route_size,
            wants_support=request.params.support and tells_support(request.params),
            placeholder=_placeholder(request.prompt),
        )

    def _fitting(self, request: GenerateRequest) -> GenerateRequest:
        """A request with new images that may fill the context says no number: SGLang refuses one beyond it, also by the
        images' tokens, which nobody knows ahead, and without one it samples up to the end."""
        prompt, params, limit = request.prompt, request.params, self.capabilities.max_context_tokens
        is_known = all(one.recorded is not None for one in prompt.media)
        if is_known or limit is None or params.max_tokens is None or params.max_tokens < limit - prompt.num_expanded:
            return request
        return structs.replace(request, params=structs.replace(params, max_tokens=None))

    def refusal(self, http: HttpReply, request: GenerateRequest) -> StenographError:
        return too_long(http) or in_our_shape(http)

    def abort_call(self, request_id: RequestId) -> Call:
        return Call(path=ABORT_PATH, body=encode_abort(request_id))

    def close_call(self, session: str) -> Call | None:
        return Call(path=CLOSE_PATH, body=encode_close(session)) if self._keeps_sessions else None

    def control_calls(self, command: WeightCommand) -> Sequence[Call]:
        return sglang_calls(command)

    def control_reply(self, command: WeightCommand, call: Call, http: HttpReply) -> ControlReply:
        return sglang_reply(command, call, http)
