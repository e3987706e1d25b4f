"""One worker's questions to the workers of its server, itself among them: each over its own socket, by HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from stenograph.core.errors import WorkerUnavailable

DROPPED = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive", "host", "expect"})
"""Headers that frame a message, and the host, which is passed on apart."""


_OWN_HEADERS = ("user-agent", "accept", "content-type", "accept-encoding")
"""Headers that aiohttp would add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """A worker's answer."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class PeerStream:
    """A worker's answer while it comes."""

    def __init__(self, where: str, response: aiohttp.ClientResponse) -> None:
        """`where` begins the sentence that it does not answer."""
        self._where = where
        self._response = response

    def __repr__(self) -> str:
        return f"<PeerStream of {self._where}>"

    @property
    def status(self) -> int:
        """The status of the answer."""
        return self._response.status

    def header(self, name: str) -> str | None:
        """A header of the answer."""
        return self._response.headers.get(name)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its bytes. Raises WorkerUnavailable if they end before the answer does."""
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise away(self._where, error) from error

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Its lines. Raises as `pieces`."""
        try:
            async for line in self._response.content:
                yield line
        except (aiohttp.ClientError, OSError) as error:
            raise away(self._where, error) from error


class Peers:
    """The workers of a server, in order. Close it at the end."""

    def __init__(self, sockets: Sequence[Path]) -> None:
        self._sockets = sockets
        self._clients: dict[int, aiohttp.ClientSession] = {}

    def __repr__(self) -> str:
        return f"<Peers at {len(self._sockets)} sockets>"

    @property
    def num(self) -> int:
        """Number of workers."""
        return len(self._sockets)

    async def ask(
        self,
        worker: int,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        *,
        timeout_s: float | None,
    ) -> PeerAnswer:
        """Ask one. Raises WorkerUnavailable if there is no answer within the time; it is caused by a TimeoutError then,
        and by another error where the worker has ended."""
        given = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        sent = [(name, value) for name, value in given if name not in DROPPED or name == "host"]
        try:
            async with self._client(worker).request(
                method,
                f"http://worker{target}",
                headers=sent,
                data=body or None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                skip_auto_headers=_OWN_HEADERS,
            ) as response:
                raw = [(name.lower(), value) for name, value in response.raw_headers]
                return PeerAnswer(status=response.status, headers=raw, body=await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise away(_named(worker), error) from error

    @asynccontextmanager
    async def reading(self, worker: int, target: str, body: bytes) -> AsyncGenerator["PeerStream", None]:
        """Ask one for an answer that is read as it comes, and no faster than its reader takes it. It may take as long
        as it does; a worker that has ended is WorkerUnavailable, also in the middle."""
        try:
            response = await self._client(worker).post(
                f"http://worker{target}",
                data=body,
                timeout=aiohttp.ClientTimeout(),
                skip_auto_headers=_OWN_HEADERS,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise away(_named(worker), error) from error
        try:
            if response.status != 200:
                raise WorkerUnavailable(f"worker {worker} answered {target} with {response.status}.")
            yield PeerStream(_named(worker), response)
        finally:
            response.close()  # what was read to its end has given its connection back

    def _client(self, worker: int) -> aiohttp.ClientSession:
        client = self._clients.get(worker)
        if client is None:
            # As many connections as there are questions: those that wait for others' answers would wait for ever.
            connector = aiohttp.UnixConnector(path=str(self._sockets[worker]), limit=0)
            client = self._clients[worker] = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return client

    async def ask_all(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        *,
        timeout_s: float,
    ) -> list[PeerAnswer | WorkerUnavailable]:
        """Ask all at once; the answer of each, in order, or the reason for which it has none."""

        async def one(worker: int) -> PeerAnswer | WorkerUnavailable:
            try:
                return await self.ask(worker, method, target, headers, body, timeout_s=timeout_s)
            except WorkerUnavailable as error:
                return error

        return list(await asyncio.gather(*map(one, range(self.num))))

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.close()


def _named(worker: int) -> str:
    return f"A process of this server (worker {worker})"


def away(where: str, error: BaseException) -> WorkerUnavailable:
    """The error for another process that does not answer."""
    return WorkerUnavailable(f"{where} does not answer: {error or 'it is away'}.", retry_after_s=1.0)
