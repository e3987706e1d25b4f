"""The routes unused by a chat: the reading of sessions, their samples, kept responses; then those of the parts.

Their code is loaded, and they are made, when the first request comes to one of them.
"""

from collections.abc import Sequence

from starlette.types import Scope

from stenograph.core.loaded import entry
from stenograph.http.bulk_parts import OwnParts
from stenograph.http.bulk_routes import BulkRoutes
from stenograph.http.media_route import MediaRoute
from stenograph.http.part import Core, Part
from stenograph.http.route import Route
from stenograph.http.route_table import rows
from stenograph.http.session_routes import SessionRoutes

HELD_RESPONSES = "stenograph.http.response_route:HeldResponses"


class Late:
    """The core of one server, with its late routes."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.sessions = SessionRoutes.of(core.settings, core.services, core.manager, core.metrics, core.moe_shape)
        self.own_parts = OwnParts(sessions=self.sessions)
        """The sessions of this process, for an answer of many."""
        self.all_parts = core.processes.all_parts(self.own_parts)
        """Those of all processes."""
        self._groups: dict[str, Sequence[object]] = {}

    def __repr__(self) -> str:
        return f"<Late of {self.core.model}, parts {sorted(self._groups)}>"

    @property
    def rows(self) -> Sequence[Route]:
        """The rows of all routes but the turns."""
        return rows(self.core.parts)

    def check_agent(self, scope: Scope) -> str | None:
        """As the authenticator: raises for whoever may not know of a request's session."""
        return self.core.authenticator.check_agent(scope)

    def own_groups(self) -> Sequence[object]:
        """The objects of the classes with the core's rows."""
        media = MediaRoute(authenticator=self.core.authenticator)
        groups = (BulkRoutes(sessions=self.sessions, parts=self.all_parts), media)
        held = self.core.spoken.held
        if held is None:
            return (*groups, self.sessions)
        responses = entry(HELD_RESPONSES)(
            authenticator=self.core.authenticator, share=self.core.services.share, model=self.core.model, dialect=held
        )
        return (*groups, self.sessions, responses)

    def groups_of(self, part: Part) -> Sequence[object]:
        """The objects with a part's routes, made once."""
        if part.name not in self._groups:
            self._groups[part.name] = entry(part.groups)(self) if part.groups else ()
        return self._groups[part.name]

    def open_parts(self) -> None:
        """Make those of all parts."""
        for part in self.core.parts:
            self.groups_of(part)
