"""`POST /sessions`: opens a session. A Starlette endpoint."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, TypeVar

from msgspec import convert
from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import Draining, IdempotencyMismatch, InvalidRequest, LimitExceeded, StartupError
from stenograph.core.json_types import Hex32
from stenograph.core.kinds import AfterLength, Compat, HistoryKind, SaltMode
from stenograph.core.loaded import entry
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.settings import Switch
from stenograph.core.stated_options import StatedOptions
from stenograph.core.weights import CacheSalt
from stenograph.dialects.common.pointers import nearest
from stenograph.dialects.sessions import CreateSession, decode_create
from stenograph.engine.base import Engine
from stenograph.http.auth import Authenticator
from stenograph.http.responses import json_response
from stenograph.http.route import STORED, TENANT, TEXT, SessionTokens, parameter, route
from stenograph.http.rule_files import sampling_of
from stenograph.http.settings import Settings
from stenograph.http.wire import header_value, read_json
from stenograph.offload.body_slots import LARGE_BODY_BYTES
from stenograph.offload.pool import CpuPool
from stenograph.session.keyed_sessions import KeyedSessions
from stenograph.session.manager import SessionManager
from stenograph.session.rewrite_rules import RewriteRules, UnknownRewrite
from stenograph.session.services import TurnServices
from stenograph.trajectory.canonical import Canonical
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.matching import MATCHERS, load_matcher

T = TypeVar("T")

MAX_SESSION_BODY_BYTES = 2**20
"""Most bytes of a body without messages, even if `--max-body-bytes` allows more."""

_ON_OPENED = (
    "getSession", "chatOnSession", "completeOnSession", "getSamples", "getDrift", "getLedger", "abortSession",
    "putOutcome", "getOutcome", "deleteSession",
)  # fmt: skip
"""Operations on the id of a new session."""


class OpenedSession(TypedDict):
    """A new session. `base_url` is for a client of OpenAI's, `root_url` for one that adds `/v1` or `/v1beta` itself.
    `token` is what its agent gets in place of a key, where the server has keys: it is good for this session's turns,
    token counts and list of models alone."""

    session_id: Hex32
    base_url: str
    root_url: str
    token: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRoute:
    """The route of one server. `defaults` are the options of a session if its creator leaves them out."""

    manager: SessionManager
    engine: Engine
    keyed: KeyedSessions
    authenticator: Authenticator
    pool: CpuPool
    defaults: SessionOptions
    rewrite_rules: RewriteRules
    max_body_bytes: int

    @staticmethod
    def of(
        settings: Settings, services: TurnServices, keyed: KeyedSessions, authenticator: Authenticator
    ) -> "CreateRoute":
        """The route of a server. Raises StartupError for a matcher or a file of sampling that cannot be loaded, or a
        history against the contract."""
        return CreateRoute(
            manager=authenticator.manager,
            engine=services.engine,
            keyed=keyed,
            authenticator=authenticator,
            pool=services.pool,
            defaults=default_options(settings, services.canonical),
            rewrite_rules=services.rewrite_rules,
            max_body_bytes=settings.max_body_bytes,
        )

    @route(
        "POST /sessions",
        "openSession",
        "Open a session",
        OpenedSession,
        parameters=(
            parameter(
                "header",
                "Idempotency-Key",
                "A retry sends the key and the body of its first request, and gets the same session.",
                TEXT,
            ),
        ),
        body=CreateSession,
        links=_ON_OPENED,
        errors=(LimitExceeded, Draining, IdempotencyMismatch, *STORED),
    )
    async def create(self, request: Request) -> Response:
        """`POST /sessions`."""
        body, (wire, sampling) = await decoded(
            request, lambda body: (body, decode_create(body)), self.pool, self.max_body_bytes
        )
        tenant: str | None = request.scope.get(TENANT)
        if wire.policy is not None:  # first: the weights of a LoRA are kept from their first use on
            await entry("stenograph.http.policy_check:check_policy")(self.engine, wire.policy)
        options = dataclasses.replace(self._options(wire, sampling), tenant=tenant)
        key = self.authenticator.own_key(request.scope, header_value(request.scope, b"idempotency-key") or None)
        session_id = await self.keyed.open(options, key=key, body=body)
        return json_response(opened_session(request, session_id, self.authenticator.tokens))

    def _options(self, wire: CreateSession, sampling: SamplingRules | None) -> SessionOptions:
        """The options of a new session. Raises InvalidRequest for those that this server cannot keep."""
        given: dict[str, Any] = {}
        if wire.compat is not None:
            given |= _contract(Compat(wire.compat))
        if wire.history is not None:
            given["history"] = HistoryKind(wire.history)
        if wire.after_length is not None:
            given["after_length"] = AfterLength(wire.after_length)
        if wire.ttl_s is not None:
            given["ttl_s"] = wire.ttl_s
        if sampling is not None:
            given["sampling"] = sampling.over(self.defaults.sampling)
        if wire.matcher is not None:
            given["matcher"] = self._matcher(wire.matcher)
        if wire.canonical is not None:
            given["canonical"] = self._canonical(wire.canonical)
        return dataclasses.replace(
            self.defaults,
            stated=convert(wire, StatedOptions, from_attributes=True),
            metadata=wire.metadata or {},
            template_kwargs=wire.chat_template_kwargs or {},
            support=self._support(wire.support),
            cache_salt=self._cache_salt(wire.cache_salt, wire.policy),
            **given,
        )

    def _matcher(self, name: str) -> str:
        if name not in (known := [*MATCHERS, self.defaults.matcher]):
            raise InvalidRequest(
                f"matcher must be one of {', '.join(dict.fromkeys(known))}, got {name[:80]!r}. A dotted path is for the"
                " server's own settings (--matcher): it imports code.",
                param="/matcher",
            )
        return name

    def _canonical(self, choice: str) -> Canonical:
        try:
            return self.rewrite_rules.chosen(choice)
        except UnknownRewrite as error:
            hint = nearest(error.name, error.known)
            raise InvalidRequest(f"canonical: {error}.{hint}", param="/canonical") from error

    def _support(self, asked: bool | None) -> bool:
        engine = self.engine.capabilities
        if asked and not engine.reports_support:
            raise InvalidRequest(
                f"support: the engine {engine.engine} does not report which ids could be sampled.", param="/support"
            )
        return self.defaults.support if asked is None else asked

    def _cache_salt(self, asked: str | None, lora: str | None) -> CacheSalt:
        engine, mode = self.engine.capabilities, SaltMode(asked or self.defaults.cache_salt.mode)
        if mode is SaltMode.PIN and mode not in engine.salt_modes:
            raise InvalidRequest(
                f"cache_salt 'pin': the engine {engine.engine} cannot keep a cache of the weights that a session began"
                " with; leave it out.",
                param="/cache_salt",
            )
        return CacheSalt.at(mode, self.manager.weights.of(lora).cached_as)


def opened_session(request: Request, session_id: str, tokens: SessionTokens) -> OpenedSession:
    """A new session, for the sender of a request."""
    root = f"{str(request.base_url).rstrip('/')}/sessions/{session_id}"
    opened: OpenedSession = {"session_id": session_id, "base_url": f"{root}/v1", "root_url": root}
    if (token := tokens.made_for(session_id)) is not None:
        opened["token"] = token
    return opened


def default_options(settings: Settings, canonical: Canonical) -> SessionOptions:
    """The settings' own. Raises StartupError for a matcher or a file of sampling that cannot be loaded, or a history
    against the contract."""
    load_matcher(settings.matcher)
    of_settings = SessionOptions(
        history=settings.history,
        after_length=settings.after_length,
        matcher=settings.matcher,
        ttl_s=settings.session_ttl_s,
        max_nodes=settings.max_nodes,
        sampling=sampling_of(settings),
        canonical=canonical,
        support=settings.support is Switch.ON,
        cache_salt=CacheSalt(mode=settings.cache_salt),
    )
    if settings.compat is None:
        return of_settings
    if settings.history is HistoryKind.TREE:
        raise StartupError("compat miles makes sessions linear: leave history tree out, or compat")
    return dataclasses.replace(of_settings, **_contract(settings.compat))


def _contract(compat: Compat) -> dict[str, Any]:
    """The options of another server's contract."""
    return {"compat": compat, "history": HistoryKind.LINEAR, "after_length": AfterLength.REFUSE}


async def decoded(request: Request, decode: Callable[[bytes], T], pool: CpuPool, max_bytes: int) -> T:
    """The body of a request about sessions, decoded on a worker if it is large, because Python checks every value."""
    body = await read_json(request.scope, request.receive, max_bytes=min(MAX_SESSION_BODY_BYTES, max_bytes))
    if len(body) < LARGE_BODY_BYTES:
        return decode(body)
    return await pool.run(lambda: decode(body), num_bytes=len(body))
