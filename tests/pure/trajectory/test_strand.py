"""The strands of a session beside a plain model: which one a request belongs to, and what all of them hold."""

from array import array
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stenograph.core.chat import ChatRequest, ParsedReply, TextPrint
from stenograph.core.errors import HistoryMismatch, SessionBusy, TruncatedGeneration
from stenograph.core.kinds import AfterLength, HistoryKind
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, Prompt, RequestId, SampledTurn, SessionId, token_ids
from stenograph.trajectory.history import Attachment
from stenograph.trajectory.matching import HarnessMatcher, StrictMatcher
from stenograph.trajectory.strand import NUM_KNOWN, Leases, Strand, Strands
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus, line_ids, line_messages

ADD = Tool(name="add", json='{"name":"add"}', parameters_json="{}")
CONTEXTS = [PromptContext(), PromptContext(tools=(ADD,)), PromptContext(template_kwargs={"k": 1})]


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def turn_of(
    messages: tuple[Message, ...], new: list[int], drawn: list[int], reply: str, context: PromptContext
) -> CommittedTurn:
    """A turn; one without a token was aborted before it had one."""
    return CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids(new),
        sampled=SampledTurn(
            ids=token_ids(drawn),
            logprobs=array("d", [-1.0] * len(drawn)),
            sampling_logprobs=None,
            top_logprobs=None,
            finish=Finish(reason=FinishReason.STOP if drawn else FinishReason.ABORT),
            weights=(),
            num_cached_tokens=0,
            times=None,
        ),
        status=TurnStatus.COMPLETED if drawn else TurnStatus.ABORTED,
        messages=messages,
        reply=ParsedReply(message=assistant(reply if drawn else "")),
        context=context,
    )


def strands_of(kind: HistoryKind = HistoryKind.STRANDS) -> Strands:
    return Strands(SessionId("s"), kind, StrictMatcher(), AfterLength.CLOSE)


Opening = tuple[str, PromptContext, tuple[Message, ...]]


@dataclass(eq=False)
class Line:
    """The model of a strand. `real` is the strand that was given for it, `nodes` are its turns."""

    opening: Opening | None
    real: Strand
    nodes: list[Node] = field(default_factory=list)
    is_held: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(node.turn.num_tokens for node in self.nodes)


@dataclass(eq=False)
class Seat:
    """A request that has its seat."""

    leases: Leases
    line: Line
    request: ChatRequest | None
    context: PromptContext
    ids: "array[int] | None" = None


