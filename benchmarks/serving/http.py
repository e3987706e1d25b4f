"""Streaming clients over HTTP: sessions at a server, or stateless chats straight at an engine that is one."""

import time

import msgspec

from benchmarks.kit.client import BUFFER_BYTES, LoadClient, RequestFailed, open_session
from benchmarks.kit.requests import TimedReply
from benchmarks.serving.mix import CHAT, COMPLETIONS, History, Mix, SessionPlan, TurnPlan, make_history
from benchmarks.serving.reply import StreamedReply

PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


class _RecordTimes(msgspec.Struct):
    request_id: str
    stage_seconds: dict[str, float]


class _StrandNumber(msgspec.Struct):
    strand: int


class _StrandNumbers(msgspec.Struct):
    strands: list[_StrandNumber] = []


class _SessionTimes(msgspec.Struct):
    records: list[_RecordTimes]
    metadata: _StrandNumbers


async def _records(client: LoadClient, session_id: str) -> list[_RecordTimes]:
    """The records of all strands; a turn that follows a cut reply is of a strand of its own."""
    path = f"/sessions/{session_id}?records=delta"
    session = msgspec.json.decode((await client.asked("GET", path, [])).body, type=_SessionTimes)
    if len(session.metadata.strands) < 2:
        return session.records
    records: list[_RecordTimes] = []
    for one in session.metadata.strands:
        answer = await client.asked("GET", f"{path}&strand={one.strand}", [])
        records += msgspec.json.decode(answer.body, type=_SessionTimes).records
    return records


class HttpTarget:
    """A server with sessions, or (`sessionless`) an engine's own route. Completions have no session anywhere."""

    def __init__(self, host: str, port: int, *, sessionless: bool, endpoint: str = CHAT) -> None:
        self._address = (host, port)
        self._endpoint = endpoint
        self._sessionless = sessionless or endpoint == COMPLETIONS
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._session_ids: list[str] = []

    def client(self) -> LoadClient:
        """A client with a connection of its own."""
        return LoadClient(*self._address, self._buffer)

    def talk(self, mix: Mix, plan: SessionPlan) -> "HttpTalk":
        """The client of a session."""
        history = make_history(self._endpoint, mix, plan)
        session_ids = None if self._sessionless else self._session_ids
        return HttpTalk(history, PATHS[self._endpoint], self.client(), session_ids)

    async def collect(self, heard: list[TimedReply]) -> None:
        """Read every session's records for their stage times, then delete it."""
        stages_s: dict[str, dict[str, float]] = {}
        client = self.client()
        try:
            for session_id in self._session_ids:
                records = await _records(client, session_id)
                stages_s |= {record.request_id: record.stage_seconds for record in records}
                await client.asked("DELETE", f"/sessions/{session_id}", [])
        except msgspec.DecodeError as error:
            raise RequestFailed("not a session", str(error)) from error
        finally:
            client.close()
            self._session_ids.clear()
            for one in heard:
                one.stages_s = stages_s.get(one.request_id, {})

    async def start(self) -> None:
        """Nothing is to be done: it runs."""

    async def aclose(self) -> None:
        """Nothing is held."""


class HttpTalk:
    """A session over HTTP. It is opened with its first turn, whose latency has that in it."""

    def __init__(self, history: History, path: str, client: LoadClient, session_ids: list[str] | None) -> None:
        self._history = history
        self._path = path
        self._client = client
        self._session_ids = session_ids
        """Those of the target, to which this one will be added; None where there are no sessions."""
        self._body = b""

    def prepare(self, turn: TurnPlan) -> None:
        """Join the body."""
        self._body = self._history.body(turn)

    async def ask(self, turn: TurnPlan) -> TimedReply:
        """Raises RequestFailed."""
        if self._session_ids is not None:
            session_id = await open_session(self._client)
            self._session_ids.append(session_id)
            self._path, self._session_ids = f"/sessions/{session_id}{self._path}", None
        reply = StreamedReply(time.monotonic())
        answer = await self._client.asked("POST", self._path, [self._body], reply.feed)
        reply.end(time.monotonic())
        reply.request_id = answer.request_id
        if not reply.is_cut:
            self._history.answered(turn, reply.text)
        return reply

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()
