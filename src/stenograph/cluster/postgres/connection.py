"""Connections to a PostgreSQL, by asyncpg, and the meaning of its errors. Knows no statements.

asyncpg is an extra (`pip install -e '.[postgres]'`), imported when a database is asked for. Its errors are translated
here and nowhere else.
"""

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from stenograph.cluster.postgres.shared_rows import DatabaseAway
from stenograph.core.errors import StartupError, StorageUnavailable
from stenograph.store.base import FULL_RETRY_S

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 1.0
"""Longest wait for a connection to close."""

_READ_ONLY = "25006"
_FULL = "53100"
_RACED = ("40001", "40P01")
"""Serialization failure and deadlock: nothing was done, and the same statement may succeed now."""
_AWAY = ("08", "53", "57P")
"""Classes: connection exceptions, insufficient resources, and a server ending, starting, or told to stop."""


class PgConnection(Protocol):
    """The part of asyncpg's connection used here."""

    async def fetch(self, query: str, *args: object) -> Sequence[Any]: ...
    async def execute(self, query: str) -> str: ...
    async def close(self) -> None: ...
    def terminate(self) -> None: ...
    def is_closed(self) -> bool: ...


def asyncpg() -> Any:
    """The library. Raises StartupError, with the way to get it."""
    try:
        return importlib.import_module("asyncpg")
    except ImportError as error:
        raise StartupError("--store postgresql://… needs asyncpg: pip install -e '.[postgres]'") from error


class Lane:
    """One connection: made when it is needed, and made again after it broke. One statement at a time."""

    def __init__(self, url: str, *, name: str, timeout_s: float) -> None:
        self._url = url
        self._name = name
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._connection: PgConnection | None = None
        self.num_connects = 0

    def __repr__(self) -> str:
        return f"<Lane {self._name}>"

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and not self._connection.is_closed()

    async def open(self) -> None:
        """Have a connection. Raises as `fetch`."""

        async def nothing(connection: PgConnection) -> None:
            pass

        if not self.is_open:
            await self._run(nothing)

    async def fetch(self, query: str, *args: object) -> Sequence[Any]:
        """Run one statement; its rows. Raises DatabaseAway or StorageUnavailable."""

        def work(connection: PgConnection) -> Awaitable[Sequence[Any]]:
            return connection.fetch(query, *args)

        return await self._run(work)

    async def execute(self, script: str) -> None:
        """Run several statements in one transaction, whole or not at all. Raises as `fetch`."""

        def work(connection: PgConnection) -> Awaitable[str]:
            return connection.execute(script)

        await self._run(work)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await closed(connection)

    async def _run(self, work: Callable[[PgConnection], Awaitable[T]]) -> T:
        """Do `work` with the connection. A failed one, or one with an abandoned answer, is not used again."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s):
                    connection = await self._connected()
                    return await work(connection)
            except Exception as error:
                raise self._meaning(error) from error
            except BaseException:
                self._drop()
                raise

    async def _connected(self) -> PgConnection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._url, name=self._name, timeout_s=self._timeout_s)
            self.num_connects += 1
        return self._connection

    def _meaning(self, error: Exception) -> Exception:
        """The asker's error for a statement's failure. Unless nothing was done, it is DatabaseAway."""
        if isinstance(error, StorageUnavailable):
            return error
        code = str(getattr(error, "sqlstate", "") or "")
        if code == _FULL:
            return StorageUnavailable(
                "The disk of the database of --store is full: nothing more can be kept. Delete sessions, or make room.",
                is_full=True,
                retry_after_s=FULL_RETRY_S,
            )
        if code in _RACED:
            return DatabaseAway(str(error))
        if not code or code == _READ_ONLY or code.startswith(_AWAY):
            self._drop()
            return DatabaseAway(f"{type(error).__name__}: {error}")
        log.error("the database of --store refuses a statement: %s", error)
        return StorageUnavailable(f"The database of --store refuses the statement: {error}.", is_full=False)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


async def closed(connection: PgConnection) -> None:
    """Close a connection, so that the database has room for another; not waiting for long."""
    with suppress(Exception):
        async with asyncio.timeout(CLOSE_S):
            await connection.close()
    connection.terminate()


async def connect(url: str, *, name: str, timeout_s: float) -> PgConnection:
    """A connection on which a commit is durable once answered. Raises as asyncpg does."""
    connection: PgConnection = await asyncpg().connect(
        url, timeout=timeout_s, server_settings={"application_name": f"stenograph {name}"}
    )
    # A database whose own settings acknowledge before they sync would lose turns: this connection does not.
    try:
        await connection.fetch(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    except BaseException:
        connection.terminate()
        raise
    return connection
