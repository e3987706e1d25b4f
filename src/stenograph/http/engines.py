"""Makes the engine named in the settings, and imports no other: the embedded one, or clients of engines' servers."""

from pathlib import Path

from stenograph.core.clock import Clock
from stenograph.core.loaded import entry
from stenograph.engine.base import Engine
from stenograph.engine.settings import EngineKind
from stenograph.http.settings import Settings
from stenograph.model.files import ModelFiles
from stenograph.model.tokenizer import Tokenizer
from stenograph.offload.body_slots import BodySlots

EMBEDDED = "stenograph.embedded.part:make_embedded"
SERVERS = "stenograph.http.engine_servers:make_fleet"
ADAPTERS = "stenograph.http.engine_servers:ADAPTERS"


def load_engine(settings: Settings) -> None:
    """Import the modules for `make_engine`."""
    if settings.engine is EngineKind.EMBEDDED:
        entry(EMBEDDED)
    else:
        entry(entry(ADAPTERS)[settings.engine])


def make_engine(
    settings: Settings,
    files: ModelFiles,
    path: Path,
    body_slots: BodySlots,
    clock: Clock,
    tokenizer: Tokenizer | None = None,
    *,
    shared: Path | None = None,
) -> Engine:
    """The engine named in the settings, or a fleet of those at its addresses; not yet started.

    `body_slots` are those of the clients' bodies: engines' replies have slots of their own. `tokenizer` is the
    server's, where it is made. `shared` is the socket of an embedded engine, used by other processes too.
    """
    made: Engine
    if settings.engine_url and settings.engine is not EngineKind.EMBEDDED:
        made = entry(SERVERS)(settings, files, body_slots, clock)
    else:
        made = entry(EMBEDDED)(settings, path, tokenizer, shared)
    return made
