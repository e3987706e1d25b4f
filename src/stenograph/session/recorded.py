"""A recorded session as a script: the replies in their order, the requests they answered, and where a request parts
from all of them. Pure. Loaded where sessions are lived again, and by the first fork with recorded replies.
"""

import re
from collections.abc import Sequence
from itertools import takewhile, zip_longest

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenograph.core.chat import Asked, ChatRequest, TurnRequest
from stenograph.core.errors import StenographError
from stenograph.core.messages import Message
from stenograph.session.kept import StoredReply
from stenograph.session.retries import RequestIdentity, is_like, is_repeated
from stenograph.session.watch import Delivery
from stenograph.trajectory.commits import RequestMark, SessionCommit
from stenograph.trajectory.history import is_same
from stenograph.trajectory.matching import load_matcher
from stenograph.trajectory.strand import Strand, Strands
from stenograph.trajectory.turn import Node, PromptContext, line_messages

UNMARKED = RequestMark(route="", body_print=b"", num_body_bytes=-1)
"""The mark of a reply to a request without one."""

SHOWN_CHARS = 60
"""Of each spelling, from a little before their difference on."""
SHOWN_BEFORE = 20
COMPARED_CHARS = 4096
"""Compared at once, in search of the difference of two spellings."""


VOLATILE = (
    r"Chunk ID: [0-9a-f]+",  # Codex, of each command
    r"Wall time: [0-9.]+ seconds",
    r"Process Group PGID: [0-9]+",  # Gemini CLI
    r"stenograph-run-\w+",  # the folder of an agent's settings by `stenograph run`; Codex names it
)
"""Parts of messages made anew each time by an agent: any two are alike. Each begins with a text, by which a megabyte is
searched in a millisecond."""

SEARCHED_CHARS = 4_000_000
"""Of a request and its record, searched for ignored parts: at most 65 ms of the event loop by `VOLATILE`."""


class Recorded(Struct, eq=False):
    """One recorded reply, how often it was given, and the request it was given to last."""

    commit: SessionCommit
    placed: Sequence[tuple[Strand | None, Node]]
    num_given: int = 0
    given_to: RequestMark | None = None

    @property
    def node(self) -> Node:
        """The first turn."""
        return self.placed[0][1]

    @property
    def is_chat(self) -> bool:
        """Whether messages were answered, not a prompt of ids or text."""
        return self.node.turn.asked is Asked.CHAT

    @property
    def num_asked(self) -> int:
        """The messages of its request."""
        return self.node.num_messages - 1

    def stored(self) -> StoredReply:
        """It, for one more request."""
        first, strand = self.node.turn, self.placed[0][0]
        return StoredReply(
            request_id=first.request_id,
            identity=self.commit.request or UNMARKED,
            reply_id=self.commit.reply_id or first.reply_id,
            nodes=tuple(node for _, node in self.placed),
            strand=None if strand is None else strand.number,
            delivery=Delivery(_ignore),
        )


class RecordedSession:
    """The replies of one session, in the order of their commits, and how far it has been lived."""

    def __init__(
        self,
        commits: Sequence[tuple[SessionCommit, Sequence[tuple[Strand | None, Node]]]],
        matcher: str,
        ignored: Sequence[re.Pattern[str]],
        *,
        refusal: StenographError | None = None,
    ) -> None:
        """`commits` come with their nodes; parents before children. Parts of messages that are `ignored` are alike.
        `refusal` is the reason why the session takes no other turns than its own."""
        self._ignored, self._search = ignored, _AlikeSearch(ignored)
        self._matcher = load_matcher(matcher)
        self.refusal = refusal
        self._replies = [Recorded(commit, placed) for commit, placed in commits]
        self._lived: dict[int, Node] = {}
        self._num_lived = 0
        self.has_parted = False
        """Whether the engine has answered a request of it."""

    def __repr__(self) -> str:
        return f"<RecordedSession {self._num_lived} of {len(self._replies)} replies lived>"

    def find(self, request: TurnRequest, identity: RequestIdentity | None) -> Recorded | None:
        """The recorded reply to a request: for a retry that of its first try, else of those to the same bytes, else of
        those to the same conversation, the first one not given yet, else the last. None: it was never asked. Raises
        IdempotencyMismatch."""
        self._search = _AlikeSearch(self._ignored)
        if identity is not None and (identity.is_retry or identity.key is not None):
            for one in reversed(self._replies):
                if one.given_to is not None and is_repeated(one.given_to, identity):
                    return one
        same: list[Recorded] = []
        if identity is not None:
            same = [one for one in self._replies if one.commit.request and is_like(one.commit.request, identity)]
        if isinstance(request, ChatRequest) and all(one.num_given for one in same):
            num, context, alike = len(request.messages), context_of(request), self.num_alike(request.messages)
            same += [
                one
                for one in self._replies
                if one.is_chat
                and one not in same
                and alike[one.node.id] >= num == one.num_asked
                and one.node.turn.context.is_same(context)
            ]
        if same:
            self._search = _AlikeSearch(self._ignored)  # what it keeps is for `difference`
        return next((one for one in same if not one.num_given), same[-1] if same else None)

    def live_to(self, reply: Recorded, strands: Strands, identity: RequestIdentity | None = None) -> StoredReply:
        """Give a reply to a request: live the session on to it, in the order of the record. Raises ValueError where the
        session has gone on elsewhere."""
        last = self._replies.index(reply)
        while self._num_lived <= last and not self.has_parted:
            one = self._replies[self._num_lived]
            for placed in one.commit.turns:
                parent = None if placed.parent is None else self._lived[placed.parent.id]
                _, node = strands.replay(replace(placed, parent=parent), one.commit.label)
                self._lived[node.id] = node
            self._num_lived += 1
        reply.num_given += 1
        reply.given_to = None if identity is None else identity.mark()
        return reply.stored()

    def difference(self, request: TurnRequest) -> str:
        """Where a request parts from the record: the turn, the place, both spellings."""
        if not isinstance(request, ChatRequest):
            return "no completion of this prompt is recorded in this session"
        given, alike = request.messages, self.num_alike(request.messages)
        chats = [one for one in self._replies if one.is_chat]
        if not chats:
            return "no chat is recorded in this session"
        num = len(given)
        best = max(
            chats, key=lambda one: (min(alike[one.node.id], one.num_asked), one.num_asked == num, not one.num_given)
        )
        stored, at = line_messages(best.node)[:-1], min(alike[best.node.id], best.num_asked)
        if at < len(stored) or at < len(given):
            return f"turn {best.node.id}, {_other_message(stored, given, request.place_of(at), at)}"
        return f"turn {best.node.id}, {_other_context(best.node.turn.context, context_of(request))}"

    def num_alike(self, given: Sequence[Message]) -> dict[int, int]:
        """By turn, how many messages a request and its line have alike from the first on."""
        found: dict[int, int] = {}
        for _, node in (placed for one in self._replies for placed in one.placed):
            own = (*node.turn.messages, node.turn.reply.message)
            before = node.num_messages - len(own)
            at = 0 if node.parent is None else found[node.parent.id]
            if at == before:
                pairs = zip(own, given[before : before + len(own)], strict=False)
                at += sum(1 for _ in takewhile(lambda pair: self._is_alike(*pair), pairs))
            found[node.id] = at
        return found

    def _is_alike(self, stored: Message, given: Message) -> bool:
        """Whether a message is the recorded one, ignored parts aside."""
        return is_same(self._matcher, stored, given) or (
            stored.content != given.content
            and is_same(self._matcher, stored, replace(given, content=stored.content))
            and self._search.are_alike(stored.content or "", given.content or "")
        )


