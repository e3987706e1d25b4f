"""Sessions, turns and retries against a plain model of their contract (SPEC 3 and 4, docs/http-api.md), in any order.

The engine's replies are all paused, so that every turn stands in the engine between two rules; what strikes a turn in
the middle of a step is a part of the rule that makes the step. All kinds of histories are driven by one machine.
"""

import asyncio
import gc
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import (
    BudgetSpent,
    Draining,
    EngineUnavailable,
    Limit,
    LimitExceeded,
    SessionNotFound,
    StenographError,
)
from stenograph.core.kinds import HistoryKind
from stenograph.core.messages import Message, Role
from stenograph.core.outcome import TokenFate
from stenograph.core.stages import StageTimes
from stenograph.core.stated_options import OverLimit, StatedOptions
from stenograph.core.telemetry import NoTelemetry, SessionEnd, SessionReport, TurnEnd, TurnReport
from stenograph.core.types import Finish, FinishReason, RequestId, SamplingParams
from stenograph.offload.pool import CpuPool
from stenograph.session.admission import Limits
from stenograph.session.fates import num_by_fate
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.session import Session
from stenograph.session.steps import TurnServices
from stenograph.session.turn import TurnOutcome
from stenograph.session.watch import TurnAbandoned, Watch
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.history import Discarded
from stenograph.trajectory.strand import NUM_FORKS
from stenograph.trajectory.turn import Node, TurnStatus, line_ids, line_messages

from .conftest import begun
from .movable_loop import MovableLoop

T = TypeVar("T")

END = 2
"""`<|im_end|>`"""
TIMEOUT_S, GRACE_S, TTL_S = 60.0, 5.0, 100.0
MAX_IN_FLIGHT, MAX_SESSIONS = 4, 3
QUIET_PASSES = 60
"""Passes of the loop after which nothing moves any more that waits for no step and no time."""


class Counted(NoTelemetry):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[TurnReport] = []
        self.retries: list[bool] = []
        self.session_ends: list[SessionEnd] = []

    def turn_ended(self, report: TurnReport) -> None:
        self.reports.append(report)

    def retry_answered(self, *, joined: bool) -> None:
        self.retries.append(joined)

    def session_ended(self, report: SessionReport) -> None:
        self.session_ends.append(report.end)


# -- the model


Opening = tuple[tuple[Message, ...], str]
"""The messages before the first reply, and the template arguments."""


def opening_of(messages: list[Message], kwargs: dict[str, object]) -> Opening:
    return tuple(takewhile(lambda message: message.role is not Role.ASSISTANT, messages)), repr(kwargs)


@dataclass(eq=False, kw_only=True)
class Branch:
    """A strand. `fork_of` is the one from whose last turn it parts with another reply, `work` the first whose work it
    is."""

    fork_of: "Branch | None" = None
    goes_on: bool = False

    @property
    def work(self) -> "Branch":
        return self.fork_of.work if self.fork_of is not None and self.goes_on else self


@dataclass(eq=False, kw_only=True)
class Turn:
    """A committed turn: the whole line down to it, as messages and ids."""

    branch: Branch
    parent: "Turn | None"
    kwargs: dict[str, object]
    messages: list[Message]
    ids: list[int]
    status: TurnStatus
    request_id: str
    node_id: int
    num_sampled: int

    def is_in(self, sent: "Sent") -> bool:
        """Whether a request begins with its line."""
        return self.messages == sent.messages[: len(self.messages)] and _same_kwargs(self, sent.kwargs)

    def may_be_followed(self, sent: "Sent") -> bool:
        return len(self.messages) < len(sent.messages) and self.status is not TurnStatus.ABORTED

    @property
    def num_own(self) -> int:
        return len(self.ids) - (len(self.parent.ids) if self.parent else 0)


@dataclass(kw_only=True)
class Sent:
    """A request as a client sends it, and what the engine will say to it. `ending` is how that ends."""

    messages: list[Message]
    kwargs: dict[str, object]
    seed: int
    key: str | None
    script: Script
    ending: str

    @property
    def opening(self) -> Opening:
        return opening_of(self.messages, self.kwargs)

    @property
    def body(self) -> bytes:
        return repr((self.messages, self.kwargs, self.seed)).encode()


@dataclass(eq=False, kw_only=True)
class Flight:
    """A turn that runs. `place` is the model of its session; times are the loop's, `began_at` counts events."""

    place: "Place | None"
    sent: Sent
    parent: Turn | None
    held: list[Branch]
    """The strands in which it has a place; in the last of them it is kept."""
    began_at: int
    deadline: float
    request_id: RequestId
    watches: list[tuple[Watch, "asyncio.Task[Any]"]] = field(default_factory=list)
    num_steps: int = 0
    is_aborted: bool = False

    @property
    def num_left(self) -> int:
        """Steps until the engine's last word."""
        return len(self.sent.script.ids) + 1 - self.num_steps


@dataclass(eq=False, kw_only=True)
class Reply:
    """A committed turn's reply that may be asked for again."""

    sent: Sent
    held: list[Branch]
    outcome: TurnOutcome
    began_at: int
    committed_at: int
    was_delivered: bool


