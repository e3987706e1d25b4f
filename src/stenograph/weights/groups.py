"""The part of new weights: the routes of a trainer and of an administrator of engines, and their shared state."""

from collections.abc import Sequence

from stenograph.http.late_routes import Late
from stenograph.parts import WeightSettings, settings_of
from stenograph.weights.engine_routes import EngineRoutes
from stenograph.weights.routes import ModelInfoRoute, WeightRoutes
from stenograph.weights.sync import WeightSync


def weight_groups(late: Late) -> Sequence[object]:
    """The objects with the rows in their classes. The other processes hear of the weights from here."""
    core = late.core
    settings, engine, manager = core.settings, core.services.engine, core.manager
    weights_dir = settings_of(WeightSettings, settings).weights_dir
    sync = WeightSync(engine, manager.weights, lambda: manager.abort(None), core.processes.followers)
    engines = EngineRoutes(engine=engine, sync=sync, max_body_bytes=settings.max_body_bytes)
    core.processes.share_weights(sync, engines)
    return (
        WeightRoutes(sync=sync, weights_dir=weights_dir, max_body_bytes=settings.max_body_bytes),
        engines,
        ModelInfoRoute(sync=sync, model=core.model),
    )