def _ignore() -> None:
    return


class _AlikeSearch:
    """Texts held against each other without their ignored parts, for one request. Each is searched once."""

    def __init__(self, ignored: Sequence[re.Pattern[str]]) -> None:
        self._ignored, self._num_left = ignored, SEARCHED_CHARS
        self._found: dict[str, str] = {}

    def are_alike(self, one: str, other: str) -> bool:
        """Whether two texts are equal, ignored parts aside. No: there is too much to search."""
        texts = {text for text in (one, other) if text not in self._found}
        num = sum(map(len, texts))
        if num > self._num_left:
            return False
        self._num_left -= num
        for text in texts:
            found = text
            for pattern in self._ignored:
                found = pattern.sub("", found)
            self._found[text] = found
        return self._found[one] == self._found[other]


def context_of(request: ChatRequest) -> PromptContext:
    return PromptContext(tools=request.tools, template_kwargs=request.template_kwargs)


def _other_message(stored: Sequence[Message], given: Sequence[Message], number: int, at: int) -> str:
    """The first difference of two conversations: message number `at` of both; `number` is the client's."""
    if at >= len(given):
        return f"the request ends before message {number}: recorded is {_shown(_spelled(stored[at]))}"
    if at >= len(stored):
        return f"message {number} was not there: sent is {_shown(_spelled(given[at]))}"
    one, other = stored[at], given[at]
    if one.role is not other.role:
        return f"message {number}: recorded is a message of {one.role}, sent is one of {other.role}"
    pairs = {
        "content": (one.content or "", other.content or ""),
        "reasoning": (one.reasoning or "", other.reasoning or ""),
        "tool_call_id": (one.tool_call_id or "", other.tool_call_id or ""),
        "tool_calls": (_spelled(one.tool_calls), _spelled(other.tool_calls)),
        "media": (_spelled(one.media), _spelled(other.media)),
    }
    name = next((name for name, (a, b) in pairs.items() if a.strip() != b.strip()), "content")
    return f"message {number} ({one.role}), {name}{_parted(*pairs[name])}"


def _other_context(stored: PromptContext, given: PromptContext) -> str:
    """The first difference of two requests beside their messages."""
    if stored.tools != given.tools:
        before, now = [one.json for one in stored.tools], [one.json for one in given.tools]
        at = next((i for i, (a, b) in enumerate(zip_longest(before, now)) if a != b), 0)
        one, other = (tools[at] if at < len(tools) else "no tool" for tools in (before, now))
        return f"tool {at}{_parted(one, other)}"
    return f"chat_template_kwargs{_parted(stored.kwargs_json.decode(), given.kwargs_json.decode())}"


def _spelled(value: object) -> str:
    """A value as JSON."""
    return msgspec.json.encode(value).decode()


def _parted(one: str, other: str) -> str:
    """The place where two texts part, and both from a little before it."""
    least, begin = min(len(one), len(other)), 0
    while begin < least and one[begin : begin + COMPARED_CHARS] == other[begin : begin + COMPARED_CHARS]:
        begin += COMPARED_CHARS
    pairs = enumerate(zip(one[begin:][:COMPARED_CHARS], other[begin:][:COMPARED_CHARS], strict=False), begin)
    at = next((index for index, (a, b) in pairs if a != b), least)
    start = max(0, at - SHOWN_BEFORE)
    return f", character {at}: recorded {_shown(one[start:])}, sent {_shown(other[start:])}"


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARS]) + ("..." if len(text) > SHOWN_CHARS else "")
