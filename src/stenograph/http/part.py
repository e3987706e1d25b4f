"""A part: an optional piece of a server. The command line names the parts (cli/parts.py); the core imports none, and
loads only the entries in use.
"""

from dataclasses import dataclass

from stenograph.dialects.base import Spoken
from stenograph.http.auth import Authenticator
from stenograph.http.metrics import Metrics
from stenograph.http.processes import Processes
from stenograph.http.settings import Settings
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. Each name here is an entry, `module:name`, or empty where the part has no such thing."""

    name: str
    by: str = ""
    """The setting that switches on its `authenticator`, its `tracing` and its `processes`."""
    metrics: str = ""
    """Its own metrics."""
    routes: tuple[str, ...] = ()
    """The classes with rows of routes, in the order of /openapi.json."""
    below: str = ""
    """Its routes are at and below this path; empty: anywhere. They are made when a request comes there."""
    groups: str = ""
    """`(Late) -> Sequence[object]`: makes the objects of the classes of `routes`."""
    authenticator: str = ""
    """`(Settings, SessionManager, Processes) -> Authenticator`: in place of the core's own."""
    tracing: str = ""
    """`(Core) -> RouteTracing`"""
    processes: str = ""
    """`(Settings) -> Processes`"""
    engine: str = ""
    """`(Settings, Path, Tokenizer | None, Path | None) -> Engine`: makes the engine of the part's name, of the model at
    a path; arguments are those of `make_engine`."""
    shared_engine: str = ""
    """`(Settings, LoadedModel, Path, Callable[[], SyncState | None]) -> EngineProcess`: makes the one process of that
    engine for several of a server, in a folder; the last argument reads the last state of the weights."""

    def is_wanted(self, settings: Settings) -> bool:
        """Whether the settings ask for it from the start, or for its engine."""
        return getattr(settings, self.by, None) is not None or self.name == settings.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The core of one server, as its parts use it."""

    settings: Settings
    services: TurnServices
    authenticator: Authenticator
    metrics: Metrics
    processes: Processes
    spoken: Spoken
    model: str
    moe_shape: tuple[int, int] | None
    parts: tuple[Part, ...]

    @property
    def manager(self) -> SessionManager:
        return self.authenticator.manager
