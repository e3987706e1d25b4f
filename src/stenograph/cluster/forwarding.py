"""A client's connection in a server of several processes: another process's requests are passed on to it, to a
worker of this server or to another server.

A request's head names its process. Another's request goes to that process byte by byte as it came, except the
head towards another server, and the bytes of its answer come back as they are; only the end of each is looked
for. Reading stops on one side while the other does not take the bytes, and the end of the one is the end of the
other. A request goes from one server to another once.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
from starlette.types import Scope

from stenograph.cluster.owners import Finding, Found, Owner, Owners
from stenograph.cluster.peer_connection import DELIVERED, GREETING, client_line
from stenograph.cluster.peers import CONNECT_TIMEOUT_S
from stenograph.core.errors import StenographError, UnexpectedFailure
from stenograph.dialects.base import Refusal
from stenograph.http.auth import PASSED_ON, SESSION_ID, session_named
from stenograph.http.connection import Bytes, ClientConnection, RequestPhase
from stenograph.http.wire import header_value, headers_of

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Longest wait of a request for a restarting worker."""


def is_for_anyone(scope: Scope) -> bool:
    """Whether a request is the console's: it shows a session from the database, on any process."""
    path: str = scope["path"]
    return path.startswith("/console/")


class Forwarded:
    """Counts of the requests passed on by one process, to workers of its server or to others."""

    def __init__(self) -> None:
        self.num_passed_on = 0
        self.num_refused = 0
        """Those of them refused: their process was away for too long, or ended before its answer."""

    def __repr__(self) -> str:
        return f"<Forwarded {self.num_passed_on} requests, {self.num_refused} refused>"