@dataclass(eq=False, kw_only=True)
class Place:
    """A session."""

    real: Session
    kind: HistoryKind
    last_chat: float
    turns: list[Turn] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    last_began: dict[bytes, int] = field(default_factory=dict[bytes, int])
    sent: list[Sent] = field(default_factory=list)
    node_ids: set[int] = field(default_factory=set)
    replaced: list[Turn] = field(default_factory=list[Turn])
    newest: dict[Opening, Branch] = field(default_factory=dict[Opening, Branch])
    """Of the strands with an opening the one that was opened last."""
    branches: dict[Branch, None] = field(default_factory=dict[Branch, None])
    """The strands that have had a turn, in the order of their first."""
    whole: Branch = field(default_factory=Branch)
    """All there is, in a session without strands."""
    is_gone: bool = False

    def turns_in(self, branch: Branch) -> list[Turn]:
        return [turn for turn in self.turns if turn.branch is branch]

    def branch_of(self, sent: Sent) -> Branch:
        """The strand that a request belongs to: of those with its opening one that it goes on with, else the newest."""
        if self.kind is not HistoryKind.STRANDS:
            return self.whole
        newest = self.newest.setdefault(sent.opening, Branch())
        forks = [newest]
        while forks[-1].fork_of is not None:
            forks.append(forks[-1].fork_of)
        return next((one for one in forks[:NUM_FORKS] if len(forks) > 1 and self.goes_on(one, sent)), newest)

    def goes_on(self, branch: Branch, sent: Sent) -> bool:
        turns = self.turns_in(branch)
        return bool(turns) and turns[-1].is_in(sent) and turns[-1].may_be_followed(sent)

    def forks(self, sent: Sent) -> bool:
        """Whether a request is no other try of the last turn of its strand: it has another message in the place of the
        reply, or parts from the turn earlier and has a reply after that."""
        turns = self.turns_in(self.branch_of(sent))
        if self.kind is not HistoryKind.STRANDS or not turns or not all(turn.is_in(sent) for turn in turns[:-1]):
            return False
        last, given = turns[-1].messages, sent.messages
        at = next((i for i, pair in enumerate(zip(last, given, strict=False)) if pair[0] != pair[1]), len(given))
        in_its_place = at == len(last) - 1 < len(given)
        return at < len(last) and (in_its_place or any(message.role is Role.ASSISTANT for message in given[at:]))

    def places_of(self, sent: Sent) -> list[Branch]:
        """The strands in which a request has a place."""
        branch = self.branch_of(sent)
        if not self.forks(sent):
            return [branch]
        return [branch, Branch(fork_of=branch, goes_on=len(self.turns_in(branch)) > 1)]


