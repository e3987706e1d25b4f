"""The routes whose answer is that of all servers that share a database: turns that are ended, what became of tokens.

An ASGI application around a server's own. The request goes to each server as it came, once: one that another server
asks with is about that server alone. Pauses, weights and engines stay each server's own, because whoever has them knows
which engines are whose; the answer names the servers that were not asked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenograph.cluster.nodes import Nodes
from stenograph.cluster.peer_connection import is_workers_own
from stenograph.cluster.postgres.owner_name import OwnerName
from stenograph.core.errors import StenographError, StorageUnavailable, WorkerUnavailable
from stenograph.core.loaded import entry
from stenograph.dialects.base import Refuse
from stenograph.http.bulk_parts import PASSED_ON
from stenograph.http.create_route import MAX_SESSION_BODY_BYTES
from stenograph.http.metrics import Metrics
from stenograph.http.route import All, Needs, Reach, Route, Who
from stenograph.http.wire import ClientGone, count_error, header_value, read_body, send_refusal

NOT_ASKED = b"x-stenograph-not-asked"
"""Header of an answer that is of one server: the addresses of the others, with commas."""


class AllServers:
    """One server's application, and before it the routes of all servers."""

    def __init__(self, app: ASGIApp, nodes: Nodes, rows: Sequence[Route], *, metrics: Metrics, refuse: Refuse) -> None:
        self._app = app
        self._nodes = nodes
        self._merged: Mapping[tuple[str, str], Callable[[Sequence[bytes]], bytes]] = {
            (row.method, row.path): entry(row.who.merge)
            for row in rows
            if isinstance(row.who, All) and row.who.reach is Reach.SERVERS
        }
        self._own_paths = {row.path for row in rows if row.who is Who.SERVER and row.needs is Needs.ADMIN}
        """Paths of what each server does with its own engines."""
        self._metrics = metrics
        self._refuse = refuse

    def __repr__(self) -> str:
        return f"<AllServers of {self._nodes!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for HTTP."""
        merged = self._merged.get((scope["method"], scope["path"]))
        is_own = scope["path"] in self._own_paths
        if not (merged or is_own) or is_workers_own(scope) or header_value(scope, PASSED_ON) is not None:
            await self._app(scope, receive, send)
            return
        if merged is None:
            await self._app(scope, receive, await self._naming_others(send))
            return
        try:
            body = await read_body(scope, receive, max_bytes=MAX_SESSION_BODY_BYTES)
            start, own = await self._own(scope, body)
            if start["status"] == 200:
                own = merged([own, *[await self._of(server, scope, body) for server in await self._nodes.servers()]])
            kept = [pair for pair in start["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
            await send({**start, "headers": [*kept, (b"content-length", b"%d" % len(own))]})
            await send({"type": "http.response.body", "body": own})
        except ClientGone:
            return
        except StenographError as error:
            count_error(self._metrics, error)
            await send_refusal(send, self._refuse(error))

    async def _naming_others(self, send: Send) -> Send:
        """Sends an answer with the servers that were not asked."""
        try:
            others = ", ".join(await self._nodes.servers())
        except StorageUnavailable:
            others = "unknown: the database does not answer"

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and others:
                message = {**message, "headers": [*message["headers"], (NOT_ASKED, others.encode("latin-1"))]}
            await send(message)

        return sent

    async def _own(self, scope: Scope, body: bytes) -> tuple[Message, bytes]:
        """The answer of this server: how it begins, and its body."""
        start: list[Message] = []
        pieces: list[bytes] = []

        async def whole() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def take(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
            else:
                pieces.append(bytes(message.get("body", b"")))

        await self._app(_of_no_connection(scope), whole, take)
        return start[0], b"".join(pieces)

    async def _of(self, server: str, scope: Scope, body: bytes) -> bytes:
        """The answer of another server. Raises WorkerUnavailable."""
        query = scope["query_string"].decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        async with self._nodes.asked(OwnerName(server=server), scope, scope["method"], target, {}, body) as answer:
            given = b"".join([piece async for piece in answer.pieces()])
            if answer.status != 200:
                raise WorkerUnavailable(
                    f"The server at {server}, which shares the database, answered with {answer.status}; this server has"
                    " done its part. Ask again."
                )
            return given


def _of_no_connection(scope: Scope) -> dict[str, Any]:
    """A request whose answer goes to nobody's connection."""
    return {**scope, "extensions": {}}
