"""The sessions of all workers, for an answer of many: each worker makes the parts of its own, one after the other.

Whoever takes the request asks for one part after the other, and reads it as its client takes it; so no worker is ahead
by more than the buffers of a socket, and a client that leaves ends the one part that is made. A session is deleted by
its worker, on the word of the one that has seen its part leave.
"""

import heapq
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace
from starlette.types import Scope

from stenograph.cluster.owners import number_of
from stenograph.cluster.peers import Peers
from stenograph.core.errors import WorkerUnavailable
from stenograph.dialects.sessions import BulkSamplesRequest
from stenograph.export.group_rollouts import GroupRollout, RolloutFacts
from stenograph.http.bulk_parts import SIZE_BYTES, OneAnswer, OwnParts, SessionParts, sized
from stenograph.http.session_routes import REVISION_HEADER
from stenograph.session.rollout_points import RolloutPoint
from stenograph.session.selection import SessionFilter

IDS_PATH, PART_PATH, DELETE_PATH = "/workers/ids", "/workers/part", "/workers/delete"
ROLLOUT_PATH, POINTS_PATH = "/workers/rollout", "/workers/points"

_POINT = msgspec.json.Decoder(RolloutPoint | None)


class PartAsked(msgspec.Struct):
    """A question for a session's part."""

    session_id: str
    wire: BulkSamplesRequest


class DeleteAsked(msgspec.Struct):
    """A question to delete a session that is still of this revision."""

    session_id: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllParts:
    """The sessions of a server of several workers. `own` writes the errors of those that cannot be asked."""

    own: OwnParts
    peers: Peers
    number: int
    timeout_s: float

    def asked_by(self, scope: Scope) -> SessionParts:
        return self

    async def remove(self, session_id: str) -> None:
        """Of this worker's sessions: a request to delete some by filter is asked of each."""
        await self.own.remove(session_id)

    async def ids(self, wanted: SessionFilter) -> AsyncGenerator[str, None]:
        """The lists of all workers, merged by the time at which sessions were opened."""
        asked = msgspec.json.encode(wanted)
        async with AsyncExitStack() as stack:
            lists: list[AsyncGenerator[bytes, None]] = []
            for worker in range(self.peers.num):
                stream = await stack.enter_async_context(self.peers.reading(worker, IDS_PATH, asked))
                lists.append(await stack.enter_async_context(aclosing(stream.lines())))
            firsts: list[tuple[float, int, str]] = []
            for worker, lines in enumerate(lists):
                await _push_next(firsts, worker, lines)
            while firsts:
                _, worker, session_id = heapq.heappop(firsts)
                yield session_id
                await _push_next(firsts, worker, lists[worker])

    @asynccontextmanager
    async def part(self, session_id: str, wire: BulkSamplesRequest) -> AsyncGenerator[OneAnswer, None]:
        """The part as the session's worker makes it; an error in its place where that worker is away."""
        asked = msgspec.json.encode(PartAsked(session_id=session_id, wire=replace(wire, sessions=None)))
        async with AsyncExitStack() as stack:
            try:
                stream = await stack.enter_async_context(self.peers.reading(self._worker(session_id), PART_PATH, asked))
            except WorkerUnavailable as error:
                failed = self.own.failed(session_id, wire, error)
                yield OneAnswer(None, await stack.enter_async_context(aclosing(failed.pieces)))
                return
            yield OneAnswer(stream.header(REVISION_HEADER), await stack.enter_async_context(aclosing(stream.pieces())))

    async def delete(self, session_id: str, revision: str) -> bool:
        """False also where its worker does not answer: whether the session has gone is not known then."""
        asked = msgspec.json.encode(DeleteAsked(session_id=session_id, revision=revision))
        worker = self._worker(session_id)
        try:
            answer = await self.peers.ask(worker, "POST", DELETE_PATH, body=asked, timeout_s=self.timeout_s)
        except WorkerUnavailable:
            return False
        return answer.status == 200 and msgspec.json.decode(answer.body, type=bool)

    async def points(self) -> AsyncGenerator[RolloutPoint | None, None]:
        """Those of each worker, as it makes them."""
        for worker in range(self.peers.num):
            async with self.peers.reading(worker, POINTS_PATH, b"") as stream, aclosing(stream.lines()) as lines:
                async for line in lines:
                    yield _POINT.decode(line)

    async def rollout(self, session_id: str) -> RolloutFacts | None:
        """As the session's worker makes it."""
        asked, worker = msgspec.json.encode(session_id), self._worker(session_id)
        answer = await self.peers.ask(worker, "POST", ROLLOUT_PATH, body=asked, timeout_s=self.timeout_s)
        if answer.status != 200:
            raise WorkerUnavailable(f"worker {worker} cannot read session {session_id}: it answered {answer.status}.")
        return decoded_rollout(answer.body)

    def _worker(self, session_id: str) -> int:
        """The worker that has a session; what is no id, this one refuses."""
        number = number_of(session_id, self.peers.num)
        return self.number if number is None else number


def encoded_rollout(rollout: RolloutFacts | None) -> bytes:
    """A rollout for another process: its row, then its ids as they are in memory; nothing for None."""
    return b"" if rollout is None else sized(msgspec.json.encode(rollout.row)) + rollout.ids.tobytes()


def decoded_rollout(body: bytes) -> RolloutFacts | None:
    """A rollout as another process of this machine has encoded it."""
    if not body:
        return None
    end = SIZE_BYTES + int.from_bytes(body[:SIZE_BYTES], "little")
    row = msgspec.json.decode(body[SIZE_BYTES:end], type=GroupRollout)
    return RolloutFacts(row=row, ids=np.frombuffer(body, np.int32, offset=end))


async def _push_next(firsts: list[tuple[float, int, str]], worker: int, lines: AsyncGenerator[bytes, None]) -> None:
    if (line := await anext(lines, None)) is not None:
        opened_at, session_id = msgspec.json.decode(line, type=tuple[float, str])
        heapq.heappush(firsts, (opened_at, worker, session_id))
