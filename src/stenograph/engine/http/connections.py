"""Connections to an engine, kept between requests: one is used again only while nothing has come on it unasked.

Bytes on an idle connection close it, and a connection is looked at once more before it is used again: bytes in the
kernel by then were sent before the request was. For later bytes, only the id of a reply decides
(`request_agrees`); an engine without such ids gets a new connection for each request. A reply flows while its reader
takes it: otherwise one buffer of it is read, and the rest waits in the engine's socket. Knows no engine; sends no
request twice if the engine may have received it, except a GET.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import cast

from yarl import URL

from stenograph.core.errors import InvalidRequest, UpstreamUnreachable
from stenograph.engine.http.exchange import KEEPALIVE_S, Pairs, basic, not_connected, tls_of_clients, unreachable
from stenograph.engine.http.response import NotHttp, ReplyCut, ResponseReader

READ_BUFFER_BYTES = 2**18
"""The most bytes of one read."""
FIRST_READ_BYTES = 2**15
MANY_CHUNKS = 1024
"""After a read with more chunks of a body than this, the loop serves others before the next one, a short one. So is
the first of a reply: Python is called for each chunk, and there may be one for each byte."""
MOST_UNTAKEN_BYTES = 2**16
"""Most untaken bytes of a body before reading pauses."""
JOINED_BYTES = 2**16
"""A body up to this size is copied behind its head: cheaper than a write of two buffers."""
LOOKUP_KEPT_S = 10.0
"""Seconds for which a host's addresses are kept, unless none of them answers."""
MAX_KEPT_HEADS = 256
REPEATABLE = ("GET", "HEAD", "OPTIONS")
"""Methods without a generation: sent again if a kept connection turns out to be closed."""
_WITHOUT_LENGTH = ("GET", "HEAD", "OPTIONS", "TRACE")
_Address = tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]
"""As `getaddrinfo` returns it: for `connect`, whose type depends on the family."""


