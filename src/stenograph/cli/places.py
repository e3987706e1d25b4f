"""The places of stored sessions, for a look: a folder of files, or a database shared by servers."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stenograph.core.loaded import entry
from stenograph.parts import POSTGRES
from stenograph.store.look import StoreLook, looks

if TYPE_CHECKING:  # loaded for a database alone
    from stenograph.cluster.postgres.look import PostgresLook

StorePlace = Path | str
"""A folder, or the address of a database."""


Look: TypeAlias = "StoreLook | PostgresLook"
"""A part of a place, opened for reading."""


@contextmanager
def looks_at(place: StorePlace) -> Generator[list[Look]]:
    """The parts of a place. Raises StartupError."""
    if isinstance(place, str) and re.fullmatch(POSTGRES, place):
        with entry("stenograph.cluster.postgres.look:looked_at_database")(place) as database:
            yield [database]
    else:
        with looks(Path(place)) as files:
            yield [*files]
