"""Keys of a server with tenants: the operator's are --api-key and --admin-key, a tenant has its own, an agent its
session's token.

A session's id has the tag of its tenant. So every process knows a request's right to a session from the id alone, and
before it reads anything: another tenant's session is answered as a session unknown to the server.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from stenograph.core.errors import (
    Forbidden,
    Limit,
    LimitExceeded,
    SessionNotFound,
    StartupError,
    StenographError,
    Unauthorized,
    UnexpectedFailure,
)
from stenograph.core.stages import StageTimes
from stenograph.core.stated_options import TAG, tag_of
from stenograph.http.auth import Authenticator, are_among, credentials_of, session_named
from stenograph.http.processes import Processes
from stenograph.http.route import DELETES, TAG_SEEN, TENANT, Handler
from stenograph.http.settings import Settings
from stenograph.http.wire import delivery_of
from stenograph.parts import TenantSettings, settings_of
from stenograph.session.admission import Admission
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.selection import SessionFilter, selected
from stenograph.session.session import Session
from stenograph.session.watch import Watch
from stenograph.tenants.audit import AUDITED, AuditLog
from stenograph.tenants.counts import TenantCounts
from stenograph.tenants.lanes import POLL_S, HeldPlace, Lanes
from stenograph.tenants.tenant import BadTenants, Tenant, TenantKey, Tenants, TenantScope, read_tenants, scopes_of

log = logging.getLogger(__name__)

OPERATOR = ""
"""The operator's lane."""
_OPERATORS = Tenant(key_sha256=["0" * 64], scopes=[TenantScope.ADMIN])
_NOBODYS = "-"
"""A tag of no session."""
_CALLER = "stenograph.caller"
"""In a scope: the name for the audit log."""