class ForwardingConnection(ClientConnection):
    """A client's connection, with a way to each process it has had requests for."""

    def __init__(
        self,
        *arguments: Any,
        owners: Owners,
        of_server: Collection[str],
        by_credential: bool,
        refuse_at: Callable[[str, StenographError], Refusal],
        objects: Callable[[Scope], bool],
        forwarded: Forwarded,
        passed_on: Forwarded,
        patience_s: float,
        answer_s: float,
        **named: Any,
    ) -> None:
        """`objects` says whether a request is refused here, for any process. `forwarded` counts those for workers, each
        with `patience_s` to be there; `passed_on` those for other servers, with `answer_s` each."""
        super().__init__(*arguments, **named)
        self._owners = owners
        self._of_server = of_server
        """Paths served by one process for all."""
        self._open_paths = tuple(path.partition("{")[0] for path in of_server if path.endswith(":path}"))
        """The beginnings of those with further paths below."""
        self._by_credential = by_credential
        self._refuse_at = refuse_at
        self._objects = objects
        self._forwarded = forwarded
        self._passed_on = passed_on
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._finding: asyncio.Task[None] | None = None
        self._found: tuple[Owner | Finding, Scope] | None = None
        """The server of the request at hand, after its head."""
        self._is_ours = False
        """The request was found to be this process's."""
        self._early: list[Bytes] = []
        """Bytes received before the request's process was known."""
        self._ways: dict[Owner, _Way] = {}
        self._way: _Way | None = None
        """The way of another process's request."""
        self._owner: Owner | None = None
        """The process of that request."""
        self._num_to_pass: int | None = 0
        """Bytes of its body still to come; None for a chunked one."""
        self._is_answered = False
        self._is_last = False
        self._path = ""
        self._telling: asyncio.Task[None] | None = None
        self._untold: _Way | None = None
        """The way of an answer not yet sent to the client."""

    def __repr__(self) -> str:
        return f"<ForwardingConnection {self.client} {self._phase.name}, {len(self._ways)} ways>"

    def _feed(self, data: Bytes) -> None:
        """Take a head, or bytes of a body read here."""
        is_head = self._phase is RequestPhase.HEAD
        if is_head and not self._is_ours:
            self._has_taken()
        super()._feed(data)
        found, self._found = self._found, None
        if found is None:
            return
        self._renew_parser()  # the old one awaits a body that it does not get
        server, scope = found
        if isinstance(server, Owner):
            self._begin_elsewhere(server, bytes(data), scope)
        else:
            self._begin_found(server, bytes(data), scope)

    def _begin(self, scope: Scope, *, keeps_connection: bool) -> None:
        server = None if self._is_ours else self._server_of(scope)
        if server is None:
            super()._begin(scope, keeps_connection=keeps_connection)
        else:
            self._found, self._phase = (server, scope), RequestPhase.ELSEWHERE

    def _server_of(self, scope: Scope) -> Found:
        """The process of a request, if another than this."""
        method, path = scope["method"], scope["path"]
        if path in self._of_server or path.startswith(self._open_paths):
            return self._owners.first()
        session_id = session_named(scope, by_id=self._by_credential)
        if session_id is not None:
            return self._owners.owner_of(session_id) if SESSION_ID.fullmatch(session_id) else None
        if method == "POST" and path.strip("/") == "sessions":
            key = headers_of(scope).get(b"idempotency-key")
            return self._owners.opener_of(key) if key else None
        return None

    def _begin_found(self, finding: Finding, head: bytes, scope: Scope) -> None:
        """Begin a request once its process is known. Until then nothing is read."""

        async def begin() -> None:
            owner, failure = None, None
            try:
                owner = await finding()
            except StenographError as error:
                failure = error
            except Exception:
                log.exception("no owner was found for %s %s", scope["method"], scope["path"])
                failure = UnexpectedFailure("The server failed on this request.")
            self._finding, early = None, b"".join(self._early)
            self._phase = RequestPhase.HEAD
            self.flow.resume_reading()
            if failure is not None:
                self._refuse_with = partial(self._refuse_at, scope["path"])
                self._refuse(failure)
                return
            if owner is not None and not (owner.is_server and self._stays(scope)):
                self._begin_elsewhere(owner, head, scope)
                self.data_received(early)
                return
            self._is_ours = True
            self.data_received(head + early)
            self._is_ours = False
            if self._shuts_down:
                super(ForwardingConnection, self).shutdown()

        self._early = []
        self.flow.pause_reading()
        self._finding = self.begin_task(begin(), name="find-owner")

    def _stays(self, scope: Scope) -> bool:
        """Whether a request is not passed on to another server: one from another server, one refused here, and
        the console's, shown from the database on any process."""
        return header_value(scope, PASSED_ON) is not None or is_for_anyone(scope) or self._objects(scope)

    def _count(self, owner: Owner) -> Forwarded:
        return self._passed_on if owner.is_server else self._forwarded

    def _begin_elsewhere(self, owner: Owner, head: bytes, scope: Scope) -> None:
        self._phase = RequestPhase.ELSEWHERE
        headers = headers_of(scope)
        is_chunked = b"transfer-encoding" in headers
        self._num_to_pass = None if is_chunked else int(headers.get(b"content-length", b"0"))
        self._is_answered = False
        self._path, self._owner = scope["path"], owner
        way = self._ways.get(owner)
        if way is None:
            way = self._ways[owner] = _Way(self, owner)
            if owner.is_server:
                way.open(b"", CONNECT_TIMEOUT_S)
            else:
                way.open(client_line(self.client, self.server), self._patience_s)
        self._way = way
        self._count(owner).num_passed_on += 1
        if owner.is_server:
            way.begin(_head_for(owner, scope), is_head=scope["method"] == "HEAD", answer_s=self._answer_s)
        else:
            way.begin(head, is_head=scope["method"] == "HEAD")

    def _pass_on(self, data: Bytes) -> Bytes:
        if self._finding is not None:
            self._early.append(data)
            return b""
        rest: Bytes = b""
        if self._num_to_pass is not None:
            data, rest = data[: self._num_to_pass], data[self._num_to_pass :]
            self._num_to_pass -= len(data)
        if data and self._way is not None:
            self._way.write(data)
        if rest:
            if bytes(rest).strip(b"\r\n"):
                self._hang_up()  # pipelined, as where it is served
            return b""
        if self._is_answered and self._num_to_pass == 0:
            self._end_elsewhere()
        return b""

    # --- what the way brings

    def came_back(self, data: bytes) -> None:
        """Bytes of the answer."""
        self.transport.write(data)

    def answered(self, *, is_last: bool) -> None:
        """The answer is whole; `is_last`: so is the connection."""
        self._is_answered = True
        self._is_last = is_last or self._num_to_pass is None
        if self._is_last or not self._num_to_pass:
            self._end_elsewhere()

    def way_ended(self, owner: Owner, *, was_answering: bool) -> None:
        """A worker has closed the way to it, or has ended. `was_answering`: some of the answer has come back."""
        way = self._ways.pop(owner, None)
        if way is None or way is not self._way:
            return
        self._way = None
        if self._is_answered:
            self._linger()
        elif was_answering:
            self._count(owner).num_refused += 1
            self.transport.abort()
        else:
            self._count(owner).num_refused += 1
            self.flow.resume_reading()
            self._refuse_with = partial(self._refuse_at, self._path)
            self._refuse((self._owner or owner).away())

    def _end_elsewhere(self) -> None:
        """The answer is whole, and so is the request, or nobody reads the rest of it."""
        way, self._way = self._way, None
        if way is None or self.transport.is_closing():
            return
        if not (self._is_last or self._shuts_down):
            self._phase = RequestPhase.HEAD
            self._head_since = self.loop.time()
            self._rest()
        self._untold = way
        if self.transport.get_write_buffer_size():
            self._telling = self.begin_task(self._tell(), name="tell-of-delivery")
        else:
            self._has_taken()
            self._close_last()

    async def _tell(self) -> None:
        """Wait until the answer has left, and tell the worker."""
        if await self.has_left():
            self._has_taken()
        self._close_last()

    def _has_taken(self) -> None:
        """The client has the answer: its last byte has left, or the next request is there. Tell its worker."""
        way, self._untold = self._untold, None
        if way is not None:
            way.delivered()

    def _close_last(self) -> None:
        if self._phase is not RequestPhase.ELSEWHERE:
            return
        if self._num_to_pass:
            self._linger()
        else:
            self._hang_up()

    # --- the client's side

    _shuts_down = False

    def shutdown(self) -> None:
        """Close once another worker's request is answered."""
        if self._way is not None or self._finding is not None:
            self._shuts_down = True
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._way is not None:
            self._way.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._way is not None:
            self._way.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._way = self._untold = None
        ways, self._ways = self._ways, {}
        for way in ways.values():
            way.close()
        for task in (self._telling, self._finding):
            if task is not None:
                task.cancel()
        super().connection_lost(exc)


