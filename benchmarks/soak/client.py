"""A soak's client of one session: what its moves are made of.

Orders, chats, and holding each answer against what was ordered; what is kept goes to the model. Knows no moves.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.kit.client import LoadClient
from benchmarks.soak.http import Answered, told
from benchmarks.soak.http import chat as send_chat
from benchmarks.soak.model import ABORTED, COMPLETED, TRUNCATED, Kept, SessionModel
from benchmarks.soak.plan import ABORTED as SAW_ABORTED
from benchmarks.soak.plan import CUT, OK, Move, SoakSession, Step
from benchmarks.soak.tally import SoakTally
from standins.ordered_engine import Order, OrderedReply

STATUSES = {OK: COMPLETED, CUT: TRUNCATED, SAW_ABORTED: ABORTED}
BUSY = "409 session_busy"
MOST_PATIENT = 20
PATIENCE_S = 0.02
"""A client that has hung up may be back before the server has seen it leave: it asks again, so often and so soon."""
KEYED = frozenset({Move.RETRY, Move.REPEAT, Move.JOIN, Move.LOST, Move.OTHER_BODY})

_TOOL = b'{"type":"function","function":{"name":"note","parameters":{"type":"object","properties":{}}}}'
"""Only with tools does the engine get to see messages, and so its orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakContext:
    """The common part of a soak's sessions. `stopping` tells that there is to be no further turn; `filler` is text."""

    server: Callable[[], LoadClient]
    engine: Callable[[], LoadClient]
    replies: Sequence[OrderedReply]
    filler: str
    tally: SoakTally
    stopping: Callable[[], bool]


@dataclass(slots=True, kw_only=True)
class SoakClient:
    """`said` is what the engine was ordered to draw, by turn and how often it is asked."""

    plan: SoakSession
    around: SoakContext
    model: SessionModel
    session_id: str = ""
    said: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict[tuple[str, int], tuple[int, ...]])
    _clients: list[LoadClient] = field(default_factory=list[LoadClient])
    _engine_client: LoadClient | None = None
    _num_patient: int = 0

    @property
    def path(self) -> str:
        """The session's."""
        return f"/sessions/{self.session_id}"

    def close(self) -> None:
        """Drop all connections."""
        for client in self._clients:
            client.close()

    def new_client(self) -> LoadClient:
        client = self.around.server()
        self._clients.append(client)
        return client

    def engine(self) -> LoadClient:
        if self._engine_client is None:
            self._engine_client = self.around.engine()
            self._clients.append(self._engine_client)
        return self._engine_client

    def user(self, step: Step, parent: Kept | None = None, *, turn: str = "") -> Kept:
        """A new message, after `parent` or the tip, and what the engine is to do about it."""
        turn = turn or step.turn
        return Kept(turn=turn, parent=parent or self.model.tip, user=self.message(turn, step))

    def message(self, turn: str, step: Step) -> bytes:
        first, again = step.replies
        for play, number in enumerate(step.replies):
            self.said[turn, play] = self.around.replies[number].ids
        plays = ((step.card.act, first), ("none", again))
        order = Order(turn=turn, plays=plays, filler_bytes=step.filler_bytes, replays=self.plan.replays)
        start = step.message_bytes % 1000
        text = self.around.filler[start : start + step.message_bytes]
        content = msgspec.json.encode(order).decode() + "\n" + text
        return msgspec.json.encode({"role": "user", "content": content})

    async def chat(self, step: Step, user: Kept, client: LoadClient | None = None) -> Answered:
        parts = [b'{"model":"bench","stream":', b"true" if step.streams else b"false", b',"messages":[']
        for turn in user.line()[:-1]:
            parts += [turn.user, b",", turn.assistant, b","]
        parts += [user.user, b'],"tools":[', _TOOL, b"]}"]
        headers = [("idempotency-key", step.turn)] if step.card.move in KEYED else []
        path = f"{self.path}/v1/chat/completions"
        client = client or self._clients[0]
        while True:
            answered = await send_chat(client, path, [b"".join(parts)], streams=step.streams, headers=headers)
            self.around.tally.num_turns += 1
            if not self._num_patient or answered.seen != BUSY:
                self._num_patient = 0
                return answered
            self._num_patient -= 1
            self.around.tally.saw("a chat just after a hang-up", f"{BUSY}, asked again")
            await asyncio.sleep(PATIENCE_S)

    async def cancelled(self, work: Coroutine[None, None, Answered], after_s: float) -> Answered | None:
        """The answer, if it came in time; else the client has hung up."""
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(work)
            await asyncio.wait({call}, timeout=after_s)
            call.cancel()
        if not call.cancelled():
            return call.result()
        self._num_patient = MOST_PATIENT
        self.around.tally.num_turns += 1
        return None

    async def begun(self, call: "asyncio.Task[Answered]", step: Step) -> None:
        """Wait until the engine has a chat's request, or the chat has ended without."""
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self.engine_told("/soak/begun", step))
            await asyncio.wait({waiting, call}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def engine_told(self, path: str, step: Step) -> None:
        await told(self.engine(), "POST", path, {"turn": step.turn, "session": self.session_id})

    # -- outcomes

    def saw(self, step: Step, seen: str) -> None:
        self.around.tally.saw(step.card.name, seen)

    def expect(self, name: str, step: Step, answered: Answered, expected: Collection[str]) -> bool:
        if answered.seen in expected:
            self.around.tally.saw(name, answered.seen)
            return True
        what = f"{answered.seen} instead of {' or '.join(sorted(expected))}: {answered.detail[:300]}"
        self.around.tally.failed(name, step.turn, what)
        return False

    def take(self, step: Step, user: Kept, answered: Answered, expected: Collection[str], *, name: str = "") -> bool:
        """Hold an answer against what was ordered, and keep the turn if it is one. Tells whether it is whole."""
        name = name or step.card.name
        if not self.expect(name, step, answered, expected) or answered.seen not in STATUSES:
            return False
        ids = self._ids_of(user, answered)
        if ids is None:
            self.around.tally.failed(name, step.turn, f"its reply is not one that was ordered: {answered.text[:80]!r}")
            return False
        user.rid, user.ids, user.status = answered.rid, ids, STATUSES[answered.seen]
        user.assistant = msgspec.json.encode({"role": "assistant", "content": answered.text})
        self.model.commit(user)
        return user.status == COMPLETED

    def _ids_of(self, user: Kept, answered: Answered) -> tuple[int, ...] | None:
        """The ids of the ordered reply that an answer is; None where it is none of them."""
        for play in (0, 1):
            whole = self.said[user.turn, play]
            text = next(reply.text for reply in self.around.replies if reply.ids == whole)
            if answered.text == text and answered.ids in (None, whole):
                return whole
            half = whole[: len(whole) // 2]
            if answered.seen == SAW_ABORTED and answered.ids in (None, half) and answered.text != text:
                return half
        return None

    def same(self, step: Step, first: Answered, second: Answered) -> None:
        """The answer to a repeated request is the first one's."""
        if self.expect("the same answer again", step, second, {OK}) and (second.rid, second.text) != (
            first.rid,
            first.text,
        ):
            what = f"the second answer is {second.rid}, the first was {first.rid}"
            self.around.tally.failed("the same answer again", step.turn, what)
