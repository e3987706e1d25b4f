"""The turns that forks begin with.

In memory a fork has the very ids, log-probabilities and messages of the session before it. In the store it has rows of
its own, so it stays when the other is deleted.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from stenograph.core.chat import Asked
from stenograph.core.errors import InvalidRequest, SessionInvariant, StenographError
from stenograph.core.kinds import Label
from stenograph.core.messages import MediaRef
from stenograph.core.types import SessionId
from stenograph.session.continued import first_tokens
from stenograph.session.session import Session
from stenograph.session.storage import SessionStorage
from stenograph.store.codec.commits import encode_commit
from stenograph.store.codec.rows import Totals
from stenograph.trajectory.commits import PlacedTurn, SessionCommit, SessionOptions, StrandOpened
from stenograph.trajectory.forks import ForkPoint
from stenograph.trajectory.turn import CommittedTurn, Node, TurnStatus

FORKED_FROM = "forked_from"
"""The place of a fork in its metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlace:
    """A place in a session: behind `node`, or behind its first `token` sampled tokens. Its strand was `opened` so, by a
    request of this label."""

    node: Node
    token: int | None
    opened: StrandOpened
    label: Label

    @staticmethod
    def of(session: Session, turn: int, token: int | None) -> "ForkPlace":
        """The place behind the turn of this id. Raises InvalidRequest if there is no such place."""
        for strand in session.strands.kept:
            node = next((node for node in strand.history.nodes if node.id == turn), None)
            if node is None:
                continue
            if token is not None:
                _check_cut(node.turn, token)
            opened = StrandOpened(key=strand.key, agent_id=strand.agent_id)
            return ForkPlace(node=node, token=token, opened=opened, label=strand.label)
        known = [node.id for node in session.nodes]
        raise InvalidRequest(f"The session has no turn {turn}: its turns are {known[:50]}.", param="/turn")

    @property
    def line(self) -> list[Node]:
        """The whole turns before it."""
        last = self.node if self.token is None else self.node.parent
        return [] if last is None else last.line()

    @property
    def num_tokens(self) -> int:
        """Tokens of the line before it."""
        return self.node.num_tokens - (0 if self.token is None else len(self.node.turn.sampled.ids) - self.token)

    @property
    def media(self) -> set[MediaRef]:
        """Those in the line before it."""
        return {one.ref for node in self.node.line() for message in node.turn.messages for one in message.media}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The beginning of all forks at one place: their options, their turns, and these as rows of a store."""

    options: SessionOptions
    label: Label
    opened: StrandOpened
    turns: Sequence[CommittedTurn]
    payloads: Sequence[bytes]

    @staticmethod
    def of(place: ForkPlace, session_id: str, options: SessionOptions, *, replays: bool, writes: bool) -> "Beginning":
        """The beginning of forks of a session with these options. Pure: a worker may make it. `replays`: requests for
        its turns get their replies. `writes`: there is a store."""
        turn, token = place.node.turn, place.token
        line = place.line
        fork = ForkPoint(
            session_id=SessionId(session_id),
            turn=place.node.id,
            token=token,
            num_turns=len(line),
            cut=None if token is None else first_tokens(turn, token),
            replays=replays,
        )
        turns = [structs.replace(one.turn, num_inherited=len(one.turn.sampled.ids)) for one in line]
        placed = _placed(turns, place.opened) if writes else ()
        return Beginning(
            options=replace(options, fork=fork, metadata={**options.metadata, FORKED_FROM: fork.shown()}),
            label=place.label,
            opened=place.opened,
            turns=turns,
            payloads=[encode_commit(SessionCommit(turns=(one,), label=place.label)) for one in placed],
        )

    async def give(self, storage: SessionStorage | None, session: Session) -> None:
        """Give a new session its turns: durably, where there is a store. Raises StorageUnavailable."""
        parent: Node | None = None
        adds: list[Totals] = []
        for number, turn in enumerate(self.turns):
            placed = PlacedTurn(turn=turn, parent=parent, strand=0 if number else None, opened=self.opened)
            _, parent = session.strands.replay(placed, self.label)
            if parent.id != number:
                raise SessionInvariant("the turns of a fork have other numbers than it was written with")
            num_strands = int(number == 0 and session.strands.only is None)
            adds.append(Totals(num_strands=num_strands, num_turns=1, num_tokens=turn.num_effective))
        if storage is None or session.tail is None:
            return
        written: list[asyncio.Future[None]] = []
        for payload, one in zip(self.payloads, adds, strict=True):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done = partial(_done, future)
            storage.store.append(session.tail, payload, adds=one, at=session.created_at, done=done)
            written.append(future)
        if written:
            await asyncio.wait(written)
        for future in written:
            future.result()


def _placed(turns: Sequence[CommittedTurn], opened: StrandOpened) -> Iterator[PlacedTurn]:
    """Each turn in its place in a fork."""
    parent: Node | None = None
    for number, turn in enumerate(turns):
        yield PlacedTurn(turn=turn, parent=parent, strand=0 if number else None, opened=opened)
        parent = Node(id_=number, turn=turn, parent=parent)


def _done(future: "asyncio.Future[None]", error: StenographError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _check_cut(turn: CommittedTurn, token: int) -> None:
    """Raise InvalidRequest for a turn that cannot be cut there."""
    if turn.asked is Asked.COMPLETION:
        raise InvalidRequest(
            "A completion cannot be cut at a token: its prompt is ids, so send those to be continued.", param="/token"
        )
    is_whole = turn.status is TurnStatus.COMPLETED
    most = len(turn.sampled.ids) - is_whole
    if token > most:
        why = " The last one ends its reply." if is_whole else ""
        raise InvalidRequest(
            f"token must be at most {most}: the turn has sampled {most + is_whole}.{why}", param="/token"
        )
