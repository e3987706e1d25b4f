"""One rollout: its strands, the requests running on it, and the replies kept to be asked for again."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from stenograph.core.clock import Clock
from stenograph.core.errors import ModelMismatch, SessionAbandoned, SessionClaimed, SessionNotFound, StorageUnavailable
from stenograph.core.kinds import HistoryKind
from stenograph.core.outcome import Annotation, SessionOutcome
from stenograph.core.types import RequestId, SessionId
from stenograph.session.kept import KeptReply, StoredReply
from stenograph.session.ledger import RequestLedger
from stenograph.session.retries import RequestIdentity, is_like, is_repeated
from stenograph.session.watch import Delivery, RequestTask
from stenograph.store.base import Tail
from stenograph.store.codec.rows import Totals
from stenograph.store.restored import totals_of
from stenograph.trajectory.commits import RequestMark, SessionCommit, SessionOptions
from stenograph.trajectory.matching import load_matcher
from stenograph.trajectory.strand import Strand, Strands
from stenograph.trajectory.turn import Node

if TYPE_CHECKING:
    from stenograph.trajectory.account import Account  # loaded by the first entry


def _ignore() -> None:
    return


MAX_KEPT = 256
"""Replies of a session kept to be asked for again; the oldest goes first."""


class _Kept(Struct, kw_only=True):
    """A reply kept to be asked for again, and how many requests had been started when it was committed.

    `strands` are those of its turns. `is_superseded`: another request with the same body was begun after it.
    """

    reply: KeptReply | StoredReply
    strands: frozenset[Strand]
    num_started: int
    is_superseded: bool


class Session:
    """A session's state. Changed by the manager alone, in synchronous methods."""

    def __init__(
        self,
        session_id: SessionId,
        options: SessionOptions,
        *,
        created_at: float,
        now: float,
        strands: Strands | None = None,
    ) -> None:
        """`strands` None: it has no turn."""
        self.id = session_id
        self.options = options
        self.created_at = created_at
        self.is_limited = options.stated.has_budget or options.history is HistoryKind.TREE
        """Whether a request may find one of its budgets spent."""
        self.strands = Strands.of(session_id, options, load_matcher(options.matcher)) if strands is None else strands
        self.ledger = RequestLedger()
        self.outcome: SessionOutcome | None = None
        """The rollout's outcome, once somebody has said it."""
        self.annotations: dict[str, Annotation] = {}
        """Scores of its tokens, by name."""
        self.is_closing = False
        """Whether it is being deleted; nothing is committed from then on."""
        self.on_closed: Callable[[], None] = _ignore
        """Called when it leaves memory: whoever read it before then has an older state than the store."""
        self._running: dict[RequestId, RequestTask] = {}
        self._kept: dict[RequestId, _Kept] = {}
        self.last_chat = now
        """When its last request ended, in monotonic seconds; before the first one, when it was opened."""
        self.held_until = -math.inf
        """End of a trainer's lease on its samples, in monotonic seconds: until then nobody changes or deletes it."""
        self.num_started = 0
        """Requests begun on it."""
        self._drift_seen: set[int] = set()
        self.opened_by: RequestMark | None = None
        """The opening request; None if it had no key."""
        self.tail: Tail | None = None
        """The end of its rows in the store; None if it is kept in memory alone."""
        self.refusal: ModelMismatch | SessionAbandoned | StorageUnavailable | None = None
        """The reason why it takes no turns: it can only be read, or it is abandoned or another process's by now."""
        self.media: dict[str, object] = {}
        """Its media by hash, where no store has them (kept_media.py)."""
        self.given: dict[int, int] = {}
        """Sampled tokens in samples given out, by node id; the end of the process forgets it."""
        self.account: Account | None = None
        """The entries of its tokens; None before the first."""
        self.num_counted_tokens = 0
        """Number of its tokens in the manager's count of all sessions' tokens."""

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.strands!r}, {len(self._running)} requests run>"

    @property
    def running(self) -> list[RequestTask]:
        """The turns running now."""
        return list(self._running.values())

    @property
    def is_busy(self) -> bool:
        """Whether a request runs."""
        return bool(self._running)

    @property
    def nodes(self) -> Sequence[Node]:
        """All its turns, oldest commit first. A view: do not keep it across a commit."""
        return self.strands.nodes

    @property
    def totals(self) -> Totals:
        """Sums over it, but for the row of its outcome."""
        return totals_of(self.strands)

    @property
    def latest(self) -> Node | None:
        """The latest committed turn."""
        strand = self.strands.latest
        return None if strand is None else strand.history.latest

    @property
    def is_full(self) -> bool:
        """Whether a running request may keep another from running beside it."""
        return self.is_busy and self.options.history is not HistoryKind.TREE

    def check_open(self, now: float) -> None:
        """Raise SessionNotFound if it is being deleted, its refusal if it takes no turns, SessionClaimed while a
        trainer has its samples, SessionBusy if it takes one chat at a time and runs one."""
        if self.is_closing:
            raise SessionNotFound(self.id)
        if self.refusal is not None:
            raise self.refusal
        self.check_unclaimed(now)
        if (only := self.strands.only) is not None:
            only.check_free()

    def check_unclaimed(self, now: float) -> None:
        """Raise SessionClaimed while a trainer has its samples."""
        if now < self.held_until:
            left_s = self.held_until - now
            raise SessionClaimed(f"A trainer has claimed the session, for {left_s:.0f} s yet unless it is done before.")

    def idle_since(self, clock: Clock) -> float:
        """When its time to live began, in seconds of the epoch: after its last chat, and after a trainer's lease."""
        return clock.wall() - (clock.monotonic() - max(self.last_chat, self.held_until))

    def is_expired(self, now: float) -> bool:
        """Whether it has been without a chat for longer than it may. A session being deleted ends by its deletion."""
        ttl_s, since = self.options.ttl_s, max(self.last_chat, self.held_until)
        return ttl_s is not None and not self.is_busy and not self.is_closing and now - since >= ttl_s

    def refuse_new(self) -> None:
        """Begin to be deleted: every turn is refused from now on. Running ones keep their leases until they end, and
        commit nothing."""
        self.is_closing = True
        for request in self._running.values():
            request.run.may_commit = False

    def note_trained(self, num_by_node: Mapping[int, int]) -> None:
        """Samples were given out. They train so many sampled tokens of each of these turns, its first ones."""
        for node_id, num_tokens in num_by_node.items():
            self.given[node_id] = max(num_tokens, self.given.get(node_id, 0))

    def close(self) -> None:
        """Drop the references back to the session, to free it at once."""
        self.on_closed()
        self._kept.clear()

    def is_first_drift(self, leaf_id: int) -> bool:
        """Whether the drift of the line down to this node is looked at for the first time."""
        is_first = leaf_id not in self._drift_seen
        self._drift_seen.add(leaf_id)
        return is_first

    @property
    def is_idle(self) -> bool:
        """Whether nobody is at work on it: no request naming it is being read, run or answered."""
        return not self._running and not self.is_closing and self.ledger.num_open == 0

    def find_repeated(self, identity: RequestIdentity) -> RequestTask | KeptReply | StoredReply | None:
        """The turn repeated by a request: one running, or one with its reply still kept for it.

        A delivered reply is given again only to the key of its request: the same body without a key may be an agent
        that wants another reply. If it has asked for another, with or without success, a retry without a key is not of
        the turn before. Raises IdempotencyMismatch.
        """
        for request in self._running.values():
            known = request.identity
            if known is None or request.is_abandoned or not is_repeated(known, identity):
                continue
            if not request.is_superseded or identity.key is not None:
                return request
        for kept in self._kept.values():
            reply = kept.reply
            if not is_repeated(reply.identity, identity):
                continue
            if not (reply.delivery.is_done or kept.is_superseded) or identity.key is not None:
                return reply
        return None

    def began(self, request: RequestTask) -> None:
        """A turn runs. A retry by its body alone is of this one from now on, and of no earlier one with that body."""
        if (identity := request.identity) is not None:
            for before in self._running.values():
                before.is_superseded |= before.identity is not None and is_like(before.identity, identity)
            for kept in self._kept.values():
                kept.is_superseded |= is_like(kept.reply.identity, identity)
        self.num_started += 1
        request.order = self.num_started
        self._running[request.request_id] = request

    def ended(self, request: RequestTask, *, now: float, committed: bool) -> None:
        """A turn is over. A committed one is kept, and drops those of its strand already committed when it began."""
        del self._running[request.request_id]
        self.last_chat = now
        if not committed:
            return
        run, reply = request.run, None
        if request.identity is not None:  # else no other request can be known to repeat it
            reply = KeptReply(
                request_id=request.request_id,
                identity=request.identity,
                options=run.request.reply,
                spelling=run.request.spelling,
                outcome=request.task.result(),
                budget=run.remaining,
                created=int(run.turn.requested_at),
                delivery=request.delivery,
            )
        self._keep(reply, run.leases.taken, request.order, self.num_started, is_superseded=request.is_superseded)
        self.release_delivered(request.request_id)

    def _keep(
        self,
        reply: KeptReply | StoredReply | None,
        strands: Sequence[Strand],
        order: int,
        num_started: int,
        *,
        is_superseded: bool = False,
    ) -> None:
        """Keep the reply of the request begun as number `order`, if it has one to keep, and drop those committed in
        these strands, its own, before it began."""
        for id_, kept in [*self._kept.items()]:
            if kept.num_started < order and not kept.strands.isdisjoint(strands):
                del self._kept[id_]
        if reply is None:
            return
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[reply.request_id] = _Kept(
            reply=reply, strands=frozenset(strands), num_started=num_started, is_superseded=is_superseded
        )

    def order_of(self, request_id: RequestId) -> int:
        """The number of a running request, among those of the session as they were begun."""
        return self._running[request_id].order

    def keep_restored(self, commit: SessionCommit, placed: Sequence[tuple[Strand, Node]]) -> None:
        """Keep the reply of a commit made before this process began, of these nodes with their strands, as after the
        commit; nobody knows any more whether it was delivered."""
        nodes, mark = [node for _, node in placed], commit.request
        if mark is None:
            return
        strands = [strand for strand, _ in placed]
        first = nodes[0].turn
        self.num_started = max(self.num_started, mark.num_begun)
        reply = StoredReply(
            request_id=first.request_id,
            identity=mark,
            reply_id=first.reply_id if commit.reply_id is None else commit.reply_id,
            nodes=tuple(nodes),
            strand=strands[0].number,
            delivery=Delivery(partial(self.release_delivered, first.request_id)),
        )
        self._keep(reply, strands, mark.order, mark.num_begun)

    def release_delivered(self, request_id: RequestId) -> None:
        """Keep a reply no longer if it has been delivered, unless a key can still ask for it."""
        kept = self._kept.get(request_id)
        if kept is not None and kept.reply.delivery.is_done and kept.reply.identity.key is None:
            del self._kept[request_id]
