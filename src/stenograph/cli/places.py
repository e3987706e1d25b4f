"""The places of stored sessions, for a look: a folder of files, or a database shared by servers."""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.parts import POSTGRES
from stenograph.store.base import SessionColumns, StoredSession, StoredSummary
from stenograph.store.look import looks

StorePlace = Path | str
"""A folder, or the address of a database."""


class Look(Protocol):
    """A part of a place, opened for reading."""

    @property
    def name(self) -> str:
        """Its name, in reports of its faults."""
        ...

    def summaries(self) -> Iterator[StoredSummary]:
        """All sessions in the order of their creation. Raises StorageUnavailable."""
        ...

    def read(self, session_id: SessionId) -> StoredSession | None:
        """A session's rows. Raises SessionDamaged or StorageUnavailable."""
        ...

    def columns(self, session_id: SessionId) -> SessionColumns:
        """The columns beside a session's rows. Raises StorageUnavailable."""
        ...

    def faults(self) -> list[str]:
        """Faults of its own structure."""
        ...


@contextmanager
def looks_at(place: StorePlace) -> Generator[list[Look]]:
    """The parts of a place. Raises StartupError."""
    if isinstance(place, str) and re.fullmatch(POSTGRES, place):
        with entry("stenograph.cluster.postgres.look:looked_at_database")(place) as database:
            yield [database]
    else:
        with looks(Path(place)) as files:
            yield [*files]