class Refused(Exception):
    """What the model says that a turn is refused with, before or after it started."""

    def __init__(self, code: str, limit: Limit | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.limit = limit

    def stops(self, place: Place) -> bool:
        """Whether the session answers it with an empty reply."""
        is_budget = self.limit not in (None, Limit.IN_FLIGHT)
        return is_budget and place.real.options.stated.over_limit is OverLimit.STOP


def parent_of(place: Place, sent: Sent) -> Turn | None:
    """Where a request attaches. Raises Refused."""
    turns = place.turns_in(place.branch_of(sent))
    matching = [turn for turn in turns if turn.is_in(sent)]
    parent = max(matching, key=lambda turn: (len(turn.messages), turn.node_id), default=None)
    if place.forks(sent):
        return None
    if place.kind is not HistoryKind.TREE and len(matching) < len(turns) - 1:
        raise Refused("history_mismatch")
    if parent is not None and len(parent.messages) == len(sent.messages):
        raise Refused("history_mismatch")
    if parent is not None and parent.status is TurnStatus.ABORTED:
        raise Refused("truncated_generation")
    return parent


def _same_kwargs(turn: Turn | None, kwargs: dict[str, object]) -> bool:
    return turn is None or (turn.kwargs == kwargs and _same_kwargs(turn.parent, kwargs))


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


TEXTS = st.sampled_from(["a", "b"])
NEW_MESSAGES = st.one_of(
    TEXTS.map(lambda text: [user(text)]),
    TEXTS.map(lambda text: [user(text)]),
    TEXTS.map(lambda text: [user("x"), assistant(text), user("y")]),
    TEXTS.map(lambda text: [assistant(text), user("y")]),
    st.just([Message(role=Role.TOOL, content="answers no call", tool_call_id="1")]),
    st.just([]),
)
ENDINGS = st.sampled_from(["stop"] * 6 + ["length", "bad_id", "nan", "no_finish", "unavailable", "bug"])
FAILURES = {
    "bad_id": "upstream_invalid",
    "nan": "upstream_invalid",
    "no_finish": "upstream_invalid",
    "unavailable": "engine_unavailable",
    "bug": "internal_error",
}
WAYS_ON = st.sampled_from(["on", "on", "again", "another reply"])
STRIKES = st.sampled_from([None, None, None, None, "leave", "abort", "delete", "deadline"])
"""What falls in the middle of a step."""


class SessionMachine(RuleBasedStateMachine):
    """Real sessions beside the model. Between two rules the loop is quiet and every turn waits in the engine."""

    def __init__(self, renderer: Renderer, kind: HistoryKind, *, timeout_s: float | None, num_passes: int) -> None:
        super().__init__()
        self.kind = kind
        self.renderer = renderer
        self.timeout_s = timeout_s
        self.loop = MovableLoop()
        self.engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, num_passes=num_passes)
        self.pool = CpuPool(1)
        self.clock = ManualClock()
        self.telemetry = Counted()
        services = TurnServices(
            engine=self.engine,
            renderer=renderer,
            pool=self.pool,
            clock=self.clock,
            timeout_s=timeout_s,
            abort_grace_s=GRACE_S,
        )
        limits = Limits(max_sessions=MAX_SESSIONS, max_in_flight=MAX_IN_FLIGHT)
        self.manager = SessionManager(services=services, limits=limits, telemetry=self.telemetry)
        self.places: list[Place] = []
        self.flights: list[Flight] = []
        self.reports: list[TurnReport] = []
        self.retries: list[bool] = []
        self.session_ends: list[SessionEnd] = []
        self.events = 0
        self.is_whole = True
        """Whether the last rule came to its end: only then does the teardown look at anything."""
        self.seed = 0

    # -- the loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        self.is_whole = False
        return self.loop.run_until_complete(work)

    def passes(self, num: int = QUIET_PASSES) -> None:
        async def passing() -> None:
            for _ in range(num):
                await asyncio.sleep(0)

        self.run(passing())

    def begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self.loop.create_task(work)

    def tick(self) -> int:
        self.events += 1
        return self.events

    @property
    def live(self) -> list[Place]:
        return [place for place in self.places if not place.is_gone]

    # -- rules: sessions

    @precondition(lambda self: len(self.live) < MAX_SESSIONS)
    @rule(
        budgets=st.builds(
            StatedOptions,
            max_turns=st.sampled_from([None, None, None, 4, 1]),
            max_requests=st.sampled_from([None, None, None, 6, 2]),
            max_total_tokens=st.sampled_from([None, None, None, 100]),
            over_limit=st.sampled_from([None, *OverLimit]),
        ),
        max_nodes=st.sampled_from([100, 100, 3]),
        ttl_s=st.sampled_from([None, None, TTL_S]),
    )
    def open(self, budgets: StatedOptions, max_nodes: int, ttl_s: float | None) -> None:
        options = SessionOptions(
            history=self.kind,
            stated=budgets,
            max_nodes=max_nodes,
            ttl_s=ttl_s,
        )
        real = self.manager.sessions.create(options)
        self.places.append(Place(real=real, kind=self.kind, last_chat=self.clock.monotonic()))

    @precondition(lambda self: len(self.live) == MAX_SESSIONS)
    @rule()
    def open_one_too_many(self) -> None:
        if any(self.is_expired(place) for place in self.live):
            return
        with pytest.raises(LimitExceeded):
            self.manager.sessions.create(SessionOptions())

    @precondition(lambda self: len(self.live) == MAX_SESSIONS or any(flight.place for flight in self.flights))
    @rule(data=st.data(), gives_up_after=st.sampled_from([None, None, 0, 1, 2, 5]))
    def delete(self, data: st.DataObject, gives_up_after: int | None) -> None:
        place = data.draw(st.sampled_from(self.live), label="session")
        self.strike_delete(place, gives_up_after)

    @precondition(lambda self: any(place.is_gone for place in self.places))
    @rule(data=st.data())
    def ask_for_what_is_gone(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([place for place in self.places if place.is_gone]), label="session")
        for refused in (self.manager.sessions.get, lambda id_: self.run(self.manager.delete(id_))):
            with pytest.raises(SessionNotFound):
                refused(place.real.id)
        assert not self.manager.sessions.has(place.real.id)
        sent = self.new_sent(data, place, None, "stop")
        with pytest.raises(SessionNotFound):
            begun(self.manager, place.real, _request(sent))

    @rule(seconds=st.sampled_from([1.0, TTL_S / 2, TTL_S]), sweeps=st.booleans())
    def time_goes_on_for_sessions(self, seconds: float, sweeps: bool) -> None:
        self.clock.advance(seconds)
        expired = [place for place in self.live if self.is_expired(place)]
        if sweeps:
            assert self.manager.sessions.expire() == len(expired)
        for place in expired:
            assert not self.manager.sessions.has(place.real.id)
            with pytest.raises(SessionNotFound):
                self.manager.sessions.get(place.real.id)
            place.is_gone = True
            self.session_ends.append(SessionEnd.EXPIRED)

    def is_expired(self, place: Place) -> bool:
        ttl_s = place.real.options.ttl_s
        return ttl_s is not None and not place.flights and self.clock.monotonic() - place.last_chat >= ttl_s

    # -- rules: chats

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        ending=ENDINGS,
        has_key=st.sampled_from([False, False, True]),
        strike=STRIKES,
        num=st.integers(0, 12),
    )
    def chat(self, data: st.DataObject, ending: str, has_key: bool, strike: str | None, num: int) -> None:
        place = data.draw(st.sampled_from(self.live), label="session")
        sent = self.new_sent(data, place, f"key {self.tick()}" if has_key else None, ending)
        place.sent.append(sent)
        self.ask(place, sent, is_retry=False, strike=strike, num=num)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chats=st.lists(st.tuples(st.integers(1, 3), WAYS_ON), min_size=1, max_size=5))
    def whole_chats(self, data: st.DataObject, chats: list[tuple[int, str]]) -> None:
        """The usual case, for histories to grow: on from one of the last lines, its last turn again, or with another
        reply to it, to the end."""
        place = data.draw(st.sampled_from(self.live), label="session")
        for back, way in chats:
            line = place.turns[-min(back, len(place.turns))].messages if place.turns else []
            messages = line[:-1] if way == "again" and line else [*line, user("a")]
            if way == "another reply" and line:
                messages = [*line[:-1], assistant("mine"), user("a")]
            sent = self.scripted(messages, {}, None, "stop", "A", deaf=False)
            place.sent.append(sent)
            num = len(self.flights)
            self.ask(place, sent, is_retry=False, strike=None, num=0)
            if len(self.flights) > num:
                flight = self.flights[-1]
                self.engine.step_turn(flight.request_id, flight.num_left)
                flight.num_steps += flight.num_left
                self.passes()
                self.has_ended(flight, hears=back != 1)

    @precondition(lambda self: any(flight.place for flight in self.flights))
    @rule(data=st.data(), is_retry=st.sampled_from([True, True, False]))
    def ask_for_what_runs(self, data: st.DataObject, is_retry: bool) -> None:
        flight = data.draw(st.sampled_from([flight for flight in self.flights if flight.place]), label="turn")
        self.ask(flight.place, flight.sent, is_retry=is_retry, strike=None, num=0)

    @rule(data=st.data(), ending=ENDINGS)
    def chat_without_a_session(self, data: st.DataObject, ending: str) -> None:
        self.ask(None, self.new_sent(data, None, None, ending), is_retry=False, strike=None, num=0)

    @precondition(lambda self: any(place.sent for place in self.live))
    @rule(
        data=st.data(), is_retry=st.booleans(), drops_key=st.sampled_from([False, False, True]), num=st.integers(0, 9)
    )
    def ask_again(self, data: st.DataObject, is_retry: bool, drops_key: bool, num: int) -> None:
        place = data.draw(st.sampled_from([place for place in self.live if place.sent]), label="session")
        before = data.draw(st.sampled_from(place.sent[-4:]), label="request")
        sent = before if not drops_key else _with_key(before, None)
        self.ask(place, sent, is_retry=is_retry, strike=None, num=num)

    @precondition(lambda self: any(sent.key for place in self.live for sent in place.sent))
    @rule(data=st.data())
    def use_a_key_again_for_something_else(self, data: st.DataObject) -> None:
        places = [place for place in self.live if any(sent.key for sent in place.sent)]
        place = data.draw(st.sampled_from(places), label="session")
        key = data.draw(st.sampled_from([sent.key for sent in place.sent if sent.key]), label="key")
        self.ask(place, self.new_sent(data, place, key, "stop"), is_retry=False, strike=None, num=0)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def draw_a_token(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(self.flights), label="turn")
        if flight.num_left > 2:
            self.engine.step_turn(flight.request_id)
            flight.num_steps += 1
            self.passes()

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), strike=STRIKES, num=st.integers(0, 40), hears=st.booleans())
    def finish(self, data: st.DataObject, strike: str | None, num: int, hears: bool) -> None:
        """The engine plays to the end; whatever strikes in the middle finds the turn before or after its commit."""
        flight = data.draw(st.sampled_from(self.flights), label="turn")
        self.engine.step_turn(flight.request_id, flight.num_left)
        flight.num_steps += flight.num_left
        if strike is None:
            self.passes()
            self.has_ended(flight, hears=hears)
            return
        self.passes(num)
        self.strike(strike, flight)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def a_watcher_leaves(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(self.flights), label="turn")
        watch, task = data.draw(st.sampled_from(flight.watches), label="watcher")
        watch.leave()
        watch.leave()
        flight.watches.remove((watch, task))
        self.passes()
        if not flight.watches:
            assert isinstance(task.exception(), TurnAbandoned)
            self.has_been_abandoned(flight)
        else:  # it goes on; a handler that waits for the end may be given up
            task.cancel()
            self.passes(2)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort_a_session(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.live), label="session")
        if self.is_expired(place):
            return
        self.aborted(place.flights, self.run(self.manager.abort(place.real.id)))

    @rule()
    def abort_all(self) -> None:
        self.aborted(self.flights, self.run(self.manager.abort(None)))

    @precondition(lambda self: any(flight.deadline < math.inf for flight in self.flights))
    @rule()
    def a_deadline_passes(self) -> None:
        self.skip(min(flight.deadline for flight in self.flights) - self.loop.skipped_s)

    # -- asking

    def new_sent(self, data: st.DataObject, place: Place | None, key: str | None, ending: str) -> Sent:
        """A request that has to do with some line of the session: goes on, cuts it, or begins another."""
        turns = place.turns if place is not None else []
        line: list[Message] = []
        if turns and data.draw(st.sampled_from([True, True, True, False]), label="goes on"):
            latest = st.just(turns[-1])
            line = data.draw(st.one_of(latest, latest, st.sampled_from(turns)), label="line").messages
            cut = data.draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]), label="messages cut")
            line = line[: len(line) - cut]
        new = data.draw(NEW_MESSAGES, label="new messages") if line else [user(data.draw(TEXTS, label="question"))]
        kwargs: dict[str, object] = data.draw(st.sampled_from([{}] * 7 + [{"k": 1}]), label="template arguments")
        reply = data.draw(st.sampled_from(["A", "A", "AB", "a b"]), label="reply")
        deaf = data.draw(st.sampled_from([False] * 7 + [True]), label="deaf")
        return self.scripted([*line, *new], kwargs, key, ending, reply, deaf=deaf)

    def scripted(
        self,
        messages: list[Message],
        kwargs: dict[str, object],
        key: str | None,
        ending: str,
        reply: str,
        *,
        deaf: bool,
    ) -> Sent:
        """A request, with its reply planned."""
        self.seed += 1
        ids = tuple(self.renderer.tokenizer.encode(reply))
        finish: Finish | None = Finish(reason=FinishReason.STOP, matched=END)
        error: Exception | None = None
        logprobs = None
        if ending == "length":
            finish = Finish(reason=FinishReason.LENGTH)
        elif ending == "bad_id":
            ids = (*ids, self.renderer.tokenizer.vocab_size)
        elif ending == "nan":
            logprobs = (*(-1.0 for _ in ids), math.nan)
            ids = (*ids, END)
        elif ending == "no_finish":
            finish = None
        elif ending == "unavailable":
            error = EngineUnavailable("it died")
        elif ending == "bug":
            error = ValueError("an adapter's mistake")
        else:
            ids = (*ids, END)
        script = Script(ids=ids, finish=finish, error=error, paused=True, logprobs=logprobs, deaf=deaf)
        self.engine.plan_for(self.seed, script)
        return Sent(messages=messages, kwargs=kwargs, seed=self.seed, key=key, script=script, ending=ending)

    def ask(self, place: Place | None, sent: Sent, *, is_retry: bool, strike: str | None, num: int) -> None:
        """Send a request and hold what happens against the model."""
        if place is not None and self.is_expired(place):
            return  # as a server does, which has looked for the session before this
        num_requests = len(self.engine.requests)
        identity = RequestIdentity(route="chat", body=sent.body, key=sent.key, is_retry=is_retry)
        refused: Refused | None = None
        joins: list[Flight] = []
        replies: list[Reply] = []
        try:
            joins, replies = self.repeated(place, sent, is_retry=is_retry)
            if not joins and not replies:
                self.check_admitted(place, sent)
        except Refused as error:
            refused = error
        granted = None if joins or replies or refused else self.granted(place, sent)
        if granted is not None and 1 <= granted < len(sent.script.ids):
            return  # an engine ends with the tokens that it is granted; a script would go on
        if refused is not None and place is not None and refused.stops(place):
            watch = self.start(place, sent, identity)
            place.last_began[sent.body] = self.tick()
            self.is_stopped(place, watch, self.begin(self.reader(watch)), refused)
            return
        if refused is not None:
            with pytest.raises(StenographError) as caught:
                self.start(place, sent, identity)
            assert caught.value.code == refused.code
            assert not isinstance(caught.value, LimitExceeded | BudgetSpent) or caught.value.limit is refused.limit
            assert caught.value.should_retry is (refused.limit is Limit.IN_FLIGHT)
            self.passes()
            return
        watch = self.start(place, sent, identity)
        task = self.begin(self.reader(watch) if self.tick() % 2 else watch.result())
        if joins:
            flight = next(flight for flight in joins if flight.request_id == watch.request_id)
            flight.watches.append((watch, task))
            self.retries.append(True)
            self.passes()
        elif replies:
            self.passes()
            reply = next(reply for reply in replies if reply.outcome is task.result())
            self.retries.append(False)
            if num % 2:  # this time it arrives
                watch.delivered()
                reply.was_delivered = True
            watch.leave()
        else:
            self.has_started(place, sent, watch, task, strike, num)
        if joins or replies:
            assert len(self.engine.requests) == num_requests

    def is_stopped(self, place: Place, watch: Watch, task: "asyncio.Task[TurnOutcome]", refused: Refused) -> None:
        """A turn for which its session has no budget ended with an empty reply, of which nothing is kept."""
        num_strands = len(place.real.strands.kept)
        self.passes()
        outcome = task.result()
        assert outcome.spent is not None
        assert (outcome.spent.limit, outcome.committed) == (refused.limit, False)
        assert (len(outcome.reply.sampled.ids), outcome.reply.sampled.finish.reason) == (0, FinishReason.STOP)
        assert len(place.real.strands.kept) == num_strands
        watch.leave()
        self.take_report(TurnEnd.UNRECORDED, None, num=0)
        place.last_chat = self.clock.monotonic()

    def start(self, place: Place | None, sent: Sent, identity: RequestIdentity) -> Watch:
        real = None if place is None else place.real
        stages = StageTimes(start=self.clock.monotonic())

        async def starting() -> Watch:
            return begun(self.manager, real, _request(sent), stages=stages, identity=identity)

        return self.run(starting())

    async def reader(self, watch: Watch) -> TurnOutcome:
        """As a stream reads: all pieces, then the end; the pieces are all that was drawn."""
        ids: list[int] = []
        text = ""
        while (pieces := await watch.take()) is not None:
            ids += [id_ for piece in pieces for chunk in piece.chunks for id_ in chunk.ids]
            text += "".join(piece.delta.content for piece in pieces)
        outcome = await watch.result()
        assert ids == outcome.reply.sampled.ids.tolist()
        assert text == (outcome.reply.parsed.message.content or "")
        return outcome

    def repeated(self, place: Place | None, sent: Sent, *, is_retry: bool) -> tuple[list[Flight], list[Reply]]:
        """The running turns and the kept replies that a request asks for again. Raises Refused."""
        if place is None:
            return [], []

        def asks_for(other: Sent, began_at: int) -> bool:
            if sent.key is None:  # the last request with this body, and no earlier one
                return is_retry and other.body == sent.body and place.last_began[sent.body] == began_at
            if other.key == sent.key and other.body != sent.body:
                raise Refused("idempotency_mismatch")
            return other.key == sent.key

        joins = [flight for flight in place.flights if asks_for(flight.sent, flight.began_at)]
        replies = [
            reply
            for reply in place.replies
            if asks_for(reply.sent, reply.began_at) and (not reply.was_delivered or sent.key is not None)
        ]
        return joins, [] if joins else replies

    def check_admitted(self, place: Place | None, sent: Sent) -> None:
        """Raises Refused if a new turn is. A strand is known only when the request is decoded: it comes last."""
        if place is not None and place.kind is HistoryKind.LINEAR and place.flights:
            raise Refused("session_busy")
        if len(self.flights) >= MAX_IN_FLIGHT:
            raise Refused("limit_exceeded", Limit.IN_FLIGHT)
        if place is None:
            return
        is_strands = place.kind is HistoryKind.STRANDS
        if is_strands and any(place.branch_of(sent) in flight.held for flight in place.flights):
            raise Refused("session_busy")
        options, num = place.real.options, len(place.turns) + len(place.flights)
        budgets = options.stated
        if budgets.max_requests is not None and num + len(place.replaced) >= budgets.max_requests:
            raise Refused("limit_exceeded", Limit.SESSION_REQUESTS)
        if place.kind is HistoryKind.TREE and options.max_nodes is not None and num >= options.max_nodes:
            raise Refused("limit_exceeded", Limit.NODES)
        if budgets.max_turns is not None and num >= budgets.max_turns:  # none shows tools, and no rule holds for one
            raise Refused("limit_exceeded", Limit.SESSION_TURNS)
        num_tokens = sum(turn.num_own for turn in place.turns)
        if budgets.max_total_tokens is not None and num_tokens >= budgets.max_total_tokens:
            raise Refused("limit_exceeded", Limit.SESSION_TOKENS)

    def granted(self, place: Place | None, sent: Sent) -> int | None:
        """How many tokens its session has left for the reply; None if it has no limit, or the turn no place."""
        limit = None if place is None else place.real.options.stated.max_total_tokens
        if place is None or limit is None or any(message.role is Role.TOOL for message in sent.messages):
            return None
        try:
            parent = parent_of(place, sent)
        except Refused:
            return None
        num_line = len(parent.ids) if parent else 0
        num_new = len(self.renderer.render(sent.messages, (), sent.kwargs)) - num_line
        if place.kind is HistoryKind.TREE:
            return limit - num_new - sum(turn.num_own for turn in place.turns)
        branch = place.places_of(sent)[-1]
        beside = [turn for turn in place.turns if turn.branch is not branch]
        return limit - num_new - num_line - sum(turn.num_own for turn in beside)

    def has_started(
        self, place: Place | None, sent: Sent, watch: Watch, task: "asyncio.Task[Any]", strike: str | None, num: int
    ) -> None:
        """A turn was admitted: it ends at once for what its messages are, or stands in the engine."""
        flight = Flight(
            place=place,
            sent=sent,
            parent=None,
            held=[] if place is None else place.places_of(sent),
            began_at=self.tick(),
            deadline=math.inf if self.timeout_s is None else self.loop.skipped_s + self.timeout_s,
            request_id=watch.request_id,
            watches=[(watch, task)],
        )
        if place is not None:
            place.last_began[sent.body] = flight.began_at
        refused: Refused | None = None
        try:
            flight.parent = None if place is None else parent_of(place, sent)
            if any(message.role is Role.TOOL for message in sent.messages):
                raise Refused("unrenderable_message")
            granted = self.granted(place, sent)
            if granted is not None and granted < 1:
                raise Refused("limit_exceeded", Limit.SESSION_TOKENS)
        except Refused as error:
            refused = error
        if refused is not None and place is not None and refused.stops(place):
            self.is_stopped(place, watch, task, refused)
            return
        if refused is not None:
            self.passes()
            assert _error_code(task) == refused.code
            watch.leave()
            self.take_report(TurnEnd.FAILED, refused.code)
            if place is not None:
                place.last_chat = self.clock.monotonic()
            return
        self.flights.append(flight)
        if place is not None:
            place.flights.append(flight)
        if strike is None:
            self.passes()
            assert not task.done(), task
            assert self.engine.requests[-1].request_id == watch.request_id
        else:
            self.passes(num)
            self.strike(strike, flight)

    # -- striking

    def strike(self, strike: str, flight: Flight) -> None:
        """End one turn, or what it is in, from outside, wherever it is; others that fall with it are looked at too."""
        if strike == "leave":
            tasks = [task for _, task in flight.watches]
            for watch, _ in flight.watches:
                watch.leave()
            self.passes()
            if any(isinstance(task.exception(), TurnAbandoned) for task in tasks):
                self.has_been_abandoned(flight)
            else:
                self.has_ended(flight, hears=False)
        elif strike == "abort":
            self.run(self.manager.abort(None if flight.place is None else flight.place.real.id))
            self.abort_takes_effect([flight] if flight.place is None else flight.place.flights)
            if flight.place is None:
                self.abort_takes_effect(self.flights)
        elif strike == "delete" and flight.place is not None:
            self.strike_delete(flight.place, None)
        elif strike == "deadline" and self.timeout_s is not None:
            self.skip(self.timeout_s)
        else:
            self.passes()
            self.settle_done()

    def settle_done(self) -> None:
        """Look at whatever has ended; a turn that was struck may have been done by then."""
        for flight in list(self.flights):
            if all(task.done() for _, task in flight.watches):
                self.has_ended(flight, hears=False)

    def aborted(self, flights: list[Flight], num: int) -> None:
        """An abort was asked for; every one of these turns stands in the engine."""
        assert num == len(flights)
        self.abort_takes_effect(flights)

    def abort_takes_effect(self, flights: list[Flight]) -> None:
        struck = list(flights)
        self.passes()
        for flight in struck:
            flight.is_aborted = True
            ends_by_itself = flight.num_left == 0 or flight.request_id not in self.engine.drawn
            if flight.sent.script.deaf and not ends_by_itself:
                flight.deadline = min(flight.deadline, self.loop.skipped_s + GRACE_S)
            else:
                self.has_ended(flight, hears=False)

    def skip(self, seconds: float) -> None:
        """Time goes on for the loop: whatever has its deadline by then ends. Its callbacks run in one pass."""
        self.loop.skipped_s += seconds
        self.passes()
        for flight in list(self.flights):
            if flight.deadline <= self.loop.skipped_s:
                if _error_code(flight.watches[0][1]) == "upstream_timeout":
                    self.has_failed(flight, "upstream_timeout")
                else:  # its last step was allowed before
                    assert flight.num_left == 0
                    self.has_ended(flight, hears=False)
            elif flight.num_left == 0:
                self.has_ended(flight, hears=False)

    def strike_delete(self, place: Place, gives_up_after: int | None) -> None:
        if self.is_expired(place):
            return
        others = [flight for flight in self.flights if flight.place is not place]
        deleter = self.begin(self.manager.delete(place.real.id))
        second = self.begin(self.manager.delete(place.real.id))
        if gives_up_after is not None:
            if gives_up_after:
                self.passes(gives_up_after)
            deleter.cancel()
        self.passes()
        if gives_up_after == 0:  # the first never began: the second did it
            deleter, second = second, deleter
            assert second.cancelled()
        else:
            assert isinstance(second.exception(), SessionNotFound)
        with pytest.raises(SessionNotFound):
            self.manager.sessions.get(place.real.id)
        left = [flight for flight in place.flights if not flight.watches[0][1].done()]
        # A deleter who gives up may take the word to the engine with it; the grace time ends the turn all the same.
        assert gives_up_after or all(flight.sent.script.deaf for flight in left)
        assert deleter.done() or left
        for flight in list(place.flights):
            if flight not in left:
                self.ends_with_its_session(flight)
        if left:
            self.loop.skipped_s += GRACE_S
            self.passes()
            for flight in left:
                self.has_failed(flight, "session_not_found")
            for flight in others:  # whose time it is too
                if flight.deadline <= self.loop.skipped_s:
                    self.has_failed(flight, "upstream_timeout")
        assert deleter.done()
        assert deleter.cancelled() or deleter.exception() is None
        place.is_gone = True
        self.session_ends.append(SessionEnd.DELETED)

    # -- looking at ends

    def take_report(
        self,
        end: TurnEnd,
        code: str | None,
        *,
        num: int | None = None,
        was_aborted: bool = False,
        num_discarded: tuple[int, int] | None = None,
    ) -> None:
        """There is a report of that kind that was not looked at yet. `num` is how many tokens were drawn, and
        `num_discarded` how many turns its commit discarded, with how many sampled tokens."""
        reports, at = self.telemetry.reports, len(self.reports)
        index = next(
            i
            for i, report in enumerate(reports)
            if i >= at
            and (report.end, report.code, report.was_aborted) == (end, code, was_aborted)
            and num in (None, report.num_completion)
            and num_discarded in (None, (report.num_discarded_turns, report.num_discarded_tokens))
        )
        reports[at], reports[index] = reports[index], reports[at]
        self.reports.append(reports[at])

    def forget(self, flight: Flight) -> None:
        """A turn has ended: nobody runs, waits, or is owed anything for it."""
        self.flights.remove(flight)
        ends = [task.exception() or task.result() for _, task in flight.watches]
        assert all(type(end) is type(ends[0]) for end in ends)
        for watch, _ in flight.watches:
            watch.leave()
        if flight.place is not None:
            flight.place.flights.remove(flight)
            flight.place.last_chat = self.clock.monotonic()

    def has_been_abandoned(self, flight: Flight) -> None:
        self.forget(flight)
        self.take_report(TurnEnd.ABANDONED, None)
        self.was_stopped(flight)

    def was_stopped(self, flight: Flight) -> None:
        """The engine was told, if it ever knew of the turn, unless it had said its last word."""
        if flight.request_id in self.engine.drawn and flight.num_left > 0:
            assert flight.request_id in self.engine.stopped

    def has_failed(self, flight: Flight, code: str) -> None:
        for _, task in flight.watches:
            assert _error_code(task) == code
        self.forget(flight)
        self.take_report(TurnEnd.FAILED, code)
        self.was_stopped(flight)

    def ends_with_its_session(self, flight: Flight) -> None:
        """Its session was deleted: its caller got what there was, and nothing of it is kept, unless it was already."""
        (_, task), *_ = flight.watches
        error = task.exception()
        if error is None:
            outcome: TurnOutcome = task.result()
            self.forget(flight)
            end = TurnEnd.COMMITTED if outcome.committed else TurnEnd.UNRECORDED
            sampled = outcome.reply.sampled
            self.take_report(end, None, num=len(sampled.ids), was_aborted=sampled.finish.reason is FinishReason.ABORT)
            assert outcome.reply.sampled.ids.tolist() == self.engine.drawn.get(flight.request_id, [])
            assert not outcome.committed or flight.num_left == 0
        else:
            code = _error_code(task)
            assert code == FAILURES.get(flight.sent.ending)
            assert code is not None
            self.has_failed(flight, code)

    def has_ended(self, flight: Flight, *, hears: bool) -> None:
        """The engine has said its last word: the turn is kept whole, or has failed as it had to."""
        (watch, task), *_ = flight.watches
        drawn = self.engine.drawn.get(flight.request_id, [])
        error = task.exception()
        if error is not None:
            assert flight.num_left == 0
            code = FAILURES[flight.sent.ending]
            self.has_failed(flight, code)
            return
        outcome: TurnOutcome = task.result()
        assert all(other.result() is outcome for _, other in flight.watches)
        reason = outcome.reply.sampled.finish.reason
        assert outcome.reply.sampled.ids.tolist() == drawn
        if reason is FinishReason.ABORT:
            assert flight.is_aborted
        else:
            assert flight.num_left == 0
            assert (drawn, outcome.reply.sampled.finish) == (list(flight.sent.script.ids), flight.sent.script.finish)
        assert outcome.committed is (flight.place is not None)
        end = TurnEnd.COMMITTED if outcome.committed else TurnEnd.UNRECORDED
        num_before = 0 if flight.place is None else len(flight.place.replaced)
        if flight.place is not None:
            self.keep(flight, outcome, drawn)
        gone = [] if flight.place is None else flight.place.replaced[num_before:]
        self.take_report(
            end,
            None,
            num=len(drawn),
            was_aborted=reason is FinishReason.ABORT,
            num_discarded=(len(gone), sum(turn.num_sampled for turn in gone)),
        )
        if flight.place is not None and hears:
            watch.delivered()
            flight.place.replies[-1].was_delivered = True
        self.forget(flight)

    def keep(self, flight: Flight, outcome: TurnOutcome, drawn: list[int]) -> None:
        """The turn is in its history: put it into the model's."""
        place = flight.place
        assert place is not None
        (node,) = [node for node in place.real.nodes if node.turn.request_id == flight.request_id]
        assert node.id not in place.node_ids
        place.node_ids.add(node.id)
        reason = outcome.reply.sampled.finish.reason
        branch = flight.held[-1]
        turn = Turn(
            branch=branch,
            parent=flight.parent,
            kwargs=flight.sent.kwargs,
            messages=[*flight.sent.messages, outcome.reply.parsed.message],
            ids=[*outcome.reply.prompt.ids, *drawn],
            status={
                FinishReason.STOP: TurnStatus.COMPLETED,
                FinishReason.LENGTH: TurnStatus.TRUNCATED,
                FinishReason.ABORT: TurnStatus.ABORTED,
            }[reason],
            request_id=flight.request_id,
            node_id=node.id,
            num_sampled=len(drawn),
        )
        if place.kind is not HistoryKind.TREE:
            turns = place.turns_in(branch)
            replaced = turns[0 if flight.parent is None else turns.index(flight.parent) + 1 :]
            place.replaced += replaced
            place.turns = [turn for turn in place.turns if turn not in replaced]
        place.turns.append(turn)
        if branch not in place.branches:
            place.branches[branch] = None
            place.newest[flight.sent.opening] = branch
        place.turns.sort(key=lambda turn: turn.node_id)
        place.replies = [
            reply
            for reply in place.replies
            if reply.committed_at > flight.began_at or not set(reply.held) & set(flight.held)
        ]
        place.replies.append(
            Reply(
                sent=flight.sent,
                held=flight.held,
                outcome=outcome,
                began_at=flight.began_at,
                committed_at=self.tick(),
                was_delivered=False,
            )
        )

    # -- what always holds

    @invariant()
    def histories_are_the_models(self) -> None:
        for place in self.live:
            nodes = place.real.nodes
            assert [node.turn.request_id for node in nodes] == [turn.request_id for turn in place.turns]
            for node, turn in zip(nodes, place.turns, strict=True):
                assert line_messages(node) == turn.messages
                assert line_ids(node).tolist() == turn.ids
                assert node.turn.status is turn.status
                parent = node.parent
                assert (parent.turn.request_id if parent else None) == (turn.parent.request_id if turn.parent else None)
                before = line_ids(parent).tolist()
                assert turn.ids[: len(before)] == before
                assert node.num_tokens == len(turn.ids)
            strands = place.real.strands
            num_gone = sum(turn.num_sampled for turn in place.replaced)
            assert strands.discarded == Discarded(num_turns=len(place.replaced), num_tokens=num_gone)
            fates, num_kept = num_by_fate(place.real), sum(turn.num_sampled for turn in place.turns)
            num_aborted = sum(turn.num_sampled for turn in place.replaced if turn.status is TurnStatus.ABORTED)
            outside = fates[TokenFate.DISCARDED] + fates[TokenFate.INFRA]
            assert fates[TokenFate.ABORTED] == num_aborted
            assert sum(fates.values()) - outside == num_gone + num_kept
            assert (strands.num_turns, strands.num_tokens) == (len(nodes), sum(turn.num_own for turn in place.turns))
            if place.kind is not HistoryKind.TREE:
                for strand in strands.kept:
                    _check_line(strand.history.nodes)
            if place.kind is HistoryKind.STRANDS:
                ids = {turn.branch: set[int]() for turn in place.turns}
                for turn in place.turns:
                    ids[turn.branch].add(turn.node_id)
                kept = [{node.id for node in strand.history.nodes} for strand in strands.kept]
                assert sorted(kept, key=min) == sorted(ids.values(), key=min)

    @invariant()
    def nothing_runs_or_is_held_but_what_the_model_knows(self) -> None:
        assert self.manager.num_in_flight == len(self.flights)
        assert self.engine.num_running == len(self.flights)
        for place in self.live:
            assert place.real.is_busy is bool(place.flights)
            assert {turn.request_id for turn in place.real.running} == {flight.request_id for flight in place.flights}
        assert self.manager.sessions.num_sessions == len(self.live)
        waiting = {task for flight in self.flights for _, task in flight.watches}
        waiting |= {task for task in asyncio.all_tasks(self.loop) if task.get_name().startswith("turn-")}
        engines = {
            task for task in asyncio.all_tasks(self.loop) if "acquire" in repr(task) or "Event.wait" in repr(task)
        }
        assert asyncio.all_tasks(self.loop) - waiting - engines == set()

    @invariant()
    def everything_was_told_once(self) -> None:
        assert len(self.telemetry.reports) == len(self.reports)
        assert self.telemetry.retries == self.retries
        assert self.telemetry.session_ends == self.session_ends
        assert self.loop.complaints == []
        self.is_whole = True

    def teardown(self) -> None:
        try:
            if self.is_whole:
                self.drain()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.passes()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            self.pool.close()

    def drain(self) -> None:
        """Half of the turns end in time, the others as by an abort: what they had drawn is kept."""
        drain = self.begin(self.manager.drain(timeout_s=30.0))
        self.passes()
        for place in (None, *self.live[:1]):
            real = place.real if place is not None and not place.flights else None
            with pytest.raises(Draining):
                begun(self.manager, real, ChatRequest(messages=(user("x"),)))
        for flight in self.flights[::2]:
            self.engine.step_turn(flight.request_id, flight.num_left)
            flight.num_steps += flight.num_left
            self.passes()
            self.has_ended(flight, hears=True)
        assert drain.done() is not bool(self.flights)
        self.loop.skipped_s += 30.0
        self.passes()
        for flight in [flight for flight in self.flights if flight.deadline <= self.loop.skipped_s]:
            self.has_failed(flight, "upstream_timeout")
        self.abort_takes_effect(self.flights)
        if self.flights:  # the engine does not listen to an abort of theirs
            assert not drain.done()
            self.loop.skipped_s += GRACE_S
            self.passes()
        for flight in list(self.flights):
            self.has_failed(flight, "draining")
        assert drain.done()
        assert self.manager.num_in_flight == 0
        self.histories_are_the_models()
        assert asyncio.all_tasks(self.loop) == set()
        gc.collect(0)
        assert self.loop.complaints == []


