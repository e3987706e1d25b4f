"""The adapter of LMDeploy: a server's route, its aborts, the requests to it. Pure.

`/generate` is used where it takes ids, the chat route with `input_ids` where it alone does. A server lists the fields
it reads in its `/openapi.json`; one without a list is probed by requests that begin nothing.
"""

from dataclasses import dataclass, replace

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.types import LogprobsKind, LogprobsReport, RequestId
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http.adapter import (
    NOT_THERE,
    AdapterOptions,
    Ask,
    Call,
    EngineAdapter,
    known,
    list_models,
    passed_through,
)
from stenograph.engine.lmdeploy.reply import TOO_LONG, LMDeployReading
from stenograph.engine.lmdeploy.request import (
    GRAMMARS,
    OLDEST,
    LMDeployRoute,
    Wanted,
    encode_abort,
    encode_request,
    fields_by_route,
    grammars_of,
    served_model,
    session_of,
)
from stenograph.engine.settings import ReplayKind

OPENAPI_PATH = "/openapi.json"
ABORT_PATH = "/abort_request"
NO_SESSION = -1
"""LMDeploy's own word for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LMDeployFound:
    """Abilities found at a server. `aborts`: it was started with `--enable-abort-handling`."""

    route: LMDeployRoute
    fields: frozenset[str]
    model: str
    aborts: bool


class LMDeploy(EngineAdapter):
    """An LMDeploy server."""

    too_long = TOO_LONG
    load_reader = "stenograph.engine.exposition:lmdeploy_load"
    names_requests = False

    def __init__(self, options: AdapterOptions) -> None:
        self._eos_ids = tuple(options.eos_token_ids)
        self._replays = options.replay is ReplayKind.ROUTED_EXPERTS
        self._found: _LMDeployFound | None = None
        self.capabilities = Capabilities(
            engine="lmdeploy",
            model=options.model,
            vocab_size=options.vocab_size,
            max_context_tokens=None,
            grammars=GRAMMARS,  # what is not known yet is no reason to refuse
            streams=True,
            takes_json=True,
            logprobs=LogprobsReport(kind=options.logprobs or LogprobsKind.RAW),
        )

    def __repr__(self) -> str:
        return f"<LMDeploy {self.capabilities.model} {self._found}>"

    async def discover(self, ask: Ask) -> None:
        """Find its model's name, a route for ids, and whether it aborts. Raises UpstreamInvalid without one."""
        models = await list_models(ask)
        routes = await _routes(ask)
        route = next((route for route in LMDeployRoute if route in routes), None)
        if route is None:
            raise UpstreamInvalid("takes_ids", "neither /generate nor the chat route of this LMDeploy takes input_ids")
        fields = routes[route]
        if self._replays and "return_routed_experts" not in fields:
            raise UpstreamInvalid("tells_experts", f"{route.value} has no return_routed_experts, which replay asks for")
        aborted = await ask("POST", ABORT_PATH, encode_abort(NO_SESSION))
        self._found = _LMDeployFound(
            route=route,
            fields=fields,
            model=served_model(models.body, wanted=self.capabilities.model),
            aborts=aborted.status not in (*NOT_THERE, 501),
        )
        self.capabilities = replace(self.capabilities, grammars=grammars_of(fields), note=_note(self._found))

    def call(self, request: GenerateRequest) -> tuple[Call, LMDeployReading]:
        found = known(self._found)
        wanted = Wanted(
            route=found.route,
            fields=found.fields,
            model=found.model,
            eos_ids=self._eos_ids,
            # Of a reply that comes at once, closing the connection leaves nothing of what was sampled.
            streams=request.streams or not found.aborts,
            replays=self._replays,
        )
        call = Call(
            path=found.route.value,
            body=encode_request(request, wanted),
            streams=wanted.streams,
        )
        return call, LMDeployReading(
            route=found.route,
            vocab_size=self.capabilities.vocab_size,
            num_prompt=request.prompt.num_tokens,
            stop_ids=(*self._eos_ids, *request.params.stop_token_ids),
            replays=self._replays,
            first_row=request.prompt.first_new_row,
        )

    def abort_call(self, request_id: RequestId) -> Call | None:
        if not known(self._found).aborts:
            return None
        return Call(path=ABORT_PATH, body=encode_abort(session_of(request_id)))


async def _routes(ask: Ask) -> dict[LMDeployRoute, frozenset[str]]:
    """The routes for ids, each with the fields it reads."""
    document = await ask("GET", OPENAPI_PATH)
    if document.status == 200:
        return fields_by_route(document.body)
    tried = await ask("POST", LMDeployRoute.GENERATE.value, b"{}")  # no prompt: refused where the route is there
    if tried.status >= 500:
        raise passed_through(tried)
    route = LMDeployRoute.CHAT if tried.status in NOT_THERE else LMDeployRoute.GENERATE
    return {route: OLDEST[route]}


def _note(found: _LMDeployFound) -> str:
    notes: list[str] = []
    if found.route is LMDeployRoute.CHAT:
        notes.append(
            f"it is asked by {found.route.value} with input_ids: its {LMDeployRoute.GENERATE.value} takes none"
        )
    if not found.aborts:
        notes.append(
            "it has no aborts: closing the connection ends a generation; start it with --enable-abort-handling"
        )
    return "; ".join(notes)