class TenantAuthenticator(Authenticator):
    """The authenticator of a server with tenants."""

    checks_open = True

    def __init__(self, settings: Settings, manager: SessionManager, processes: Processes) -> None:
        """Raises StartupError for an unreadable file; a restarted worker has its last good one."""
        super().__init__(api_keys=settings.api_key, manager=manager, admin_keys=settings.admin_key)
        own, clock = settings_of(TenantSettings, settings), manager.sessions.clock
        if own.tenants is None:
            raise StartupError("there is no file of tenants: give --tenants")
        self._file = own.tenants
        self._kept = None if processes.folder is None else processes.folder / f"tenants-{processes.number}.toml"
        self._audit = None if own.audit_log is None else AuditLog(own.audit_log, clock)
        self._timeout_s, storage = settings.request_timeout_s, manager.sessions.storage
        self._lanes = Lanes(
            manager.sessions.capacity,
            TenantCounts(processes.folder, processes.number),
            clock,
            timeout_s=settings.request_timeout_s,
            stored=self._stored,
            is_shared=storage is not None and storage.store.is_shared,
            has_others=processes.folder is not None,
        )
        self._lanes.change(OPERATOR, _OPERATORS)
        manager.sessions.may_open = self._lanes.check_opening
        self._tenants = Tenants({})
        try:
            self._take(self._file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, BadTenants) as error:
            if self._kept is None or not self._kept.exists():
                raise StartupError(f"--tenants: the file {str(self._file)!r}: {error}") from error
            self._take(self._kept.read_text(encoding="utf-8"))
            self._say_kept(error)

    def __repr__(self) -> str:
        return f"<TenantAuthenticator {self._tenants!r}>"

    def reload(self) -> None:
        """Read the file again. A bad one changes nothing, and the log says why."""
        before = self._tenants.by_name
        if self._audit is not None:
            self._audit.reopen()
        try:
            self._take(self._file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, BadTenants) as error:
            self._say_kept(error)
            return
        changes = _changes(before, self._tenants.by_name)
        log.info("--tenants: read again: %s", changes)
        if self._audit is not None and any(changes.values()):
            self._audit.note("readTenants", {"who": None, **changes})

    def _take(self, text: str) -> None:
        self._tenants = read_tenants(text)
        for name, tenant in self._tenants.by_name.items():
            self._lanes.change(name, tenant)
        if self._kept is not None:
            self._kept.write_text(text, encoding="utf-8")

    def _say_kept(self, error: Exception) -> None:
        log.error("--tenants: the file %r is not taken, the one before holds: %s", str(self._file), error)
        if self._audit is not None:
            self._audit.note("readTenants", {"who": None, "error": str(error)})

    # --- who asks

    def check_open(self, scope: Scope) -> None:
        """Metrics are of all tenants: the operator's. Of the rest nobody sees others' counts without a key."""
        key, is_operators = self._asker(scope)
        is_of_all = scope["path"] == "/metrics"
        if is_operators:
            return
        if key is not None:
            self._enter(key, scope, is_admins=is_of_all)
        elif is_of_all:
            super().check_key(scope)
        else:
            scope[TAG_SEEN] = _NOBODYS

    def check_key(self, scope: Scope) -> None:
        key, _ = self._asker(scope)
        if key is None:
            super().check_key(scope)
        else:
            self._enter(key, scope, is_admins=False)

    def check_admin(self, scope: Scope) -> None:
        key, _ = self._asker(scope)
        if key is None:
            super().check_admin(scope)
        else:
            self._enter(key, scope, is_admins=True)

    def check_agent(self, scope: Scope) -> str | None:
        key, is_operators = self._asker(scope)
        if key is not None:
            self._enter(key, scope, is_admins=False)
            return session_named(scope, by_id=False)
        named = super().check_agent(scope)
        if not is_operators and named is not None:
            scope[TAG_SEEN] = named[TAG]
        return named

    async def session_of(self, scope: Scope, *, wakes: bool = True) -> Session | None:
        session = await super().session_of(scope, wakes=wakes)
        if session is None or (owner := session.options.tenant) is None:
            return session
        if owner not in self._tenants.by_name and scope.get(TENANT) is None and not self._asker(scope)[1]:
            raise Unauthorized("The tenant of this session's token has no key any more.")
        return session

    def _asker(self, scope: Scope) -> tuple[TenantKey | None, bool]:
        """The tenant's key of a request; and whether it has one of the operator's, preferred to a tenant's."""
        given = credentials_of(scope)
        if are_among(given, self._keys):
            scope[_CALLER] = "operator"
            return None, True
        key = self._tenants.key_among(given)
        scope[_CALLER] = None if key is None else key.shown
        return key, False

    def _enter(self, key: TenantKey, scope: Scope, *, is_admins: bool) -> None:
        """Let a tenant in, as far as its key goes. Raises SessionNotFound for another's session, and Forbidden."""
        name, named = key.tenant, session_named(scope, by_id=False)
        scope[TENANT] = name
        is_admin = TenantScope.ADMIN in key.scopes
        if not is_admin:
            tag = tag_of(name)
            scope[TAG_SEEN] = tag
            if named is not None and named[TAG] != tag:
                raise SessionNotFound(named)
        needed = scopes_of(scope["method"], scope["path"], is_admins=is_admins)
        if needed and not is_admin and not set(needed).intersection(key.scopes):
            raise Forbidden(f"The key of {key.shown} may not do this: it has not the scope {needed[0]}.")

    # --- what is done

    async def admitted(
        self, scope: Scope, session: Session | None, *, stages: StageTimes, identity: RequestIdentity | None
    ) -> Admission | Watch:
        """The admission of a request, once its tenant has a place for it. Raises as `Lanes.place`."""
        name: str = (scope.get(TENANT) if session is None else session.options.tenant) or OPERATOR
        if name not in self._tenants.by_name:
            name = OPERATOR  # a session of a tenant that is gone, and the operator's request
        clock = self.manager.sessions.clock
        until = clock.monotonic() + self._timeout_s
        while True:
            place = await self._lanes.place(name, delivery_of(scope))
            try:
                return self._admitted(place, session, stages=stages, identity=identity)
            except LimitExceeded as error:  # another worker was quicker
                if error.limit is not Limit.IN_FLIGHT or clock.monotonic() >= until:
                    raise
            again = asyncio.Event()
            clock.call_later(POLL_S, again.set)
            await again.wait()

    def _admitted(
        self, place: HeldPlace, session: Session | None, *, stages: StageTimes, identity: RequestIdentity | None
    ) -> Admission | Watch:
        try:
            admitted = self.manager.admit(session, stages=stages, identity=identity)
        except BaseException:
            place.end()
            raise
        if isinstance(admitted, Admission):
            place.counted()
            admitted.place = place
        else:
            place.end()
        return admitted

    def own_key(self, scope: Scope, key: str | None) -> str | None:
        return None if key is None else f"{scope.get(TENANT) or OPERATOR}/{key}"

    def noted(  # pyright: ignore[reportIncompatibleVariableOverride]  # set where there are tenants
        self, route: str, endpoint: Handler
    ) -> Handler:
        """The endpoint, with a line in the audit log for each answer, if its route has any."""
        audit = self._audit
        if audit is None or route not in AUDITED:
            return endpoint

        async def noting(request: Request) -> Response:
            status = UnexpectedFailure.status
            try:
                response = await endpoint(request)
                status = response.status_code
                return response
            except StenographError as error:
                status = error.status
                raise
            finally:
                if request.scope.get(DELETES, True) or status != HTTPStatus.OK:
                    version = self.manager.weights.version
                    audit.request(route, request.scope, status, who=request.scope.get(_CALLER), weights=version)

        return noting

    async def _stored(self, tag: str) -> tuple[int, int]:
        """The tokens of a tenant's sessions here, and how many they are; where servers share a database, of all."""
        num_tokens = [one.totals.num_tokens async for one in selected(self.manager, SessionFilter(tag=tag))]
        return sum(num_tokens), len(num_tokens)


def _changes(before: Mapping[str, Tenant], now: Mapping[str, Tenant]) -> Mapping[str, list[str]]:
    """The names of tenants that came, went and changed."""
    return {
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
    }


def tenant_authenticator(settings: Settings, manager: SessionManager, processes: Processes) -> TenantAuthenticator:
    """The authenticator of a server; its file is read again at SIGHUP. Raises StartupError."""
    made = TenantAuthenticator(settings, manager, processes)
    with suppress(RuntimeError, ValueError):  # no event loop runs, or not on the main thread: there are no signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, made.reload)
    return made
