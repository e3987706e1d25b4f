"""One worker's questions to the workers of its server, itself among them: each over its own socket, by HTTP."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from stenograph.core.errors import WorkerUnavailable

DROPPED = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive", "host", "expect"})
"""Headers that frame a message, and the host, which is passed on apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """A worker's answer."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


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
        timeout_s: float,
    ) -> PeerAnswer:
        """Ask one. Raises WorkerUnavailable if there is no answer within the time."""
        client = self._clients.get(worker)
        if client is None:
            connector = aiohttp.UnixConnector(path=str(self._sockets[worker]))
            client = self._clients[worker] = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        given = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        sent = [(name, value) for name, value in given if name not in DROPPED or name == "host"]
        try:
            async with client.request(
                method,
                f"http://worker{target}",
                headers=sent,
                data=body or None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                skip_auto_headers=("user-agent", "accept", "content-type", "accept-encoding"),
            ) as response:
                raw = [(name.lower(), value) for name, value in response.raw_headers]
                return PeerAnswer(status=response.status, headers=raw, body=await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"A process of this server (worker {worker}) does not answer: {error or 'it is away'}."
            raise WorkerUnavailable(message, retry_after_s=1.0) from error

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
