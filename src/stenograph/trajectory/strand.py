"""The strands of a session: each has a history and leases of its own, and a request belongs to one of them.

`Strands` finds the strand of a request, and counts what all of them hold. A linear session and a tree have one strand,
whatever a request begins with. Changed on the loop alone. A request's strand never depends on the client's word, but
for the agent id in its opening.
"""

import itertools
from array import array
from collections.abc import Container, Iterable, Sequence

from msgspec import Struct, field

from stenograph.core.chat import Asked, ChatRequest, KnownMessages, PastLine
from stenograph.core.errors import BudgetSpent, Limit, SessionBusy
from stenograph.core.kinds import TRAINED_KINDS, UNLABELLED, AfterLength, Compat, HistoryKind, Label, StrandKind
from stenograph.core.loaded import entry
from stenograph.core.messages import Message, Role
from stenograph.core.types import Prompt, SessionId
from stenograph.trajectory.canonical import PinRule
from stenograph.trajectory.chapters import earlier_line, has_frame_of
from stenograph.trajectory.commits import PlacedTurn, SessionOptions, StrandOpened
from stenograph.trajectory.history import Attachment, Discarded, History, LinearHistory, begins_with_line, goes_on
from stenograph.trajectory.latest import LatestLine
from stenograph.trajectory.matching import HarnessMatcher, Matcher, StrictMatcher
from stenograph.trajectory.opening_key import opening_key
from stenograph.trajectory.pins import PinnedOpenings
from stenograph.trajectory.strand_facts import StrandSight, kinds_of
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, line_messages

_BETWEEN_ELEMENTS = b", \t\r\n"

NUM_KNOWN = 16
"""Strands whose latest request and line are kept as text, to be known again: the latest to commit."""


NUM_FORKS = 8
"""Forks of one opening among which a request finds the one to go on with; older ones are only kept."""


class Strand(Struct, eq=False, kw_only=True):
    """The turns of a session with one opening, and the right to add to them.

    While a turn runs on one that is `exclusive`, no other may: a refused request holds nothing. `number` counts the
    session's strands in the order of their first commits; None before. After the client rewrote its history,
    `continues` is the strand before this one in the same work, and `chapter` counts those before it. `label` is the
    rules' label of the opening request, `last_kind` that of the latest committed one. `fork_of` is a strand with the
    same opening: this one parts from its last turn, with another reply.
    """

    history: History
    session_id: SessionId
    exclusive: bool
    key: bytes | None = None
    agent_id: str = ""
    line: LatestLine = field(default_factory=LatestLine)
    number: int | None = None
    continues: "Strand | None" = None
    fork_of: "Strand | None" = None
    chapter: int = 0
    label: Label = UNLABELLED
    last_kind: StrandKind | None = None
    num_running: int = 0
    """Turns running on it: the leases held by requests."""

    def __repr__(self) -> str:
        return f"<Strand {self.number} {self.history!r} running={self.num_running}>"

    def check_free(self) -> None:
        """Raise SessionBusy while a turn runs on an exclusive strand."""
        if self.exclusive and self.num_running:
            raise SessionBusy(self.session_id)

    def forget_texts(self) -> None:
        """Keep its latest request and line as text no longer: they are as large as a whole line."""
        self.line = LatestLine()


