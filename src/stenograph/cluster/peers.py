"""One process's questions to others, by HTTP: to the workers of its server, itself among them, each over its own
socket, and to the other servers on its database.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from starlette.types import Scope
from yarl import URL

from stenograph.core.errors import WorkerUnavailable
from stenograph.http.auth import KEY_HEADERS, PASSED_ON, keys_in_query

CONNECT_TIMEOUT_S = 1.0
"""Longest time for another server to take a connection."""

Peer = int | str
"""Another process: a worker of this server by its number, or another server by its address."""

Headers = Sequence[tuple[bytes, bytes]]

DROPPED = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive", "host", "expect"})
"""Headers framing a message, and the host, passed on apart."""

_CREDENTIALS = frozenset({b"authorization", *(name.encode() for name in KEY_HEADERS)})

_OWN_HEADERS = ("user-agent", "accept", "content-type", "accept-encoding")
"""Headers added by aiohttp unless told not to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """Another process's answer."""

    status: int
    headers: Headers
    body: bytes


class PeerStream:
    """Another process's answer while it comes. `where` begins the error's sentence if it does not answer."""

    def __init__(self, where: str, response: aiohttp.ClientResponse) -> None:
        self._where = where
        self._response = response

    def __repr__(self) -> str:
        return f"<PeerStream of {self._where}>"

    def header(self, name: str) -> str | None:
        """A header of the answer."""
        return self._response.headers.get(name)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its bytes. Raises WorkerUnavailable if they end before the answer does."""
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _away(self._where, error) from error

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Its lines. Raises as `pieces`."""
        try:
            async for line in self._response.content:
                yield line
        except (aiohttp.ClientError, OSError) as error:
            raise _away(self._where, error) from error


class Peers:
    """The workers of this server, in order, and any other server. Close it at the end."""

    def __init__(self, sockets: Sequence[Path] = ()) -> None:
        self._sockets = sockets
        self._clients: dict[int | None, aiohttp.ClientSession] = {}

    def __repr__(self) -> str:
        return f"<Peers at {len(self._sockets)} sockets>"

    @property
    def num(self) -> int:
        """Number of workers."""
        return len(self._sockets)

    async def ask(
        self,
        peer: Peer,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes = b"",
        *,
        timeout_s: float | None,
    ) -> PeerAnswer:
        """Ask one. Raises WorkerUnavailable if there is no answer within the time; it is caused by a TimeoutError then,
        and by another error where the worker has ended."""
        async with self._asked(peer, method, target, headers, body, timeout_s) as response:
            try:
                raw = [(name.lower(), value) for name, value in response.raw_headers]
                return PeerAnswer(status=response.status, headers=raw, body=await response.read())
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
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
        """Post to one for an answer read as it comes, and no faster than its reader takes it. An ended one
        is WorkerUnavailable, also in the middle, and so is any answer but 200."""
        async with self._asked(peer, "POST", target, headers, body, timeout_s) as response:
            if response.status != 200:
                raise WorkerUnavailable(f"{named(peer)} answered {target} with {response.status}.")
            yield PeerStream(named(peer), response)

    @asynccontextmanager
    async def _asked(
        self, peer: Peer, method: str, target: str, headers: Headers, body: bytes, timeout_s: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        given = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        base, is_server = (peer, True) if isinstance(peer, str) else ("http://localhost", False)
        try:
            response = await self._client(peer).request(
                method,
                URL(base + target, encoded=True),
                headers=[pair for pair in given if pair[0] not in DROPPED or (pair[0] == "host" and not is_server)],
                data=body or None,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S if is_server else None),
                allow_redirects=False,
                skip_auto_headers=_OWN_HEADERS,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _away(named(peer), error) from error
        try:
            yield response
        finally:
            response.close()  # what was read to its end has given its connection back

    def _client(self, peer: Peer) -> aiohttp.ClientSession:
        worker = peer if isinstance(peer, int) else None
        if worker not in self._clients:
            # As many connections as there are questions: those that wait for others' answers would wait for ever.
            connector: aiohttp.BaseConnector = (
                aiohttp.TCPConnector(limit=0)
                if worker is None
                else aiohttp.UnixConnector(path=str(self._sockets[worker]), limit=0)
            )
            self._clients[worker] = aiohttp.ClientSession(
                connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._clients[worker]

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.close()


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
    return WorkerUnavailable(f"{where} does not answer: {error or 'it is away'}.", retry_after_s=1.0)
