"""A server of several processes takes any request at any of them: another's is passed on to it, to a worker of this
server or to another server.

An ASGI application around each process's own. The client's side of a request is that of every other request; the other
process sees it as its own client's. A body and an answer flow a piece at a time, no faster than they are taken. A
client's leaving closes the way, and a worker hears of the departure of its answer. A request goes from one server to
another once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, asynccontextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from stenograph.cluster.owners import Owner, Owners
from stenograph.cluster.peer_connection import CLIENT, client_named, is_passed_on, is_workers_own
from stenograph.cluster.peers import CONNECT_TIMEOUT_S, Peers
from stenograph.cluster.way import FAILURES, PeerWay, end_to_end
from stenograph.core.errors import SessionElsewhere, StenographError, UnexpectedFailure
from stenograph.engine.http.response import NotHttp
from stenograph.http.auth import PASSED_ON, SESSION_ID, session_named
from stenograph.http.processes import ServedApp
from stenograph.http.wire import (
    ClientLink,
    count_error,
    delivery_of,
    header_bytes,
    header_value,
    headers_of,
    send_refusal,
)

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Longest wait of a request for a restarting worker."""

WAITS_FOR_BYTES = 2**16
"""A body up to this size is passed on once it is whole; a longer one as it comes."""

_WRITTEN_ANEW = frozenset({"server", "date"})
"""Headers of an answer, written by the server of each connection."""
_WITHOUT_BODY = (204, 304)


def is_for_anyone(scope: Scope) -> bool:
    """Whether a request is the console's: it shows a session from the database, on any process."""
    path: str = scope["path"]
    return path.startswith("/console/")


def seen_by(scope: Scope, error: StenographError, check: Callable[[Scope], None]) -> StenographError:
    """A request's refusal as its asker may see it. That a session is elsewhere tells that it exists: whoever may not
    know of it, by `check`, gets that refusal, as for one that never was."""
    if isinstance(error, SessionElsewhere):
        try:
            check(scope)
        except StenographError as unseen:
            return unseen
    return error


class Forwarded:
    """Counts of the requests passed on by one process, to workers of its server or to others."""

    def __init__(self) -> None:
        self.num_passed_on = 0
        self.num_refused = 0
        """Those of them refused: their process was away for too long, or ended before its answer."""

    def __repr__(self) -> str:
        return f"<Forwarded {self.num_passed_on} requests, {self.num_refused} refused>"


class Forwarding:
    """One process's application, and before it the ways to the others."""

    def __init__(
        self,
        served: ASGIApp,
        app: ServedApp,
        *,
        owners: Owners,
        peers: Peers,
        of_server: Collection[str],
        by_credential: bool,
        objects: Callable[[Scope], bool],
        check: Callable[[Scope], None],
        forwarded: Forwarded,
        passed_on: Forwarded,
        patience_s: float,
        answer_s: float,
    ) -> None:
        """`objects` says whether a request is refused here, for any process; `check` is `seen_by`'s. `forwarded` counts
        those for workers, each with `patience_s` to be there; `passed_on` those for other servers, with `answer_s`
        each."""
        self._served = served
        self._app = app
        self._owners = owners
        self._peers = peers
        self._of_server = of_server
        """Paths served by one process for all."""
        self._open_paths = tuple(path.partition("{")[0] for path in of_server if path.endswith(":path}"))
        """The beginnings of those with further paths below."""
        self._by_credential = by_credential
        self._objects = objects
        self._check = check
        self._forwarded = forwarded
        self._passed_on = passed_on
        self._patience_s = patience_s
        self._answer_s = answer_s

    def __repr__(self) -> str:
        return f"<Forwarding to {self._peers!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for HTTP."""
        try:
            owner = None if is_passed_on(scope) or is_workers_own(scope) else await self._owner_of(scope)
            if owner is not None and not (owner.is_server and self._stays(scope)):
                await self._forward(owner, scope, receive, send)
                return
        except StenographError as error:
            await self._refuse(scope, send, seen_by(scope, error, self._check))
        except Exception:
            log.exception("no owner was found for %s %s", scope["method"], scope["path"])
            await self._refuse(scope, send, UnexpectedFailure("The server failed on this request."))
        else:
            await self._served(scope, receive, send)

    async def _refuse(self, scope: Scope, send: Send, error: StenographError) -> None:
        count_error(self._app.metrics, error)
        await send_refusal(send, self._app.refuse_at(scope["path"], error))

    async def _owner_of(self, scope: Scope) -> Owner | None:
        """The process of a request, if another than this."""
        method, path = scope["method"], scope["path"]
        if path in self._of_server or path.startswith(self._open_paths):
            return self._owners.first()
        session_id = session_named(scope, by_id=self._by_credential)
        if session_id is not None:
            return await self._owners.owner_of(session_id) if SESSION_ID.fullmatch(session_id) else None
        if method == "POST" and path.strip("/") == "sessions":
            key = headers_of(scope).get(b"idempotency-key")
            return self._owners.opener_of(key) if key else None
        return None

    def _stays(self, scope: Scope) -> bool:
        """Whether a request is not passed on to another server: one from another server, one refused here, and
        the console's, shown from the database on any process."""
        return header_value(scope, PASSED_ON) is not None or is_for_anyone(scope) or self._objects(scope)

    async def _forward(self, owner: Owner, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back. Raises the owner's error if the answer does not begin."""
        link, count, answer_s, patience_s = delivery_of(scope), self._forwarded, None, self._patience_s
        if owner.is_server:
            count, answer_s, patience_s = self._passed_on, self._answer_s, CONNECT_TIMEOUT_S
        count.num_passed_on += 1
        num_bytes = _num_bytes(scope)
        has_begun = False
        try:
            body = None
            if num_bytes is not None and num_bytes <= WAITS_FOR_BYTES and (body := await _whole(receive)) is None:
                return
            async with self._peers.way(owner.socket or owner.name, patience_s) as way:
                _begin(way, scope, num_bytes, is_server=owner.is_server)
                async with asyncio.timeout(answer_s), _sending(way, body, receive, link):
                    await way.head()
                    has_begun = True
                    await _send_answer(way, scope["method"], link, send)
                if not await link.has_left():
                    way.cut()
                elif not owner.is_server:
                    way.delivered()
        except FAILURES as error:
            if link.is_gone:
                return
            count.num_refused += 1
            if not has_begun:
                raise owner.away() from error
            link.cut()


def _num_bytes(scope: Scope) -> int | None:
    """The length of a request's body; None if it is not known."""
    named = headers_of(scope)
    return None if b"transfer-encoding" in named else int(named.get(b"content-length", b"0"))


async def _whole(receive: Receive) -> bytes | None:
    """A whole body; None if the client has left."""
    pieces: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)
    return None