class Strands:
    """All strands of one session, and the sums over them."""

    def __init__(
        self,
        session_id: SessionId,
        kind: HistoryKind,
        matcher: Matcher,
        after_length: AfterLength,
        pins: Sequence[PinRule] = (),
        compat: Compat | None = None,
    ) -> None:
        self.pins = PinnedOpenings(pins, strips=isinstance(matcher, HarnessMatcher)) if pins else None
        """The openings in whose spelling requests are put, where rules say so."""
        self.session_id = session_id
        self._matcher = matcher
        self._after_length = after_length
        self.compat = compat
        """Another server's contract, kept by the session."""
        self._ids = itertools.count()
        self._by_key: dict[bytes, Strand] = {}
        self._latest: list[Strand] = []
        self._has_compaction = False
        self._kept: list[Strand] = []
        self._unkept: set[Strand] = set()
        """Those without a turn where a request has a lease."""
        self.num_turns = 0
        self.num_tokens = 0
        self.discarded = Discarded()
        self._by_request: dict[str, Node] = {}
        self.only: Strand | None = None
        """The strand of every request, where the session has but one."""
        if kind is HistoryKind.LINEAR:
            self.only = self._new(None, "")
        elif kind is HistoryKind.TREE:
            tree: History = entry("stenograph.trajectory.tree:TreeHistory")(matcher, after_length=after_length)
            self.only = Strand(history=tree, session_id=session_id, exclusive=False)

    @staticmethod
    def of(session_id: SessionId, options: SessionOptions, matcher: Matcher) -> "Strands":
        """Those of a session with these options."""
        pins = options.canonical.pins
        return Strands(session_id, options.history, matcher, options.after_length, pins, options.compat)

    def __repr__(self) -> str:
        return f"<Strands {len(self._kept)} with {self.num_turns} turns>"

    @property
    def kept(self) -> Sequence[Strand]:
        """Those with a turn, now or before, in the order of their first commits. A view."""
        return self._kept

    @property
    def latest(self) -> Strand | None:
        """The latest strand to commit."""
        return self._latest[0] if self._latest else None

    @property
    def nodes(self) -> Sequence[Node]:
        """All turns, oldest commit first. A view where there is one strand."""
        if len(self._kept) == 1:
            return self._kept[0].history.nodes
        return sorted((node for strand in self._kept for node in strand.history.nodes), key=_id)

    def known(self, dialect: str, body: bytes) -> Sequence[KnownMessages]:
        """The possible beginnings of a body: the latest messages of the strands that committed last."""
        found: list[KnownMessages] = []
        for strand in self._latest:
            if (one := strand.line.known) is not None and one.dialect == dialect:
                end = one.text_print.length
                if end < len(body) and body[end] in _BETWEEN_ELEMENTS:  # more than that is for the decoder to see
                    found.append(one)
        return found

    def recall(self, nodes: Iterable[Node]) -> None:
        """Let requests name these turns, held elsewhere, by their ids."""
        self._by_request.update((node.turn.request_id, node) for node in nodes)

    def turn_of(self, request_id: str) -> Node | None:
        """The turn of a chat; None if there is no such turn."""
        node = self._by_request.get(request_id)
        return node if node is not None and node.turn.asked is Asked.CHAT else None

    def line_of(self, request_id: str) -> PastLine | None:
        """The line of a chat's turn; None if there is no such turn."""
        node = self.turn_of(request_id)
        return None if node is None else PastLine(messages=line_messages(node), request_json=node.turn.request_json)

    def reply_of(self, request_id: str) -> Message | None:
        """The reply of a chat's turn; None if there is no such turn."""
        node = self.turn_of(request_id)
        return None if node is None else node.turn.reply.message

    def of_chat(self, request: ChatRequest, context: PromptContext, agent_id: str) -> Strand:
        """The strand of a chat; a new one, without a turn, if none has its opening."""
        if self.only is not None:
            return self.only
        if request.known is not None:
            for strand in self._latest:
                node = strand.line.node_of(request)
                if node is None or strand.agent_id != agent_id or not node.turn.context.is_same(context):
                    continue
                has_reply = request.messages[node.num_messages - 1].role is Role.ASSISTANT
                if has_reply and (strand.key is None or self._by_key[strand.key] is strand):
                    return strand  # a reply ends the opening, if no fork may have the one that comes next
        strips = isinstance(self._matcher, HarnessMatcher)
        key = opening_key(request.messages, context, agent_id, strips=strips)
        if key not in self._by_key:
            self._by_key[key] = self._new(key, agent_id)
        found = self._by_key[key]
        return found if found.fork_of is None else self._of_forks(found, request.messages, context)

    def _of_forks(self, newest: Strand, messages: Sequence[Message], context: PromptContext) -> Strand:
        """The strand, of the last forks, whose last turn a request continues; the newest if there is none."""
        one: Strand | None = newest
        for _ in range(NUM_FORKS):
            if one is None:
                break
            if goes_on(one.history.nodes, messages, context, self._matcher, self._after_length):
                return one
            one = one.fork_of
        return newest

    def fork(self, strand: Strand) -> Strand:
        """A strand, without a turn, for a request parting from the last turn of this one with another reply."""
        fork = self._new(strand.key, strand.agent_id)
        fork.fork_of = strand
        return fork

    def seen(self, request: ChatRequest, context: PromptContext, agent_id: str) -> Strand:
        """The strand of a chat, as it is now: for a request that takes no lease, while others may commit."""
        strand = self.of_chat(request, context, agent_id)
        self.released(strand)
        return Strand(
            history=strand.history.as_it_is(),
            session_id=self.session_id,
            exclusive=False,
            key=strand.key,
            agent_id=agent_id,
            line=strand.line,
            number=strand.number,
        )

    def of_ids(self, ids: "array[int]", taken: Container[Strand] = ()) -> Strand:
        """The strand whose line is the longest at the beginning of a prompt; a new one if there is none.

        Those `taken` have another prompt of the same request: none can be after the other's reply.
        """
        if self.only is not None:
            return self.only
        best: Strand | None = None
        most = 0
        for strand in self._kept:
            latest = strand.history.latest
            if latest is None or latest.num_tokens <= most or strand in taken:
                continue
            if begins_with_line(ids, latest):
                best, most = strand, latest.num_tokens
        return self._new(None, "") if best is None else best

    def pinned(self, pins: PinnedOpenings, request: ChatRequest, agent_id: str) -> ChatRequest:
        """A chat in the spelling of its strand. It stays as it is if another strand has it so."""
        pinned = pins.pinned(request, "" if self.only is not None else agent_id)
        if pinned is request or self.only is not None:
            return pinned
        context = PromptContext(tools=request.tools, template_kwargs=request.template_kwargs)
        strips = isinstance(self._matcher, HarnessMatcher)
        return request if opening_key(request.messages, context, agent_id, strips=strips) in self._by_key else pinned

    def kinds(self, *, beside_tools: bool = False) -> Sequence[StrandKind]:
        """The kind of each kept strand, as it is now, or once there is one with tools besides."""
        return kinds_of([_sight(strand) for strand in self._kept], beside_tools=beside_tools)

    def before(self, strand: Strand, messages: Sequence[Message]) -> "list[tuple[Strand, list[Node]]]":
        """The strands whose work a new one may continue, the latest first, with their turns as they are now."""
        if self.only is not None or strand.number is not None:
            return []
        if not self._has_compaction and all(message.role is not Role.ASSISTANT for message in messages):
            return []
        found = [(other, list(other.history.nodes)) for other in self._kept if other.history.latest is not None]
        return sorted(found, key=lambda pair: -pair[1][-1].id)

    def commit(
        self,
        strand: Strand,
        attachment: Attachment,
        turn: CommittedTurn,
        prompt: Prompt | None,
        label: Label = UNLABELLED,
        request: ChatRequest | None = None,
    ) -> tuple[Node, Sequence[Node]]:
        """Keep a turn in its strand, in one step: its node, in place of those it replaces.

        `prompt` None: no text of its line is at hand; `request` is the chat's. Raises SessionInvariant if its place is
        no more.
        """
        history = strand.history
        gone = history.replaced_by(attachment)
        num_before = history.num_tokens
        node = history.commit(attachment, turn)
        if prompt is not None:
            strand.line.extend(node, prompt, request)
        self._by_request[turn.request_id] = node
        if gone:
            self.discarded = self.discarded.with_turns(gone)
            for one in gone:
                self._by_request.pop(one.turn.request_id, None)
                if self.pins is not None:
                    self.pins.forget(one)
        if self.pins is not None:
            self.pins.keep(node, strand.agent_id)
        self.num_turns += 1 - len(gone)
        self.num_tokens += history.num_tokens - num_before
        strand.last_kind = label.kind
        self._has_compaction |= label.kind is StrandKind.COMPACTION
        if strand.number is None:
            strand.number = len(self._kept)
            if self.only is None:  # a strand of all openings is of no kind of its own
                strand.label = label
            if strand.key is not None:
                self._by_key[strand.key] = strand  # of forks the newest goes on
            self._kept.append(strand)
        if not self._latest or self._latest[0] is not strand:
            self._latest = [strand, *(other for other in self._latest if other is not strand)]
            if len(self._latest) > NUM_KNOWN:
                self._latest.pop().forget_texts()
        return node, gone

    def replay(self, placed: PlacedTurn, label: Label) -> tuple[Strand, Node]:
        """Restore a committed turn to its place: its strand and its node.

        Raises ValueError if it has no such place here.
        """
        strand = self.only
        if strand is None and placed.strand is not None:
            strand = self._numbered(placed.strand)
        strand = strand or self._reopened(placed.opened)
        attachment = strand.history.after(placed.parent, placed.turn.messages)
        if attachment is None:
            raise ValueError("the turn before it is not in the history of its strand")
        return strand, self.commit(strand, attachment, placed.turn, None, label)[0]

    def _reopened(self, opened: StrandOpened) -> Strand:
        strand = self._new(opened.key, opened.agent_id)
        if opened.fork_of is not None:
            strand.fork_of = self._numbered(opened.fork_of)
        if opened.continues is not None:
            strand.continues = self._numbered(opened.continues)
            strand.chapter = strand.continues.chapter + 1
        return strand

    def _numbered(self, number: int) -> Strand:
        if not 0 <= number < len(self._kept):
            raise ValueError(f"there is no strand {number}")
        return self._kept[number]

    def take(self, strand: Strand, most: int) -> None:
        """Hold a strand, perhaps a new one. Raises BudgetSpent if there are `most` without it."""
        if self.only is None and strand.number is None:
            num = len(self._kept) + sum(one.number is None for one in self._unkept)
            if num >= most:
                self.released(strand)
                raise BudgetSpent(
                    Limit.STRANDS,
                    f"This session has had {num} of its {most} strands (--max-strands), and this request would open"
                    " another one: its messages go on with none of them. Raise --max-strands, or open another session.",
                )
            self._unkept.add(strand)

    def released(self, strand: Strand) -> None:
        """A lease was given back. Forget a strand without a turn once nobody works on it."""
        if strand.num_running:
            return
        self._unkept.discard(strand)
        if strand.key is None or strand.number is not None:
            return
        if self._by_key.get(strand.key) is strand:
            del self._by_key[strand.key]

    def _new(self, key: bytes | None, agent_id: str) -> Strand:
        history = LinearHistory(self._matcher, after_length=self._after_length, ids=self._ids, compat=self.compat)
        return Strand(history=history, session_id=self.session_id, exclusive=True, key=key, agent_id=agent_id)


