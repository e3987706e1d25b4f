"""A soak's session, played turn by turn to its end: the moves, and what each must come to.

What must be in the session then is the model's business (model.py); what it shows is read and compared in check.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from benchmarks.kit.client import LoadClient, RequestFailed
from benchmarks.soak.check import check
from benchmarks.soak.client import BUSY, SoakClient
from benchmarks.soak.http import told
from benchmarks.soak.model import COMPLETED, Kept
from benchmarks.soak.plan import ABORTED, NEVER, OK, OUTCOMES, TIMEOUT, Move, Step

GOES_NOT_ON = "409 truncated_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays one session; `own` is its client."""

    own: SoakClient

    async def run(self) -> None:
        """Play it, compare what it left behind, delete it. What must not be goes to the tally."""
        own, tally = self.own, self.own.around.tally
        where = f"session {own.plan.number}"
        client = own.new_client()
        try:
            options = {"history": "tree" if own.plan.is_tree else "linear", "after_length": "refuse"}
            opened = await told(client, "POST", "/sessions", options)
            self.own.session_id = opened["session_id"]
            for step in own.plan.steps:
                if self.own.around.stopping():
                    break
                where = step.turn
                await self._play(step)
            where = f"session {self.own.plan.number}, at its end"
            await self._finish(client)
        except* (RequestFailed, msgspec.ValidationError) as failures:  # bare, or out of a group of tasks
            tally.failed("another request", where, "; ".join(map(str, failures.exceptions)))
        finally:
            tally.num_sessions += 1
            self.own.close()

    async def _finish(self, client: LoadClient) -> None:
        own, tally = self.own, self.own.around.tally
        tally.num_kept += len(own.model.kept)
        found = await check(client, own.engine(), own.session_id, own.model, own.said, replays=own.plan.replays)
        tally.num_ids_checked += found.num_ids
        tally.num_generations += found.num_generations
        for difference in found.differences:
            tally.failed("what the session holds", f"session {self.own.plan.number}", difference)
        if not found.differences:
            tally.saw("what the session holds", "as the model of it")
        if self.own.plan.delete is None:
            await told(client, "DELETE", own.path)
        else:
            await self._delete_in_flight(client, self.own.plan.delete)
        await self._refused(client, own.path, "404 session_not_found", "a deleted session")
        await told(self.own.engine(), "POST", "/soak/session", {"session": self.own.session_id})

    # -- moves

    async def _play(self, step: Step) -> None:
        moves: dict[Move, Callable[[Step], Awaitable[None]]] = {
            Move.RETRY: self._retry,
            Move.REPEAT: self._repeat,
            Move.JOIN: self._join,
            Move.LOST: self._lost,
            Move.HANG_UP: self._hang_up,
            Move.LEAVE: self._leave,
            Move.ABORT: self._abort,
            Move.BUSY: self._busy,
            Move.DEADLINE: self._deadline,
            Move.REGENERATE: self._regenerate,
            Move.BRANCH: self._branch,
            Move.TWINS: self._twins,
            Move.STALE: self._stale,
            Move.OTHER_BODY: self._other_body,
        }
        await moves.get(step.card.move, self._ask)(step)

    async def _ask(self, step: Step) -> None:
        user = self.own.user(step)
        self.own.take(step, user, await self.own.chat(step, user), OUTCOMES[step.card.act])
        if user.rid and user.status != COMPLETED:
            after = Kept(turn=f"{step.turn}+", parent=user, user=self.own.message(f"{step.turn}+", step))
            self.own.expect(f"go on after {user.status}", step, await self.own.chat(step, after), {GOES_NOT_ON})

    async def _retry(self, step: Step) -> None:
        user = self.own.user(step)
        self.own.take(step, user, await self.own.chat(step, user), OUTCOMES[step.card.act])
        self.own.take(step, user, await self.own.chat(step, user), {OK}, name="the retry of it")

    async def _repeat(self, step: Step) -> None:
        user = self.own.user(step)
        first = await self.own.chat(step, user)
        if self.own.take(step, user, first, {OK}):
            self.own.same(step, first, await self.own.chat(step, user))

    async def _join(self, step: Step) -> None:
        user = self.own.user(step)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self.own.chat(step, user, self.own.new_client())) for _ in range(2)]
        first, second = (call.result() for call in calls)
        if self.own.take(step, user, first, {OK}):
            self.own.same(step, first, second)

    async def _lost(self, step: Step) -> None:
        user = self.own.user(step)
        await self.own.cancelled(self.own.chat(step, user, self.own.new_client()), step.wait_s)
        self.own.take(step, user, await self.own.chat(step, user), {OK})

    async def _hang_up(self, step: Step) -> None:
        user = self.own.user(step)
        answered = await self.own.cancelled(self.own.chat(step, user, self.own.new_client()), step.wait_s)
        if answered is not None:
            self.own.take(step, user, answered, {OK})
        else:
            self.own.saw(step, "left, kept or not")
            self.own.model.doubt(user)

    async def _leave(self, step: Step) -> None:
        """Hang up on an engine that never answers: it is told to stop, and nothing is kept."""
        user = self.own.user(step)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(self.own.chat(step, user, self.own.new_client()))
            await self.own.begun(call, step)
            call.cancel()
        if not call.cancelled():
            self.own.expect(step.card.name, step, call.result(), {"no answer"})
            return
        await self.own.engine_told("/soak/ended", step)
        self.own.saw(step, "left, and stopped at the engine")

    async def _abort(self, step: Step) -> None:
        user = self.own.user(step)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(self.own.chat(step, user, self.own.new_client()))
            await self.own.begun(call, step)
            await self._aborted(step)
        self.own.take(step, user, call.result(), {TIMEOUT} if step.card.act in NEVER else {ABORTED})

    async def _busy(self, step: Step) -> None:
        user = self.own.user(step)
        other = Kept(turn=f"{step.turn}+", parent=user.parent, user=self.own.message(f"{step.turn}+", step))
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(self.own.chat(step, user, self.own.new_client()))
            await self.own.begun(call, step)
            self.own.expect("a second chat meanwhile", step, await self.own.chat(step, other), {BUSY})
            await self._aborted(step)
        self.own.take(step, user, call.result(), {ABORTED})

    async def _deadline(self, step: Step) -> None:
        user = self.own.user(step)
        self.own.take(step, user, await self.own.chat(step, user), {TIMEOUT})

    async def _regenerate(self, step: Step) -> None:
        """Ask a turn, which settles what was in doubt, and for the same once more, with the same bytes."""
        user = self.own.user(step)
        if not self.own.take(step, user, await self.own.chat(step, user), {OK}, name="a turn to regenerate"):
            return
        again = Kept(turn=user.turn, parent=user.parent, user=user.user)
        self.own.take(step, again, await self.own.chat(step, again), {OK})

    async def _branch(self, step: Step) -> None:
        """Go on from an earlier turn: the one that the turn's number picks."""
        whole = [kept for kept in self.own.model.kept if kept.status == COMPLETED]
        parent = whole[step.message_bytes % len(whole)] if whole else None
        user = self.own.user(step, parent)
        self.own.take(step, user, await self.own.chat(step, user), {OK})

    async def _twins(self, step: Step) -> None:
        users = [self.own.user(step), self.own.user(step, turn=f"{step.turn}+")]
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self.own.chat(step, user, self.own.new_client())) for user in users]
        for user, call in zip(users, calls, strict=True):
            self.own.take(step, user, call.result(), {OK})

    async def _stale(self, step: Step) -> None:
        """Where there are two turns that can be continued: leave both out, which a line refuses."""
        for index in range(2):
            user = self.own.user(step, turn=f"{step.turn}{'+' * index}")
            if not self.own.take(step, user, await self.own.chat(step, user), {OK}, name="a turn to be left out"):
                return
        assert self.own.model.tip is not None
        before = self.own.model.tip.line()[-2].parent
        other = Kept(turn=f"{step.turn}-", parent=before, user=self.own.message(f"{step.turn}-", step))
        self.own.expect(step.card.name, step, await self.own.chat(step, other), {"400 history_mismatch"})

    async def _other_body(self, step: Step) -> None:
        user = self.own.user(step)
        if self.own.take(step, user, await self.own.chat(step, user), {OK}, name="a turn with a key"):
            other = Kept(turn=step.turn, parent=user.parent, user=self.own.message(f"{step.turn}-", step))
            self.own.expect(step.card.name, step, await self.own.chat(step, other), {"422 idempotency_mismatch"})

    async def _delete_in_flight(self, client: LoadClient, step: Step) -> None:
        user = self.own.user(step)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(self.own.chat(step, user, self.own.new_client()))
            await self.own.begun(call, step)
            await told(client, "DELETE", self.own.path)
        expected = {"404 session_not_found"} if step.card.act in NEVER else {ABORTED}
        self.own.expect(step.card.name, step, call.result(), expected)
        await self.own.engine_told("/soak/ended", step)

    async def _aborted(self, step: Step) -> None:
        answer = await told(self.own.new_client(), "POST", f"{self.own.path}/abort", {})
        if answer != {"aborted": 1}:
            self.own.around.tally.failed(step.card.name, step.turn, f"the abort said {answer}")

    async def _refused(self, client: LoadClient, path: str, expected: str, name: str) -> None:
        try:
            await told(client, "GET", path)
        except RequestFailed as failure:
            if failure.kind == expected:
                self.own.around.tally.saw(name, expected)
                return
            raise
        self.own.around.tally.failed(name, f"session {self.own.plan.number}", "it is still there")
