"""Makes the engine named in the settings, and imports no other: that of a part, or clients of engines' servers."""

from pathlib import Path

from stenograph.core.clock import Clock
from stenograph.core.loaded import entry
from stenograph.engine.base import Engine
from stenograph.http.part import Part
from stenograph.http.settings import Settings
from stenograph.model.files import ModelFiles
from stenograph.model.tokenizer import Tokenizer
from stenograph.offload.body_slots import BodySlots

SERVERS = "stenograph.http.engine_servers:make_fleet"
ADAPTERS = "stenograph.http.engine_servers:ADAPTERS"


def engine_part(settings: Settings, parts: tuple[Part, ...]) -> Part | None:
    """The part that has the engine named in the settings; None: the engine is a server."""
    return next((part for part in parts if part.engine and part.name == settings.engine), None)


def load_engine(settings: Settings, parts: tuple[Part, ...]) -> None:
    """Import the modules for `make_engine`."""
    part = engine_part(settings, parts)
    entry(entry(ADAPTERS)[settings.engine] if part is None else part.engine)


def make_engine(
    settings: Settings,
    files: ModelFiles,
    path: Path,
    body_slots: BodySlots,
    clock: Clock,
    tokenizer: Tokenizer | None = None,
    *,
    shared: Path | None = None,
    parts: tuple[Part, ...] = (),
) -> Engine:
    """The engine named in the settings, or a fleet of those at its addresses; not yet started.

    `body_slots` are those of the clients' bodies: engines' replies have slots of their own. `tokenizer` is the
    server's, where it is made. `shared` is the socket of a part's engine, used by other processes too.
    """
    part = engine_part(settings, parts)
    made: Engine
    if part is None:
        made = entry(SERVERS)(settings, files, body_slots, clock)
    else:
        made = entry(part.engine)(settings, path, tokenizer, shared)
    return made
