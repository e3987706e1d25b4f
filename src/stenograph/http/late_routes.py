"""The routes that a chat needs none of: sessions that are read, weights, engines, backups, the console.

Their code is loaded, and they are made, when the first request comes to one of them.
"""

from collections.abc import Sequence

from stenograph.core.loaded import entry
from stenograph.dialects.base import Spoken
from stenograph.http.auth import Doorman
from stenograph.http.bulk_parts import OwnParts
from stenograph.http.bulk_routes import BulkRoutes
from stenograph.http.engine_routes import EngineRoutes
from stenograph.http.metrics import Metrics
from stenograph.http.now_board import NowBoard
from stenograph.http.processes import Processes
from stenograph.http.session_routes import SessionRoutes
from stenograph.http.settings import Settings
from stenograph.http.storage import BackupRoute
from stenograph.http.waste_route import WasteRoute
from stenograph.http.weight_routes import ModelInfoRoute, WeightRoutes
from stenograph.session.services import TurnServices
from stenograph.session.weight_sync import WeightSync

HELD_RESPONSES = "stenograph.http.response_route:HeldResponses"
CONSOLE = "stenograph.http.console_routes:ConsoleRoutes"


class LateRoutes:
    """The late routes of one server."""

    def __init__(
        self,
        settings: Settings,
        services: TurnServices,
        doorman: Doorman,
        metrics: Metrics,
        sync: WeightSync,
        *,
        spoken: Spoken,
        model: str,
        moe_shape: tuple[int, int] | None,
        processes: Processes,
    ) -> None:
        self.sync = sync
        self.engines = EngineRoutes(engine=services.engine, sync=sync, max_body_bytes=settings.max_body_bytes)
        self.sessions = SessionRoutes.of(settings, services, doorman.manager, metrics, moe_shape)
        self.own_parts = OwnParts(sessions=self.sessions)
        self.board = NowBoard(self.sessions, services.engine, services.weights, model, processes.instance_id)
        self._moments = processes.moments(self.board)
        self._parts = processes.all_parts(self.own_parts)
        self._model = model
        self._weights_dir = settings.weights_dir
        self._backup = BackupRoute(
            storage=doorman.manager.sessions.storage,
            max_body_bytes=settings.max_body_bytes,
            processes=processes,
        )
        self._responses = (
            None
            if spoken.held is None
            else entry(HELD_RESPONSES)(doorman=doorman, share=services.share, model=model, dialect=spoken.held)
        )

    def __repr__(self) -> str:
        return f"<LateRoutes of {self._model}>"

    def groups(self) -> Sequence[object]:
        """The objects whose classes have the rows, but for the console's."""
        max_body_bytes = self.sessions.max_body_bytes
        return (
            BulkRoutes(sessions=self.sessions, parts=self._parts),
            WasteRoute(sessions=self.sessions),
            self.sessions,
            WeightRoutes(sync=self.sync, weights_dir=self._weights_dir, max_body_bytes=max_body_bytes),
            self.engines,
            ModelInfoRoute(sync=self.sync, model=self._model),
            self._backup,
            *(() if self._responses is None else (self._responses,)),
        )

    def console(self) -> object:
        """The console, which has rows too."""
        made: object = entry(CONSOLE)(sessions=self.sessions, parts=self._parts, moments=self._moments)
        return made
