"""Streaming clients over HTTP: sessions at a server, or stateless chats straight at an engine that is one."""

import time

import msgspec

from stenograph.bench.kit.client import BUFFER_BYTES, LoadClient, RequestFailed
from stenograph.bench.kit.load import open_session
from stenograph.bench.serving.mix import CHAT, COMPLETIONS, ChatHistory, Mix, SessionPlan, TextHistory, TurnPlan
from stenograph.bench.serving.reply import StreamedReply
from stenograph.bench.serving.target import CUT, ServedReply

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"


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

    def talk(self, number: int, mix: Mix, plan: SessionPlan) -> "HttpTalk":
        """The client of a session."""
        line = TextHistory(mix, plan) if self._endpoint == COMPLETIONS else ChatHistory(mix, plan)
        return HttpTalk(number, line, self.client(), None if self._sessionless else self._session_ids)

    async def collect(self, heard: list[ServedReply]) -> None:
        """Read every session's records for their stage times, then delete it."""
        by_id = {one.request_id: one for one in heard}
        client = self.client()
        try:
            for session_id in self._session_ids:
                for record in await _records(client, session_id):
                    if (one := by_id.get(record.request_id)) is not None:
                        one.stages_s = record.stage_seconds
                await client.asked("DELETE", f"/sessions/{session_id}", [])
        except msgspec.DecodeError as error:
            raise RequestFailed("not a session", str(error)) from error
        finally:
            client.close()
            self._session_ids.clear()

    async def aclose(self) -> None:
        """Nothing is held."""


class HttpTalk:
    """A session over HTTP. It is opened with its first turn, whose latency has that in it."""

    def __init__(
        self, number: int, line: ChatHistory | TextHistory, client: LoadClient, session_ids: list[str] | None
    ) -> None:
        self._number = number
        self._line = line
        self._path = COMPLETIONS_PATH if isinstance(line, TextHistory) else CHAT_PATH
        self._client = client
        self._session_ids = session_ids
        self._prefix = "" if session_ids is None else None
        self._parts: list[bytes] = []
        self._turn = -1

    def prepare(self, turn: TurnPlan) -> None:
        """Join the body."""
        self._parts = self._line.body_parts(turn)
        self._turn += 1

    async def ask(self, turn: TurnPlan, due_s: float) -> ServedReply:
        """Raises RequestFailed."""
        prefix = await self._opened()
        reader = StreamedReply()
        sent_s = time.monotonic()
        answer = await self._client.asked("POST", prefix + self._path, self._parts, reader)
        end_s = time.monotonic()
        reader.end(end_s)
        is_cut = reader.finish_reason == CUT
        if not is_cut:
            self._line.answered(turn, reader.content)
        return ServedReply(
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
            request_id=answer.request_id,
        )

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()

    async def _opened(self) -> str:
        if self._prefix is None:
            assert self._session_ids is not None
            session_id = await open_session(self._client)
            self._session_ids.append(session_id)
            self._prefix = f"/sessions/{session_id}"
        return self._prefix