class _Way(asyncio.Protocol):
    """A client connection's own connection to one other process."""

    def __init__(self, client: ForwardingConnection, owner: Owner) -> None:
        self._client = client
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._waiting: list[Bytes] = []
        """Bytes waiting for the connection to be made."""
        self._connecting: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        """Until the other process is there, or has answered."""
        self._is_greeted = owner.is_server
        self._parser = httptools.HttpResponseParser(self)
        self._answer_s: float | None = None
        self._is_head = False
        self._is_running = self._has_begun = self._is_closed = False

    def __repr__(self) -> str:
        return f"<_Way to {self._owner.name}>"

    def open(self, line: bytes, patience_s: float) -> None:
        """Connect. A worker announces itself with its first byte."""
        if line:
            self._waiting.append(line)
        self._patience = self._client.loop.call_later(patience_s, self._lost_patience)
        self._connecting = self._client.begin_task(self._connect(), name="connect-to-owner")

    async def _connect(self) -> None:
        loop, socket = self._client.loop, self._owner.socket
        try:
            if socket is not None:
                await loop.create_unix_connection(lambda: self, str(socket))
            else:
                at = urlsplit(self._owner.name)
                tls = _trusted() if at.scheme == "https" else None
                port = at.port or (80 if tls is None else 443)
                await loop.create_connection(lambda: self, at.hostname or "", port, ssl=tls)
        except OSError:
            self._end()

    def begin(self, head: bytes, *, is_head: bool, answer_s: float | None = None) -> None:
        """Begin a request. The answer to `HEAD` has no body, whatever its length says. `answer_s`: its longest
        time."""
        self._is_head, self._is_running, self._has_begun, self._answer_s = is_head, True, False, answer_s
        self.write(head)
        if self._transport is not None:
            self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        self._stop_waiting()
        if self._answer_s is not None and self._is_running:
            self._patience = self._client.loop.call_later(self._answer_s, self._lost_patience)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def write(self, data: Bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            return
        self._waiting.append(data)
        if sum(map(len, self._waiting)) > 65536:
            self._client.flow.pause_reading()

    def delivered(self) -> None:
        """The last answer has left for the client."""
        if self._transport is not None and not self._is_closed and not self._owner.is_server:
            self._transport.write(DELIVERED)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._is_closed:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._is_closed:
            self._transport.resume_reading()

    def close(self) -> None:
        """Hang up."""
        self._is_closed = True
        self._stop_waiting()
        if self._transport is not None:
            self._transport.close()
        elif self._connecting is not None:
            self._connecting.cancel()

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        way = self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        if self._is_closed:
            way.close()
            return
        way.write(b"".join(self._waiting))
        self._waiting.clear()
        if self._owner.is_server:
            self._wait_for_answer()
        self._client.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if not self._is_greeted:
            assert data.startswith(GREETING), f"another worker said {data[:20]!r}"
            self._is_greeted = True
            self._stop_waiting()
            data = data[1:]
        if not data or not self._is_running:
            return
        self._has_begun = True
        self._client.came_back(data)
        self._parser.feed_data(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def pause_writing(self) -> None:
        self._client.flow.pause_reading()

    def resume_writing(self) -> None:
        self._client.flow.resume_reading()

    def _lost_patience(self) -> None:
        self.close()
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._stop_waiting()
        self._client.way_ended(self._owner, was_answering=self._has_begun)

    # --- the parser's side

    def on_headers_complete(self) -> None:
        if self._is_head and self._parser.get_status_code() >= 200:
            self._answered()

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200 and self._is_running:
            self._answered()

    def _answered(self) -> None:
        is_last = not self._parser.should_keep_alive()
        self._is_running = False
        self._stop_waiting()
        if self._is_head:
            self._parser = httptools.HttpResponseParser(self)
        self._client.answered(is_last=is_last)


def _head_for(owner: Owner, scope: Scope) -> bytes:
    """The head of a request as another server is to see it: under its own name, and not to be passed on again."""
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    named = [(b"host", urlsplit(owner.name).netloc.encode()), (PASSED_ON, b"1")]
    headers = [*named, *(pair for pair in scope["headers"] if pair[0] != b"host")]
    lines = [b"%s %s HTTP/%s" % (scope["method"].encode(), target, scope["http_version"].encode())]
    return b"\r\n".join([*lines, *(b"%s: %s" % pair for pair in headers), b"", b""])


@cache
def _trusted() -> ssl.SSLContext:
    """The machine's certificates, read once: that takes 50 ms."""
    return ssl.create_default_context()
