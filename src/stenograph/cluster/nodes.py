"""The nodes that share a database: a request for a session that another node has is passed on to it, as it came.

The request's body and the answer are streamed; a client that hangs up ends the request at the other node. A request is
passed on once: a node that gets one for a session that it does not have refuses it, and says who has it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from stenograph.cluster.ownership import SharedOwnership
from stenograph.cluster.peer_connection import is_passed_on as is_worker_passed_on
from stenograph.cluster.peers import PeerStream, away
from stenograph.cluster.postgres.owner_name import OwnerName
from stenograph.cluster.postgres.store import held_elsewhere
from stenograph.core.errors import SessionElsewhere, StorageUnavailable
from stenograph.http.auth import KEY_HEADERS, SESSION_ID, keys_in_query, session_named
from stenograph.http.bulk_parts import PASSED_ON
from stenograph.http.metrics import Metrics
from stenograph.http.processes import RefuseAt
from stenograph.http.wire import ClientGone, count_error, delivery_of, header_value, send_refusal

CONNECT_TIMEOUT_S = 1.0

_CONSOLE = "/console/"
"""Paths of the console, which shows what the database has of a session, whoever has it."""

_FRAMING = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host", b"expect", b"upgrade", b"te"}
)
"""Request headers that are between two ends of a connection."""

_OURS = frozenset({b"server", b"date", b"connection", b"keep-alive", b"transfer-encoding"})
"""Answer headers that each node sends itself."""

_CREDENTIALS = frozenset({b"authorization", *(name.encode() for name in KEY_HEADERS)})


class Nodes:
    """The other nodes, as this one sees them. `by_credential`: a credential may be a session's id."""

    def __init__(
        self,
        ownership: SharedOwnership,
        *,
        metrics: Metrics,
        by_credential: bool,
        timeout_s: float,
        sockets: Sequence[Path] = (),
    ) -> None:
        """`sockets` are those of the workers of this server, where it has several."""
        self._sockets = sockets
        self._workers: dict[int, aiohttp.ClientSession] = {}
        self.ownership = ownership
        self._metrics = metrics
        self._by_credential = by_credential
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._client: aiohttp.ClientSession | None = None
        self.num_passed_on = 0
        """Requests that were passed on to another node."""
        self.num_unreachable = 0
        """Those of them whose node could not be reached, or left before it answered."""

    def __repr__(self) -> str:
        return f"<Nodes by {self.ownership!r}>"

    async def answered(self, scope: Scope, receive: Receive, send: Send, refuse_at: RefuseAt) -> bool:
        """Answer a request for a session that another node has; False for every other one, of which nothing was read.

        From then on nothing is in memory that may be another's.
        """
        if scope["type"] != "http":
            return False
        self.ownership.settle()
        session_id = session_named(scope, by_id=self._by_credential)
        if session_id is None or SESSION_ID.fullmatch(session_id) is None or scope["path"].startswith(_CONSOLE):
            return False
        try:
            elsewhere = await self.ownership.elsewhere(session_id)
            if elsewhere is None:
                return False
            is_passed_on = header_value(scope, PASSED_ON) is not None or is_worker_passed_on(scope)
            if elsewhere.url in ("", self.ownership.server) or is_passed_on:
                raise elsewhere
            await self._pass_on(scope, receive, send, elsewhere)
        except (SessionElsewhere, StorageUnavailable) as error:
            count_error(self._metrics, error)
            await send_refusal(send, refuse_at(scope["path"], error))
        except ClientGone:
            pass
        return True

    async def aclose(self) -> None:
        """Close the connections to other nodes."""
        for client in (self._client, *self._workers.values()):
            if client is not None:
                await client.close()

    async def servers(self) -> list[str]:
        """The addresses of the other servers. Raises StorageUnavailable."""
        names = await self.ownership.owners()
        return sorted({OwnerName.of(name).server for name in names} - {self.ownership.server})

    async def owner_of(self, session_id: str) -> OwnerName | None:
        """The other process that has a session; None if none has. Raises StorageUnavailable, and SessionElsewhere if
        that process was one of this server's, which has ended."""
        if SESSION_ID.fullmatch(session_id) is None or self.ownership.has(session_id):
            return None
        if (held := await self.ownership.holder(session_id)) is None:
            return None
        name = OwnerName.of(held.name)
        if name.server == self.ownership.server and (
            held.name == self.ownership.name or name.worker is None or name.worker >= len(self._sockets)
        ):
            raise held_elsewhere(session_id, held)
        return name

    @asynccontextmanager
    async def asked(
        self, owner: OwnerName, asker: Scope, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncGenerator[PeerStream, None]:
        """Ask another process on behalf of whoever asked here, with its keys. Raises WorkerUnavailable."""
        sent = {name.decode(): value.decode("latin-1") for name, value in asker["headers"] if name in _CREDENTIALS}
        sent |= {PASSED_ON.decode(): "1", "content-type": "application/json", **headers}
        base, where = owner.server, f"The server at {owner.server}, which shares the database,"
        client = self._tcp()
        if owner.server == self.ownership.server and owner.worker is not None:
            base, where, client = "http://localhost", f"Worker {owner.worker} of this server", self._unix(owner.worker)
        key = keys_in_query(asker["query_string"])
        url = base + target + (f"{'&' if '?' in target else '?'}{key}" if key and key not in target else "")
        try:
            response = await client.request(
                method,
                URL(url, encoded=True),
                headers=sent,
                data=body or None,
                timeout=self._timeout,
                allow_redirects=False,
                skip_auto_headers=("user-agent", "accept", "accept-encoding"),
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise away(where, error) from error
        try:
            yield PeerStream(where, response)
        finally:
            response.close()

    def _tcp(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._client

    def _unix(self, worker: int) -> aiohttp.ClientSession:
        if worker not in self._workers:
            connector = aiohttp.UnixConnector(path=str(self._sockets[worker]), limit=0)
            self._workers[worker] = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._workers[worker]

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, owner: SessionElsewhere) -> None:
        """Raises SessionElsewhere if the owner could not be reached and nothing was answered, and ClientGone."""
        body = _StreamedBody(receive)
        work = self._exchange(scope, body, send, owner)
        passing = asyncio.get_running_loop().create_task(work, name="pass-on")
        link = delivery_of(scope)
        self.num_passed_on += 1
        try:
            await asyncio.wait({passing, body.is_read}, return_when=asyncio.FIRST_COMPLETED)
            link.when_gone(passing.cancel)
            await asyncio.wait({passing})
        finally:
            link.when_gone(None)
            passing.cancel()
            body.is_read.cancel()
            await asyncio.wait({passing})
        if passing.cancelled():
            raise ClientGone
        passing.result()

    async def _exchange(self, scope: Scope, body: "_StreamedBody", send: Send, owner: SessionElsewhere) -> None:
        headers = CIMultiDict(
            [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in scope["headers"]
                if name not in _FRAMING
            ]
        )
        headers[PASSED_ON.decode()] = "1"
        if (length := header_value(scope, b"content-length")) is not None:
            headers["content-length"] = length
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        has_body = length not in (None, "0") or header_value(scope, b"transfer-encoding") is not None
        if not has_body:
            body.is_read.set_result(None)
        has_begun = False
        try:
            async with self._tcp().request(
                scope["method"],
                URL(owner.url + target, encoded=True),
                headers=headers,
                data=body.pieces() if has_body else None,
                timeout=self._timeout,
                allow_redirects=False,
                skip_auto_headers=("user-agent", "accept", "content-type", "accept-encoding"),
            ) as answer:
                raw = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _OURS]
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status, "headers": raw})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.num_unreachable += 1
            if has_begun:  # the client sees that it is cut off
                raise
            raise owner from error


class _StreamedBody:
    """A request's body, as it comes. `is_read` is done when it was read to its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_read: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Its pieces. Raises ClientGone."""
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            has_more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        self.is_read.set_result(None)