def _begin(way: PeerWay, scope: Scope, num_bytes: int | None, *, is_server: bool) -> None:
    """Send the head of a request, for another server as it is not to be passed on again."""
    query: bytes = scope["query_string"]
    target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
    mark = (PASSED_ON, b"1") if is_server else (CLIENT, client_named(scope))
    way.begin(scope["method"], target, [mark, *end_to_end(scope["headers"])], num_bytes=num_bytes)


@asynccontextmanager
async def _sending(way: PeerWay, body: bytes | None, receive: Receive, link: ClientLink) -> AsyncGenerator[None]:
    """Send the body of a request, as it comes if it is not there, and cut the way if the client leaves."""
    sending: asyncio.Task[None] | None = None
    if body is None:
        sending = asyncio.get_running_loop().create_task(_send_body(way, receive, link), name="forward")
    else:
        await way.send(body, is_last=True)
        link.when_gone(way.cut)
    try:
        yield
    finally:
        link.when_gone(None)
        if sending is not None and not sending.done():
            sending.cancel()
            await asyncio.wait({sending})


async def _send_body(way: PeerWay, receive: Receive, link: ClientLink) -> None:
    is_last = False
    while not is_last:
        message = await receive()
        if message["type"] != "http.request":
            if not way.answer.is_whole:
                way.cut()
            return
        is_last = not message.get("more_body", False)
        with suppress(*FAILURES):  # the answer's reader says so
            await way.send(message.get("body", b""), is_last=is_last)
    link.when_gone(way.cut)


async def _send_answer(way: PeerWay, method: str, link: ClientLink, send: Send) -> None:
    """Send the answer as it comes, within the framing of the client's connection. Raises `FAILURES`, also for a client
    that has left before its last byte is written: what is written then goes nowhere, and looks sent."""
    answer, status = way.answer, way.answer.status
    if not 200 <= status <= 599:
        raise NotHttp(f"{status} is no status of an answer")
    length = (
        None if status in _WITHOUT_BODY or answer.num_expected is None else dict(answer.headers).get("content-length")
    )
    headers = [pair for pair in end_to_end(answer.headers) if pair[0] not in _WRITTEN_ANEW]
    if length is not None and answer.is_whole and method != "HEAD":
        _check_there(link)
        await link.answer(send, status, b"".join(answer.take()), headers)
        return
    raw = [header_bytes(*pair) for pair in headers]
    if length is not None:
        raw.append((b"content-length", length.encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    async with aclosing(way.pieces()) as pieces:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    _check_there(link)
    await send({"type": "http.response.body"})


def _check_there(link: ClientLink) -> None:
    if link.is_gone:
        raise ConnectionResetError("the client has left")
