"""The state shared by all workers, in a file of their server's own folder: it outlives each of them, and the server's
end removes it. The first worker writes it, whole; the others read it at start or when told. Blocks for microseconds.
"""

import os
from pathlib import Path

import msgspec

from stenograph.core.errors import UnexpectedFailure
from stenograph.session.weights import SyncState

_DECODER = msgspec.json.Decoder(SyncState)


class StateFile:
    """The file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.json"

    def __repr__(self) -> str:
        return f"<StateFile {self._path}>"

    def read(self) -> SyncState | None:
        """The last state; None if nothing has changed since the server's start."""
        try:
            return _DECODER.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None

    def write(self, state: SyncState) -> None:
        """Put a state in the place of the one before. Raises UnexpectedFailure; the old one stays then."""
        written = self._path.with_suffix(".new")
        try:
            written.write_bytes(msgspec.json.encode(state))
            os.replace(written, self._path)
        except OSError as error:
            raise UnexpectedFailure(f"The server's state cannot be kept in {self._path.parent}: {error}.") from error
