"""What clients were told, and what an engine said: the oracle of a run in which servers are killed.

`Book.check_disk` holds the folder of a server that is dead to it, `Book.check_view` what a server shows.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stenograph.cli.store_commands import restored, rows_of
from stenograph.core.types import SessionId
from stenograph.store.look import looks
from stenograph.trajectory.turn import Node, line_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One generation of the engine: what it was asked, and what it said."""

    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    payload_digest: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A reply that a client has whole. `ids` None: its protocol does not show them."""

    reply_id: str
    text: str
    ids: tuple[int, ...] | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """What a server showed of a session that nobody worked on. `state` is what its client had asked for."""

    state: object
    num_turns: int
    records: Sequence[str]
    samples: str


@dataclass(slots=True, kw_only=True)
class Rollout:
    """A session as its client knows it. `outcomes` are those that may hold: the last is the one that was asked for."""

    session_id: str
    history: str
    acknowledged: list[Acknowledged] = field(default_factory=list[Acknowledged])
    num_asked: int = 0
    """Turns that were asked for."""
    outcomes: list[float | None] = field(default_factory=lambda: [None])
    all_outcomes: list[float | None] = field(default_factory=lambda: [None])
    is_delete_asked: bool = False
    deleted_at: float | None = None
    """When the answer came that it is deleted."""
    found: set[str] = field(default_factory=set[str])
    """Replies that were on the disk: whoever asked for them has to get these."""
    shot: Shot | None = None

    @property
    def is_deleted(self) -> bool:
        return self.deleted_at is not None

    @property
    def state(self) -> object:
        """Changes with all that its client asks for, and is told."""
        return self.num_asked, len(self.acknowledged), tuple(self.outcomes), self.is_delete_asked


class Lost(AssertionError):
    """What was acknowledged is not there, or something is there that nobody said."""


class Book:
    """All that was acknowledged, by session, and all that the engine said, by its ids."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.rollouts: dict[str, Rollout] = {}
        self.generated: dict[tuple[int, ...], Generated] = {}
        self.touched: set[str] = set()
        """Sessions that were worked on since the last check."""
        self.num_acknowledged = 0
        self.num_in_doubt = 0
        """Turns that were on the disk, and whose client had not been answered."""
        self._seen: dict[tuple[int, ...], tuple[str, int]] = {}

    def __repr__(self) -> str:
        return f"<Book {len(self.rollouts)} sessions, {self.num_acknowledged} turns>"

    @staticmethod
    def digest(payload: bytes) -> bytes:
        """By which a large payload is compared."""
        return hashlib.sha256(payload).digest()

    def opened(self, session_id: str, history: str) -> Rollout:
        """A session was opened, or the answer came again."""
        return self.rollouts.setdefault(session_id, Rollout(session_id=session_id, history=history))

    def check_disk(
        self, folder: Path, *, everything: bool = False, is_at_rest: bool = False, may_be_torn: bool = False
    ) -> int:
        """Hold the sessions of a folder to the book, those that were touched or `everything`; the number of turns.

        Raises Lost. `is_at_rest`: no request is on its way, so nothing is in doubt. `may_be_torn`: the log may end with
        a transaction that is torn, and was not acknowledged.
        """
        wanted = [*self.rollouts] if everything else [one for one in self.touched if one in self.rollouts]
        num_turns = 0
        with looks(folder) as files:
            if everything:
                faults = [fault for file in files for fault in file.faults()]
                faults = [fault for fault in faults if not (may_be_torn and fault.startswith("log: "))]
                _same(faults, [], "`check`")
                listed = {str(one.session_id) for file in files for one in file.summaries()}
                self._check_list(listed, is_at_rest=is_at_rest)
            for session_id in wanted:
                rollout = self.rollouts[session_id]
                stored = next((file for file in files if file.read(SessionId(session_id)) is not None), None)
                if stored is None:
                    if not rollout.is_delete_asked:
                        raise Lost(f"session {session_id} with {len(rollout.acknowledged)} turns is gone")
                    continue
                if rollout.is_deleted:
                    raise Lost(f"session {session_id} was deleted, and is there")
                session = restored(rows_of(stored, SessionId(session_id)))
                nodes = list(session.strands.nodes)
                num_turns += len(nodes)
                self._check_nodes(rollout, nodes, is_at_rest=is_at_rest)
                reward = None if session.outcome is None else session.outcome.reward
                if reward not in rollout.outcomes:
                    raise Lost(f"the outcome of {session_id} is {reward}, and not one of {rollout.outcomes}")
        self.touched.clear()
        return num_turns

    def forget_last_second(self, folder: Path, lost_at: float, *, most_s: float) -> float:
        """After a loss of power with `interval`: what is missing was acknowledged in the last `most_s`, and of each
        session the end alone; the rest is checked as ever. The age of the oldest turn that is missing. Raises Lost."""
        oldest_s = 0.0
        with looks(folder) as files:
            for rollout in self.rollouts.values():
                stored = next((file for file in files if file.read(SessionId(rollout.session_id)) is not None), None)
                session = None if stored is None else restored(rows_of(stored, SessionId(rollout.session_id)))
                there = {node.turn.reply_id for node in session.strands.nodes} if session is not None else set[str]()
                if stored is not None or not rollout.is_delete_asked:
                    missing = [one.at for one in rollout.acknowledged if one.reply_id not in there]
                    if stored is not None and rollout.deleted_at is not None:
                        missing.append(rollout.deleted_at)
                    oldest_s = max([oldest_s, *(lost_at - at for at in missing)])
                rollout.acknowledged = [one for one in rollout.acknowledged if one.reply_id in there]
                rollout.is_delete_asked |= stored is None
                rollout.deleted_at = None
                rollout.outcomes = [*rollout.all_outcomes]
        if oldest_s > most_s:
            raise Lost(f"a turn that was acknowledged {oldest_s:.2f} s before the loss of power is gone")
        return oldest_s

    def _check_list(self, listed: set[str], *, is_at_rest: bool) -> None:
        """All sessions are listed, and no others, but for those that are being opened or deleted."""
        there = {one.session_id for one in self.rollouts.values() if not one.is_deleted}
        leaving = {one.session_id for one in self.rollouts.values() if one.is_delete_asked}
        _same(there - leaving - listed, set(), "sessions that are not listed")
        unknown = listed - there
        if is_at_rest or len(unknown) > self.num_clients:
            _same(unknown, set(), "sessions that nobody opened, or that were deleted")

    def _check_nodes(self, rollout: Rollout, nodes: list[Node], *, is_at_rest: bool) -> None:
        there = {node.turn.reply_id: node for node in nodes}
        name = f"session {rollout.session_id}"
        _same(len(there), len(nodes), f"{name}: replies of its turns, and turns")
        told = {one.reply_id: one for one in rollout.acknowledged}
        for reply_id, one in told.items():
            node = there.get(reply_id)
            if node is None:
                raise Lost(f"{name}: the acknowledged reply {reply_id} is not there, of {len(nodes)} turns")
            if one.ids is not None:
                _same(tuple(node.turn.sampled.ids), one.ids, f"{name}: ids of {reply_id}")
            _same(node.turn.reply.message.content or "", one.text, f"{name}: text of {reply_id}")
        if rollout.history != "tree":
            _same([node.turn.reply_id for node in nodes][: len(told)], list(told), f"{name}: order")
        in_doubt = there.keys() - told.keys()
        most = 0 if is_at_rest else rollout.num_asked - len(told)
        if len(in_doubt) > most:
            raise Lost(f"{name} has {len(in_doubt)} turns that nobody was told of; {most} were on their way")
        missing = rollout.found - there.keys()
        if missing:
            raise Lost(f"{name}: {missing} were on the disk before, and are gone")
        self.num_in_doubt += len(in_doubt - rollout.found)
        rollout.found |= in_doubt
        for node in nodes:
            self._check_node(rollout.session_id, node)

    def _check_node(self, session_id: str, node: Node) -> None:
        """A turn is what the engine said to its prompt, bit for bit, and stands in one place alone."""
        sampled = node.turn.sampled
        ids = tuple(sampled.ids)
        said = self.generated.get(ids)
        where = (session_id, node.id)
        if said is None:
            raise Lost(f"turn {where}: the engine never said {ids[:8]}…")
        _same(self._seen.setdefault(ids, where), where, "the place of a generation")
        _same(tuple(sampled.logprobs), said.logprobs, f"logprobs of turn {where}")
        whole = tuple(line_ids(node))
        _same(whole[: len(whole) - len(ids)], said.prompt_ids, f"prompt of turn {where}")
        payload = None if sampled.replay is None else sampled.replay.routed_experts
        digest = None if payload is None else self.digest(base64.b64decode(payload.base64))
        _same(digest, said.payload_digest, f"payload of turn {where}")

    def check_shot(self, rollout: Rollout, now: Shot) -> None:
        """What a server shows now is what one showed before: records as they were, samples if no turn was added."""
        before = rollout.shot
        if before is None:
            return
        name = f"session {rollout.session_id}"
        _same(now.records[: before.num_turns], before.records, f"{name}: records")
        if now.state == before.state:
            _same(now.samples, before.samples, f"{name}: samples")


def shot_of(view: Any, samples: Any, state: object) -> Shot:
    """The digests of what a server shows: of each record, and of the samples."""
    records: list[str] = []
    for record in view["records"]:
        records.append(hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest())
    digest = hashlib.sha256(json.dumps(samples, sort_keys=True).encode()).hexdigest()
    return Shot(state=state, num_turns=len(records), records=records, samples=digest)


def _same(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Lost(f"{what}: found {found!s:.300}, and not {wanted!s:.300}")
