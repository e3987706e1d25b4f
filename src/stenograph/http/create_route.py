"""`POST /sessions`: opens a session. A Starlette endpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NotRequired, TypedDict, TypeVar

from msgspec import convert
from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.budgets import Budgets
from stenograph.core.errors import Draining, IdempotencyMismatch, InvalidRequest, LimitExceeded
from stenograph.core.json_types import Hex32
from stenograph.core.kinds import AfterLength, Compat, HistoryKind
from stenograph.dialects.sessions import CreateSession, decode_create
from stenograph.engine.base import Engine
from stenograph.http.auth import Doorman, SessionTokens
from stenograph.http.route import STORED, TEXT, parameter, route
from stenograph.http.session_defaults import SessionDefaults, session_defaults
from stenograph.http.settings import Settings
from stenograph.http.wire import header_value, json_response, read_json
from stenograph.offload.body_slots import LARGE_BODY_BYTES
from stenograph.offload.pool import CpuPool
from stenograph.session.keyed_openings import KeyedOpenings
from stenograph.session.manager import SessionManager
from stenograph.session.rewrite_rules import RewriteRules
from stenograph.session.services import TurnServices
from stenograph.session.session import SessionOptions
from stenograph.trajectory.matching import MATCHERS, Matcher

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
    """The route of one server."""

    manager: SessionManager
    engine: Engine
    openings: KeyedOpenings
    tokens: SessionTokens
    pool: CpuPool
    defaults: SessionDefaults
    rewrite_rules: RewriteRules
    max_body_bytes: int

    @staticmethod
    def of(settings: Settings, services: TurnServices, openings: KeyedOpenings, doorman: Doorman) -> "CreateRoute":
        """The route of a server. Raises StartupError for a matcher or a file of sampling that cannot be loaded, or a
        history against the contract."""
        return CreateRoute(
            manager=doorman.manager,
            engine=services.engine,
            openings=openings,
            tokens=doorman.tokens,
            pool=services.pool,
            defaults=session_defaults(settings, services.canonical),
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
        history, after_length, compat = self.defaults.history, self.defaults.after_length, self.defaults.compat
        if wire.compat is not None:
            history, after_length, compat = HistoryKind.LINEAR, AfterLength.REFUSE, Compat(wire.compat)
        options = SessionOptions(
            history=history if wire.history is None else HistoryKind(wire.history),
            matcher=self._matcher(wire.matcher),
            matcher_name=self.defaults.matcher_name if wire.matcher is None else wire.matcher,
            after_length=after_length if wire.after_length is None else AfterLength(wire.after_length),
            metadata=wire.metadata or {},
            ttl_s=self.defaults.ttl_s if wire.ttl_s is None else wire.ttl_s,
            budgets=convert(wire, Budgets, from_attributes=True),
            max_nodes=self.defaults.max_nodes,
            template_kwargs=wire.chat_template_kwargs or {},
            sampling=self.defaults.sampling if sampling is None else sampling.over(self.defaults.sampling),
            group=wire.group,
            canonical=self.defaults.canonical_of(wire.canonical, self.rewrite_rules),
            support=self.defaults.support_of(wire.support, self.engine.capabilities),
            compat=compat,
            cache_salt=self.defaults.salt_of(wire.cache_salt, self.engine.capabilities, self.manager.weights.version),
        )
        key = header_value(request.scope, b"idempotency-key") or None
        session_id = await self.openings.open(options, key=key, body=body)
        root = f"{str(request.base_url).rstrip('/')}/sessions/{session_id}"
        opened: OpenedSession = {"session_id": session_id, "base_url": f"{root}/v1", "root_url": root}
        if (token := self.tokens.made_for(session_id)) is not None:
            opened["token"] = token
        return json_response(opened)

    def _matcher(self, name: str | None) -> Matcher:
        defaults = self.defaults
        if name is None or name == defaults.matcher_name:
            return defaults.matcher
        if name not in MATCHERS:
            known = ", ".join(dict.fromkeys([*MATCHERS, defaults.matcher_name]))
            raise InvalidRequest(
                f"matcher must be one of {known}, got {name[:80]!r}. A dotted path is for the server's own settings"
                " (--matcher): it imports code.",
                param="/matcher",
            )
        return MATCHERS[name]


async def decoded(request: Request, decode: Callable[[bytes], T], pool: CpuPool, max_bytes: int) -> T:
    """The body of a request about sessions, decoded on a worker if it is large, because Python checks every value."""
    body = await read_json(request.scope, request.receive, max_bytes=min(MAX_SESSION_BODY_BYTES, max_bytes))
    if len(body) < LARGE_BODY_BYTES:
        return decode(body)
    return await pool.run(lambda: decode(body), num_bytes=len(body))