class Connections:
    """A pool for one address, http or https. Everything happens in the loop of its opening."""

    def __init__(self, url: URL, connect_timeout_s: float, *, reuses: bool) -> None:
        """`reuses` False: each connection carries one request."""
        self._tls = tls_of_clients() if url.scheme == "https" else None
        usual_port = 443 if self._tls else 80
        self._host, self._port = url.raw_host or "", url.port or usual_port
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._host_header = host if self._port == usual_port else f"{host}:{self._port}"
        self._credentials = None if url.user is None else basic(url.user, url.password or "")
        self._connect_timeout_s = connect_timeout_s
        self._reuses = reuses
        self._buffer = memoryview(bytearray(0))
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        """The one used last is the last, and used first: the others come to be closed."""
        self._closing_idle: asyncio.TimerHandle | None = None
        self._found: list[_Address] = []
        self._found_until = 0.0
        self._is_open = False
        self._emptied: asyncio.Future[None] | None = None
        self._begun_head = lru_cache(maxsize=MAX_KEPT_HEADS)(self._written_head)

    def __repr__(self) -> str:
        return f"<Connections {self._host}:{self._port} {len(self._all)}, {len(self._idle)} of them idle>"

    def open(self) -> None:
        self._buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._is_open = True

    async def aclose(self) -> None:
        self._is_open = False
        if self._closing_idle is not None:
            self._closing_idle.cancel()
        for connection in list(self._all):
            connection.abort()
        while self._all:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    async def ask(self, method: str, target: str, headers: Pairs, body: bytes) -> "Connection":
        """Send a request and wait for the head of its reply; `target` has the address's own path. Cancelling it closes
        the connection. Raises UpstreamUnreachable, and InvalidRequest for a header that cannot be sent."""
        assert self._is_open, "a transport is open while it is used"
        head = self._begun_head(method, target, tuple(headers))
        if body or method not in _WITHOUT_LENGTH:
            head = b"%bcontent-length: %d\r\n" % (head, len(body))
        head += b"\r\n"
        while self._idle:
            connection = self._idle.pop()
            if connection.has_spoken():  # nobody asked for it
                connection.abort()
                continue
            try:
                await connection.ask(head, body, is_head=method == "HEAD")
            except UpstreamUnreachable:
                if connection.has_replied or method not in REPEATABLE:
                    raise
                break
            return connection
        connection = await self._connected()
        await connection.ask(head, body, is_head=method == "HEAD")
        return connection

    def _written_head(self, method: str, target: str, headers: Pairs) -> bytes:
        """A head but for the length of its body, in which a session's requests differ."""
        lines = [f"{method} {target} HTTP/1.1\r\nhost: {self._host_header}"]
        lines += [f"{name}: {value}" for name, value in headers]
        names = {name for name, _ in headers}
        if "accept" not in names:
            lines.append("accept: */*")
        if self._credentials is not None and "authorization" not in names:
            lines.append(f"authorization: {self._credentials}")
        head = "\r\n".join(lines)
        if not (head.count("\n") == head.count("\r") == len(lines)) or "\0" in head:
            raise InvalidRequest("A header has a line break or a null character in its name or value.")
        return (head + "\r\n").encode("utf-8", "surrogateescape")

    # -- the pool

    def rest(self, connection: "Connection") -> None:
        """The connection's reply is whole, and it could carry another."""
        if not self._reuses or not self._is_open:
            connection.abort()
            return
        self._idle.append(connection)
        if self._closing_idle is None:
            self._closing_idle = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._close_idle)

    def lost(self, connection: "Connection") -> None:
        """The connection is no more."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._emptied is not None and not self._all and not self._emptied.done():
            self._emptied.set_result(None)

    def _close_idle(self) -> None:
        """Close those idle for long enough; come again for the next."""
        self._closing_idle = None
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since + KEEPALIVE_S <= loop.time():
            self._idle.pop(0).abort()
        if self._idle:
            self._closing_idle = loop.call_at(self._idle[0].idle_since + KEEPALIVE_S, self._close_idle)

    # -- new connections

    async def _connected(self) -> "Connection":
        """A new connection. Raises UpstreamUnreachable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                sock = await _reached(loop, await self._addresses(loop), deadline)
                try:
                    connection = await self._connection_on(loop, sock)
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError as error:
            where = f"no connection to {self._host}:{self._port} within {self._connect_timeout_s:g} s"
            raise unreachable("The engine could not be reached in time", where) from error
        except OSError as error:
            self._found_until = 0.0
            raise not_connected(self._host, self._port, error) from error
        if not self._is_open:
            connection.abort()
            raise unreachable("The connection to the engine broke", "it was closed here")
        return connection

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> "list[_Address]":
        """The host's addresses. Raises OSError."""
        if loop.time() >= self._found_until:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._found = [(family, address) for family, _, _, _, address in found]
            self._found_until = loop.time() + LOOKUP_KEPT_S
        return self._found

    async def _connection_on(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> "Connection":
        connection = Connection(self._buffer, self._all.add, self.rest, self.lost)
        try:
            name = self._host if self._tls else None
            await loop.create_connection(lambda: connection, sock=sock, ssl=self._tls, server_hostname=name)
        except BaseException:
            self.lost(connection)  # one that is cancelled hears nothing more from uvloop, whether it was made or not
            raise
        return connection


async def _reached(loop: asyncio.AbstractEventLoop, addresses: "list[_Address]", deadline: float) -> socket.socket:
    """A socket connected to the first address to answer; no address takes the time of those after it.

    Raises OSError, the last address's, and TimeoutError.
    """
    for number, (family, address) in enumerate(addresses):
        is_last = number == len(addresses) - 1
        share_s = (deadline - loop.time()) / (len(addresses) - number)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(None if is_last else share_s):
                await loop.sock_connect(sock, address)
        except OSError:  # TimeoutError is one
            sock.close()
            if is_last:
                raise
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise OSError("the name has no address")


class Connection(asyncio.BufferedProtocol):
    """One connection, with one request under way at most. All of a pool share `buffer`: between `get_buffer` and
    `buffer_updated` nothing else runs.

    From `ask` to `leave` it is an exchange: a reply, its body in pieces. Whoever got it calls `leave` in the end.
    """

    def __init__(
        self,
        buffer: memoryview,
        on_made: Callable[["Connection"], None],
        on_rest: Callable[["Connection"], None],
        on_lost: Callable[["Connection"], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = buffer
        self._on_made = on_made
        self._on_rest = on_rest
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._looked = select.poll()
        self._reader = ResponseReader()
        self._waiter: asyncio.Future[None] | None = None
        self._read_bytes = FIRST_READ_BYTES
        self._num_wanted = 0
        """Bytes of the body for which somebody waits; nobody is woken before they are there, or the reply is whole."""
        self._is_idle = True
        self._is_paused = False
        self._resting: asyncio.Handle | None = None
        """Reading goes on after this, because much was read in this event-loop iteration."""
        self._fault: UpstreamUnreachable | None = None
        """The reason why no more comes."""
        self.idle_since = 0.0
        self.status = 0
        self.headers: Pairs = ()
        self.num_expected: int | None = None

    def __repr__(self) -> str:
        return f"<Connection {'idle' if self._is_idle else self._reader} {self._fault or ''}>"

    # -- the exchange

    async def ask(self, head: bytes, body: bytes, *, is_head: bool) -> None:
        """Send a request, and wait for the head of its reply. Raises UpstreamUnreachable; leaves by itself then."""
        transport = self._transport
        assert self._is_idle, "one request is under way at a time"
        if transport is None:
            raise self._fault or self._broken("it was closed")
        self._is_idle = False
        if len(body) <= JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        reader = self._reader
        reader.begin(is_head=is_head)
        self._read_bytes = FIRST_READ_BYTES
        self._num_wanted = 0
        try:
            while not reader.has_head:
                await self._news()
        except BaseException:
            self.abort()
            raise
        self.status, self.headers, self.num_expected = reader.status, reader.headers, reader.num_expected

    @property
    def has_replied(self) -> bool:
        """Whether a byte of the reply has come."""
        return self._reader.has_begun

    async def piece(self) -> bytes:
        """The next bytes of the body, empty at its end; `UpstreamUnreachable` if it is cut."""
        return b"".join(await self.pieces(1))

    async def pieces(self, num_bytes: int) -> list[bytes]:
        """The same in pieces, at least `num_bytes` unless the body ends before; none at its end."""
        reader = self._reader
        self._num_wanted = num_bytes
        while reader.num_pending < self._num_wanted and not reader.is_whole:
            if self._is_paused:
                self._read_on()
            await self._news()
        self._num_wanted = 0
        return reader.take()

    @property
    def num_pending(self) -> int:
        """Bytes of the body received and not yet taken."""
        return self._reader.num_pending

    def hand_over(self) -> None:
        """Let `pieces` return with the bytes so far, at the latest once more come."""
        self._num_wanted = 1
        if self._reader.num_pending:
            self._wake()

    def leave(self) -> None:
        """Keep the connection for another request if the reply is whole, else close it at once."""
        transport = self._transport
        keeps = self._reader.is_whole and self._reader.keeps_connection and self._fault is None
        if not keeps or transport is None or transport.is_closing() or transport.get_write_buffer_size():
            self.abort()
            return
        if self._is_paused:
            self._read_on()
        self._is_idle = True
        self.idle_since = self._loop.time()
        self._on_rest(self)

    def has_spoken(self) -> bool:
        """Whether anything has come unasked, also bytes still in the kernel. An end counts as well."""
        return self._transport is None or self._transport.is_closing() or bool(self._looked.poll(0))

    def abort(self) -> None:
        """Close at once, unsent bytes are dropped. Does nothing the second time."""
        if self._fault is None:
            self._fault = self._broken("it was closed here")
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        """Wait until something came. Raises UpstreamUnreachable if nothing more will come."""
        if self._fault is not None:
            raise self._fault
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _read_on(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _broken(self, cause: Exception | str) -> UpstreamUnreachable:
        if self._reader.has_head:
            return unreachable("The engine's reply was cut", cause, reply_began=True)
        return unreachable("The connection to the engine broke", cause)

    # -- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass of it
        self._on_made(self)  # not before: of one that is cancelled by then uvloop says nothing more, not even its end
        self._looked.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer[: self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        if self._is_idle:
            self.abort()
            return
        try:
            reader.feed(self._buffer[:nbytes])
        except NotHttp as error:
            self._fault = unreachable("The engine answered what is not HTTP", error, reply_began=reader.has_head)
            self.abort()
            self._wake()
            return
        is_many = reader.num_fed > MANY_CHUNKS
        if is_many or nbytes >= FIRST_READ_BYTES:  # of less is not known yet what chunks it comes in
            self._read_bytes = FIRST_READ_BYTES if is_many else READ_BUFFER_BYTES
        is_enough = reader.num_pending >= self._num_wanted
        is_full = is_enough and reader.num_pending > MOST_UNTAKEN_BYTES
        if (is_full or is_many) and not self._is_paused and not reader.is_whole:
            assert self._transport is not None, "bytes come only while the connection is there"
            self._is_paused = True
            self._transport.pause_reading()
            if not is_full:
                self._resting = self._loop.call_soon(self._read_on)
        if reader.is_whole or (reader.has_head and is_enough):
            self._wake()

    def eof_received(self) -> None:
        if not self._is_idle:
            try:
                self._reader.end()
            except ReplyCut as error:
                self._fault = self._fault or self._broken(error)
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._fault is None:
            self._fault = self._broken(exc or "the connection was closed")
        self._transport = None
        if self._resting is not None:
            self._resting.cancel()
        self._reader.close()
        self._wake()
        self._on_lost(self)
