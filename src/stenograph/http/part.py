"""A part: something that a server can do without. The command line names the parts (cli/parts.py); the core imports
none, and loads of one what is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from stenograph.core.loaded import entry
from stenograph.dialects.base import Spoken
from stenograph.http.auth import Doorman
from stenograph.http.metrics import Metrics
from stenograph.http.processes import Processes
from stenograph.http.settings import Settings
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices

if TYPE_CHECKING:  # of routes that are loaded late
    from stenograph.http.bulk_parts import OwnParts, SessionParts
    from stenograph.http.session_routes import SessionRoutes

Kind = TypeVar("Kind")

SESSIONS = "stenograph.http.session_routes:SessionRoutes"
OWN_PARTS = "stenograph.http.bulk_parts:OwnParts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. Each name that it gives is an entry, `module:name`, or empty where it has no such thing."""

    name: str
    settings: str = ""
    """The class of its settings, which is among the bases of a server's."""
    by: str = ""
    """The setting without which its `tracing` and its `processes` are left out."""
    metrics: str = ""
    """The metrics that it adds."""
    routes: tuple[str, ...] = ()
    """The classes that have rows of routes, in the order of /openapi.json."""
    below: str = ""
    """The path that its routes are at and below; empty: anywhere. They are made when a request comes there."""
    groups: str = ""
    """`(Core) -> Sequence[object]`: makes the objects of the classes of `routes`."""
    tracing: str = ""
    """`(Core) -> RouteTracing`"""
    processes: str = ""
    """`(Settings) -> Processes`"""

    def is_wanted(self, settings: Settings) -> bool:
        """Whether the settings ask for what it does from the start."""
        return getattr(settings, self.by, None) is not None


@dataclass(frozen=True, kw_only=True)
class Core:
    """The core of one server, as its parts and its late routes use it."""

    settings: Settings
    services: TurnServices
    doorman: Doorman
    metrics: Metrics
    processes: Processes
    spoken: Spoken
    model: str
    moe_shape: tuple[int, int] | None
    parts: tuple[Part, ...]
    _groups: dict[str, Sequence[object]] = field(default_factory=dict[str, Sequence[object]])

    @property
    def manager(self) -> SessionManager:
        return self.doorman.manager

    def settings_of(self, kind: type[Kind]) -> Kind:
        """The settings of a part, which are among the server's."""
        assert isinstance(self.settings, kind), f"a server with this part has its settings, {kind.__name__}"
        return self.settings

    def groups_of(self, part: Part) -> Sequence[object]:
        """The objects that have a part's routes, made once."""
        if part.name not in self._groups:
            self._groups[part.name] = entry(part.groups)(self) if part.groups else ()
        return self._groups[part.name]

    @cached_property
    def sessions(self) -> "SessionRoutes":
        """The routes of sessions, which other routes use."""
        made: SessionRoutes = entry(SESSIONS).of(self)
        return made

    @cached_property
    def own_parts(self) -> "OwnParts":
        """The sessions of this process, for an answer of many."""
        made: OwnParts = entry(OWN_PARTS)(sessions=self.sessions)
        return made

    @cached_property
    def all_parts(self) -> "SessionParts":
        """Those of all processes."""
        return self.processes.all_parts(self.own_parts)