class Leases(Struct, eq=False):
    """The leases of one request's turns, each of a strand of its session. Give them back.

    `strands` None: the request has no session, and each turn a strand of its own, seen by nobody else. `agent_id` is
    the client's own id of the asking agent, `label` the rules' label of the request, `max_strands` the session's limit.
    """

    strands: Strands | None
    agent_id: str = ""
    label: Label = UNLABELLED
    max_strands: int = 1000
    taken: list[Strand] = []
    """The strands of which it has or had a lease."""
    num_leases: int = 0
    """Leases held: the first ones of those, or none."""
    spent: BudgetSpent | None = None
    """The reason why a chat has no lease: its session has all its strands. Refuse the request by it."""

    def __repr__(self) -> str:
        return f"<Leases {self.num_leases}>"

    @property
    def session_id(self) -> SessionId | None:
        """The session's; None if there is none."""
        return None if self.strands is None else self.strands.session_id

    def of_chat(self, request: ChatRequest, context: PromptContext) -> Strand:
        """Take a chat's lease; or, for one strand too many, note that as `spent` and take none. Raises SessionBusy."""
        if self.strands is None:
            return _alone()
        try:
            return self._take(self.strands.of_chat(request, context, self.agent_id))
        except BudgetSpent as error:
            self.spent = error.with_traceback(None)  # the frames would keep the request's bytes and its connection
            return _alone()

    def of_ids(self, ids: "array[int]") -> Strand:
        """Take the lease of a prompt given as ids. Raises SessionBusy."""
        return _alone() if self.strands is None else self._take(self.strands.of_ids(ids, self.taken))

    def num_tokens_before(self, places: Sequence[tuple[Strand, Attachment]]) -> int:
        """Tokens of the session left if turns are committed at these places."""
        if self.strands is None:
            return 0
        goes = {id(strand): strand.history.num_tokens - strand.history.num_tokens_before(at) for strand, at in places}
        return self.strands.num_tokens - sum(goes.values())

    @property
    def is_side(self) -> bool:
        """Whether a rule puts the request outside of the work."""
        return self.label.kind is not None and self.label.kind not in TRAINED_KINDS

    def before(self, strand: Strand, messages: Sequence[Message]) -> "list[tuple[Strand, list[Node]]]":
        """The strands of which this one may be a chapter, the latest first; none if it is known for something else."""
        return [] if self.strands is None or self.is_side else self.strands.before(strand, messages)

    def continued_by_fork(
        self, strand: Strand, attachment: Attachment, request: ChatRequest, context: PromptContext
    ) -> Strand | None:
        """The strand, if a fork of it goes on with its work: more than the opening is the same. A worker may ask."""
        if self.is_side or attachment.parent is not None:
            return None if self.is_side else strand
        return chapter_of([(strand, list(strand.history.nodes))], request, context)

    def fork(self, strand: Strand) -> Strand:
        """Take a lease of a strand beside this one, where it has one already."""
        assert self.strands is not None, "only a session has strands"
        return self._take(self.strands.fork(strand))

    def give_back(self) -> None:
        """Release every lease. Harmless when repeated."""
        held, self.num_leases = self.taken[: self.num_leases], 0
        for strand in held:
            strand.num_running -= 1
            if self.strands is not None:
                self.strands.released(strand)

    def _take(self, strand: Strand) -> Strand:
        """Take a lease of a strand. Raises SessionBusy, and BudgetSpent for one strand too many."""
        strand.check_free()
        if self.strands is not None:
            self.strands.take(strand, self.max_strands)
        strand.num_running += 1
        self.num_leases += 1
        self.taken.append(strand)
        return strand


