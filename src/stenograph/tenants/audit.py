"""The audit log: a line of JSON for each request to change policies or outcomes, refused ones too.

Policies (weights, LoRAs, pauses), engines, backups, outcomes, claims, receipts, abandonments, ends of turns, deletions,
and the tenants themselves. Each line is appended by one write: several workers have the same file.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_plus

import msgspec
from starlette.types import Scope

from stenograph.core.clock import Clock
from stenograph.core.errors import StartupError
from stenograph.http.auth import KEY_QUERY

log = logging.getLogger(__name__)

AUDITED = frozenset({
    "updateWeights", "pauseGeneration", "continueGeneration", "flushCache", "nameWeights", "loadLora", "unloadLora",
    "addEngine", "removeEngine", "backUp", "putOutcome", "claimSamples", "receiveSamples", "abandonSessions",
    "abortSession", "abortAll", "deleteSession", "deleteSessions", "getManySamples",
})  # fmt: skip
"""The ids of the routes. `getManySamples` has a line where it deletes, or is refused."""


class AuditLog:
    """The log of one process."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises StartupError for an unwritable file."""
        self._path = path
        self._is_cut = False
        """Whether the last line was written in part."""
        self._clock = clock
        try:
            self._file = self._opened()
        except OSError as error:
            raise StartupError(f"--audit-log: cannot write {str(path)!r}: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"<AuditLog {self._path}>"

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def reopen(self) -> None:
        """Go on in the file of this name, after somebody has moved the one before away."""
        try:
            file = self._opened()
        except OSError as error:
            log.error(
                "--audit-log: cannot open %r again (%s), the file before goes on", str(self._path), error.strerror
            )
            return
        os.close(self._file)
        self._file, self._is_cut = file, False

    def request(self, route: str, scope: Scope, status: int, *, who: str | None, weights: str | None) -> None:
        """Note the answer to a request."""
        client = scope.get("client")
        self.note(
            route,
            {
                "who": who,
                "from": None if client is None else client[0],
                "method": scope["method"],
                "path": scope["path"],
                "query": _without_key(scope["query_string"].decode("latin-1")),
                "status": status,
                "weights": weights,
            },
        )

    def note(self, what: str, facts: Mapping[str, object]) -> None:
        """Append a line. A full disk stops no request: the server's log has the line instead."""
        line = msgspec.json.encode({"at": self._clock.wall(), "what": what, **facts})
        begin = b"\n" if self._is_cut else b""
        try:
            num = os.write(self._file, begin + line + b"\n")
        except OSError as error:
            log.error("the audit log cannot be written (%s): %s", error.strerror, line.decode())
            return
        self._is_cut = num <= len(begin + line)
        if self._is_cut:
            log.error("the audit log has a line in part, the disk is full: %s", line.decode())


def _without_key(query: str) -> str | None:
    """A query as it is logged; None if there is none."""
    return "&".join(one for one in query.split("&") if one and unquote_plus(one.partition("=")[0]) != KEY_QUERY) or None
