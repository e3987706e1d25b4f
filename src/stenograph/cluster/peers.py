"""The ways to the other processes: to the workers of this server, each over its own socket, this one among them, and to
the other servers on its database. Owns the connections at rest.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.types import Scope

from stenograph.cluster.way import FAILURES, Headers, PeerWay, end_to_end
from stenograph.core.errors import WorkerUnavailable
from stenograph.engine.http.exchange import tls_of_clients
from stenograph.http.auth import KEY_HEADERS, PASSED_ON
from stenograph.http.proxy_route import keys_in_query
from stenograph.http.wire import header_bytes

CONNECT_TIMEOUT_S = 1.0
"""Longest time for another server to take a connection."""

REST_S = 10.0
"""Longest rest of a connection between two requests; a server closes its own after 20 s."""

Peer = int | str
"""Another process: a worker of this server by its number, or another server by its address."""

_CREDENTIALS = frozenset({b"authorization", *(name.encode() for name in KEY_HEADERS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """Another process's answer."""

    status: int
    headers: Headers
    body: bytes


class PeerStream:
    """Another process's answer while it comes. `where` begins the error's sentence if it does not answer."""

    def __init__(self, where: str, way: PeerWay, until: float | None) -> None:
        """All of it is to come `until` then, by the loop's clock."""
        self._where = where
        self._way = way
        self._until = until

    def __repr__(self) -> str:
        return f"<PeerStream of {self._where}>"

    def header(self, name: str) -> str | None:
        """A header of the answer."""
        return dict(self._way.answer.headers).get(name)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its bytes. Raises WorkerUnavailable if they end before the answer does."""
        async with aclosing(self._way.pieces()) as pieces:
            while (piece := await self._next(pieces)) is not None:
                yield piece

    async def _next(self, pieces: AsyncGenerator[bytes, None]) -> bytes | None:
        try:
            async with asyncio.timeout_at(self._until):
                return await anext(pieces, None)
        except FAILURES as error:
            raise _away(self._where, error) from error

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Its lines, without the line feed at each one's end. Raises as `pieces`."""
        rest = b""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line


class Peers:
    """The workers of this server, in order, and any other server. Close it at the end."""

    def __init__(self, sockets: Sequence[Path] = ()) -> None:
        self._sockets = sockets
        self._resting: dict[Path | str, list[PeerWay]] = {}
        """The one used last is the last, and used first."""
        self._trusted = cache(tls_of_clients)  # to read the machine's certificates takes 50 ms

    def __repr__(self) -> str:
        return f"<Peers at {len(self._sockets)} sockets>"

    @property
    def num(self) -> int:
        """Number of workers, this one included."""
        return len(self._sockets)

    @asynccontextmanager
    async def way(self, at: Path | str, patience_s: float | None) -> AsyncGenerator[PeerWay, None]:
        """A way to a worker's socket, or to a server's address, for one request; made within `patience_s`. Raises
        `FAILURES`."""
        resting, now = self._resting.setdefault(at, []), asyncio.get_running_loop().time()
        while resting and now >= resting[0].rests_since + REST_S:
            resting.pop(0).cut()
        way: PeerWay | None = None
        while resting and way is None:
            if (kept := resting.pop()).has_spoken:
                kept.cut()
            else:
                way = kept
        if way is None:
            async with asyncio.timeout(patience_s):
                way = await PeerWay.to(at, self._trusted)
        try:
            yield way
        except BaseException:
            way.cut()
            raise
        if way.rest():
            resting.append(way)
        else:
            way.close()

    async def ask(
        self, peer: Peer, method: str, target: str, headers: Headers = (), body: bytes = b"", *, timeout_s: float | None
    ) -> PeerAnswer:
        """Ask one, and wait for its answer. Raises WorkerUnavailable."""
        try:
            async with asyncio.timeout(timeout_s), self._asked(peer, method, target, headers, body) as way:
                whole = b"".join([piece async for piece in way.pieces()])
                raw = [header_bytes(name, value) for name, value in way.answer.headers]
                return PeerAnswer(status=way.answer.status, headers=raw, body=whole)
        except FAILURES as error:
            raise _away(named(peer), error) from error

    async def ask_all(
        self, method: str, target: str, headers: Headers = (), body: bytes = b"", *, timeout_s: float
    ) -> list[PeerAnswer | WorkerUnavailable]:
        """Ask all workers at once; the answer of each, in order, or the reason for having none."""

        async def one(worker: int) -> PeerAnswer | WorkerUnavailable:
            try:
                return await self.ask(worker, method, target, headers, body, timeout_s=timeout_s)
            except WorkerUnavailable as error:
                return error

        return list(await asyncio.gather(*map(one, range(self.num))))

    @asynccontextmanager
    async def reading(
        self, peer: Peer, target: str, body: bytes, headers: Headers = (), *, timeout_s: float | None = None
    ) -> AsyncGenerator[PeerStream, None]:
        """Post to one for an answer read as it comes, and no faster than its reader takes it; all of it within
        `timeout_s`. An ended one is WorkerUnavailable, also in the middle, and so is any answer but 200."""
        until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(until):
                    way = await stack.enter_async_context(self._asked(peer, "POST", target, headers, body))
            except FAILURES as error:
                raise _away(named(peer), error) from error
            if way.answer.status != 200:
                raise WorkerUnavailable(f"{named(peer)} answered {target} with {way.answer.status}.")
            yield PeerStream(named(peer), way, until)

    @asynccontextmanager
    async def _asked(
        self, peer: Peer, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncGenerator[PeerWay, None]:
        """A way with a request sent, and the head of its answer there. Raises `FAILURES`."""
        at, patience_s = (peer, CONNECT_TIMEOUT_S) if isinstance(peer, str) else (self._sockets[peer], None)
        async with self.way(at, patience_s) as way:
            way.begin(method, target.encode("latin-1"), end_to_end(headers), num_bytes=len(body))
            await way.send(body, is_last=True)
            await way.head()
            yield way

    async def aclose(self) -> None:
        """Close the connections at rest."""
        for resting in self._resting.values():
            while resting:
                resting.pop().close()


def for_asker(asker: Scope, target: str, passed_on: str = "1") -> tuple[str, list[tuple[bytes, bytes]]]:
    """The target and headers of a question on behalf of the asker here, with the keys of its request. `passed_on`
    is the session in question, where nothing else names it."""
    key = keys_in_query(asker["query_string"])
    sent = [pair for pair in asker["headers"] if pair[0] in _CREDENTIALS]
    sent += [(PASSED_ON, passed_on.encode()), (b"content-type", b"application/json")]
    return target + (f"{'&' if '?' in target else '?'}{key}" if key and key not in target else ""), sent


def named(peer: Peer) -> str:
    """Another process, at the beginning of a sentence."""
    if isinstance(peer, int):
        return f"A process of this server (worker {peer})"
    return f"The server at {peer}, which shares the database,"


def _away(where: str, error: BaseException) -> WorkerUnavailable:
    """The error for another process without an answer."""
    return WorkerUnavailable(f"{where} does not answer: {str(error) or 'it is away'}.", retry_after_s=1.0)
