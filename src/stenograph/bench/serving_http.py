"""Streaming clients over HTTP: sessions at a server, or stateless chats straight at an engine that is one."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from stenograph.bench.load import BUFFER_BYTES, Answer, ClientConnection, error_kind
from stenograph.bench.serving_mix import Line, Mix, SessionPlan, TurnPlan
from stenograph.bench.serving_reply import ReplyReader
from stenograph.bench.serving_target import CUT, ChatFailed, Heard

CHAT_PATH = "/v1/chat/completions"
SHOWN_BYTES = 300
REQUEST_ID = b"x-request-id"


class BodyReader(Protocol):
    """Takes a reply's body as it comes."""

    def feed(self, data: bytes, now: float, /) -> None:
        """Take the next bytes; `now` is in monotonic seconds. Raises ChatFailed for what is no such reply."""
        ...


class StreamingConnection(ClientConnection):
    """A connection that hands out each piece of a body as it comes."""

    def __init__(self, buffer: memoryview) -> None:
        super().__init__(buffer)
        self.reader: BodyReader | None = None
        self.request_id = ""
        self.body = bytearray()
        self.failure: ChatFailed | None = None

    def begin(self, reader: BodyReader | None) -> None:
        """The next reply is for `reader`, or kept as `body`."""
        self.reader, self.request_id, self.body, self.failure = reader, "", bytearray(), None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if name.lower() == REQUEST_ID:
            self.request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """Called by the parser, for each piece as it comes."""
        if self.reader is None:
            self.body += body
        elif self.failure is None:
            try:
                self.reader.feed(body, time.monotonic())
            except ChatFailed as failure:
                self.failure = failure


class _Opened(msgspec.Struct):
    session_id: str


class _Record(msgspec.Struct):
    request_id: str
    stage_seconds: dict[str, float]


class _Session(msgspec.Struct):
    records: list[_Record]


class HttpClient:
    """Requests on a connection of its own, which is opened when it is needed."""

    def __init__(self, host: str, port: int, buffer: memoryview) -> None:
        self._address = (host, port)
        self._host = f"{host}:{port}"
        self._buffer = buffer
        self._connection: StreamingConnection | None = None

    async def asked(
        self,
        method: str,
        path: str,
        parts: list[bytes],
        reader: BodyReader | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Send a request and wait for the whole answer. Raises ChatFailed, also for a status that is no 2xx."""
        try:
            connection = await self._connected()
        except OSError as error:
            raise ChatFailed("connect", str(error)) from error
        connection.begin(reader)
        more = "".join(f"{name}: {value}\r\n" for name, value in headers)
        try:
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
                f"content-length: {sum(map(len, parts))}\r\n{more}\r\n"
            )
            answer = await connection.request([head.encode(), *parts], keeps=False)
        except OSError as error:
            raise ChatFailed("connection", str(error)) from error
        except asyncio.CancelledError:
            connection.close()  # the rest of this answer is not the next one
            raise
        if not 200 <= answer.status < 300:
            raise ChatFailed(error_kind(answer), answer.body[:SHOWN_BYTES].decode(errors="replace"))
        if connection.failure is not None:
            raise connection.failure
        return answer

    @property
    def request_id(self) -> str:
        """What the last answer was called."""
        return "" if self._connection is None else self._connection.request_id

    @property
    def body(self) -> bytes:
        """The body of the last answer that nobody read as it came."""
        return b"" if self._connection is None else bytes(self._connection.body)

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> StreamingConnection:
        if self._connection is None or not self._connection.is_open:
            _, self._connection = await asyncio.get_running_loop().create_connection(
                lambda: StreamingConnection(self._buffer), *self._address
            )
        return self._connection


class HttpTarget:
    """A server with sessions, or (`sessionless`) an engine's own chat route."""

    def __init__(self, host: str, port: int, *, sessionless: bool) -> None:
        self._address = (host, port)
        self._sessionless = sessionless
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._session_ids: list[str] = []

    def client(self) -> HttpClient:
        """A client with a connection of its own."""
        return HttpClient(*self._address, self._buffer)

    def talk(self, number: int, mix: Mix, plan: SessionPlan) -> "HttpTalk":
        """The client of a session."""
        return HttpTalk(number, Line(mix, plan), self.client(), None if self._sessionless else self._session_ids)

    async def collect(self, heard: list[Heard]) -> None:
        """Read every session's records for their stage times, then delete it."""
        by_id = {one.request_id: one for one in heard}
        client = self.client()
        try:
            for session_id in self._session_ids:
                await client.asked("GET", f"/sessions/{session_id}?records=delta", [])
                for record in msgspec.json.decode(client.body, type=_Session).records:
                    if (one := by_id.get(record.request_id)) is not None:
                        one.stages_s = record.stage_seconds
                await client.asked("DELETE", f"/sessions/{session_id}", [])
        except msgspec.DecodeError as error:
            raise ChatFailed("not a session", str(error)) from error
        finally:
            client.close()
            self._session_ids.clear()

    async def aclose(self) -> None:
        """Nothing is held."""


class HttpTalk:
    """A session over HTTP. It is opened with its first turn, whose latency has that in it."""

    def __init__(self, number: int, line: Line, client: HttpClient, session_ids: list[str] | None) -> None:
        self._number = number
        self._line = line
        self._client = client
        self._session_ids = session_ids
        self._prefix = "" if session_ids is None else None
        self._parts: list[bytes] = []
        self._turn = -1

    def prepare(self, turn: TurnPlan) -> None:
        """Join the body."""
        self._parts = self._line.body_parts(turn)
        self._turn += 1

    async def ask(self, turn: TurnPlan, due_s: float) -> Heard:
        """Raises ChatFailed."""
        prefix = await self._opened()
        reader = ReplyReader()
        sent_s = time.monotonic()
        await self._client.asked("POST", prefix + CHAT_PATH, self._parts, reader)
        end_s = time.monotonic()
        reader.end(end_s)
        is_cut = reader.finish_reason == CUT
        if not is_cut:
            self._line.answered(turn, reader.content)
        return Heard(
            session=self._number,
            turn=self._turn,
            due_s=due_s,
            sent_s=sent_s,
            pieces_s=reader.pieces_s,
            end_s=end_s,
            num_prompt=reader.num_prompt,
            num_completion=reader.num_completion,
            num_cached=reader.num_cached,
            is_cut=is_cut,
            request_id=self._client.request_id,
        )

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()

    async def _opened(self) -> str:
        if self._prefix is None:
            assert self._session_ids is not None
            await self._client.asked("POST", "/sessions", [b"{}"])
            try:
                session_id = msgspec.json.decode(self._client.body, type=_Opened).session_id
            except msgspec.DecodeError as error:
                raise ChatFailed("not a session", str(error)) from error
            self._session_ids.append(session_id)
            self._prefix = f"/sessions/{session_id}"
        return self._prefix