class StrandsMachine(RuleBasedStateMachine):
    """Chats and completions take leases, commit or fail, and give back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.strands = strands_of()
        self.lines: list[Line] = []
        self.kept: list[Line] = []
        self.recent: list[Line] = []
        self.forgotten: list[Strand] = []
        self.seats: list[Seat] = []
        self.discarded: list[Node] = []
        self.num_drawn = 0

    @rule(
        data=st.data(),
        agent=st.sampled_from(["", "", "x"]),
        context=st.sampled_from(CONTEXTS),
        new=st.lists(st.sampled_from("ab").map(user), min_size=1, max_size=2),
    )
    def chat(self, data: st.DataObject, agent: str, context: PromptContext, new: list[Message]) -> None:
        messages = new
        if self.kept and data.draw(st.booleans(), label="goes on"):
            line = data.draw(st.sampled_from(self.kept), label="line")
            before = line_messages(line.nodes[-1])
            messages = [*before[: len(before) - data.draw(st.integers(0, 2), label="cut")], *new]
            if line.opening is not None:
                agent, context, _ = line.opening
        request = self.request_of(data, messages)
        opening = (agent, context, tuple(takewhile(lambda one: one.role is not Role.ASSISTANT, messages)))
        self.take(opening, request, context)

    def request_of(self, data: st.DataObject, messages: list[Message]) -> ChatRequest:
        """The request as a decoder gives it, which may have recognized the beginning of its body."""
        known = [
            line.real.line.known
            for line in self.recent
            if line.real.line.known is not None
            and len(stored := list(line.real.line.known.messages)) < len(messages)
            and messages[: len(stored)] == stored
        ]
        chosen = data.draw(st.sampled_from([None, *known]), label="known")
        return ChatRequest(messages=tuple(messages), known=chosen, text_print=TextPrint())

    def take(self, opening: Opening, request: ChatRequest, context: PromptContext) -> None:
        agent, _, _ = opening
        line = next((line for line in self.lines if line.opening is not None and same(line.opening, opening)), None)
        leases = Leases(self.strands, agent_id=agent)
        if line is not None and line.is_held:
            with pytest.raises(SessionBusy):
                leases.of_chat(request, context)
            leases.give_back()
            return
        real = leases.of_chat(request, context)
        if line is None:
            assert (real.number, list(real.history.nodes), real.agent_id) == (None, [], agent)
            assert real not in [other.real for other in self.lines]
            assert real not in self.forgotten
            line = Line(opening, real)
            self.lines.append(line)
        assert real is line.real
        line.is_held = True
        self.seats.append(Seat(leases, line, request, context))

    @rule(data=st.data(), extra=st.lists(st.integers(900, 901), min_size=1, max_size=2))
    def complete(self, data: st.DataObject, extra: list[int]) -> None:
        """A prompt of ids: a whole line, or a part of one, and a little more."""
        line = data.draw(st.sampled_from([None, *self.kept]), label="line")
        ids = token_ids() if line is None else line_ids(line.nodes[-1])
        ids = ids[: len(ids) - data.draw(st.sampled_from([0, 0, 0, 1, 3]), label="cut")] + token_ids(extra)
        matching = [line for line in self.kept if ids[: line.nodes[-1].num_tokens] == line_ids(line.nodes[-1])]
        best = max(matching, key=lambda line: line.nodes[-1].num_tokens, default=None)
        leases = Leases(self.strands)
        if best is not None and best.is_held:
            with pytest.raises(SessionBusy):
                leases.of_ids(ids)
            leases.give_back()
            return
        real = leases.of_ids(ids)
        if best is None:
            assert (real.number, list(real.history.nodes), real.key) == (None, [], None)
            best = Line(None, real)
            self.lines.append(best)
        assert real is best.real
        best.is_held = True
        self.seats.append(Seat(leases, best, None, PromptContext(), ids))

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), num_drawn=st.integers(0, 3))
    def commit(self, data: st.DataObject, num_drawn: int) -> None:
        seat = self.leave(data)
        line, history = seat.line, seat.line.real.history
        try:
            at = self.place(seat)
        except (HistoryMismatch, TruncatedGeneration):
            self.give_back(seat)
            return
        keep = line.nodes.index(at.parent) + 1 if at.parent is not None else 0
        replaced = line.nodes[keep:]
        stays = sum(other.num_tokens for other in self.lines) - sum(node.turn.num_tokens for node in replaced)
        assert seat.leases.num_tokens_before([(line.real, at)]) == stays
        assert seat.leases.num_tokens_before([]) == self.strands.num_tokens
        drawn = [self.num_drawn + 1 + number for number in range(num_drawn)]
        self.num_drawn += num_drawn
        before = line_ids(at.parent)
        ids = before + token_ids([0]) if seat.ids is None else seat.ids
        turn = turn_of(at.new_messages, ids[len(before) :].tolist(), drawn, f"reply {self.num_drawn}", seat.context)
        prompt = Prompt.of(ids, num_kept=len(before))
        node, gone = self.strands.commit(line.real, at, turn, prompt, seat.leases.label, seat.request)
        assert list(gone) == replaced
        line.nodes = [*line.nodes[:keep], node]
        self.discarded += replaced
        if line not in self.kept:
            self.kept.append(line)
        self.recent = [line, *(other for other in self.recent if other is not line)][:NUM_KNOWN]
        assert history.latest is node
        self.give_back(seat)

    def place(self, seat: Seat) -> Attachment:
        history = seat.line.real.history
        if seat.request is None:
            assert seat.ids is not None
            return history.position_ids(seat.ids)
        return history.position(seat.request.messages, seat.context)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.give_back(self.leave(data))

    def leave(self, data: st.DataObject) -> Seat:
        seat = data.draw(st.sampled_from(self.seats), label="seat")
        self.seats.remove(seat)
        return seat

    def give_back(self, seat: Seat) -> None:
        seat.leases.give_back()
        seat.leases.give_back()
        seat.line.is_held = False
        if not seat.line.nodes:
            self.lines.remove(seat.line)
            self.forgotten.append(seat.line.real)

    @invariant()
    def they_are_the_models(self) -> None:
        strands = self.strands
        assert list(strands.kept) == [line.real for line in self.kept]
        assert [strand.number for strand in strands.kept] == list(range(len(self.kept)))
        for line in self.lines:
            assert list(line.real.history.nodes) == line.nodes
            assert bool(line.real.num_running) is line.is_held
        nodes = sorted((node for line in self.lines for node in line.nodes), key=lambda node: node.id)
        assert list(strands.nodes) == nodes
        assert len({node.id for node in [*nodes, *self.discarded]}) == len(nodes) + len(self.discarded)
        assert strands.num_turns == len(nodes)
        assert strands.num_tokens == sum(node.turn.num_tokens for node in nodes)
        assert strands.discarded.num_turns == len(self.discarded)
        assert strands.discarded.num_tokens == sum(len(node.turn.sampled.ids) for node in self.discarded)
        assert strands.latest is (self.recent[0].real if self.recent else None)
        assert strands.only is None


def same(one: Opening, other: Opening) -> bool:
    return one[0] == other[0] and one[1].is_same(other[1]) and one[2] == other[2]


TestStrands = StrandsMachine.TestCase
TestStrands.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("kind", [HistoryKind.LINEAR, HistoryKind.TREE])
def test_a_session_of_another_kind_has_one_strand_whatever_a_request_begins_with(kind: HistoryKind) -> None:
    strands = strands_of(kind)
    only = strands.only
    assert only is not None
    for text in "ab":
        assert strands.of_chat(ChatRequest(messages=(user(text),)), PromptContext(), text) is only
    assert strands.of_ids(token_ids([1])) is only
    assert not strands.kept
    assert not strands.nodes
    leases = Leases(strands)
    leases.of_ids(token_ids([1]))
    if kind is HistoryKind.LINEAR:
        with pytest.raises(SessionBusy):
            Leases(strands).of_ids(token_ids([2]))
    else:
        Leases(strands).of_ids(token_ids([2]))
    leases.give_back()
    assert strands.of_ids(token_ids([3])) is only, "it is not forgotten without a turn"


def test_white_space_makes_no_other_opening_where_the_matcher_sees_none() -> None:
    for matcher, num in ((HarnessMatcher(), 1), (StrictMatcher(), 2)):
        strands = Strands(SessionId("s"), HistoryKind.STRANDS, matcher, AfterLength.CLOSE)
        found = [
            strands.of_chat(ChatRequest(messages=(user(text),)), PromptContext(), "") for text in ("a", " a\n", "a")
        ]
        assert found[0] is found[2]
        assert len({id(strand) for strand in found}) == num


def test_without_a_session_each_turn_has_a_strand_that_nobody_else_sees() -> None:
    leases = Leases(None)
    request = ChatRequest(messages=(user("a"),))
    chats = [leases.of_chat(request, PromptContext()) for _ in range(2)]
    found = [*chats, leases.of_ids(array("i"))]
    assert len({id(strand) for strand in found}) == 3
    assert leases.num_tokens_before([]) == 0
    leases.give_back()


def test_that_one_strand_was_too_many_is_noted_without_the_request() -> None:
    leases = Leases(strands_of(HistoryKind.STRANDS), max_strands=0)
    leases.of_chat(ChatRequest(messages=(user("a"),)), PromptContext())
    assert leases.spent is not None
    assert leases.spent.__traceback__ is None, "its frames hold the request's bytes, and its connection"