class Onlooker(Leases):
    """A request without a turn: it reads its strand and takes no lease, so it never waits for a running one and is
    never refused for it."""

    def of_chat(self, request: ChatRequest, context: PromptContext) -> Strand:
        return _alone() if self.strands is None else self.strands.seen(request, context, self.agent_id)

    def before(self, strand: Strand, messages: Sequence[Message]) -> "list[tuple[Strand, list[Node]]]":
        return []

    def fork(self, strand: Strand) -> Strand:
        return _alone()


def _alone() -> Strand:
    return Strand(history=LinearHistory(StrictMatcher()), session_id=SessionId(""), exclusive=False)


def chapter_of(
    before: "Sequence[tuple[Strand, list[Node]]]", request: ChatRequest, context: PromptContext
) -> Strand | None:
    """The strand whose work a new one continues: it generated a reply in the new one's prompt, or it ended with a
    compaction and has the same frame. Pure: a worker may call it."""
    messages = request.messages
    found = earlier_line(messages, [line for _, line in before], request.replies_of)
    if found is not None:
        return before[found][0]
    lines = {id(strand): line for strand, line in before}
    ended = (pair for pair in before if pair[0].last_kind is StrandKind.COMPACTION)
    for strand, line in ended:  # a client may ask for the summary without its tools: then its frame is the one before
        if any(has_frame_of(one, messages, context) for one in (line, lines.get(id(strand.continues), ()))):
            return strand
    return None


def _sight(strand: Strand) -> StrandSight:
    latest = strand.history.latest
    return StrandSight(
        kind=strand.label.kind,
        shows_tools=latest is not None and bool(latest.turn.context.tools),
        num_turns=len(strand.history.nodes),
        continues=None if strand.continues is None else strand.continues.number,
    )


def _id(node: Node) -> int:
    return node.id
