"""LMDeploy as a dialect: which of its routes a server has, its aborts, what is asked of it. Pure.

`/generate` is used where it takes ids, the chat route with `input_ids` where that alone does. A server says in its
`/openapi.json` which fields it reads; one that shows none is asked by requests that begin nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stenograph.core.errors import EngineUnavailable, StenographError, UpstreamInvalid
from stenograph.core.settings import ReplayKind
from stenograph.core.types import Chunk, RequestId
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http_engine import NOT_THERE, Ask, Call, passed_through, routing_headers
from stenograph.engine.lmdeploy_wire import (
    GRAMMARS,
    OLDEST,
    LMDeployReading,
    Route,
    Wanted,
    encode_abort,
    encode_request,
    fields_by_route,
    grammars_of,
    served_model,
    session_of,
)
from stenograph.engine.transport import HttpReply

MODELS_PATH = "/v1/models"
OPENAPI_PATH = "/openapi.json"
ABORT_PATH = "/abort_request"
PROBE_PATHS = ("/health", MODELS_PATH)
"""The second is for routers that have no `/health`."""
NO_SESSION = -1
"""LMDeploy's own word for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a server turned out to have. `aborts`: it was started with `--enable-abort-handling`."""

    route: Route
    fields: frozenset[str]
    model: str
    aborts: bool


class LMDeploy:
    """An LMDeploy server."""

    def __init__(
        self,
        *,
        model: str,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        replay: ReplayKind = ReplayKind.NONE,
    ) -> None:
        """`model` is its model's name there, if it serves several. `eos_token_ids` are those that end a turn there.
        `replay` says whether routed experts are asked for.
        """
        self._eos_ids = tuple(eos_token_ids)
        self._replays = replay is ReplayKind.ROUTED_EXPERTS
        self._found: _Found | None = None
        self._capabilities = Capabilities(
            engine="lmdeploy",
            model=model,
            vocab_size=vocab_size,
            max_context_tokens=None,
            grammars=GRAMMARS,  # what is not known yet is no reason to refuse
            streams=True,
            takes_json=True,
        )

    def __repr__(self) -> str:
        return f"<LMDeploy {self._capabilities.model} {self._found}>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def probe_paths(self) -> Sequence[str]:
        return PROBE_PATHS

    async def discover(self, ask: Ask) -> None:
        """Find its model's name, a route that takes ids, and whether it aborts. Raises UpstreamInvalid without one."""
        models = await ask("GET", MODELS_PATH)
        if models.status != 200:
            raise passed_through(models)
        routes = await _routes(ask)
        route = next((route for route in Route if route in routes), None)
        if route is None:
            raise UpstreamInvalid("takes_ids", "neither /generate nor the chat route of this LMDeploy takes input_ids")
        fields = routes[route]
        if self._replays and "return_routed_experts" not in fields:
            raise UpstreamInvalid("tells_experts", f"{route.value} has no return_routed_experts, which replay asks for")
        aborted = await ask("POST", ABORT_PATH, encode_abort(NO_SESSION))
        self._found = _Found(
            route=route,
            fields=fields,
            model=served_model(models.body, wanted=self._capabilities.model),
            aborts=aborted.status not in (*NOT_THERE, 501),
        )
        self._capabilities = replace(self._capabilities, grammars=grammars_of(fields), note=_note(self._found))

    def call(self, request: GenerateRequest) -> Call:
        found = self._known()
        wanted = Wanted(
            route=found.route,
            fields=found.fields,
            model=found.model,
            eos_ids=self._eos_ids,
            # Of a reply that comes at once, a hang-up leaves nothing of what was drawn.
            streams=request.streams or not found.aborts,
            replays=self._replays,
        )
        return Call(
            path=found.route.value,
            body=encode_request(request, wanted),
            headers=routing_headers(request),
            streams=wanted.streams,
        )

    def reading(self, request: GenerateRequest) -> "LMDeployHttpReading":
        return LMDeployHttpReading(
            route=self._known().route,
            vocab_size=self._capabilities.vocab_size,
            num_prompt=len(request.prompt.ids),
            stop_ids=(*self._eos_ids, *request.params.stop_token_ids),
        )

    def refusal(self, http: HttpReply, request: GenerateRequest) -> StenographError:
        return passed_through(http)

    def abort_call(self, request_id: RequestId) -> Call | None:
        if not self._known().aborts:
            return None
        return Call(path=ABORT_PATH, body=encode_abort(session_of(request_id)))

    def _known(self) -> _Found:
        if self._found is None:
            raise EngineUnavailable("It is not known yet what the engine can do: it has not been reached.")
        return self._found


class LMDeployHttpReading(LMDeployReading):
    """A reply of either route, whole or as it comes."""

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        """The chunks of a 200 that came at once."""
        return self.whole_body(http.body)


async def _routes(ask: Ask) -> dict[Route, frozenset[str]]:
    """The routes that take ids, with the fields that each reads."""
    document = await ask("GET", OPENAPI_PATH)
    if document.status == 200:
        return fields_by_route(document.body)
    tried = await ask("POST", Route.GENERATE.value, b"{}")  # no prompt: refused where the route is there
    if tried.status >= 500:
        raise passed_through(tried)
    route = Route.CHAT if tried.status in NOT_THERE else Route.GENERATE
    return {route: OLDEST[route]}


def _note(found: _Found) -> str:
    notes: list[str] = []
    if found.route is Route.CHAT:
        notes.append(f"it is asked by {found.route.value} with input_ids: its {Route.GENERATE.value} takes none")
    if not found.aborts:
        notes.append("it does not abort: generations are ended by hanging up; start it with --enable-abort-handling")
    return "; ".join(notes)
