"""The other workers, as the first one has them follow: it writes the state, then notifies each of the change.

A notice has no content: a late worker reads the state of that time. An ended worker needs no notice,
because its next life begins with the file; one present and silent is waited for before anything is
changed, and left to itself after.
"""

import asyncio
import logging

import msgspec

from stenograph.cluster.peers import Peers
from stenograph.cluster.state_file import StateFile
from stenograph.core.errors import InvalidRequest, WorkerUnavailable
from stenograph.session.weights import Followers, SyncState

log = logging.getLogger(__name__)

FOLLOW_PATH, ENGINES_PATH, ABORT_PATH = "/workers/follow", "/workers/engines", "/workers/abort"

HEAR_S = 5.0
"""Longest time for a present worker to follow; a restarting one takes less."""


class OtherWorkers(Followers):
    """All workers but this one."""

    def __init__(self, peers: Peers, file: StateFile, *, own: int, long_s: float, hear_s: float = HEAR_S) -> None:
        """`long_s`: the longest time for work."""
        self._peers = peers
        self._file = file
        self._others = [worker for worker in range(peers.num) if worker != own]
        self._long_s = long_s
        self._hear_s = hear_s

    def __repr__(self) -> str:
        return f"<OtherWorkers of {self._peers!r}>"

    async def hold(self, state: SyncState) -> int:
        self._file.write(state)
        bodies, silent = await self._ask(FOLLOW_PATH, self._hear_s)
        if silent is not None:
            raise silent
        return sum(msgspec.json.decode(body, type=int) for body in bodies)

    async def follow(self, state: SyncState) -> None:
        self._file.write(state)
        await self.tell()

    async def tell(self) -> None:
        """Have all follow the state in the file."""
        _, silent = await self._ask(FOLLOW_PATH, self._hear_s)
        if silent is not None:
            log.warning("%s It follows the others when it can.", silent)

    async def abort_all(self) -> int:
        bodies, _ = await self._ask(ABORT_PATH, self._long_s)
        return sum(msgspec.json.decode(body, type=int) for body in bodies)

    async def change_engines(self, state: SyncState) -> None:
        self._file.write(state)
        bodies, silent = await self._ask(ENGINES_PATH, None)
        if silent is not None:
            raise silent
        for problem in (msgspec.json.decode(body, type=str) for body in bodies):
            if problem:
                raise InvalidRequest(f"The engine cannot join: {problem}.", param="/url")

    async def _ask(self, path: str, timeout_s: float | None) -> tuple[list[bytes], WorkerUnavailable | None]:
        """The answers of the present ones, and why one of them does not answer, if one does not. An ended process
        is not present."""
        bodies: list[bytes] = []
        silent: WorkerUnavailable | None = None

        async def one(worker: int) -> None:
            nonlocal silent
            try:
                answer = await self._peers.ask(worker, "POST", path, timeout_s=timeout_s)
            except WorkerUnavailable as error:
                silent = error if isinstance(error.__cause__, TimeoutError) else silent
                return
            if answer.status == 200:
                bodies.append(answer.body)
            else:
                silent = WorkerUnavailable(f"A process of this server (worker {worker}) failed: {answer.body!r}.")

        await asyncio.gather(*map(one, self._others))
        return bodies, silent