def _with_key(sent: Sent, key: str | None) -> Sent:
    return Sent(
        messages=sent.messages,
        kwargs=sent.kwargs,
        seed=sent.seed,
        key=key,
        script=sent.script,
        ending=sent.ending,
    )


def _request(sent: Sent) -> ChatRequest:
    return ChatRequest(
        messages=tuple(sent.messages), template_kwargs=sent.kwargs, params=SamplingParams(seed=sent.seed)
    )


def _error_code(task: "asyncio.Task[Any]") -> str | None:
    error = task.exception()
    assert error is None or isinstance(error, StenographError), error
    return None if error is None else error.code


def _check_line(nodes: Any) -> None:
    """Nodes of a linear history are one line."""
    before: Node | None = None
    for depth, node in enumerate(nodes, 1):
        assert (node.parent, node.depth) == (before, depth)
        before = node


@pytest.mark.timeout(600)  # hundreds of examples, on a machine that may do other work too
@pytest.mark.parametrize(("timeout_s", "num_passes"), [(None, 0), (TIMEOUT_S, 3)])
@pytest.mark.parametrize("kind", list(HistoryKind))
def test_whatever_happens_in_whatever_order_the_sessions_are_what_the_contract_says(
    kind: HistoryKind, timeout_s: float | None, num_passes: int, renderer: Renderer
) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: SessionMachine(renderer, kind, timeout_s=timeout_s, num_passes=num_passes),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
