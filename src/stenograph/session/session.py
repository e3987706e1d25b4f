"""One rollout: its history, its gate, the turns that run on it, and the replies that nobody has received yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stenograph.core.errors import Limit, LimitExceeded
from stenograph.core.settings import HistoryKind
from stenograph.core.types import RequestId, SessionId
from stenograph.session.gate import Gate
from stenograph.session.history import History, LinearHistory
from stenograph.session.line_json import LineJson
from stenograph.session.matching import HarnessMatcher, Matcher
from stenograph.session.recent import RecentRequest
from stenograph.session.retries import RequestIdentity
from stenograph.session.running import Turn
from stenograph.session.tree import TreeHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a session is created with. None is no limit.

    `max_turns` counts turns in the history and on their way there, `max_total_tokens` the tokens of all of them, each
    once. `ttl_s`: seconds without a chat after which the session is dropped.
    """

    history: HistoryKind = HistoryKind.LINEAR
    matcher: Matcher = field(default_factory=HarnessMatcher)
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    ttl_s: float | None = None
    max_turns: int | None = None
    max_total_tokens: int | None = None
    max_nodes: int | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A committed turn whose reply may be asked for again, and how many turns had been started when it committed."""

    turn: Turn
    num_started: int


class Session:
    """A session's state. Changed by the manager alone, in synchronous methods."""

    def __init__(self, session_id: SessionId, options: SessionOptions, *, created_at: float, now: float) -> None:
        self.id = session_id
        self.options = options
        self.created_at = created_at
        is_tree = options.history is HistoryKind.TREE
        self.history: History = TreeHistory(options.matcher) if is_tree else LinearHistory(options.matcher)
        self.line_json = LineJson()
        self.recent = RecentRequest()
        self.gate = Gate(session_id, exclusive=not is_tree)
        self._running: dict[RequestId, Turn] = {}
        self._kept: dict[RequestId, _Kept] = {}
        self._last_chat = now
        self._num_started = 0
        self._looked_at: set[int] = set()
        self.num_counted_tokens = 0
        """Of its tokens, how many the manager has counted among those that all sessions hold."""

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.history!r} {self.gate!r}>"

    @property
    def running(self) -> list[Turn]:
        """The turns that run now."""
        return list(self._running.values())

    def is_expired(self, now: float) -> bool:
        """Whether it has been without a chat for longer than it may. One that is being deleted ends by that."""
        ttl_s, gate = self.options.ttl_s, self.gate
        return ttl_s is not None and not gate.is_busy and not gate.is_closing and now - self._last_chat >= ttl_s

    def check_limits(self, num_new: int = 1) -> None:
        """Raise LimitExceeded if there is no room for more turns than those that are kept or may yet be."""
        options, nodes = self.options, self.history.nodes
        # One whose task is done is a node by now, or never will be, though its lease ends a moment later.
        num_turns = len(nodes) + sum(len(turn.run.turns) for turn in self._running.values() if not turn.task.done())
        if options.max_turns is not None and num_turns + num_new > options.max_turns:
            raise LimitExceeded(
                Limit.SESSION_TURNS, f"this session has {num_turns} of its {options.max_turns} turns (max_turns)"
            )
        is_tree = options.history is HistoryKind.TREE
        if options.max_nodes is not None and is_tree and num_turns + num_new > options.max_nodes:
            raise LimitExceeded(
                Limit.NODES, f"this session's tree has {num_turns} of its {options.max_nodes} nodes (--max-nodes)"
            )
        if options.max_total_tokens is not None:
            used = self.history.num_tokens
            if used >= options.max_total_tokens:
                raise LimitExceeded(
                    Limit.SESSION_TOKENS,
                    f"this session has used {used} of its {options.max_total_tokens} tokens (max_total_tokens)",
                )

    def close(self) -> None:
        """Let go of what refers back to the session, so that it is given back at once."""
        self._kept.clear()

    def is_first_look(self, leaf_id: int) -> bool:
        """Whether the drift of the line that ends with this node is looked at for the first time."""
        is_first = leaf_id not in self._looked_at
        self._looked_at.add(leaf_id)
        return is_first

    def find_repeated(self, identity: RequestIdentity) -> Turn | None:
        """The turn that a request asks for again: one that runs, or one whose reply is still kept for it.

        A kept reply that was delivered is given again only to the key it was asked for with: the same body without a
        key may be an agent that wants another reply. Raises IdempotencyMismatch.
        """
        for turn in self._running.values():
            known = turn.identity
            if known is not None and not turn.is_abandoned and known.is_repeated_by(identity):
                return turn
        for kept in self._kept.values():
            turn, known = kept.turn, kept.turn.identity
            if known is None or not known.is_repeated_by(identity):
                continue
            if not turn.was_delivered or identity.key is not None:
                return turn
        return None

    def began(self, turn: Turn) -> None:
        """A turn runs."""
        self._num_started += 1
        turn.order = self._num_started
        self._running[turn.request_id] = turn

    def ended(self, turn: Turn, *, now: float, committed: bool) -> None:
        """A turn is over. One that was committed is kept, and drops those that had been committed when it began."""
        del self._running[turn.request_id]
        self._last_chat = now
        if committed:
            self._kept = {id_: kept for id_, kept in self._kept.items() if kept.num_started >= turn.order}
            self._kept[turn.request_id] = _Kept(turn=turn, num_started=self._num_started)
            self.release_delivered(turn)

    def release_delivered(self, turn: Turn) -> None:
        """Keep a delivered reply no longer, unless a key can still ask for it."""
        if turn.was_delivered and (turn.identity is None or turn.identity.key is None):
            self._kept.pop(turn.request_id, None)
