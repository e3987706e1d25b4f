"""The only place to wire things together: a server's settings, engine and store in, its application out."""

from functools import cache

from stenograph.core.clock import Clock
from stenograph.core.loaded import entry
from stenograph.dialects.base import Spoken
from stenograph.dialects.common.errors import refusal_of
from stenograph.engine.base import Engine
from stenograph.http.auth import Authenticator
from stenograph.http.control_routes import LATE, ControlRoutes
from stenograph.http.create_route import CreateRoute
from stenograph.http.dialects import spoken_by, turn_routes
from stenograph.http.metric_table import WEIGHT_METRICS
from stenograph.http.metrics import Metrics
from stenograph.http.mounts import App
from stenograph.http.part import Core, Part
from stenograph.http.processes import Processes
from stenograph.http.session_services import manager_of, services_of
from stenograph.http.settings import Settings
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.pool import CpuPool, LoopShare
from stenograph.session.keyed_sessions import KeyedSessions
from stenograph.session.manager import SessionManager
from stenograph.store.base import SessionStore
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark

OPENAPI = "stenograph.http.openapi.document:document_of"


def make_app(
    settings: Settings,
    *,
    engine: Engine,
    renderer: Renderer,
    pool: CpuPool,
    model: str,
    clock: Clock,
    moe_shape: tuple[int, int] | None = None,
    body_slots: BodySlots | None = None,
    spoken: Spoken | None = None,
    store: SessionStore | None = None,
    mark: ModelMark | None = None,
    processes: Processes | None = None,
    parts: tuple[Part, ...] = (),
) -> tuple[App, SessionManager]:
    """The application around an engine, and the manager, to be drained at its end. Raises StartupError.

    `spoken` are its dialects with clients; None: the settings' dialects. Sessions are kept in `store`, by the `mark` of
    the model; None: in memory alone. `processes` None: the server has one. `parts` stand beside the core.
    """
    processes = processes or Processes()
    metrics, share, body_slots = Metrics(), LoopShare(), body_slots or BodySlots(settings.body_slots)
    services = services_of(settings, engine, renderer, pool, share, clock)
    spoken = spoken or spoken_by(settings, renderer, model)
    manager = manager_of(settings, services, metrics, store, mark or ModelMark(name=model), processes)
    own = next((part.authenticator for part in parts if part.authenticator and part.is_wanted(settings)), None)
    if own is None:
        authenticator = Authenticator(api_keys=settings.api_key, manager=manager, admin_keys=settings.admin_key)
    else:
        authenticator = entry(own)(settings, manager, processes)
    processes.find_others(settings, manager, metrics)
    metrics.show(WEIGHT_METRICS, services.weights)
    keyed = KeyedSessions(manager, processes.opened_elsewhere(has_store=store is not None))
    core = Core(
        settings=settings,
        services=services,
        authenticator=authenticator,
        metrics=metrics,
        processes=processes,
        spoken=spoken,
        model=model,
        moe_shape=moe_shape,
        parts=parts,
    )
    late = cache(lambda: entry(LATE)(core))
    control = ControlRoutes(
        core=core,
        late=late,
        create=CreateRoute.of(settings, services, keyed, authenticator),
        body_slots=body_slots,
        started_at=int(clock.wall()),
        openapi=cache(lambda: entry(OPENAPI)(core)),
    )
    tracing = next((part.tracing for part in parts if part.tracing and part.is_wanted(settings)), None)
    app = App(
        turns=turn_routes(core, body_slots),
        control=control.app(),
        metrics=metrics,
        refuse=refusal_of(settings.compat),
        tracing=None if tracing is None else entry(tracing)(core),
    )
    processes.wire(app, keyed, late)
    return app, manager
